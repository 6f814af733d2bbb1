"""Sizes, sampling parameters and prompts that cannot be are refused, and the error names them."""

import pytest

from config import EngineConfig, GPTConfig, QueueFull, TooLong
from engine import Engine
from sampling import SamplingParams
from tests.helpers import finish, tiny_model

MODEL = tiny_model()


def engine(**sizes):
    return Engine(MODEL, **dict(chunk=4, max_batch=2, max_len=16) | sizes)


def add(prompt, *params, **sizes):
    return engine(**sizes).add_request(prompt, SamplingParams(*params))


@pytest.mark.parametrize(
    "name, call",
    [
        ("n_layer", lambda: GPTConfig(n_layer=0)),
        ("n_kv_head", lambda: GPTConfig(n_head=4, n_kv_head=3)),
        ("preset", lambda: GPTConfig.preset("llama-9b")),
        ("chunk", lambda: engine(chunk=0)),
        ("pages", lambda: EngineConfig(pages=-1)),
        ("pages", lambda: engine(page_size=4, pages=3)),  # too few for max_len
        ("max_len", lambda: engine(max_len=10**6)),  # more than the model's positions
        ("policy", lambda: engine(policy="sarathi-serv")),
        ("max_new_tokens", lambda: SamplingParams(0)),
        ("temperature", lambda: SamplingParams(temperature=-0.1)),
        ("top_p", lambda: SamplingParams(top_p=0.0)),
        ("prompt", lambda: add([])),
        ("prompt", lambda: add([1, MODEL.config.vocab_size])),
        ("prompt", lambda: add("a text, and no tokenizer")),
    ],
)
def test_a_value_that_cannot_be_is_refused_by_name(name, call):
    with pytest.raises(ValueError, match=rf"^{name}\b"):
        call()


def test_a_refused_request_leaves_the_engine_as_it_was():
    small = engine(max_waiting=1)
    kept = small.add_request([1, 2], SamplingParams(3))
    with pytest.raises(TooLong, match="max_len=16"):
        small.add_request([1] * 9, SamplingParams(8))
    with pytest.raises(QueueFull, match="max_waiting=1"):
        small.add_request([1], SamplingParams(1))
    assert list(small.scheduler.requests) == [kept]
    assert len(finish(small)) == 3
