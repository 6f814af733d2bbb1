"""A server of a small model at a port of its own, for the tests of server/, and its clients."""

import socket
import threading
import time
from contextlib import contextmanager
from types import SimpleNamespace

import httpx2 as httpx
import openai
import torch

from engine import Engine
from model import GPT, GPTConfig
from pretrained.tokenizers import Tokenizer, Writer, load_chat  # noqa: F401
from sampling import SamplingParams

# what a test wants of server/ it imports from here
from server import checks, connections, engine_thread, protocol  # noqa: F401
from server.__main__ import url_of  # noqa: F401
from server.app import Api, CompletionResponse, encode_prompts  # noqa: F401
from server.connections import Server
from server.engine_thread import EngineThread
from server.protocol import ChatRequest, CompletionRequest  # noqa: F401
from tests.helpers import tiny_model

LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ .,:!?-()"[:61]
letters = Tokenizer(
    lambda text: [LETTERS.find(c) % 61 for c in text], lambda ids: "".join(LETTERS[i] for i in ids)
)
GREEDY = SamplingParams(20, logprobs=True)
TEXT = "abc né日👍_xyz!"  # no byte twice


def circle(text=TEXT):
    """A model that continues `text`, and after its end with its beginning, in bytes."""
    sizes = dict(n_layer=1, n_head=2, n_kv_head=2, n_embd=256, n_inner=8, max_positions=512)
    model = GPT(GPTConfig("llama", vocab_size=256, **sizes), dtype=torch.float64)
    for p in model.parameters():
        if p.ndim == 2:
            p.zero_()
    model.token_embedding.weight.copy_(torch.eye(256))
    for this, following in zip(text.encode(), text.encode()[1:] + text.encode()[:1], strict=True):
        model.head.weight[following, this] = 0.1
    return model


@contextmanager
def serving(
    model=None,
    tokenizer=letters,
    key=None,
    max_body=2**20,
    hosts=(),
    cors=(),
    drain_s=1.0,
    **settings,
):
    """A server in a thread, at a port of its own."""
    sizes = dict(max_batch=4, max_len=128, page_size=16, chunk=16) | settings
    engine = Engine(model or tiny_model(), **sizes)
    steps = EngineThread(lambda: engine)
    api = Api(steps, tokenizer, "tiny", load_chat(None), key, max_body, hosts, cors=cors)
    server = Server(api, drain_s)
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    url = "http://{}:{}".format(*listener.getsockname())
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    wait_for(lambda: server.started)
    client = openai.OpenAI(base_url=f"{url}/v1", api_key=key or "none", max_retries=0, timeout=30)
    try:
        with httpx.Client(base_url=url, timeout=30) as http, client:
            yield SimpleNamespace(
                engine=engine,
                api=api,
                server=server,
                thread=thread,
                client=client,
                http=http,
                url=url,
            )
    finally:
        server.should_exit = True
        thread.join(20)
    assert not thread.is_alive()
    api.thread.executor.shutdown()


def wait_for(what, seconds=20):
    """Until what() is true."""
    end = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < end, "it never came"
        time.sleep(0.005)


def idle(engine):
    """Whether nothing runs and no page is missing."""
    pages = engine.scheduler.pages
    return not engine.has_work and pages.num_free == pages.total


def complete(served, prompt, **more):
    """(text, finish_reason, the usage, the choices) of a completion, greedy if not told."""
    asked = dict(model="tiny", prompt=prompt, max_tokens=20, temperature=0) | more
    if not asked.get("stream"):
        done = served.client.completions.create(**asked)
        return done.choices[0].text, done.choices[0].finish_reason, done.usage, done.choices
    asked["stream_options"] = {"include_usage": True}
    *parts, last = served.client.completions.create(**asked)
    assert last.choices == [] and all(part.usage is None for part in parts)
    choices = [part.choices[0] for part in parts]
    assert [c.finish_reason for c in choices[:-1]] == [None] * (len(choices) - 1)
    return "".join(c.text for c in choices), choices[-1].finish_reason, last.usage, choices


def generate(served, prompt, params=GREEDY):
    """What the engine itself makes of a prompt."""
    model = served.engine.runner.model
    config = served.engine.config
    engine = Engine(model, config, tokenizer=served.api.tokenizer)
    return engine.generate([prompt], params)[0]


def generate_text(prompt):
    """The text that the tiny model makes of a prompt."""
    return Engine(tiny_model(), max_len=128, tokenizer=letters).generate([prompt], GREEDY)[0].text


def slow(function, seconds):
    """The same, later."""
    return lambda *args: time.sleep(seconds) or function(*args)
