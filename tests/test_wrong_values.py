"""Whatever is passed to the Python API: it is right, or one line says what is wrong.

Each argument has a kind: values that it takes, and values that it refuses, the strangest of them
too. All are tried, one at a time; whatever is refused leaves everything as it was."""

import itertools
import math
import pickle
import re
import time
from fractions import Fraction
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch

from config import EngineConfig
from engine import Engine
from kv_cache import Pages
from model import GPT
from policies import make_scheduler
from policies.iteration_time import BatchShape
from pretrained.geometry import GPTConfig, RopeScaling
from pretrained.tokenizers import byte_tokenizer
from sampling import SamplingParams
from tests.helpers import tiny_model

MODEL = tiny_model()
ON_META = GPT(MODEL.config, "meta", seed=None)
ONE_TOKEN = SamplingParams(1)
LETTERS = byte_tokenizer()


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
NO_VALUES = torch.tensor(1, device="meta")
STRANGE = [  # refused everywhere
    *(1j, b"ab", {1: 2}, {"x"}, [NESTED], [NoRepr()], NoRepr(), Unprintable(), ValueError("x")),
    *(Path("/no/such"), itertools.count(), range(10**9), range(10**30)),
    *(torch.ones(2, 2), torch.tensor([0.5]), torch.tensor([1, 2]).to_sparse()),
    *(NO_VALUES, [NO_VALUES]),
]
NO_NUMBERS = [
    *(*STRANGE, True, np.True_, "1", "", "é\n", [1], torch.tensor(2), 10**400, 10**5000),
    *(np.timedelta64(3), np.timedelta64(3, "s"), math.nan, math.inf, -math.inf, None),
]


class Kind(NamedTuple):
    """The values that an argument takes, some of them, and some that it refuses."""

    right: list
    wrong: list


def whole(minimum, maximum=2**63 - 1):
    """A whole number in limits."""
    right = [minimum, np.int64(maximum), maximum]
    return Kind(right, [*NO_NUMBERS, minimum - 1, maximum + 1, float(maximum), minimum + 0.5])


def number(right, wrong):
    """A finite number, in limits that lie between these."""
    return Kind([*right, np.float32(right[0])], [*NO_NUMBERS, *wrong])


def instance(*right):
    """Objects of a type."""
    return Kind([*right], [*STRANGE, None, 5, "x", "llama-tiny", *map(type, right)])


def one_of(*names):
    """One of some names."""
    wrong = [None, True, 5, "", "x", "é\n", "\ud800", "a" * 5000 + ".py:X", "\0.py:X", [names[0]]]
    return Kind([*names], [*STRANGE, *wrong])


def optional(kind):
    """A kind, or None."""
    return Kind([None, *kind.right], [value for value in kind.wrong if value is not None])


def besides(kind, *wrong):
    """A kind that refuses more."""
    return kind._replace(wrong=[*kind.wrong, *wrong])


SIZE = whole(1)
FLAG = Kind([True, False], [*STRANGE, None, 0, 1, "yes", "no", np.True_, torch.tensor(True)])
NO_TOKEN_IDS = [[True], [-1], [1.5], ["1"], [None], [[1]], torch.tensor([True]), True, 5, None]
TOKEN_IDS = [[1], (1, 2), range(3), np.array([1, 2]), torch.tensor([1, 2])]
PROMPT = Kind(TOKEN_IDS, [*STRANGE, *NO_TOKEN_IDS, [], [61], {1, 2}, "text", [1, 10**5000]])
PARAMS = besides(optional(instance(ONE_TOKEN)), 0, False, "", {}, dict(max_new_tokens=3))
POSITIVE = number([0.5, 3e-308, 1e308, Fraction(1, 9)], [0, -1, 5e-324])
CLOCK = Kind([time.monotonic, int], [*STRANGE, 5, None])
POLICY = one_of("orca", "sarathi-serve")
NO_OPTIONS = Kind([{}], [*STRANGE, None, 0, False, "", [], dict(x=1), dict(chunk=2), dict(tile=1)])
PROFILE = Kind(
    right=[[], ((BatchShape(decodes=1), 0.5),)],
    wrong=[*STRANGE, 5, None, [(1, 2)], [(BatchShape(decodes=1), "1")]],
)
BROKEN_TOKENIZERS = [
    LETTERS._replace(encode=None),
    LETTERS._replace(decode=5),
    *[LETTERS._replace(stop_token_ids=ids) for ids in (None, "ab", [-1], ["1"])],
    *[LETTERS._replace(longest_token=length) for length in (0, 1.5, "x", True)],
]

GEOMETRY = dict(
    family=one_of("gpt2", "llama"),
    vocab_size=whole(1, 2**24),
    n_layer=whole(1, 2**10),
    n_head=Kind([2, 4], [*NO_NUMBERS, 0, 3, 2.0]),
    n_embd=whole(1, 2**24),
    n_kv_head=optional(Kind([1, 2, np.uint8(4)], [*NO_NUMBERS, 0, 3, 2.0])),
    head_dim=optional(Kind([2, 2**16], [*NO_NUMBERS, 0, 7, 2**17])),
    n_inner=optional(whole(1, 2**26)),
    max_positions=whole(1, 2**24),
    norm_eps=number([1e-5, 1], [0, -1, 2.0, 5e-324]),
    qkv_bias=FLAG,
    qk_norm=FLAG,
    tie_embeddings=FLAG,
    rope_theta=number([1, 1e6], [0.5, -1]),
    rope_scaling=optional(instance(RopeScaling(8.0, 1.0, 4.0, 64))),
)
SCALING = dict(
    factor=number([1, 8.0], [0.5, 5e-324]),
    low_freq_factor=number([0.5, 3.9], [0, 4.0]),
    high_freq_factor=number([1.5, 1e6], [1.0, -1]),
    original_max_positions=whole(1, 2**24),
)
CONFIG = dict(
    policy=POLICY,
    chunk=SIZE,
    max_batch=optional(SIZE),
    max_len=optional(whole(2, 2**63 - 1)),
    page_size=optional(SIZE),
    pages=optional(whole(1, 2**28)),
    prefix_caching=FLAG,
    max_waiting=optional(SIZE),
    attention=Kind(["auto", "sdpa"], [*STRANGE, None, 5]),
    policy_options=NO_OPTIONS,
)
ENGINE = CONFIG | dict(
    model=besides(instance(MODEL), MODEL.config, ON_META),
    max_len=whole(8, 64),  # from a page to all pages, so that the model's limit is too much
    page_size=optional(whole(4, 32)),  # from an eighth of max_len to max_len
    pages=optional(Kind([4, np.uint8(9)], [*NO_NUMBERS, 0, 3, 2**40])),
    attention=besides(CONFIG["attention"], "cudnn", "flash", "xformers"),
    tokenizer=besides(optional(instance(LETTERS)), 0, *BROKEN_TOKENIZERS),
    clock=CLOCK,
    policy_options=besides(NO_OPTIONS, dict(clock=time.monotonic)),
)
REQUEST = dict(
    prompt=PROMPT,
    params=PARAMS,
    arrival=optional(number([0.5, -1e308], [])),
    request_id=optional(Kind([2, np.int64(9)], [*whole(0).wrong, 0, 1])),  # which are there
    priority=one_of("low", "realtime"),
    ttft_slo=optional(POSITIVE),
    tbt_slo=optional(POSITIVE),
    user=Kind(["", "me"], [*STRANGE, None, 5, "a" * 5000]),
)
GENERATE = dict(
    prompts=Kind([[], [[1], [2]], torch.tensor([[1], [2]])], [*STRANGE, None, 5, "text", [[61]]]),
    params=Kind(
        [None, ONE_TOKEN, [ONE_TOKEN] * 2], [*STRANGE, 0, "xy", [ONE_TOKEN], [ONE_TOKEN, 0]]
    ),
    progress=FLAG,
)
SCHEDULER = dict(
    policy=one_of("dynamic", "priority"),
    pages=instance(Pages(8, 8)),
    clock=CLOCK,
    tile=SIZE,
    tbt_slo=optional(POSITIVE),
    profile=PROFILE,
)
MODEL_ARGUMENTS = dict(
    config=besides(instance(MODEL.config), MODEL),
    device=Kind(["cpu", "meta", torch.device("cpu")], [*STRANGE, None, 5, "nonsense", "cuda:99"]),
    dtype=Kind([torch.float16], [*STRANGE, None, "float32", torch.int64, torch.complex64]),
    seed=optional(whole(-(2**63))),
)
SMALL = {
    "model": MODEL,
    "policy": "orca",
    "chunk": 8,
    "max_batch": 2,
    "max_len": 32,
    "page_size": 8,
    "pages": 8,
}


def small_engine(**changes):
    """A small engine."""
    return Engine(**SMALL | changes)


def busy_engine():
    """An engine with two requests, of which one runs."""
    engine = small_engine(policy="sarathi-serve", chunk=4, max_batch=1, max_len=128, pages=16)
    for _ in range(2):
        engine.add_request([1, 2, 3], SamplingParams(4))
    engine.step()
    return engine


BUSY = busy_engine()
IDLE = small_engine(max_len=128, pages=16)


def state(engine):
    """All that a refused call may not change."""
    scheduler = engine.scheduler
    requests = [(r.id, r.num_computed, tuple(r.tokens)) for r in scheduler.requests.values()]
    queues = [[r.id for r in queue] for queue in (scheduler.waiting, scheduler.running)]
    restarts = scheduler.journal.restarts
    return requests, queues, restarts, scheduler.pages.num_free, engine.config, engine.has_work


def add_request(**changes):
    """Add a third request, and drop it."""
    arguments = dict(prompt=[1, 2], params=ONE_TOKEN) | changes
    BUSY.abort(BUSY.add_request(**arguments))


def generate(**changes):
    """The completions of two prompts, or of others."""
    return IDLE.generate(**dict(prompts=[[1], [2]], params=ONE_TOKEN) | changes)


def preset(**changes):
    """A small geometry with changes."""
    return GPTConfig.preset("llama-tiny", **changes)


def scaling(**changes):
    """A RopeScaling with changes."""
    factors = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    return RopeScaling(**factors | {"original_max_positions": 64} | changes)


def scheduler(**changes):
    """A scheduler with options."""
    sizes = {"pages": Pages(8, 8), "chunk": 8, "max_batch": 2, "max_len": 32}
    return make_scheduler(**{"policy": "dynamic"} | sizes | changes)


def with_config(**changes):
    """An engine with the config of another."""
    return Engine(**dict(model=MODEL, config=IDLE.config) | changes)


def priority(**options):
    """An engine of the policy `priority` with these options."""
    return small_engine(policy="priority", policy_options=options)


def model(**changes):
    """A model without weights."""
    return GPT(**dict(config=MODEL.config, seed=None) | changes)


CALLS = {
    preset: GEOMETRY,
    scaling: SCALING,
    EngineConfig: CONFIG,
    small_engine: ENGINE,
    with_config: dict(config=besides(optional(instance(IDLE.config)), {})),
    add_request: REQUEST,
    generate: GENERATE,
    BUSY.abort: dict(request_id=Kind([], [*NO_NUMBERS, -1, 7])),
    scheduler: SCHEDULER,
    priority: dict(ttft_slo=POSITIVE, tbt_slo=optional(POSITIVE), ageing=POSITIVE, tile=SIZE),
    model: MODEL_ARGUMENTS,
}
NAMES = {  # what errors may call an argument
    "prompts": "prompts?",  # one of several
    "policy_options": r"policy_options|\w+",
}
ROWS = [(call, argument) for call, kinds in CALLS.items() for argument in kinds]


@pytest.mark.parametrize("call, argument", ROWS, ids=lambda part: getattr(part, "__name__", part))
def test_wrong_values_are_refused_in_one_line_and_right_ones_are_not(call, argument):
    kind = CALLS[call][argument]
    name = NAMES.get(argument, argument)
    before = state(BUSY), state(IDLE)
    for value in kind.wrong:
        with pytest.raises(ValueError) as refused:
            call(**{argument: value})
        message = str(refused.value)
        assert re.search(rf"\b({name})[=:]", message), message
        assert message.isprintable() and len(message) < 400
        assert re.match(rf"({name})\b", getattr(refused.value, "argument", "") or argument)
        assert (state(BUSY), state(IDLE)) == before
    for value in kind.right:
        call(**{argument: value})


WHOLE = "must be a whole number of at least"
LONG = SamplingParams(99)
NO_TOKENIZER = "no tokenizer here, give token ids"
CACHING = {"prefix_caching": True, "page_size": 16, "max_len": 16}
MESSAGES = [  # a call, its arguments, and what it says
    (add_request, {"prompt": []}, "prompt: must hold at least 1 token"),
    (
        add_request,
        {"prompt": [1, 61]},
        "prompt: token 61 is out of range, the vocabulary is 0 … 60",
    ),
    (add_request, {"prompt": "text"}, f"prompt='text': {NO_TOKENIZER}"),
    (add_request, {"params": SamplingParams(1, stop="a")}, f"stop=('a',): {NO_TOKENIZER}"),
    (
        add_request,
        {"prompt": [1] * 30, "params": LONG},
        "prompt of 30 tokens + max_new_tokens=99: must not exceed max_len=128",
    ),
    (generate, {"prompts": "abc"}, "prompts='abc': must be a list of prompts"),
    (EngineConfig, {"prefix_caching": 1}, "prefix_caching=1: must be True or False"),
    (EngineConfig, {"max_len": 1}, f"max_len=1: {WHOLE} 2"),
    (EngineConfig, CACHING, "page_size=16: must be below max_len=16, for prefix_caching"),
    (small_engine, {"policy": "fifo"}, "policy='fifo': must be one of request-level"),
    (small_engine, {"max_len": 513}, "max_len=513: must be at most 512"),
    (small_engine, {"page_size": 41}, "page_size=41: must be at most max_len=32"),
    (small_engine, {"pages": 3}, "pages=3: a request of max_len=32 takes 4 pages"),
    (small_engine, {"pages": None, "max_batch": 2**40}, f"max_batch={2**40}, max_len=32: takes"),
    (
        small_engine,
        {"policy_options": {"tile": 2}},
        "tile=2: policy 'orca' has no such option, only []",
    ),
    (priority, {"ttft_slo": math.nan}, "ttft_slo=nan: must be a finite number above 0"),
    (GPTConfig.preset, {"name": "llama-99b"}, "preset='llama-99b': must be one of"),
]


@pytest.mark.parametrize("call, arguments, message", MESSAGES)
def test_an_error_says_what_is_allowed(call, arguments, message):
    with pytest.raises(ValueError) as refused:
        call(**arguments)
    assert str(refused.value).startswith(message)


@pytest.mark.parametrize(
    "call, arguments, message",
    [
        (small_engine, dict(polcy="vllm"), "polcy: did you mean policy?"),
        (EngineConfig, dict(no_such=2), "no_such: there is no such argument"),
        (with_config, dict(chunk=2), "chunk: give these to the EngineConfig"),
    ],
)
def test_an_unknown_argument_is_a_type_error(call, arguments, message):
    with pytest.raises(TypeError) as refused:
        call(**arguments)
    assert str(refused.value) == message


def test_an_error_knows_its_argument_and_a_rank_can_send_it():
    with pytest.raises(ValueError) as refused:
        EngineConfig(chunk=0)
    sent = pickle.loads(pickle.dumps(refused.value))
    assert (str(sent), sent.argument) == (str(refused.value), "chunk")


def test_numbers_of_numpy_become_ints_and_floats():
    names = ("chunk", "max_batch", "max_len", "page_size", "pages")
    config = EngineConfig("sarathi", **dict.fromkeys(names, np.uint8(200)))  # 200 + 200 overflows
    sizes = [getattr(config, name) for name in names]
    assert sizes == [200] * 5 and {*map(type, sizes)} == {int}
    geometry = preset(n_head=np.uint8(16), n_embd=np.uint8(224), rope_theta=np.int64(500))
    factor = scaling(factor=np.float32(8)).factor
    assert {type(geometry.n_head), type(geometry.n_embd)} == {int}
    assert [geometry.rope_theta, factor] == [500.0, 8.0] and type(factor) is float


@pytest.mark.parametrize("seconds", [math.nan, math.inf, None, "x", True, 1j, 10**400])
def test_a_clock_that_returns_no_seconds_is_named(seconds):
    engine = small_engine(clock=lambda: seconds)
    with pytest.raises(ValueError, match=r"^clock\(\)="):
        engine.add_request([1], ONE_TOKEN)
    engine.add_request([1], ONE_TOKEN, arrival=0.0)
    with pytest.raises(ValueError, match=r"^clock\(\)="):
        engine.step()
