"""A server of a small model at a port of its own, for the tests of server/, and its clients."""

import threading
import time
from contextlib import contextmanager
from types import SimpleNamespace

import httpx2 as httpx
import openai
import torch
import uvicorn

from engine import Engine
from model import GPT, GPTConfig
from sampling import SamplingParams
from server.app import make_app
from server.engine_thread import EngineThread
from tests.helpers import FakeTokenizer, tiny_model

LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ .,:!?-()"[:61]
letters = FakeTokenizer(
    lambda text: [LETTERS.find(c) % 61 for c in text],
    lambda ids: "".join(LETTERS[i] for i in ids),
)
GREEDY = SamplingParams(20, logprobs=True)
TEXT = "abc né日👍_xyz!"  # no byte twice


def circle():
    """A model that continues TEXT, and after its end with its beginning, in bytes."""
    config = GPTConfig(
        vocab_size=256,
        n_layer=1,
        n_head=2,
        n_embd=256,
        n_inner=8,
        max_positions=512,
    )
    model = GPT(config, dtype=torch.float64)
    for p in model.parameters():
        if p.ndim == 2:
            p.zero_()
    model.token_embedding.weight.copy_(torch.eye(256))
    text = TEXT.encode()
    for byte, following in zip(text, text[1:] + text[:1], strict=True):
        model.head.weight[following, byte] = 0.1
    return model


@contextmanager
def serving(model=None, tokenizer=letters, step_s=0.0, key=None, cors=(), **settings):
    """A server in a thread, at a port of its own. A step takes `step_s` longer than it must."""
    sizes = {"max_batch": 4, "max_len": 128, "page_size": 16, "chunk": 16}
    engine = Engine(model or tiny_model(), **sizes | settings)
    thread = EngineThread(lambda: engine, tokenizer, "tiny")
    fetch = engine.runner.fetch
    if step_s:
        engine.runner.fetch = lambda *args: time.sleep(step_s) or fetch(*args)
    app = make_app(thread, key, cors=cors)
    config = uvicorn.Config(app, port=0, log_level="error", timeout_graceful_shutdown=1)
    server = uvicorn.Server(config)
    listener = config.bind_socket()
    listener.listen()
    loop = threading.Thread(target=server.run, args=[[listener]], daemon=True)
    loop.start()
    url = "http://{}:{}".format(*listener.getsockname())
    client = openai.OpenAI(base_url=f"{url}/v1", api_key=key or "none", max_retries=0, timeout=30)
    try:
        with httpx.Client(base_url=url, timeout=30) as http, client:
            yield SimpleNamespace(engine=engine, app=app, client=client, http=http, url=url)
    finally:
        server.should_exit = True
        loop.join(20)
        thread.executor.shutdown()


def wait_for(happens, seconds=20):
    """Until happens() is true."""
    end = time.monotonic() + seconds
    while not happens():
        assert time.monotonic() < end, "it never came"
        time.sleep(0.005)


def idle(engine):
    """Whether nothing runs and no page is missing."""
    pages = engine.scheduler.pages
    return not engine.has_work and pages.num_free == pages.total


def complete(served, prompt, stream=False, **fields):
    """(text and finish reason of each choice, the choices of all events, usage) of a completion, or
    of a chat if the prompt is messages; greedy if not told. A whole one is one event."""
    fields = {"model": "tiny", "temperature": 0, "stream": stream, "max_tokens": 20} | fields
    if stream:
        fields.setdefault("stream_options", {"include_usage": True})
    if isinstance(prompt[0], dict):
        reply = served.client.chat.completions.create(messages=prompt, **fields)
    else:
        reply = served.client.completions.create(prompt=prompt, **fields)
    events = list(reply) if stream else [reply]
    parts = [part for event in events for part in event.choices]
    choices = {part.index: ["", None] for part in parts}
    for part in parts:
        text = getattr(part, "delta", None) or getattr(part, "message", None)
        choices[part.index][0] += text.content if text else part.text
        choices[part.index][1] = part.finish_reason
    return [tuple(choices[i]) for i in range(len(choices))], parts, events[-1].usage


def generate(served, prompt, params=GREEDY, tokenizer=letters):
    """What the engine itself makes of a prompt."""
    engine = Engine(served.engine.runner.model, served.engine.config, tokenizer=tokenizer)
    return engine.generate([prompt], params)[0]
