"""The engine: its answers, its records, its errors, and what a failing step leaves behind."""

import pytest
import torch

from conftest import alone, poisoned_cache, run, tiny_model
from engine import Engine
from kv_cache import KVCache
from model import GPT, GPTConfig, Span
from sampling import SamplingParams, sample
from scheduler import POLICIES
from tokenizer import byte_tokenizer

PROMPTS = [[7, 8, 9], [1] * 20, [5], [3, 1, 4, 1, 5, 9, 2, 6] * 2, [60, 0, 60]]


@pytest.fixture(scope="module")
def model():
    return tiny_model(n_kv_head=2)


def make_engine(model, policy="sarathi-serve", **options):
    """A small engine whose cache holds NaN where nothing was written."""
    engine = Engine(model, policy, **(dict(chunk=6, max_batch=3, max_len=40) | options))
    engine.cache.data.fill_(float("nan"))
    return engine


class Ticks:
    """A clock that moves by one second whenever it is read."""

    def __init__(self):
        self.now = 0

    def __call__(self):
        self.now += 1
        return float(self.now)


class CharTokenizer:
    """Lower-case letters are 0 … 25; '.' is 26 and ends the text."""

    stop_token_ids = (26,)

    def encode(self, text):
        return [26 if c == "." else ord(c) - ord("a") for c in text]

    def decode(self, ids):
        return "".join("." if i == 26 else chr(ord("a") + i % 26) for i in ids)


class WordTokenizer(CharTokenizer):
    """Every token is a word; the space before the first word is dropped, as sentencepiece does."""

    def decode(self, ids):
        return " ".join(f"w{i}" for i in ids)


# -----------------------------------------------------------------------------------------------------
# sampling


@pytest.mark.parametrize("policy", POLICIES)
def test_seeded_sampling_is_the_same_under_every_policy(model, policy):
    params = [
        SamplingParams(8, temperature=t, top_k=k, top_p=p, seed=s)
        for t, k, p, s in [(1.0, 0, 1.0, 1), (0.7, 5, 1.0, 2), (1.5, 0, 0.8, 3), (1.0, 9, 0.5, 4), (0.0, 0, 1.0, 5)]
    ]
    done = make_engine(model, policy).generate(PROMPTS, params)
    assert [c.tokens for c in done] == [alone(model, *request) for request in zip(PROMPTS, params)]


def test_the_seed_makes_a_difference(model):
    texts = {
        tuple(make_engine(model).generate([[1, 2, 3]], SamplingParams(8, temperature=2.0, seed=seed))[0].tokens)
        for seed in range(8)
    }
    assert len(texts) > 4


def test_each_position_has_its_own_random_number():
    params = [SamplingParams(temperature=1.0, seed=3)] * 50
    assert len(set(sample(torch.zeros(50, 1000), params, list(range(50)))[0].tolist())) > 40
    assert len(set(sample(torch.zeros(50, 1000), params, [7] * 50)[0].tolist())) == 1


def test_broken_logits_do_not_yield_a_token_that_is_none():
    logits = torch.tensor([[float("nan"), 1.0, 2.0]])
    assert sample(logits, [SamplingParams(temperature=1.0)], [0])[0].item() in (0, 1, 2)


def frequencies(logits, draws=4000, **options):
    """How often each token is drawn."""
    params = [SamplingParams(**{"temperature": 1.0, "seed": seed} | options) for seed in range(draws)]
    tokens, _ = sample(torch.tensor([logits]).expand(draws, -1), params, [0] * draws)
    return tokens.bincount(minlength=len(logits)) / draws


def test_sampling_follows_the_distribution():
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0, float("-inf")])
    for temperature in (1.0, 0.5, 3.0):
        expected = (logits / temperature).softmax(-1)
        assert (frequencies(logits.tolist(), temperature=temperature) - expected).abs().max() < 0.03
        assert frequencies(logits.tolist(), temperature=temperature)[4] == 0


def test_top_k_and_top_p_keep_what_they_say():
    probs = [0.05, 0.4, 0.3, 0.2, 0.05]
    logits = torch.tensor(probs).log().tolist()
    kept = lambda **options: (frequencies(logits, **options) > 0).nonzero().flatten().tolist()
    assert kept() == [0, 1, 2, 3, 4]
    assert kept(top_k=2) == [1, 2]
    assert kept(top_k=1) == [1]
    assert kept(top_k=50) == [0, 1, 2, 3, 4]
    assert kept(top_p=0.6) == [1, 2]
    assert kept(top_p=0.75) == [1, 2, 3]
    assert kept(top_p=1e-9) == [1]
    assert kept(top_k=2, top_p=0.5) == [1]  # of the two kept, the first holds 4/7
    halves = torch.tensor([0.5, 0.25, 0.25]).log().tolist()
    assert (frequencies(halves, top_p=0.5) > 0).tolist() == [True, False, False]  # reached, not passed
    expected = torch.tensor([0, 0.4, 0.3, 0, 0]) / 0.7
    assert (frequencies(logits, top_k=2) - expected).abs().max() < 0.03


def test_a_tiny_temperature_is_greedy_and_finite():
    assert frequencies([1.0, 3.0, 2.0], draws=20, temperature=1e-300)[1] == 1


def test_logprobs_are_those_of_the_model(model):
    params = SamplingParams(6, temperature=1.3, top_k=7, seed=3, logprobs=True)
    mixed = [params, SamplingParams(6), params, params, params]
    done = make_engine(model).generate(PROMPTS, mixed)
    assert done[1].logprobs is None
    for completion in (done[0], done[2], done[3], done[4]):
        tokens = completion.prompt + completion.tokens
        logits = run(model, poisoned_cache(model, 1, 40), [Span([0], 0, tokens)], all_rows=True)
        rows = logits[len(completion.prompt) - 1 : -1].log_softmax(-1)
        expected = rows.gather(1, torch.tensor(completion.tokens)[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(completion.logprobs, dtype=torch.float64), expected, atol=1e-10, rtol=0)


# -----------------------------------------------------------------------------------------------------
# how a request ends, and what is recorded of it


def test_finish_reasons(model):
    free = alone(model, PROMPTS[0], SamplingParams(10))
    assert len(set(free[:3])) == 3
    engine = make_engine(model)
    stopped, ended = engine.generate(
        [PROMPTS[0]] * 2, [SamplingParams(10, stop_token_ids=(free[2],)), SamplingParams(10)]
    )
    assert stopped.finish_reason == "stop" and stopped.tokens == free[:3]
    assert ended.finish_reason == "length" and ended.tokens == free
    # a stop token that is also the last one allowed counts as a stop
    assert engine.generate([PROMPTS[0]], SamplingParams(3, stop_token_ids=(free[2],)))[0].finish_reason == "stop"


@pytest.mark.parametrize("steps", [0, 1, 2, 5])
def test_abort_frees_the_slot_and_keeps_what_was_generated(model, steps):
    engine = make_engine(model, max_batch=1)
    first = engine.add_request(PROMPTS[1], SamplingParams(10))
    second = engine.add_request(PROMPTS[2], SamplingParams(3))
    for _ in range(steps):
        engine.step()
    completion = engine.abort(first)
    assert completion.finish_reason == "abort"
    assert (
        completion.tokens == alone(model, PROMPTS[1], SamplingParams(10))[: max(0, steps - 3)]
    )  # 20 = 3 chunks of 6 + 2
    events = []
    while engine.has_work:
        events += engine.step()
    assert [e.token for e in events] == alone(model, PROMPTS[2], SamplingParams(3))
    assert {e.request_id for e in events} == {second}
    with pytest.raises(ValueError, match=f"request_id={first}"):
        engine.abort(first)
    assert engine.scheduler.pages.num_free == 1


def test_events_are_the_tokens_in_order(model):
    engine = make_engine(model)
    ids = [engine.add_request(p, SamplingParams(4, logprobs=True)) for p in PROMPTS]
    tokens, completions = {i: [] for i in ids}, {}
    while engine.has_work:
        for event in engine.step():
            tokens[event.request_id].append(event.token)
            assert (event.completion is not None) == (event.finish_reason is not None)
            if event.completion:
                completions[event.request_id] = event.completion
                assert event.logprob == event.completion.logprobs[-1]
    assert engine.step() == []
    for i, prompt in zip(ids, PROMPTS):
        assert tokens[i] == completions[i].tokens == alone(model, prompt, SamplingParams(4))
        assert completions[i].prompt == prompt


def test_latencies():
    # one chunk of 6 per step, and the clock is read at its start, before forward, and at its end: 1 to 3, 4 to 6, …
    engine = make_engine(tiny_model(), "sarathi", max_batch=1, clock=Ticks())
    first, second = (
        engine.add_request([1] * 14, SamplingParams(3), arrival=0.0),
        engine.add_request([2], SamplingParams(1), 0.5),
    )
    done = {}
    while engine.has_work:
        done |= {e.request_id: e.completion for e in engine.step() if e.completion}
    a, b = done[first], done[second]
    assert (a.scheduling_delay, a.ttft, a.tbt) == (1.0, 9.0, [3.0, 3.0])  # 14 = 6 + 6 + 2
    assert a.token_times == [9.0, 12.0, 15.0] and a.latency == 15.0
    assert (b.scheduling_delay, b.ttft, b.tbt) == (15.5, 17.5, [])
    assert engine.last_iteration.chunks == [(second, 1, False)]
    assert (engine.last_iteration.prefill_tokens, engine.last_iteration.decode_tokens) == (1, 0)


def test_text_in_text_out():
    model = tiny_model()
    model.head.weight.mul_(0.3)  # flatter, so that '.' comes up now and then
    engine = make_engine(model, tokenizer=CharTokenizer())
    prompts = ["abc", "zzz", "hello", "q"]
    done = engine.generate(prompts, SamplingParams(15, temperature=3.0))
    for prompt, completion in zip(prompts, done):
        expected = alone(model, CharTokenizer().encode(prompt), SamplingParams(15, temperature=3.0), stop=(26,))
        assert completion.tokens == expected
        text = expected[:-1] if completion.finish_reason == "stop" else expected
        assert completion.text == CharTokenizer().decode(text)
    assert {c.finish_reason for c in done} == {"stop", "length"}  # or this test would not test both
    assert make_engine(model).generate([[1]], SamplingParams(1))[0].text is None
    completion = make_engine(model, tokenizer=WordTokenizer()).generate([[1, 2]], SamplingParams(2))[0]
    assert completion.text == "".join(f" w{i}" for i in completion.tokens)  # the first space belongs to the text


# -----------------------------------------------------------------------------------------------------
# a step is atomic


class Fault(Exception):
    """What a broken forward raises."""


@pytest.mark.parametrize("error", [Fault, KeyboardInterrupt, torch.OutOfMemoryError])
@pytest.mark.parametrize("policy", POLICIES)
def test_a_failed_step_is_computed_again(model, policy, error, monkeypatch):
    engine = make_engine(model, policy)
    ids = [engine.add_request(p, SamplingParams(5)) for p in PROMPTS]
    forward, calls, batches = GPT.forward, [], []

    def flaky(self, batch, cache):
        calls.append(1)
        batches.append((batch.tokens.tolist(), batch.positions.tolist(), batch.cells.tolist()))
        logits = forward(self, batch, cache)  # the cache is written before it fails
        if len(calls) % 2:
            raise error
        return logits

    monkeypatch.setattr(GPT, "forward", flaky)
    tokens = {i: [] for i in ids}
    while engine.has_work:
        before = [(r.id, r.num_computed, len(r.tokens)) for r in (*engine.scheduler.running, *engine.scheduler.waiting)]
        with pytest.raises(error):
            engine.step()
        after = [(r.id, r.num_computed, len(r.tokens)) for r in (*engine.scheduler.running, *engine.scheduler.waiting)]
        assert sorted(after) == sorted(before)
        for event in engine.step():
            tokens[event.request_id].append(event.token)
        assert batches[-1] == batches[-2]
    monkeypatch.undo()
    assert [tokens[i] for i in ids] == [alone(model, p, SamplingParams(5)) for p in PROMPTS]


def test_an_interrupt_while_recording_loses_nothing(model, monkeypatch):
    engine = make_engine(model)
    ids = [engine.add_request(p, SamplingParams(3, logprobs=True)) for p in PROMPTS]
    finish, calls, events = Engine._finish, [], []

    def interrupted(self, live, reason):
        calls.append(live.request.id)
        if len(calls) in (1, 3, 6):
            raise KeyboardInterrupt
        return finish(self, live, reason)

    monkeypatch.setattr(Engine, "_finish", interrupted)
    while engine.has_work:
        try:
            events += engine.step()
        except KeyboardInterrupt:
            pass
    for i, prompt in zip(ids, PROMPTS):
        expected = alone(model, prompt, SamplingParams(3))
        assert [e.token for e in events if e.request_id == i] == expected
        completion = next(e.completion for e in events if e.request_id == i and e.completion)
        assert completion.tokens == expected and len(completion.token_times) == len(completion.logprobs) == 3


@pytest.mark.parametrize("policy", ["orca", "sarathi-serve"])
def test_abort_after_an_interrupted_recording_leaves_the_others_alone(model, policy, monkeypatch):
    engine = make_engine(model, policy, chunk=30)
    ids = [engine.add_request(p, SamplingParams(n)) for p, n in zip(PROMPTS, (1, 5, 5))]
    with monkeypatch.context() as patch:
        patch.setattr(Engine, "_finish", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            engine.step()
    assert engine.abort(ids[0]).finish_reason == "abort"
    done = {}
    while engine.has_work:
        done |= {e.request_id: e.completion for e in engine.step() if e.completion}
    assert done.keys() == set(ids[1:])
    for i, prompt in zip(ids[1:], PROMPTS[1:]):
        assert done[i].tokens == alone(model, prompt, SamplingParams(5))


def test_generate_after_an_interrupted_recording(model, monkeypatch):
    engine, finish, calls = make_engine(model, "vllm", chunk=30), Engine._finish, []

    def interrupted(self, live, reason):
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return finish(self, live, reason)

    monkeypatch.setattr(Engine, "_finish", interrupted)
    with pytest.raises(KeyboardInterrupt):
        engine.generate(PROMPTS[:2], SamplingParams(1), progress=False)
    done = engine.generate(PROMPTS, SamplingParams(4), progress=False)
    assert [c.tokens for c in done] == [alone(model, prompt, SamplingParams(4)) for prompt in PROMPTS]


def test_text_of_a_prompt_that_ends_within_a_character(model, monkeypatch):
    engine = make_engine(tiny_model(vocab_size=256), tokenizer=byte_tokenizer())
    monkeypatch.setattr("engine.sample", lambda logits, params, positions: (torch.tensor([0xA9]), None))
    assert engine.generate([[0xC3]], SamplingParams(1))[0].text == "é"
    assert engine.generate([[0x61]], SamplingParams(1))[0].text == "\ufffd"


def test_abort_after_a_failed_step_takes_the_request_out_of_the_batch(model, monkeypatch):
    engine = make_engine(model, "vllm")
    ids = [engine.add_request(p, SamplingParams(3)) for p in PROMPTS[:3]]
    with monkeypatch.context() as patch:
        patch.setattr(GPT, "forward", lambda *_: (_ for _ in ()).throw(Fault))
        with pytest.raises(Fault):
            engine.step()
    for i in (ids[1], ids[0], ids[2]):
        engine.abort(i)
    assert engine.step() == [] and not engine.has_work and engine.scheduler.pages.num_free == 3
    assert engine.generate([PROMPTS[0]], SamplingParams(3))[0].tokens == alone(model, PROMPTS[0], SamplingParams(3))


def test_an_interrupted_generate_leaves_nothing_behind(model, monkeypatch):
    engine = make_engine(model)
    with monkeypatch.context() as patch:
        patch.setattr(GPT, "forward", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            engine.generate(PROMPTS, SamplingParams(2))
    assert not engine.has_work and engine.step() == [] and engine.scheduler.pages.num_free == 3
    assert engine.generate([[9, 9]], SamplingParams(4))[0].tokens == alone(model, [9, 9], SamplingParams(4))


# -----------------------------------------------------------------------------------------------------
# errors


@pytest.mark.parametrize(
    "prompt, params, message",
    [
        ([], SamplingParams(), "prompt: must hold at least 1 token"),
        ([1, 61], SamplingParams(), r"token 61 is out of range, the vocabulary is 0 … 60"),
        ([-1], SamplingParams(), "token -1 is out of range"),
        ([1.5], SamplingParams(), "prompt="),
        ("text", SamplingParams(), "no tokenizer"),
        (7, SamplingParams(), "prompt=7"),
        ([1], {"max_new_tokens": 3}, "params="),
        ([1] * 30, SamplingParams(11), r"prompt of 30 tokens \+ max_new_tokens=11: must not exceed max_len=40"),
    ],
)
def test_a_bad_request_is_refused_and_changes_nothing(model, prompt, params, message):
    engine = make_engine(model)
    with pytest.raises(ValueError, match=message):
        engine.add_request(prompt, params)
    with pytest.raises(ValueError, match=message):
        engine.generate([[1], prompt], [SamplingParams(2), params], progress=False)
    assert not engine.has_work and not engine.scheduler.waiting
    assert engine.add_request([1] * 30, SamplingParams(10)) == 0  # exactly max_len fits


@pytest.mark.parametrize(
    "options, message",
    [
        (dict(policy="fifo"), "policy='fifo'.*request-level"),
        (dict(chunk=0), "chunk=0"),
        (dict(max_batch=0), "max_batch=0"),
        (dict(max_len=0), "max_len=0"),
        (dict(max_len=513), r"max_len=513: must be at most 512"),
        (dict(chunk=2.5), "chunk=2.5"),
        (dict(chunk="8"), "chunk='8'"),
        (dict(max_batch=2.0), "max_batch=2.0"),
        (dict(policy=["orca"]), r"policy=\['orca'\]"),
        (dict(policy="sarathi", tile=0), "tile=0"),
        (dict(policy="orca", tile=2), "tile=2.*'orca' has no such option"),
        (dict(tbt_slo=0), "tbt_slo=0"),
        (dict(policy="priority", ageing=-1), "ageing=-1"),
        (dict(policy="priority", ttft_slo=float("nan")), "ttft_slo=nan"),
        (dict(policy="vllm", tbt_slo=0.1), "tbt_slo=0.1.*'vllm' has no such option"),
        (dict(page_size=0), "page_size=0"),
        (dict(page_size=41), "page_size=41: must be at most max_len=40"),
        (dict(page_size=8, pages=4), "pages=4: a request of max_len=40 takes 5 pages"),
        (dict(max_waiting=0), "max_waiting=0"),
        (dict(prefills=2), "prefills=2.*sarathi-serve"),
        (dict(budget=2), "budget=2"),
        (dict(attention="flash"), "attention='flash'"),
        (dict(attention="xformers"), "attention='xformers'"),
    ],
)
def test_a_bad_engine_is_refused(model, options, message):
    with pytest.raises(ValueError, match=message):
        make_engine(model, **options)


@pytest.mark.parametrize(
    "options, name",
    [
        (dict(temperature=-0.1), "temperature=-0.1"),
        (dict(temperature=float("nan")), "temperature=nan"),
        (dict(top_k=-1), "top_k=-1"),
        (dict(top_p=0.0), "top_p=0.0"),
        (dict(top_p=1.1), "top_p=1.1"),
        (dict(max_new_tokens=0), "max_new_tokens=0"),
        (dict(max_new_tokens=2.5), "max_new_tokens=2.5"),
        (dict(top_k=1.0), "top_k=1.0"),
        (dict(temperature="1"), "temperature='1'"),
        (dict(stop_token_ids=5), "stop_token_ids=5"),
    ],
)
def test_bad_sampling_params_are_refused(options, name):
    with pytest.raises(ValueError, match=name):
        SamplingParams(**options)
    with pytest.raises(TypeError):
        SamplingParams(temprature=1)


def test_generate_checks_its_arguments(model):
    engine = make_engine(model)
    with pytest.raises(ValueError, match="prompts: must be a list"):
        engine.generate("abc")
    with pytest.raises(ValueError, match="params: 1 given for 2 prompts"):
        engine.generate([[1], [2]], [SamplingParams()])
    assert engine.generate([]) == []
    kept = engine.add_request([9, 9], SamplingParams(1))
    with pytest.raises(ValueError, match="1 requests are running"):
        engine.generate([[1]])  # it would swallow the events of the other
    assert [event.request_id for event in engine.step()] == [kept]


@pytest.mark.parametrize(
    "changes, message",
    [
        (dict(family="bert"), "family='bert'"),
        (dict(n_kv_head=3), "n_kv_head=3"),
        (dict(n_layer=0), "n_layer=0"),
        (dict(head_dim=7), "head_dim=7"),
    ],
)
def test_a_bad_geometry_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        GPTConfig.preset("llama-tiny", **changes)
    with pytest.raises(ValueError, match="preset='llama-99b'.*llama-13b"):
        GPTConfig.preset("llama-99b")


# -----------------------------------------------------------------------------------------------------
# memory


def test_kv_bytes_are_known_before_they_are_allocated(model):
    for slots, max_len, dtype in [(1, 7, torch.float64), (5, 40, torch.bfloat16)]:
        cache = KVCache(model.config, slots, max_len, dtype=dtype)
        assert KVCache.kv_bytes(model.config, slots, max_len, dtype) == cache.data.numel() * cache.data.element_size()
    thirteen_b = GPTConfig.preset("llama-13b")
    assert KVCache.kv_bytes(thirteen_b, 1, 1, torch.float16) == 819_200  # 40 layers * 2 * 5,120 * 2 bytes


def test_without_a_batch_size_memory_decides(model, monkeypatch):
    per_token, weights = 2 * 2 * 2 * 8 * 8, sum(p.numel() for p in model.parameters()) * 8
    monkeypatch.setattr(
        "os.sysconf", lambda name: {"SC_PHYS_PAGES": 2 * (weights + 7 * 40 * per_token + 99), "SC_PAGE_SIZE": 1}[name]
    )
    engine = Engine(model, max_len=40)
    assert engine.scheduler.max_batch == engine.cache.pages == 7
    with pytest.raises(ValueError, match="max_len=400: one request takes"):
        Engine(model, max_len=400)
    monkeypatch.setattr("os.sysconf", lambda name: 10**6)
    assert Engine(model, max_len=4).scheduler.max_batch == 256  # however much there is


def test_sarathi_is_aligned_to_the_tile_on_cuda_only(model, monkeypatch):
    assert make_engine(model, "sarathi", chunk=300, max_len=400).scheduler.budget == 300
    monkeypatch.setattr(GPT, "device", torch.device("cuda"))
    for name in ("KVCache", "make_attention"):
        monkeypatch.setattr(f"engine.{name}", lambda *_: None)
    assert Engine(model, "sarathi", 300, 3, 400).scheduler.budget == 256
    assert Engine(model, "sarathi", 300, 3, 400, tile=64).scheduler.budget == 256
    assert Engine(model, "sarathi", 300, 3, 400, tile=100).scheduler.budget == 300


def test_a_cache_needs_a_page_and_a_page_a_token(model):
    for pages, page_size, message in ((0, 8, "pages=0"), (2, 0, "page_size=0")):
        with pytest.raises(ValueError, match=message):
            KVCache(model.config, pages, page_size)


def test_random_weights_follow_gpt2():
    config = GPTConfig("gpt2", 512, 8, 4, 128)
    named = dict(GPT(config).named_parameters())
    assert all((p == ("norm.weight" in name)).all() for name, p in named.items() if p.ndim == 1)
    std = {name: p.std().item() for name, p in named.items() if p.ndim == 2}
    for name, value in std.items():
        residual = name.endswith(("postproj.weight", "ffn_ln2.weight"))
        assert value == pytest.approx(0.02 / 4 if residual else 0.02, rel=0.1)  # 4 = sqrt(2 * 8 layers)
    assert torch.equal(GPT(config, seed=5).head.weight, GPT(config, seed=5).head.weight)
    assert not torch.equal(GPT(config, seed=5).head.weight, GPT(config, seed=6).head.weight)


def test_presets_have_their_published_size():
    published = {
        "gpt2": 124e6,
        "gpt2-medium": 355e6,
        "gpt2-large": 774e6,
        "gpt2-xl": 1558e6,
        "llama-7b": 6.74e9,
        "llama-13b": 13.02e9,
        "llama-33b": 32.5e9,
        "llama-65b": 65.3e9,
        "llama2-70b": 69.0e9,
        "llama3-8b": 8.03e9,
        "mistral-7b": 7.24e9,
        "yi-34b": 34.4e9,
    }
    for name, parameters in published.items():
        assert GPTConfig.preset(name).num_params() == pytest.approx(parameters, rel=0.01)
    assert 160e6 <= GPTConfig.preset("llama-160m").num_params() <= 220e6
