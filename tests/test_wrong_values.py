"""Whatever is passed to the Python API: it is right, or one line says what is wrong.

Each argument has a rule here, which says independently of the code which values are right. Random
values of all kinds are refused if and only if the rule says so: 200 of them, or as many as
NANOSARATHI_WRONG_VALUES says."""

import itertools
import math
import os
import pickle
import random
import re
import time
from contextlib import suppress
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch

from attention import BACKENDS, DEVICES
from config import EngineConfig
from engine import Engine
from kv_cache import Pages
from model import GPT
from policies import POLICIES, make_scheduler
from policies.iteration_time import BatchShape
from policies.priority import PRIORITIES
from pretrained.geometry import GPTConfig, RopeScaling
from pretrained.tokenizers import Tokenizer, byte_tokenizer
from sampling import SamplingParams
from tests.helpers import tiny_model

CASES = int(os.environ.get("NANOSARATHI_WRONG_VALUES", "200"))
MODEL = tiny_model()
VOCAB_SIZE = MODEL.config.vocab_size
ONE_TOKEN = SamplingParams(1)
LIMIT_S = 60  # for all calls on one target; a second more for each


class Unprintable:
    """A value whose repr has several lines."""

    def __repr__(self):
        return "two\nlines\x1b"


class NoRepr:
    """A value that has no repr."""

    def __repr__(self):
        raise KeyError("no repr")


NESTED = []
for _ in range(10**5):
    NESTED = [NESTED]
VALUES = [
    *(None, True, False, np.True_, torch.tensor(True), torch.tensor([True])),
    *(0, 1, 2, 3, 4, 8, 60, 61, -1, 2**40, 2**63 - 1, 2**63, -(2**63) - 1, 10**400, 10**5000),
    *(np.int64(2), np.uint8(4), np.int32(-1), torch.tensor(2), np.array([1, 2])),
    *(0.0, -0.0, 0.5, 1.0, 2.5, -1.0, math.nan, math.inf, -math.inf, 5e-324, 1e-300, 1e308),
    *(np.float32(0.5), np.float64("nan"), Fraction(1, 2), Fraction(1, 10**400), 1j),
    *("", "auto", "x", "2", "vllm", "low", "sdpa", "llama", "gpt2", "no.py:X", "\0.py:X", "é\n"),
    *("a" * 5000 + ".py:X", "cpu", "meta", "cuda:99", b"", b"ab", bytearray(b"ab")),
    *([], [1], [1, 2], [True], [61], [-1], [1.5], ["1"], [None], [[1]], [[1], [2, 3]], [[True]]),
    *([[]], ["x"], (), (1, 2), range(3), {1}, {"x"}, {}, {"x": 1}, {1: 2}, {"chunk": 2}),
    *(torch.tensor([1, 2]), torch.tensor([0.5]), torch.ones(2, 2), NESTED, [NESTED]),
    *(torch.ones(2, device="meta"), torch.tensor([1, 2]).to_sparse(), [torch.ones(1).to("meta")]),
    *(range(10**9), range(10**30), itertools.count(), itertools.repeat(1)),
    *(np.timedelta64(3), np.timedelta64(3, "s"), NoRepr(), [NoRepr()]),
    *(Unprintable(), object(), int, print, len, ValueError("x"), Path("/"), Path("/no/such")),
    *(torch.float32, torch.int64, torch.float16, torch.complex64, torch.device("cpu")),
    *(MODEL, MODEL.config, ONE_TOKEN, [ONE_TOKEN], [ONE_TOKEN] * 2, [0], EngineConfig()),
    *(Pages(8, 8), Pages(2, 8), byte_tokenizer(), Tokenizer, time.monotonic, GPT),
    *([(BatchShape(decodes=1), 0.5)], [(BatchShape(decodes=1), "1")], [(1, 2)]),
    RopeScaling(8.0, 1.0, 4.0, 64),
]


# The rules: whether a value is right.


def is_whole(value):
    """Whether it is a whole number."""
    return isinstance(value, (int, np.integer)) and not isinstance(value, (bool, np.timedelta64))


def whole(minimum, maximum=2**63 - 1):
    """The rule of a whole number in limits."""
    return lambda value: is_whole(value) and minimum <= value <= maximum


def number(is_allowed):
    """The rule of a finite number for which `is_allowed` is true as a float."""

    def is_right(value):
        is_real = isinstance(value, (int, float, Fraction, np.integer, np.floating))
        with suppress(OverflowError):  # 10**400
            if is_real and not isinstance(value, (bool, np.timedelta64)):
                return math.isfinite(value) and is_allowed(float(value))
        return False

    return is_right


def flag(value):
    """The rule of a bool."""
    return value is True or value is False


def one_of(names):
    """The rule of a name."""
    return lambda value: isinstance(value, str) and value in names


def instance(kind):
    """The rule of an object."""
    return lambda value: isinstance(value, kind)


def optional(rule):
    """The rule of an argument that may be None."""
    return lambda value: value is None or rule(value)


def either(*rules):
    """The rule of an argument of several kinds."""
    return lambda value: any(rule(value) for rule in rules)


def token_ids(value):
    """The rule of a prompt, and of stop tokens if these are no set."""
    if not isinstance(value, (list, tuple, range, np.ndarray, torch.Tensor)):
        return False
    with suppress(TypeError, RuntimeError, OverflowError):  # of tensors without values
        return len(value) <= 2**24 and all(is_whole(t) and t >= 0 for t in elements(value))
    return False


def elements(value):
    """The elements of a sequence, those of a tensor as numbers."""
    return value.tolist() if isinstance(value, (np.ndarray, torch.Tensor)) else list(value)


def prompt(value):
    """The rule of a prompt."""
    return token_ids(value) and len(value) > 0 and all(t < VOCAB_SIZE for t in elements(value))


def prompts(value):
    """The rule of a list of prompts."""
    if isinstance(value, (np.ndarray, torch.Tensor)):
        return value.ndim == 2 and value.dtype in (torch.int64, np.int64)
    if isinstance(value, range):
        return not value
    return isinstance(value, (list, tuple, range)) and all(prompt(each) for each in value)


def params_of_two(value):
    """The rule of the params of two prompts."""
    is_list = isinstance(value, list) and value == [ONE_TOKEN] * 2
    return value is None or isinstance(value, SamplingParams) or is_list


def stop_tokens(value):
    """The rule of stop tokens."""
    return token_ids(value) or isinstance(value, set) and token_ids(list(value))


def tokenizer(value):
    """The rule of a tokenizer."""
    if not isinstance(value, Tokenizer) or not callable(value.encode) or not callable(value.decode):
        return False
    stop = value.stop_token_ids
    is_stop = isinstance(stop, (list, frozenset)) and all(is_whole(t) and t >= 0 for t in stop)
    return is_stop and optional(whole(1))(value.longest_token)


def no_options(value):
    """The rule of the options of a policy that has none."""
    return isinstance(value, dict) and not value


def profile(value):
    """The rule of a profile."""
    if isinstance(value, range):
        return not value
    return isinstance(value, (list, tuple)) and all(
        isinstance(row, tuple) and isinstance(row[0], BatchShape) and row[1] == 0.5 for row in value
    )


positive = number(lambda value: value > 1e-307)
size = whole(1)
POLICY = one_of(POLICIES)

# What is called, with one argument changed; and the rule of each argument.

SAMPLING = dict(
    max_new_tokens=size,
    temperature=number(lambda value: value >= 0),
    top_k=whole(0),
    top_p=number(lambda value: 1e-307 < value <= 1),
    seed=whole(-(2**63)),
    stop_token_ids=stop_tokens,
    logprobs=flag,
)
GEOMETRY = dict(
    family=one_of(["gpt2", "llama"]),
    vocab_size=whole(1, 2**24),
    n_layer=whole(1, 2**10),
    n_head=lambda value: whole(1, 2**16)(value) and value % 2 == 0,
    n_embd=whole(1, 2**24),
    n_kv_head=lambda value: value is None or is_whole(value) and value in (1, 2, 4),
    head_dim=lambda value: value is None or whole(1, 2**16)(value) and value % 2 == 0,
    n_inner=optional(whole(1, 2**26)),
    max_positions=whole(1, 2**24),
    norm_eps=number(lambda value: 1e-307 < value <= 1),
    qkv_bias=flag,
    qk_norm=flag,
    tie_embeddings=flag,
    rope_theta=number(lambda value: value >= 1),
    rope_scaling=optional(instance(RopeScaling)),
)
SCALING = dict(
    factor=number(lambda value: value >= 1),
    low_freq_factor=number(lambda value: 1e-307 < value < 4),
    high_freq_factor=number(lambda value: value > 1),
    original_max_positions=whole(1, 2**24),
)
CONFIG = dict(
    policy=POLICY,
    chunk=size,
    max_batch=optional(size),
    max_len=optional(size),
    page_size=optional(size),
    pages=optional(size),
    prefix_caching=flag,
    max_waiting=optional(size),
    attention=instance(str),
    policy_options=no_options,
)
ENGINE = CONFIG | dict(
    model=lambda value: isinstance(value, GPT) and value.device.type == "cpu",
    policy=POLICY,
    max_len=whole(8, 64),  # from a page to all pages, so that the model's limit is too much
    page_size=optional(whole(4, 32)),  # from an eighth of max_len to max_len
    pages=optional(whole(4, 2**20)),
    attention=one_of({name for name in BACKENDS if DEVICES.get(name) != "cuda"}),
    tokenizer=optional(tokenizer),
    clock=callable,
)
WITH_CONFIG = dict(
    model=instance(GPT),
    config=optional(instance(EngineConfig)),
    tokenizer=optional(instance(Tokenizer)),
    clock=callable,
)
REQUEST = dict(
    prompt=lambda value: prompt(value) and len(value) < 32,
    params=optional(instance(SamplingParams)),
    arrival=optional(number(lambda value: True)),
    request_id=optional(whole(2)),  # 0 and 1 are there
    priority=one_of(PRIORITIES),
    ttft_slo=optional(positive),
    tbt_slo=optional(positive),
    user=instance(str),
)
GENERATE = dict(prompts=prompts, params=params_of_two, progress=flag)
ABORT = dict(request_id=lambda value: is_whole(value) and value in (0, 1))
SCHEDULER = dict(
    policy=POLICY,
    pages=lambda value: isinstance(value, Pages),
    clock=callable,
    tile=size,
    tbt_slo=optional(positive),
    profile=profile,
)
PRIORITY = dict(ttft_slo=positive, ageing=positive)
MODEL_ARGUMENTS = dict(
    config=instance(GPTConfig),
    device=either(one_of(["cpu", "meta"]), instance(torch.device)),
    dtype=lambda value: isinstance(value, torch.dtype) and value.is_floating_point,
    seed=optional(whole(-(2**63))),
)
SMALL = dict(model=MODEL, policy="orca", chunk=8, max_batch=2, max_len=32, page_size=8, pages=8)


def preset(engine, **changes):
    """A small geometry with changes."""
    return GPTConfig.preset("llama-tiny", **changes)


def scaling(engine, **changes):
    """A RopeScaling with changes."""
    sizes = dict(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_positions=64)
    return RopeScaling(**sizes | changes)


def with_config(engine, **changes):
    """An engine with the config of another."""
    return Engine(**dict(model=MODEL, config=engine.config) | changes)


def add_request(engine, **changes):
    """A third request."""
    return engine.add_request(**dict(prompt=[1, 2], params=ONE_TOKEN) | changes)


def generate(engine, **changes):
    """The completions of two prompts, or of others."""
    for request_id in list(engine.scheduler.requests):
        engine.abort(request_id)
    before = state(engine)
    try:
        return engine.generate(**dict(prompts=[[1], [2]], params=ONE_TOKEN) | changes)
    except (ValueError, TypeError):
        assert state(engine) == before
        raise


def scheduler(engine, **changes):
    """A scheduler with options."""
    sizes = dict(policy="dynamic", pages=Pages(8, 8), chunk=8, max_batch=2, max_len=32)
    return make_scheduler(**sizes | changes)


def priority(engine, **options):
    """A scheduler of the policy `priority`, made by an engine."""
    return Engine(**SMALL | dict(policy="priority", policy_options=options))


TARGETS = {
    "SamplingParams": (SAMPLING, lambda engine, **changes: SamplingParams(**changes)),
    "GPTConfig": (GEOMETRY, preset),
    "RopeScaling": (SCALING, scaling),
    "EngineConfig": (CONFIG, lambda engine, **changes: EngineConfig(**changes)),
    "Engine": (ENGINE, lambda engine, **changes: Engine(**SMALL | changes)),
    "with_config": (WITH_CONFIG, with_config),
    "add_request": (REQUEST, add_request),
    "generate": (GENERATE, generate),
    "abort": (ABORT, lambda engine, **changes: engine.abort(**changes)),
    "make_scheduler": (SCHEDULER, scheduler),
    "priority": (PRIORITY, priority),
    "GPT": (
        MODEL_ARGUMENTS,
        lambda engine, **changes: GPT(**dict(config=MODEL.config, seed=None) | changes),
    ),
}
METHODS = ("with_config", "add_request", "generate", "abort")  # of an engine, or with one
NAMES = {  # what errors may call an argument
    "prompts": "prompts?",  # one of several
    "policy_options": "policy_options|policy",
}


def state(engine):
    """All that a refused call may not change."""
    scheduler = engine.scheduler
    requests = [(r.id, r.num_computed, tuple(r.tokens)) for r in scheduler.requests.values()]
    queues = [[r.id for r in queue] for queue in (scheduler.waiting, scheduler.running)]
    journal = scheduler.journal
    counts = (scheduler.pages.num_free, journal.restarts, journal.broken, engine._next_id)
    return requests, queues, counts, engine.config, engine.has_work


def busy_engine():
    """An engine with two requests, of which one runs."""
    sizes = dict(chunk=4, max_batch=1, max_len=128, pages=16)
    engine = Engine(**SMALL | sizes | dict(policy="sarathi-serve"))
    for _ in range(2):
        engine.add_request([1, 2, 3], SamplingParams(4))
    engine.step()
    return engine


def check(target, argument, value):
    """Assert that the value is refused in one line if and only if it is wrong."""
    rules, call = TARGETS[target]
    engine = busy_engine() if target in METHODS else None
    before = engine and state(engine)
    message = ""
    try:
        call(engine, **{argument: value})
    except ValueError as error:
        message = str(error)
        assert engine is None or target == "generate" or state(engine) == before
        names = NAMES.get(argument, argument)
        assert re.search(rf"\b({names})[=:]|{names} \S+ has no such option", message), message
        assert message.isprintable() and len(message) < 400
        assert re.match(rf"({names})\b", getattr(error, "argument", "") or argument)
    is_right = bool(rules[argument](value))
    assert is_right == (not message), f"{argument}: {message or 'accepted'}"


@pytest.mark.parametrize("target", TARGETS)
def test_random_values_are_refused_exactly_where_they_are_wrong(target):
    rng = random.Random(target)
    rules = TARGETS[target][0]
    began = time.monotonic()
    for _ in range(-(-CASES // len(TARGETS))):
        check(target, rng.choice(list(rules)), rng.choice(VALUES))
    assert time.monotonic() - began < LIMIT_S + CASES


NO_VALUES = torch.tensor(1, device="meta")
ON_META = GPT(MODEL.config, "meta", seed=None)
BROKEN_TOKENIZERS = [
    byte_tokenizer()._replace(**{field: value})
    for field, values in {
        "encode": [None],
        "decode": [5],
        "stop_token_ids": [None, "ab", [-1], ["1"]],
        "longest_token": [0, 1.5, "x", True],
    }.items()
    for value in values
]
REFUSED = [  # (target, argument, values): each would lead to an error far away, or to noise
    ("GPTConfig", "norm_eps", [math.nan, -1, 0, 2.0, True, "1e-5", 10**400]),
    ("GPTConfig", "rope_theta", [True, 0.5, 5e-324, math.inf]),
    ("GPTConfig", "rope_scaling", [{"factor": 8.0}, "llama3", True]),
    ("GPTConfig", "qkv_bias", ["yes", 1, None]),
    ("GPTConfig", "tie_embeddings", ["no", 0]),
    ("GPTConfig", "n_layer", [True, 10**18, 2.0]),
    ("GPTConfig", "max_positions", [10**18]),
    ("RopeScaling", "factor", [math.nan, 5e-324, True, "8"]),
    ("SamplingParams", "max_new_tokens", [True, 1.0, np.timedelta64(3), np.timedelta64(3, "s")]),
    ("SamplingParams", "temperature", [False, math.inf, np.timedelta64(3), np.timedelta64(3, "s")]),
    ("SamplingParams", "stop_token_ids", [[True], [-1], {5: 6}, b"ab", 0, itertools.count()]),
    ("EngineConfig", "chunk", [True, None]),
    ("EngineConfig", "policy", [5, None, "fifo", "\0.py:X", "a" * 5000 + ".py:X"]),
    ("EngineConfig", "policy_options", [0, None, [], {"x": 1}, {1: 2}, {"chunk": 2}]),
    ("EngineConfig", "attention", [5, None]),
    ("EngineConfig", "prefix_caching", [1, np.True_]),
    ("Engine", "model", [None, "llama-tiny", MODEL.config, GPT, ON_META]),
    ("Engine", "tokenizer", ["x", 0, Tokenizer, *BROKEN_TOKENIZERS]),
    ("Engine", "clock", [5, None]),
    ("Engine", "policy_options", [0, False, "", {"clock": time.monotonic}]),
    ("with_config", "config", [5, {}]),
    ("add_request", "params", [0, False, "", {}]),
    ("add_request", "prompt", [None, [True], {1: 2}, {1, 2}, b"ab", torch.tensor([True]), NESTED]),
    ("add_request", "prompt", [NO_VALUES, [NO_VALUES], torch.tensor([1, 2]).to_sparse()]),
    ("add_request", "prompt", [range(10**9), range(10**30), itertools.repeat(1), NoRepr()]),
    ("add_request", "arrival", [math.nan, True, "now"]),
    ("add_request", "request_id", [True, 0]),
    ("generate", "prompts", [None, 5, "text", {1: 2}, {(1, 2)}, [[1], [61]]]),
    ("generate", "prompts", [NO_VALUES, [NO_VALUES] * 2, range(10**9), itertools.repeat([1])]),
    (
        "generate",
        "params",
        [NO_VALUES, itertools.count(), 0, False, [ONE_TOKEN], [ONE_TOKEN, 0], "xy"],
    ),
    ("generate", "progress", [1, "yes"]),
    ("abort", "request_id", ["x", None, True, -1, 7]),
    ("make_scheduler", "pages", [None, 8]),
    ("make_scheduler", "clock", [5, None]),
    ("make_scheduler", "tile", [True]),
    ("make_scheduler", "profile", [5, [(1, 2)], [(BatchShape(decodes=1), "1")], NO_VALUES]),
    ("GPT", "config", [None, "llama-tiny"]),
    ("GPT", "device", ["nonsense", "cuda:99", 5, None]),
    ("GPT", "dtype", ["float32", torch.int64, torch.complex64, None]),
    ("GPT", "seed", [1.5, "0", True, [], 2**64, -(2**63) - 1]),
]
KNOWN = [(target, argument, v) for target, argument, values in REFUSED for v in values]
IDS = [f"{target} {argument}" for target, argument, _ in KNOWN]


@pytest.mark.parametrize("target, argument, value", KNOWN, ids=IDS)
def test_a_wrong_value_is_refused_in_one_line(target, argument, value):
    check(target, argument, value)
    assert not TARGETS[target][0][argument](value)


def test_an_error_knows_its_argument_and_a_rank_can_send_it():
    with pytest.raises(ValueError) as refused:
        EngineConfig(chunk=0)
    sent = pickle.loads(pickle.dumps(refused.value))
    assert (str(sent), sent.argument) == (str(refused.value), "chunk")


def test_an_unknown_keyword_is_a_type_error():
    for _, call in TARGETS.values():
        with pytest.raises((TypeError, ValueError), match="nonsense"):
            call(busy_engine(), nonsense=1)


def test_small_integers_of_numpy_do_not_overflow():
    sizes = {name: np.uint8(200) for name in ("chunk", "max_batch", "max_len")}
    sizes |= dict(pages=np.uint8(100), page_size=np.uint8(16))
    config = EngineConfig("sarathi", policy_options=dict(tile=np.uint8(7)), **sizes)
    made = config.scheduler(time.monotonic)
    assert (made.chunk, made.max_batch, made.max_len, made.budget) == (200, 200, 200, 196)
    assert {type(made.max_len), type(made.budget), type(made.pages.total)} == {int}
    config = GPTConfig.preset("llama-tiny", n_head=np.uint8(16), n_embd=np.uint8(224))
    assert type(config.n_head) is int and config.n_embd * config.n_head == 3584
    config = EngineConfig(max_batch=np.uint8(200), max_len=np.uint8(200), pages=np.uint8(9))
    assert type(config.max_batch * config.max_len * config.pages) is int


@pytest.mark.parametrize("processes", ["0", "", "two", "-1", "1.5"])
def test_a_number_of_processes_that_makes_no_sense_is_named(processes, monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", processes)
    with pytest.raises(ValueError, match=f"^LOCAL_WORLD_SIZE='?{processes}'?: must be a whole"):
        Engine(**SMALL)


def test_numbers_of_numpy_become_floats_in_a_geometry():
    scaling = RopeScaling(np.float32(8), np.float32(1), np.float32(4), np.int64(64))
    config = GPTConfig(norm_eps=np.float32(0.5), rope_theta=np.int64(500), rope_scaling=scaling)
    floats = [config.norm_eps, config.rope_theta, scaling.factor, scaling.low_freq_factor]
    assert floats == [0.5, 500.0, 8.0, 1.0]
    assert {type(value) for value in floats} == {float}


def test_random_weights_need_memory():
    with pytest.raises(ValueError, match="^device='meta': .* must have seed=None$"):
        GPT(MODEL.config, "meta")


@pytest.mark.parametrize("seconds", [math.nan, math.inf, None, "x", True, 1j, 10**400])
def test_a_clock_that_returns_no_seconds_is_named(seconds):
    engine = Engine(**SMALL | dict(clock=lambda: seconds))
    with pytest.raises(ValueError, match=r"^clock\(\)="):
        engine.add_request([1], ONE_TOKEN)
    engine.add_request([1], ONE_TOKEN, arrival=0.0)
    with pytest.raises(ValueError, match=r"^clock\(\)="):
        engine.step()


@pytest.mark.parametrize(
    "sizes, cause",
    [
        (dict(page_size=2**31), "page_size=2147483648: must be at most max_len=2048"),
        (dict(max_batch=2**40), "max_batch=1099511627776, max_len=2048: takes"),
        (dict(pages=2**40), "pages=1099511627776: must be .* at most 268435456"),
        (dict(page_size=16, pages=2**28), "pages=268435456, page_size=16: takes"),
    ],
)
def test_the_size_that_was_wrong_is_named(sizes, cause):
    model = tiny_model(max_positions=4096)
    with pytest.raises(ValueError, match=f"^{cause}"):
        Engine(model, **sizes)


@pytest.mark.parametrize(
    "sizes",
    [
        dict(head_dim=2**16, max_positions=2**24),
        dict(n_inner=2**26, n_layer=1024),
        dict(vocab_size=2**24, n_embd=2**20),
    ],
)
def test_the_sizes_of_a_model_that_does_not_fit_are_named(sizes):
    small = dict(n_layer=1, n_head=1, n_kv_head=1, n_embd=8, n_inner=8, vocab_size=8, head_dim=8)
    with pytest.raises(ValueError, match="takes .* GB are free") as error:
        GPT(GPTConfig.preset("llama-tiny", **small | sizes))
    assert all(f"{name}={size}" in str(error.value) for name, size in sizes.items())
