"""The engine: its answers, its records, its text, and what a failing step leaves behind."""

import itertools

import pytest
import torch

from engine import Engine, QueueFull
from model import GPT, FlatBatch
from pretrained.tokenizers import ByteTokenizer
from request import Request, lone_chunk
from sampling import SamplingParams
from tests.helpers import (
    FakeTokenizer,
    alone,
    finish,
    named,
    poison,
    poisoned_cache,
    run,
    tiny_model,
)

MODEL = tiny_model(n_kv_head=2)
PROMPTS = [[7, 8, 9], [1] * 20, [5], [3, 1, 4, 1, 5, 9, 2, 6] * 2, [60, 0, 60]]


def make_engine(policy="sarathi-serve", model=MODEL, **options):
    """A small engine whose cache holds NaN where nothing was written."""
    sizes = dict(chunk=6, max_batch=3, max_len=40)
    engine = Engine(model, policy=policy, **sizes | options)
    engine.runner.cache.data.fill_(float("nan"))
    return engine


def test_logprobs_are_those_of_the_model_and_of_the_events_also_after_a_preemption():
    engine = make_engine(page_size=4, pages=11)
    params = SamplingParams(
        6,
        temperature=1.3,
        top_k=7,
        seed=3,
        logprobs=True,
    )
    for prompt in PROMPTS:
        engine.add_request(prompt, params)
    engine.add_request([1], SamplingParams(6))
    events = finish(engine)
    *completions, other = [event.request for event in events if event.finish_reason]
    assert other.logprobs == []
    assert any(c.preemptions for c in completions)
    for c in completions:
        tokens = c.prompt + c.output
        whole = lone_chunk([0], 0, tokens)
        logits = run(MODEL, poisoned_cache(MODEL, 1, 40), [whole], all_rows=True)
        rows = logits[c.prompt_len - 1 : -1].log_softmax(-1)
        expected = rows.gather(1, torch.tensor(c.output)[:, None])[:, 0].tolist()
        assert c.logprobs == pytest.approx(expected, abs=1e-10, rel=0)
        of_request = [event for event in events if event.request.id == c.id]
        assert [event.logprob for event in of_request] == c.logprobs
        assert [event.finish_reason for event in of_request] == [None] * 5 + ["length"]


def test_a_logprob_is_noted_once_however_often_its_batch_is_computed():
    engine = make_engine()
    engine.add_request([1, 2], SamplingParams(3, logprobs=True))
    batch = engine.scheduler.next_batch()
    flat = FlatBatch.build(batch, engine.runner.attention)
    for _ in range(2):  # as after an interrupt
        engine.runner.sample(engine.runner.forward(flat), batch)
    assert len(batch[0].request.logprobs) == 1


def test_latencies():
    # the clock is read at a step's start, when one is admitted, before forward, and at the end
    clock = map(float, itertools.count(1)).__next__
    engine = make_engine("sarathi", max_batch=1, clock=clock)
    learned = []
    engine.scheduler.observe = lambda batch, seconds: learned.append(seconds)
    engine.add_request([1] * 14, SamplingParams(3), arrival=0.0)  # 14 = 6 + 6 + 2
    engine.add_request([2], SamplingParams(1), 0.5)
    a, b = (event.request for event in finish(engine) if event.finish_reason)
    assert (a.scheduling_delay, a.ttft, a.tbt) == (2.0, 10.0, [3.0, 3.0])
    assert a.token_times == [10.0, 13.0, 16.0]
    assert a.latency == 16.0
    assert (b.scheduling_delay, b.ttft, b.tbt) == (17.5, 19.5, [])
    assert learned == [3.0, 2.0, 2.0, 2.0, 2.0, 3.0]
    last = engine.last_iteration
    assert last.chunks == [(1, 0, 1, False)]
    assert (last.start, last.launch, last.end) == (17, 19, 20)
    assert (last.prefill_tokens, last.decode_tokens) == (1, 0)
    never = Request(0, [1], 1, 1)
    assert never.tbt == []
    assert {never.ttft, never.scheduling_delay, never.latency} == {None}


# text


def word_tokenizer():
    """Every token is a word; the space before the first is dropped, as sentencepiece does."""

    def encode(text):
        return [int(word) for word in text.split()]

    def decode(ids):
        return " ".join(map(str, ids))

    return FakeTokenizer(encode, decode, stop_token_ids=frozenset({26}))


def test_text_in_text_out():
    model = tiny_model()
    params = [SamplingParams(15, temperature=3.0, seed=seed) for seed in range(4)]
    model.head.weight.mul_(0.3)  # flatter, so that the stop token comes up now and then
    prompts = ["0 1 2", "25 25 25", "7 4 11 11 14", "16"]
    engine = make_engine(model=model, tokenizer=word_tokenizer())
    completions = engine.generate(prompts, params)
    for prompt, each, completion in zip(prompts, params, completions, strict=True):
        tokens = [int(word) for word in prompt.split()]
        expected = alone(model, tokens, each, stop=(26,))
        assert completion.output == expected
        text = expected[:-1] if completion.finish_reason == "stop" else expected
        assert completion.text == "".join(f" {token}" for token in text)  # it begins with a space
    finish_reasons = {completion.finish_reason for completion in completions}
    assert finish_reasons == {"stop", "length"}  # or not both would be tested
    assert make_engine().generate([[1]], SamplingParams(1))[0].text is None


def test_text_of_a_prompt_that_ends_within_a_character(monkeypatch):
    engine = make_engine(model=tiny_model(vocab_size=256), tokenizer=ByteTokenizer())
    monkeypatch.setattr("runtime.runner.sample", lambda *_: (torch.tensor([0xA9]), None))
    assert engine.generate([[0x62, 0xC3]], SamplingParams(1))[0].text == "\ufffd"  # no b
    assert engine.generate([[0x61]], SamplingParams(1))[0].text == "\ufffd"


TEXTS = ["once", "a", "stop here"]
LETTERS = FakeTokenizer(
    lambda text: [ord(c) % 61 for c in text], lambda ids: "".join(map(chr, ids))
)


def test_a_stream_has_each_token_with_its_text_as_it_appears():
    params = [SamplingParams(n) for n in (3, 7, 5)]
    engine = make_engine(tokenizer=LETTERS)
    expected = engine.generate(TEXTS, params)
    events = list(engine.stream(TEXTS, params))
    first_id = events[0].request.id
    for i, completion in enumerate(expected, first_id):
        of_request = [event for event in events if event.request.id == i]
        assert [event.token for event in of_request] == completion.output
        assert "".join(event.text for event in of_request) == completion.text
        reasons = [event.finish_reason for event in of_request]
        assert reasons == [None] * (len(of_request) - 1) + ["length"]
    assert len({event.request.id for event in events[:3]}) > 1  # side by side
    without_tokenizer = make_engine().stream([[1]], SamplingParams(2))
    assert not any(event.text for event in without_tokenizer)


def test_a_stream_that_is_given_up_leaves_no_request_but_those_of_others():
    engine = make_engine(tokenizer=LETTERS)
    stream = engine.stream(TEXTS, SamplingParams(9))
    next(stream)
    other = engine.add_request("x", SamplingParams(3))
    stream.close()
    assert list(engine.scheduler.requests) == [other]
    assert [event.request.id for event in finish(engine)] == [other] * 3
    completions = engine.generate(TEXTS, SamplingParams(1))
    assert [completion.id for completion in completions] == [4, 5, 6]


def test_a_request_that_is_added_during_a_stream_is_served_in_it():
    engine = make_engine(tokenizer=LETTERS)
    stream = engine.stream(TEXTS, SamplingParams(4))
    next(stream)
    other = engine.add_request("x", SamplingParams(2))
    tokens = [event.token for event in stream if event.request.id == other]
    assert tokens == alone(MODEL, LETTERS.encode("x"), SamplingParams(2))


@pytest.mark.parametrize("stop", ["🤖", "你", "–!"])
def test_a_stop_string_of_many_tokens_ends_the_output(stop, monkeypatch):
    model = tiny_model(vocab_size=256)
    engine = make_engine(model=model, tokenizer=ByteTokenizer())
    output = f"a{stop}".encode()
    tokens = iter([*output, *b" and so on, for ever"])
    monkeypatch.setattr(engine.runner, "sample", lambda logits, batch: [next(tokens)])
    (completion,) = engine.generate(["x"], SamplingParams(20, stop=stop))
    assert (completion.text, completion.finish_reason) == ("a", "stop")
    assert completion.output == list(output)


def test_a_stop_string_counts_with_the_last_token_too():
    engine = make_engine(tokenizer=LETTERS)
    (free,) = engine.generate(TEXTS[:1], SamplingParams(4))
    (stopped,) = engine.generate(TEXTS[:1], SamplingParams(4, stop=free.text[2:]))
    assert (stopped.text, stopped.finish_reason) == (free.text[:2], "stop")


@pytest.mark.parametrize("length", [1, 2, 3])
def test_a_stop_string_ends_the_text_before_it_and_no_other_request(length):
    engine = make_engine(tokenizer=LETTERS)
    params = SamplingParams(20, temperature=2.0)
    free, other = engine.generate(TEXTS[:2], params)
    stop = free.text[7 : 7 + length]
    end = free.text.index(stop)
    stopping = SamplingParams(20, temperature=2.0, stop=["\n" * 9, stop])
    stopped, same = engine.generate(TEXTS[:2], [stopping, params])
    assert (stopped.text, stopped.finish_reason) == (free.text[:end], "stop")
    assert stopped.output == free.output[: end + length]
    assert (same.text, same.finish_reason) == (other.text, "length")
    streamed = [event.text for event in engine.stream(TEXTS[:1], stopping)]
    assert "".join(streamed) == stopped.text
    assert engine.scheduler.pages.num_free == engine.config.pages


def raise_memory_error(*_):
    raise MemoryError


# requests


def test_a_request_may_bring_its_id():
    engine = make_engine()

    def add(request_id=None):
        return engine.add_request([1], SamplingParams(2), request_id=request_id)

    assert [add(), add(7), add(), add(3), add()] == [0, 7, 8, 3, 9]
    for taken in (7, 8):
        with pytest.raises(ValueError, match=f"request_id={taken}: is the id of another"):
            add(taken)
    assert add() == 10  # what was refused took no number
    assert len(engine.scheduler.requests) == 6
    assert {event.request.id for event in finish(engine)} == {0, 7, 8, 3, 9, 10}
    assert [add(7), add()] == [7, 11]  # it has ended


def test_generate_serves_nobody_else():
    engine = make_engine(max_waiting=2)
    assert engine.generate([]) == []
    with pytest.raises(QueueFull, match="max_waiting=2"):
        engine.generate([[1], [2], [3]], SamplingParams(1))
    assert finish(engine) == []
    assert len(engine.generate([[1], [2]], SamplingParams(1))) == 2
    kept = engine.add_request([9, 9], SamplingParams(1))
    with pytest.raises(ValueError, match="other requests are running"):
        engine.generate([[1]])  # it would swallow the events of the other
    assert [event.request.id for event in finish(engine)] == [kept]


def test_a_closed_stderr_costs_the_bar_and_no_request(monkeypatch):
    monkeypatch.setattr("sys.stderr", None)
    (completion,) = make_engine().generate([[1, 2]], SamplingParams(3))
    assert len(completion.output) == 3


EXTREME_REQUESTS = [
    dict(arrival=-1e308, priority="low"),
    dict(arrival=1e308, priority="low"),
    dict(arrival=1e308, priority="realtime"),
    dict(ttft_slo=3e-308),
    dict(ttft_slo=1e308),
    dict(tbt_slo=3e-308),
    dict(tbt_slo=1e308),
    dict(request_id=2**62),
    dict(priority="high", tbt_slo=1 / 9),
]
EXTREME_PARAMS = [
    *[SamplingParams(9, temperature) for temperature in (5e-324, 1e300)],
    *[SamplingParams(9, 1.0, 2**62, 1e-300, seed) for seed in (-(2**63), 2**63 - 1, 10**30)],
]


@pytest.mark.parametrize("policy", ["sarathi-serve", "priority"])
def test_nothing_that_is_accepted_makes_a_step_fail(policy):
    options = {"ageing": 3e-308} if policy == "priority" else {}
    sizes = dict(max_batch=4, page_size=4, pages=14)
    engine = make_engine(policy, **sizes, policy_options=options)
    expected = {}
    for i, service in enumerate(EXTREME_REQUESTS):
        prompt = PROMPTS[i % len(PROMPTS)]
        params = EXTREME_PARAMS[i % len(EXTREME_PARAMS)]
        request_id = engine.add_request(prompt, params, **service)
        expected[request_id] = alone(MODEL, prompt, params)
    ended = [event.request for event in finish(engine) if event.finish_reason]
    assert {c.id: c.output for c in ended} == expected


# warm-up, and failures


def serves_as_a_new_one(engine):
    """Whether two requests get the tokens that each has alone."""
    params = SamplingParams(4)
    completions = engine.generate(PROMPTS[:2], params)
    return [c.output for c in completions] == [alone(MODEL, PROMPTS[i], params) for i in range(2)]


SHARES = dict(page_size=4, prefix_caching=True)


@pytest.mark.parametrize(
    "options", [{}, dict(max_waiting=2), dict(max_len=24, page_size=4), SHARES]
)
def test_warm_up_leaves_no_trace(options, monkeypatch):
    engine = make_engine(**options)
    sizes = set()
    forward = GPT.forward

    def count(self, batch, cache):
        sizes.add(len(batch.tokens))
        return forward(self, batch, cache)

    with monkeypatch.context() as patch:
        patch.setattr(GPT, "forward", count)
        for _ in range(2):
            engine.warm_up()
    max_waiting = options.get("max_waiting", 3)
    assert sizes.issuperset([*range(1, max_waiting + 1), 6])  # decodes, a chunk
    assert not engine.runner.cache.data.isnan().any()  # all of it was touched
    assert finish(engine) == []
    assert named(engine.scheduler.pages) == set()
    poison(engine)
    assert serves_as_a_new_one(engine)


def test_warm_up_is_for_an_idle_engine():
    engine = make_engine()
    engine.add_request([1], SamplingParams(2))
    with pytest.raises(ValueError, match="^warm_up: requests are running"):
        engine.warm_up()
    assert len(finish(engine)) == 2


def test_warm_up_serves_no_more_requests_than_have_pages(monkeypatch):
    engine = Engine(
        MODEL,
        max_len=32,
        page_size=8,
        pages=4,
        max_batch=300_000,
    )
    counts = []
    monkeypatch.setattr(engine, "generate", lambda prompts, *_, **__: counts.append(len(prompts)))
    engine.warm_up()
    assert counts == [1, 4]


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, torch.OutOfMemoryError])
def test_generate_raises_what_the_model_raises_and_leaves_no_request(error, monkeypatch):
    engine = make_engine()

    def broken(*_):
        raise error

    with monkeypatch.context() as patch, pytest.raises(error):
        patch.setattr(GPT, "forward", broken)
        engine.generate(PROMPTS, SamplingParams(3))
    assert finish(engine) == []
    assert serves_as_a_new_one(engine)


@pytest.mark.parametrize("policy", ["vllm", "sarathi-serve", "chunked-only", "hybrid-only"])
@pytest.mark.parametrize("fails, aborted", [(False, False), (True, False), (True, True)])
def test_an_iteration_names_its_victims(policy, fails, aborted, monkeypatch):
    """Also when the first try at it failed, and when before the second one all that it wanted to
    compute is given up."""

    def is_in_need(request):
        return request.is_decoding and request.num_computed % 4 == 0

    engine = make_engine(policy, chunk=20, max_batch=2, max_len=20, page_size=4, pages=6)
    scheduler = engine.scheduler
    stays, victim = (engine.add_request([i] * 10, SamplingParams(10)) for i in (1, 2))
    while scheduler.pages.num_free or not all(map(is_in_need, scheduler.running)):
        assert engine.step(), "memory is never short"
    if fails:
        with monkeypatch.context() as patch, pytest.raises(MemoryError):
            patch.setattr(engine.runner, "forward", raise_memory_error)
            engine.step()
    if aborted:
        engine.abort(stays)
    engine.step()
    last = engine.last_iteration
    assert last.preempted == [victim]
    if not aborted:
        assert (last.free_pages, last.waiting, last.running) == (2, 1, 1)
        engine.step()
        assert engine.last_iteration.preempted == []
