"""The routes: OpenAI's /v1, /health, /metrics, and the schedule page with its records.

Read first: protocol.py, engine_thread.py, pretrained/tokenizers.py."""

import asyncio
import hmac
import json
import time
import uuid
from contextlib import suppress
from functools import partial

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, StreamingResponse
from starlette.routing import Route

from engine import QueueFull
from pretrained.tokenizers import TextStream, Writer
from sampling import SamplingParams
from server.protocol import ChatRequest, CompletionRequest, Refused
from views.page import page

SECONDS = [0.005 * 2**n for n in range(15)]  # upper ends of the histograms' buckets, to 82 s


async def refuse(request, error):
    """The response to Refused, to the router's 404 and 405, or to an error of ours."""
    its = getattr(error, "headers", None)
    if not isinstance(error, Refused):
        error = Refused(getattr(error, "status_code", 500), getattr(error, "detail", "internal"))
    return JSONResponse(error.detail, error.status_code, its)


class Answer(StreamingResponse):
    """The response to a request, of which EngineThread.add returned `request` and `queue`. However
    it ends, also if the client goes away, the request ends with it."""

    def __init__(self, api, asked, prompt, request, queue):
        self.api, self.asked, self.prompt = api, asked, prompt
        self.request, self.queue, self.count = request, queue, 0
        prefix, *objects = asked.names
        self.head = {"id": f"{prefix}-{uuid.uuid4().hex}", "object": objects[asked.stream]}
        self.head |= {"created": int(time.time()), "model": api.name}
        content = self.events() if asked.stream else self.whole()
        kind = "text/event-stream" if asked.stream else "application/json"
        super().__init__(content, headers={"cache-control": "no-cache"}, media_type=kind)

    async def __call__(self, scope, receive, send):
        held = []

        async def send_later(message):  # the status waits for the first part: it may be 500
            held.append(message)
            while held and "body" in message:
                await send(held.pop(0))

        with suppress(asyncio.CancelledError):  # the server ends before it has
            try:
                await super().__call__(scope, receive, send_later)
            finally:
                await self.api.thread.call(self.api.thread.end, self.request.id)

    async def pieces(self):
        """(text, tokens, finish_reason) for each token, as choice() of the protocol wants it."""
        decode, reason = self.api.tokenizer.decode, None
        writer = Writer(TextStream(self.api.tokenizer, self.prompt), self.asked.stops)
        while not reason:
            if (event := await self.queue.get()) is None:
                raise Refused(500, "the engine failed, see its log")
            start, self.count = writer.length, self.count + 1
            text, reason = writer.push(event)
            tokens = [(decode([event.token]), start, event.logprob)]
            yield text, [] if event.finish_reason == "stop" else tokens, reason

    async def whole(self):
        """All at once."""
        texts, tokens, reasons = zip(*[piece async for piece in self.pieces()])
        its = self.asked.choice("".join(texts), sum(tokens, []), reasons[-1], "whole")
        yield json.dumps(self.head | {"choices": [its], "usage": self.usage()})

    async def events(self):
        """A server-sent event for each token, also if no text is certain with it."""
        with_usage, place = self.asked.stream_options.get("include_usage"), "first"
        head, last = self.head | ({"usage": None} if with_usage else {}), "[DONE]"
        try:
            async for piece in self.pieces():
                choices, place = [self.asked.choice(*piece, place)], "next"
                yield f"data: {json.dumps(head | {'choices': choices})}\n\n"
            if with_usage:
                yield f"data: {json.dumps(head | {'choices': [], 'usage': self.usage()})}\n\n"
        except Refused as error:
            if place == "first":
                raise
            last = json.dumps(error.detail)
        yield f"data: {last}\n\n"

    def usage(self):
        """How many tokens there were, and how many of the prompt were found in the cache."""
        its, prompt, output = self.request, len(self.prompt), self.count
        details = {
            "cached_tokens": 0 if its.preemptions else its.cached_tokens
        }  # or maybe its own, too
        counts = {"prompt_tokens": prompt, "completion_tokens": output}
        return counts | {"total_tokens": prompt + output, "prompt_tokens_details": details}


class Metrics:
    """What Prometheus is told: of requests that have ended, and of what is at the moment."""

    def __init__(self, schedulers):
        its = dict(namespace="nanosarathi", registry=(registry := CollectorRegistry()))
        self.text = partial(generate_latest, registry)
        self.ttft = Histogram("ttft_seconds", "arrival to first token", buckets=SECONDS, **its)
        self.tbt = Histogram("tbt_seconds", "between two tokens", buckets=SECONDS, **its)
        names = "prompt_tokens", "output_tokens", "preemptions", "cached_tokens"
        self.counters = [Counter(name, "of requests that have ended", **its) for name in names]
        gauge = lambda name, value: Gauge(name, "at this moment", **its).set_function(value)
        gauge("waiting_requests", lambda: len(schedulers[0].waiting))  # in one line
        gauge("running_requests", lambda: sum(len(its.running) for its in schedulers))
        gauge("free_pages", lambda: sum(its.pages.num_free for its in schedulers))

    def observe(self, its):
        """Count an engine.Completion."""
        counts = len(its.prompt), len(its.tokens), its.preemptions, its.cached_tokens
        for counter, count in zip(self.counters, counts):
            counter.inc(count)
        if its.tokens:
            self.ttft.observe(its.ttft)
        for seconds in its.tbt:
            self.tbt.observe(seconds)


class Api:
    """The server of an EngineThread, whose engine has no tokenizer. `chat` makes a prompt of
    messages, see load_chat; `key` is what a client of /v1 must know, None: nothing."""

    def __init__(self, thread, tokenizer, name, chat, key=None, max_body=2**20):
        self.thread, self.engine, self.tokenizer = thread, thread.engine, tokenizer
        self.name, self.chat, self.key, self.max_body = name, chat, key, max_body
        self.metrics = Metrics(thread.engine.schedulers)
        thread.observe, self.warmed_up = self.metrics.observe, thread.engine.last_iteration

    def app(self):
        """The ASGI application."""
        routes = [
            Route("/v1/completions", partial(self.create, CompletionRequest), methods=["POST"]),
            Route("/v1/chat/completions", partial(self.create, ChatRequest), methods=["POST"]),
            Route("/v1/models", self.models),
            Route("/health", lambda _: PlainTextResponse("ok")),
            Route("/metrics", lambda _: PlainTextResponse(self.metrics.text())),
            Route("/records/{place:int}", self.records),
            Route("/", self.page),
        ]
        handlers = dict.fromkeys((HTTPException, ClientDisconnect, Exception), refuse)
        return Starlette(routes=routes, exception_handlers=handlers)

    async def page(self, request):
        """GET /: the schedule page. Red: longer than the SLO, or ten decode iterations."""
        its, last = self.engine.config, self.warmed_up
        slo_s = its.policy_options.get("tbt_slo") or last and 10 * (last.end - last.start)
        about = f"{its.policy}, chunk {its.chunk}, {its.max_batch} requests of {its.max_len} tokens"
        return HTMLResponse(page(self.name, about, live="/records", slo_s=slo_s))

    def check_key(self, request):
        """Raise Refused if the request has not the key."""
        given = request.headers.get("authorization", "").encode("latin-1")
        if self.key and not hmac.compare_digest(given, f"Bearer {self.key}".encode()):
            raise Refused(401, "Authorization: must be Bearer and the key", None, "invalid_api_key")

    async def models(self, request):
        """GET /v1/models."""
        self.check_key(request)
        its = {"id": self.name, "object": "model", "created": 0, "owned_by": "nanosarathi"}
        return JSONResponse({"object": "list", "data": [its]})

    async def create(self, kind, request):
        """POST /v1/completions and its like: queue a request, return its Answer. Raises Refused."""
        arrival, max_len = self.engine.clock(), self.engine.config.max_len
        self.check_key(request)
        kind_of, length = map(request.headers.get, ("content-type", "content-length"))
        if (kind_of or "").partition(";")[0].strip().lower() != "application/json":
            raise Refused(415, "Content-Type: must be application/json")
        if length is None or int(length) > self.max_body:
            limit = f"Content-Length: must be there, and at most {self.max_body:,}"
            raise Refused(413 if length else 411, limit)
        asked = kind.read(await request.body())
        if asked.model != self.name:
            raise Refused(404, f"model: there is only {self.name}", "model", "model_not_found")
        prompt = await asyncio.to_thread(self.encode, asked)
        most = asked.max_tokens or max(1, max_len - len(prompt))
        stop = () if asked.ignore_eos else self.tokenizer.stop_token_ids
        its = asked.model_dump(include={"temperature", "top_k", "top_p", "seed"})
        its |= dict(max_new_tokens=most, stop_token_ids=stop, logprobs=asked.wants_logprobs)
        promised = asked.model_dump(include={"priority", "ttft_slo", "tbt_slo"})
        try:
            given = prompt, SamplingParams(**its), arrival, promised
            queued = await self.thread.call(self.thread.add, *given)
        except QueueFull as error:
            raise Refused(429, str(error), None, "queue_full", {"Retry-After": "1"}) from error
        except ValueError as error:
            too_long = "context_length_exceeded" if len(prompt) + most > max_len else None
            raise Refused(400, str(error), None, too_long) from error
        return Answer(self, asked, prompt, *queued)

    def encode(self, asked):
        """The tokens of a request's prompt, or of its messages. Raises Refused."""
        encode = self.tokenizer.encode
        if isinstance(asked, CompletionRequest):
            return encode(asked.prompt) if isinstance(asked.prompt, str) else asked.prompt
        try:
            text = self.chat(asked.messages)
        except Exception as error:  # whatever the template raises
            raise Refused(400, f"messages: no chat: {error!r}", "messages") from error
        return encode(text)[len(encode("")) :]  # the template spells what encode() adds, as BOS

    async def records(self, request):
        """GET /records/N: EngineThread.look, as JSON."""
        return JSONResponse(await self.thread.call(self.thread.look, request.path_params["place"]))
