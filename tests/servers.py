"""A server of a small model at a port of its own, for the tests of server/, and its clients."""

import threading
import time
from contextlib import contextmanager
from types import SimpleNamespace

import httpx2 as httpx
import openai
import uvicorn

from engine import Engine
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


@contextmanager
def serving(tokenizer=letters, step_s=0, key=None, cors=(), **settings):
    """A server in a thread, at a port of its own. A step takes `step_s` longer than it must."""
    sizes = {"max_batch": 4, "max_len": 128, "page_size": 16, "chunk": 16}
    engine = Engine(tiny_model(), **sizes | settings)
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
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    client = openai.OpenAI(
        base_url=f"{url}/v1",
        api_key=key or "none",
        max_retries=0,
        timeout=30,
    )
    http = httpx.Client(base_url=url, timeout=30)
    try:
        with http, client:
            yield SimpleNamespace(engine=engine, client=client, http=http, url=url)
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


def complete(served, prompt, **fields):
    """(text and finish reason of each choice, the choices of all events, usage) of a completion, or
    of a chat if the prompt is messages; greedy if not told. A whole one is one event."""
    fields = {"model": "tiny", "temperature": 0, "max_tokens": 20} | fields
    create = served.client.completions.create
    argument = "prompt"
    if isinstance(prompt[0], dict):
        create = served.client.chat.completions.create
        argument = "messages"
    if fields.get("stream"):
        fields["stream_options"] = {"include_usage": True}
        events = list(create(**{argument: prompt}, **fields))
    else:
        events = [create(**{argument: prompt}, **fields)]
    parts = [part for event in events for part in event.choices]
    choices = {}
    for part in parts:
        fields = part.model_dump()
        message = fields.get("delta") or fields.get("message") or {"content": fields.get("text")}
        text, _ = choices.get(part.index, ("", None))
        choices[part.index] = (text + message["content"], part.finish_reason)
    return [choices[i] for i in sorted(choices)], parts, events[-1].usage


def generate(served, prompt, params=GREEDY):
    """What the engine itself makes of a prompt."""
    engine = Engine(served.engine.runner.model, served.engine.config, tokenizer=letters)
    return engine.generate([prompt], params)[0]
