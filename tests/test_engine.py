"""The engine's answers, texts and records, held against alone() and the model's own log_softmax."""

import itertools

import pytest

from engine import Engine, QueueFull
from model import GPT
from policies.priority import PRIORITIES
from request import Service, lone_chunk
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
PROMPTS = [
    [7, 8, 9],
    [1] * 20,
    [5],
    list(range(3, 19)),
    [60, 0, 60],
]


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
        cache = poisoned_cache(MODEL, 1, 40)
        logits = run(MODEL, cache, [whole], all_rows=True)
        rows = logits[c.prompt_len - 1 : -1].log_softmax(-1).tolist()
        expected = [row[token] for row, token in zip(rows, c.output, strict=True)]
        assert c.logprobs == pytest.approx(expected, abs=1e-10, rel=0)
        of_request = [event for event in events if event.request.id == c.id]
        assert [event.logprob for event in of_request] == c.logprobs
        assert [event.finish_reason for event in of_request] == [None] * 5 + ["length"]


def test_a_step_that_is_repeated_writes_its_logprob_again(monkeypatch):
    engine = make_engine()
    engine.add_request([1], SamplingParams(2, logprobs=True))
    with monkeypatch.context() as patch, pytest.raises(MemoryError):
        patch.setattr(engine.scheduler, "advance", raising(MemoryError))
        engine.step()
    *_, last = finish(engine)
    assert len(last.request.logprobs) == 2


def test_latencies():
    # the clock is read at a step's start, when one is admitted, before forward, and at the end
    clock = map(float, itertools.count(1)).__next__
    engine = make_engine("sarathi", max_batch=1, clock=clock)
    learned = []
    engine.scheduler.observe = lambda batch, seconds: learned.append(seconds)
    engine.add_request([1] * 14, SamplingParams(3), arrival=0.0)  # 14 = 6 + 6 + 2
    engine.add_request([2], SamplingParams(1), 0.5)
    a, b = (event.request for event in finish(engine) if event.finish_reason)
    assert a.scheduling_delay == 2.0
    assert a.ttft == 10.0
    assert a.tbt == [3.0, 3.0]
    assert a.token_times == [10.0, 13.0, 16.0]
    assert a.latency == 16.0
    assert b.scheduling_delay == 17.5
    assert b.ttft == 19.5
    assert b.tbt == []
    assert b.latency == 19.5
    assert learned == [3.0, 2.0, 2.0, 2.0, 2.0, 3.0]
    last = engine.last_iteration
    assert last.chunks == [(1, 0, 1, False)]
    assert [last.start, last.launch, last.end] == [17, 19, 20]
    assert last.prefill_tokens == 1
    assert last.decode_tokens == 0


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
    (request,) = make_engine().generate([[1]], SamplingParams(1))
    assert request.text is None


TEXTS = ["once", "a", "stop here"]
LETTERS = FakeTokenizer(
    encode=lambda text: [ord(c) % 61 for c in text],
    decode=lambda ids: "".join(map(chr, ids)),
)


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


@pytest.mark.parametrize("length", [1, 2, 3])
def test_a_stop_string_ends_the_text_before_it_and_no_other_request(length):
    engine = make_engine(tokenizer=LETTERS)
    params = SamplingParams(20, temperature=2.0)
    free, other = engine.generate(TEXTS[:2], params)
    stop = free.text[7 : 7 + length]
    end = free.text.index(stop)
    stopping = SamplingParams(20, temperature=2.0, stop=["\n" * 9, stop])
    stopped, same = engine.generate(TEXTS[:2], [stopping, params])
    assert stopped.text == free.text[:end]
    assert stopped.finish_reason == "stop"
    assert stopped.output == free.output[: end + length]
    assert same.text == other.text
    assert same.finish_reason == "length"
    streamed = [event.text for event in engine.stream(TEXTS[:1], stopping)]
    assert "".join(streamed) == stopped.text
    assert engine.scheduler.pages.num_free == engine.config.pages


# requests


def test_generate_serves_nobody_else():
    engine = make_engine(max_waiting=2)
    assert engine.generate([]) == []
    with pytest.raises(QueueFull):
        engine.generate([[1], [2], [3]], SamplingParams(1))
    assert finish(engine) == []
    kept = engine.add_request([9, 9], SamplingParams(1))
    with pytest.raises(ValueError):
        engine.generate([[1]])  # it would swallow the events of the other
    with pytest.raises(ValueError):
        engine.warm_up()
    assert [event.request.id for event in finish(engine)] == [kept]


def test_a_request_is_of_normal_priority_by_default():
    assert Service().priority == PRIORITIES.index("normal")


# warm-up, and failures


def raising(error):
    """A function that raises an error."""

    def fail(*_):
        raise error

    return fail


def serves_as_a_new_one(engine):
    """Whether two requests get the tokens that each has alone."""
    params = SamplingParams(4)
    requests = engine.generate(PROMPTS[:2], params)
    return all(r.output == alone(MODEL, r.prompt, params) for r in requests)


@pytest.mark.parametrize(
    "options",
    [
        {},
        dict(max_waiting=2),
        dict(max_len=24, page_size=4),
        dict(page_size=4, prefix_caching=True),
    ],
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
    assert engine.add_request([1], SamplingParams(1)) == 0  # ids begin again
    finish(engine)
    poison(engine)
    assert serves_as_a_new_one(engine)


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_generate_raises_what_the_model_raises_and_leaves_no_request(error, monkeypatch):
    engine = make_engine()
    with monkeypatch.context() as patch, pytest.raises(error):
        patch.setattr(GPT, "forward", raising(error))
        engine.generate(PROMPTS, SamplingParams(3))
    assert finish(engine) == []
    assert serves_as_a_new_one(engine)


def test_generate_resets_what_an_interrupted_reset_has_left(monkeypatch):
    """As two Ctrl-C in a row: one in forward, and one in the reset that follows."""
    engine = make_engine()
    interrupt = raising(KeyboardInterrupt)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(GPT, "forward", interrupt)
        patch.setattr(engine, "reset", interrupt)
        engine.generate(PROMPTS, SamplingParams(3))
    assert engine.has_work
    assert serves_as_a_new_one(engine)


@pytest.mark.parametrize(
    "fails, aborted",
    [
        (False, False),
        (True, False),
        (True, True),
    ],
)
def test_an_iteration_names_its_victims(fails, aborted, monkeypatch):
    """Also when the first try at it failed, and when before the second one all that it wanted to
    compute is given up."""

    def is_in_need(request):
        return request.is_decoding and request.num_computed % 4 == 0

    engine = make_engine(
        chunk=20,
        max_batch=2,
        max_len=20,
        page_size=4,
        pages=6,
    )
    scheduler = engine.scheduler
    stays = engine.add_request([1] * 10, SamplingParams(10))
    victim = engine.add_request([2] * 10, SamplingParams(10))
    while scheduler.pages.num_free or not all(map(is_in_need, scheduler.running)):
        assert engine.step(), "memory is never short"
    if fails:
        with monkeypatch.context() as patch, pytest.raises(MemoryError):
            patch.setattr(engine.runner, "forward", raising(MemoryError))
            engine.step()
    if aborted:
        engine.abort(stays)
    engine.step()
    last = engine.last_iteration
    assert last.preempted == [victim]
    if not aborted:
        assert last.free_pages == 2
        assert last.waiting == 1
        assert last.running == 1
        engine.step()
        assert engine.last_iteration.preempted == []
