"""A server of a small model at a port of its own, for the tests of server/, and its clients."""

import json
import socket
import threading
import time
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, NamedTuple

import httpx2 as httpx
import openai
import torch

from engine import Engine
from model import GPT, GPTConfig
from sampling import SamplingParams
from server.app import Api
from server.connections import Server
from server.engine_thread import EngineThread
from tests.helpers import FakeTokenizer, tiny_model

LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ .,:!?-()"[:61]
letters = FakeTokenizer(
    lambda text: [LETTERS.find(c) % 61 for c in text], lambda ids: "".join(LETTERS[i] for i in ids)
)
GREEDY = SamplingParams(20, logprobs=True)
TEXT = "abc né日👍_xyz!"  # no byte twice
PROGRAM = ["-m", "server", "--preset", "llama-tiny", "--device", "cpu", "--dtype", "float32"]
PROGRAM += ["--port", "0", "--threads", "1"]


def circle():
    """A model that continues TEXT, and after its end with its beginning, in bytes."""
    config = GPTConfig(
        vocab_size=256, n_layer=1, n_head=2, n_embd=256, n_inner=8, max_positions=512
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
def serving(model=None, tokenizer=letters, drain_s=1.0, step_s=0.0, api=None, **settings):
    """A server in a thread, at a port of its own. A step takes `step_s` longer than it must."""
    sizes = {"max_batch": 4, "max_len": 128, "page_size": 16, "chunk": 16}
    engine = Engine(model or tiny_model(), **sizes | settings)
    fetch = engine.runner.fetch
    if step_s:
        engine.runner.fetch = lambda *args: time.sleep(step_s) or fetch(*args)
    api = Api(EngineThread(lambda: engine), tokenizer, "tiny", **(api or {}))
    server = Server(api, drain_s)
    listener = socket.create_server(("127.0.0.1", 0))
    address = listener.getsockname()
    url = "http://{}:{}".format(*address)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    wait_for(lambda: server.started)
    key = api.key or "none"
    client = openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0, timeout=30)
    try:
        with httpx.Client(base_url=url, timeout=30) as http, client:
            yield SimpleNamespace(
                engine=engine,
                scheduler=engine.scheduler,
                api=api,
                server=server,
                thread=thread,
                client=client,
                http=http,
                url=url,
                connect=lambda: socket.create_connection(address, timeout=60),
            )
    finally:
        server.should_exit = True
        thread.join(20)
    assert not thread.is_alive()
    api.thread.executor.shutdown()


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


class Answer(NamedTuple):
    """What a client has read."""

    choices: list[tuple[str, str]]  # text and finish_reason of each
    usage: Any
    parts: list[Any]  # the choices of all events

    @property
    def text(self):
        return self.choices[0][0]


def complete(served, prompt, chat=False, stream=False, **fields):
    """The Answer to a completion or a chat, greedy if not told. A whole one has one event."""
    fields = {"model": "tiny", "temperature": 0, "stream": stream} | fields
    if stream:
        fields["stream_options"] = {"include_usage": True}
    if chat:
        reply = served.client.chat.completions.create(messages=prompt, **fields)
    else:
        reply = served.client.completions.create(prompt=prompt, **{"max_tokens": 20} | fields)
    *events, last = reply if stream else [reply, reply]
    texts = {}
    reasons = {}
    parts = [choice for event in events for choice in event.choices]
    for part in parts:
        assert part.index not in reasons
        message = part
        if chat:
            message = part.delta if stream else part.message
        text = message.content if chat else message.text
        texts[part.index] = texts.get(part.index, "") + text
        if part.finish_reason:
            reasons[part.index] = part.finish_reason
    if stream:
        assert last.choices == [] and all(event.usage is None for event in events)
    return Answer([(texts[i], reasons[i]) for i in range(len(texts))], last.usage, parts)


def generate(served, prompt, params=GREEDY):
    """What the engine itself makes of a prompt."""
    config = served.engine.config
    engine = Engine(served.engine.runner.model, config, tokenizer=served.api.tokenizer)
    return engine.generate([prompt], params)[0]


def http_post(body=b"", length=None, **fields):
    """The bytes of a completion request, of a body or its fields; `length` is in its header."""
    if not body:
        fields = {"model": "tiny", "prompt": "a", "max_tokens": 20, "temperature": 0} | fields
        body = json.dumps(fields).encode()
    lines = [
        b"POST /v1/completions HTTP/1.1",
        b"host: localhost",
        b"content-type: application/json",
        b"content-length: %d" % (len(body) if length is None else length),
    ]
    return b"\r\n".join(lines) + b"\r\n\r\n" + body


def read_all(connection):
    """All bytes until the server closes the connection."""
    parts = []
    while part := connection.recv(65_536):
        parts.append(part)
    return b"".join(parts)
