"""The loop: schedule, forward, sample, advance.

    engine = Engine(model, policy="sarathi-serve", chunk=256, max_batch=16, max_len=2048)
    done = engine.generate(prompts, SamplingParams(max_new_tokens=64))    # offline: all at once
    for event in engine.stream(prompts, params): ...                      # tokens as they appear
    request_id = engine.add_request(prompt, params)                       # online: add, step, abort
    for event in engine.step(): ...

If anything raises before the sampled tokens are there (out of memory, Ctrl-C), the next `step()`
computes the same batch. A Ctrl-C while requests are moved on comes after that, see `no_interrupt`.

Read first: config.py. Here the core ends. Beside it: runtime/runner.py, which holds model and
cache; policies/pages.py."""

import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from types import FrameType
from typing import Any

from tqdm import tqdm

from config import EngineConfig, QueueFull, TooLong  # noqa: F401
from model import GPT, FlatBatch
from policies import scheduler_of, with_tile
from policies.observers import Iteration
from policies.priority import make_service
from pretrained.text import Prompt, Text, Tokenizer
from request import Batch, Event, Request
from runtime.memory import CUDA_TILE, fill_in
from runtime.runner import Runner
from sampling import SamplingParams
from scheduler import Scheduler


@contextmanager
def no_interrupt() -> Iterator[None]:
    """Hold a Ctrl-C back until the block has ended, so that nothing is left half done.

    A second one is raised at once, as a policy may loop for ever. Only the main thread gets any.
    What is given up:

    - A Ctrl-C in `generate` or `stream` drops their requests, as any exception does.
    - In a loop of `step()` it may cost the events of one iteration. The requests go on.
    - After a second Ctrl-C, or an exception of a policy, such a loop needs `Engine.reset()`.
    - A server fails all its requests when a step fails."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    held: list[int] = []
    handler = signal.getsignal(signal.SIGINT)

    def hold(number: int, frame: FrameType | None) -> None:
        held.append(number)
        if len(held) == 2:
            signal.signal(number, handler)
            signal.raise_signal(number)

    signal.signal(signal.SIGINT, hold)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if len(held) == 1:
            signal.raise_signal(signal.SIGINT)


class Engine:
    """Serves requests with one model under one policy.

        policy           "sarathi-serve", another name in ALL_POLICIES, or "my_policy.py:ClassName"
        chunk            C, the chunk size or token budget
        max_batch        B, the most requests at once
        max_len          the longest prompt and output, in tokens
        page_size, pages of the KV cache
        prefix_caching   share the pages of prompts that begin alike
        max_waiting      the most requests that may wait
        attention        the backend
        policy_options   as {"tbt_slo": 0.1}

    These are the fields of config.EngineConfig, where the defaults are; or give one as `config`.
    `tokenizer` is for prompts as text. Raises ValueError before anything is allocated; only a page
    size that the attention backend cannot use is found after that."""

    def __init__(
        self,
        model: GPT,
        config: EngineConfig | None = None,
        *,
        tokenizer: Tokenizer | None = None,
        clock: Callable[[], float] = time.perf_counter,
        **fields: Any,
    ) -> None:
        self.text = Text(tokenizer)
        self.clock = clock
        config = fill_in(config or EngineConfig(**fields), model)
        self.config = with_tile(config, CUDA_TILE) if model.device.type == "cuda" else config
        self.scheduler = self.make_scheduler()
        self.runner = self.make_runner(model)
        self.last_iteration: Iteration | None = None
        self._next_id = 0
        self._serving = False  # True: generate or stream computes, or was broken off

    def make_scheduler(self) -> Scheduler:
        """The scheduler, the first one if there are several."""
        return scheduler_of(self.config, self.clock)

    def make_runner(self, model: GPT) -> Runner:
        """The runner of the model: this is where memory is taken."""
        return Runner(model, *self.config.cache_sizes, self.config.attention)

    @property
    def schedulers(self) -> Sequence[Scheduler]:
        """All of them: one for each micro-batch."""
        return self.scheduler.peers

    @property
    def has_work(self) -> bool:
        """Whether any request has not ended."""
        return bool(self.scheduler.requests)

    def add_request(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        arrival: float | None = None,
        *,
        request_id: int | None = None,
        **service: Any,
    ) -> int:
        """Queue a prompt (token ids, or text if there is a tokenizer) and return the request's id.

        `arrival` is on the engine's clock (None: now), `request_id` a new one (None: the next),
        `service` the arguments of policies.priority.make_service. Raises ValueError for what makes
        no sense or can never run, QueueFull if max_waiting requests wait; then nothing changes."""
        params = SamplingParams() if params is None else params
        tokens = self._encode(prompt, params)
        request_id = self._next_id if request_id is None else request_id
        if request_id in self.scheduler.requests:
            raise ValueError(f"request_id={request_id}: is the id of another request")
        arrival = self.clock() if arrival is None else arrival
        request = Request(
            id=request_id,
            tokens=tokens,
            prompt_len=len(tokens),
            max_new_tokens=params.max_new_tokens,
            arrival=arrival,
            stop=self.text.stop_token_ids.union(params.stop_token_ids),
            params=params,
            service=make_service(**service),
        )
        self.config.check_queue(len(self.scheduler.waiting))
        with no_interrupt():
            self._next_id = max(self._next_id, request.id + 1)
            self.scheduler.add(request)
        return request.id

    def _encode(self, prompt: Prompt, params: SamplingParams) -> list[int]:
        """The prompt as a checked list of token ids."""
        tokens = self.text.encode(prompt, params.stop, self.runner.model.config.vocab_size)
        self.config.check_fits(len(tokens), params.max_new_tokens)
        return tokens

    def abort(self, request_id: int) -> Request:
        """End a request at once, and return it. Raises KeyError if there is none."""
        with no_interrupt():
            request = self.scheduler.abort(request_id)
            self.text.write(request)
        return request

    def step(self) -> list[Event]:
        """Run one iteration and return an Event for each new token; [] if there is nothing to do.

        What the model raises passes through, and the next call computes the same batch again."""
        start = self.clock()
        with no_interrupt():
            batch = self.scheduler.next_batch()
        if not batch:
            return []
        flat = FlatBatch.build(batch, self.runner.attention)
        launch = self.clock()
        logits = self.runner.forward(flat)
        tokens = self.runner.sample(logits, batch)
        end = self.clock()
        with no_interrupt():
            self.last_iteration = Iteration.of(self.scheduler, batch, start, end, launch)
            self.scheduler.observe(batch, end - start)
            return self.advance(self.scheduler, batch, tokens, end)

    def advance(
        self, scheduler: Scheduler, batch: Batch, tokens: Sequence[int | None], now: float
    ) -> list[Event]:
        """Move the requests of a computed batch on: an Event for each new token."""
        events: list[Event] = []
        for request, token in scheduler.advance(batch, tokens, now):
            if request.finish_reason != "stop" and self.text.has_stop(request):
                scheduler.finish(request, "stop")  # even if its length is reached as well
            if request.finish_reason:
                self.text.write(request)
            events.append(Event.of(request, token))
        return events

    def generate(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        progress: bool = True,
    ) -> list[Request]:
        """Complete all prompts and return their Requests, in order.

        `params` is one SamplingParams, or one for each. `progress` shows a bar on a terminal.
        Raises what `add_request` raises, before anything is computed, and ValueError while other
        requests run. After any exception none of these requests is left."""
        done: list[Request] = []
        encoded = self._encode_all(prompts, params)
        shows_bar = progress and sys.stderr and sys.stderr.isatty()
        try:
            with tqdm(total=len(encoded), desc="requests") if shows_bar else nullcontext() as bar:
                for event in self._serve(encoded):
                    if event.finish_reason is None:
                        continue
                    done.append(event.request)
                    if bar is not None:
                        bar.update()
        except BaseException:
            self.reset()
            raise
        return sorted(done, key=lambda request: request.id)

    def stream(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> Iterator[Event]:
        """As `generate`, but yields the Event of each token as it appears, with its text.

        If the iterator is given up before its end, no request is left behind."""
        for event in self.text.add_to(self._serve(self._encode_all(prompts, params))):
            self._serving = False
            yield event
            self._serving = True

    def _encode_all(self, prompts: Any, params: Any) -> list[tuple[list[int], SamplingParams]]:
        """The checked prompts with their params. Raises ValueError while other requests run."""
        if self._serving:
            self.reset()
        if self.has_work:
            raise ValueError("generate: other requests are running: step(), abort() or reset()")
        if params is None or isinstance(params, SamplingParams):
            params = [params or SamplingParams()] * len(prompts)
        pairs = zip(prompts, params, strict=True)
        return [(self._encode(prompt, each), each) for prompt, each in pairs]

    def _serve(self, requests: Sequence[tuple[list[int], SamplingParams]]) -> Iterator[Event]:
        """Serve these requests. If it is given up, they are aborted; other exceptions reset all."""
        ids: list[int] = []
        self._serving = True  # and still so, if two Ctrl-C in a row prevent the reset
        try:
            for prompt, params in requests:
                ids.append(self.add_request(prompt, params))
            while self.has_work:
                yield from self.step()
            self._serving = False
        except GeneratorExit:
            for request_id in self.scheduler.requests.keys() & ids:
                self.abort(request_id)
            raise
        except BaseException:
            self.reset()
            raise

    def warm_up(self) -> None:
        """Serve the longest prompt with a decode, then as many requests as may run, and forget all,
        so that page faults and compilations are over. Raises ValueError while requests run."""
        if self.has_work:
            raise ValueError("warm_up: requests are running: step(), abort() or reset()")
        self.runner.warm_up(self.scheduler.max_batch)
        self.reset()  # what the cache held is lost
        pages, _, max_len = self.config.cache_sizes
        count = min(self.scheduler.max_batch, pages, self.config.max_waiting or pages)
        for prompts in ([[0] * max(1, max_len - 2)], [[0]] * count):  # each has a page
            lengths = [min(n + 2, max_len - len(prompt)) for n, prompt in enumerate(prompts)]
            self.generate(prompts, list(map(SamplingParams, lengths)), progress=False)
        self.reset()  # none of this is found later
        self._next_id = 0

    def reset(self) -> None:
        """Drop all requests and all that is cached, whatever has happened before."""
        with no_interrupt():
            for scheduler in self.schedulers:
                scheduler.reset()
        self._serving = False
