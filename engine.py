"""The loop: schedule, forward, sample, advance.

    engine = Engine(model, policy="sarathi-serve", chunk=256, max_batch=16, max_len=2048)
    done = engine.generate(prompts, SamplingParams(max_new_tokens=64))    # offline: all at once
    request_id = engine.add_request(prompt, params)                       # online: add, step, abort
    for event in engine.step(): ...                                       # tokens as they appear

A step is atomic: if anything raises before the sampled tokens are there (out of memory, Ctrl-C),
the next `step()` computes the batch again. For interrupts anywhere else see Scheduler.mend.

Read first: scheduler.py, model.py, config.py and outputs.py."""

import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor
from tqdm import tqdm

from attention import check_backend, make_attention
from config import MAX_BATCH, EngineConfig
from errors import (
    QueueFull,
    check_list,
    check_number,
    check_prompt,
    check_type,
    check_whole,
    refusing,
    shorten,
)
from hardware.memory import check_memory
from kv_cache import KVCache, Span, kv_bytes_per_token
from model import GPT, FlatBatch
from outputs import Completion, Event, Iteration
from policies.priority import check_service_level
from policies.token_budget import auto_budget
from pretrained.tokenizers import Tokenizer, decode_output
from sampling import SamplingParams, sample
from scheduler import Batch, Request, Scheduler
from speedups.cuda_graphs import DecodeGraphs, compile_decodes
from speedups.packed_linear import pack

Clock = Callable[[], float]  # returns seconds
MAX_USER = 256  # characters: a policy may remember who has asked


def checked_clock(clock: Clock) -> Clock:
    """The same clock. It raises ValueError instead of returning what is no number of seconds."""

    def seconds() -> float:
        return check_number("clock()", clock(), "a finite number of seconds")

    return seconds


class StepInputs(NamedTuple):
    """What a Runner needs to compute a batch and to sample from it."""

    spans: list[Span]
    params: list[SamplingParams]  # one for each span that wants logits
    positions: list[int]  # which output token of its request each of those decides


class Sampled(NamedTuple):
    """A sampled token. `logprob` is None unless a request in the batch wants it."""

    token: int
    logprob: float | None


class Computed(NamedTuple):
    """A batch that was computed; its requests have not advanced yet."""

    batch: Batch
    sampled: list[Sampled | None]  # for each chunk; None if it yields no token
    iteration: Iteration


def sampled_by_chunk(batch: Batch, sampled: Iterable[Sampled]) -> list[Sampled | None]:
    """The token of each chunk of a batch, None for a chunk that yields none."""
    tokens = iter(sampled)
    return [next(tokens) if chunk.yields_token else None for chunk in batch]


class Runner:
    """A model, its cache and its attention: launches a batch, and fetches its tokens."""

    def __init__(
        self,
        model: GPT,
        pages: int,
        page_size: int,
        max_len: int | None = None,
        attention: str = "auto",
    ) -> None:
        check_backend(attention, model.device)
        cache_bytes = pages * page_size * kv_bytes_per_token(model.config, model.dtype)
        check_memory(f"pages={pages}, page_size={page_size}", cache_bytes, model.device)
        self.cache = KVCache(model.config, pages, page_size, model.device, model.dtype, max_len)
        self.attention = make_attention(model.config, self.cache, attention)
        self.model = pack(model)
        self.forward = DecodeGraphs(self.model, self.cache, self.attention).forward

    def flatten(self, spans: Sequence[Span]) -> FlatBatch:
        """The FlatBatch of these spans, on the device."""
        return FlatBatch.build(spans, self.attention)

    def greedy(self, spans: Sequence[Span]) -> list[int]:
        """The likeliest next token of each span that wants logits. Waits for a GPU."""
        logits = self.forward(self.flatten(spans))
        if len(logits) == 0:
            self.fetch(logits, [], [])  # waits
            return []
        return logits.argmax(dim=-1).tolist()

    def fetch(
        self, logits: Tensor, params: Sequence[SamplingParams], positions: Sequence[int]
    ) -> list[Sampled]:
        """Sample on the device and read the tokens from it, in one transfer.

        Row i of logits decides output token positions[i] of a request with params[i]."""
        if not params:
            if logits.is_cuda:  # or the iteration would seem to end before it does
                torch.cuda.current_stream(logits.device).synchronize()
            return []
        tokens, logprobs = sample(logits, params, positions)
        if logprobs is None:
            return [Sampled(token, None) for token in tokens.tolist()]
        pairs = torch.stack([tokens.double(), logprobs.double()], dim=1).tolist()
        return [Sampled(int(token), logprob) for token, logprob in pairs]


class Engine:
    """Serves requests with one model under one policy.

    Raises ValueError before anything is allocated. Only two errors come later: a page size that the
    attention backend cannot use, and an SLO that no budget meets with chunk="auto"."""

    make_runner: type[Runner] = Runner

    def __init__(
        self,
        model: GPT,
        *,
        policy: str = "sarathi-serve",
        chunk: int | str = 256,
        max_batch: int | None = None,
        max_len: int | None = None,
        page_size: int | None = None,
        pages: int | None = None,
        prefix_caching: bool = False,
        max_waiting: int | None = None,
        attention: str = "auto",
        policy_options: Mapping[str, Any] | None = None,
        tokenizer: Tokenizer | None = None,
        clock: Clock = time.perf_counter,
    ) -> None:
        """See config.EngineConfig for all but the last two. `tokenizer` is for prompts as text."""
        check_type("model", model, GPT, "a model.GPT")
        check_type("tokenizer", tokenizer, Tokenizer | None, "a Tokenizer, as of load_tokenizer")
        config = EngineConfig(
            policy=policy,
            chunk=chunk,
            max_batch=max_batch,
            max_len=max_len,
            page_size=page_size,
            pages=pages,
            prefix_caching=prefix_caching,
            max_waiting=max_waiting,
            attention=attention,
            policy_options={} if policy_options is None else policy_options,
        )
        self._start(model, config, tokenizer, clock)

    @classmethod
    def from_config(
        cls,
        model: GPT,
        config: EngineConfig,
        *,
        tokenizer: Tokenizer | None = None,
        clock: Clock = time.perf_counter,
    ) -> Self:
        """An engine with the fields of an EngineConfig."""
        check_type("config", config, EngineConfig, "an EngineConfig")
        return cls(model, **vars(config), tokenizer=tokenizer, clock=clock)

    def _start(
        self, model: GPT, config: EngineConfig, tokenizer: Tokenizer | None, clock: Clock
    ) -> None:
        """Check the config, allocate the cache, and begin with no requests."""
        if tokenizer is not None:
            tokenizer.check()
        if model.device.type == "meta":
            raise ValueError("model: is on the device 'meta', must be where there is memory")
        config = config.for_model(model)
        config.check_policy(clock)
        clock = checked_clock(clock)
        pages = config.new_pages()
        self.runner = self.make_runner(
            model, pages.total, pages.page_size, config.max_len, config.attention
        )
        if config.chunk == "auto":
            chunk, options = auto_budget(
                self.runner,
                policy=config.policy,
                options=config.policy_options,
                max_batch=config.max_batch or MAX_BATCH,
                attention=config.attention,
            )
            config = replace(config, chunk=chunk, policy_options=options)
        self.scheduler = config.scheduler(pages, clock)
        self.schedulers: Sequence[Scheduler] = [self.scheduler]  # one for each micro-batch
        self.config = config
        self.tokenizer = tokenizer
        self.clock = clock
        self.last_iteration: Iteration | None = None
        self._next_id = 0
        self._computed: Computed | None = None  # until its requests have advanced

    @property
    def has_work(self) -> bool:
        """Whether any request has not ended, or its last event was not returned yet."""
        return bool(self.scheduler.requests or self._computed)

    def add_request(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams | None = None,
        arrival: float | None = None,
        *,
        request_id: int | None = None,
        priority: str = "normal",
        ttft_slo: float | None = None,
        tbt_slo: float | None = None,
        user: str = "",
    ) -> int:
        """Queue a prompt (token ids, or text if there is a tokenizer) and return the request's id.

        `arrival` is on the engine's clock (None: now), `request_id` a new one (None: the next). The
        rest is for policies/priority.py and policies/remedies.VTC. Raises ValueError for what makes
        no sense or can never run, QueueFull if max_waiting requests wait; then nothing changes."""
        params = SamplingParams() if params is None else params
        tokens = self._encode(prompt, params)
        service = check_service_level(priority, ttft_slo, tbt_slo)
        check_type("user", user, str, "a text")
        if len(user) > MAX_USER:
            raise ValueError(f"user={shorten(user)}: must have at most {MAX_USER} characters")
        arrival = self.clock() if arrival is None else arrival
        arrival = check_number("arrival", arrival, "a finite number of seconds")
        request_id = self._next_id if request_id is None else self._check_new_id(request_id)
        self.scheduler.mend()
        max_waiting = self.config.max_waiting
        if max_waiting is not None and len(self.scheduler.waiting) >= max_waiting:
            raise QueueFull(f"max_waiting={max_waiting}: as many requests wait")
        stop = set(params.stop_token_ids)
        if self.tokenizer is not None:
            stop.update(self.tokenizer.stop_token_ids)
        request = Request(
            id=request_id,
            tokens=tokens,
            prompt_len=len(tokens),
            max_new_tokens=params.max_new_tokens,
            arrival=arrival,
            stop=frozenset(stop),
            params=params,
            priority=service.priority,
            ttft_slo=service.ttft_slo,
            tbt_slo=service.tbt_slo,
            user=user,
        )
        self._next_id = max(self._next_id, request_id + 1)
        self.scheduler.add(request)
        return request_id

    def _encode(self, prompt: str | Sequence[int], params: SamplingParams) -> list[int]:
        """The prompt as a checked list of token ids."""
        check_type("params", params, SamplingParams, "SamplingParams")
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise ValueError(f"prompt={shorten(prompt)}: no tokenizer here, give token ids")
            prompt = self.tokenizer.encode(prompt)
        tokens = check_prompt(prompt, self.runner.model.config.vocab_size)
        self.scheduler.check_fits(len(tokens), params.max_new_tokens)
        return tokens

    def _check_new_id(self, request_id: int) -> int:
        """The id, if no request has it whose last event was not returned yet."""
        request_id = check_whole("request_id", request_id, minimum=0)
        batch = self._computed.batch if self._computed else []  # some of these have ended
        finishing = {chunk.request.id for chunk in batch}
        if request_id in self.scheduler.requests or request_id in finishing:
            raise ValueError(f"request_id={request_id}: is the id of another request")
        return request_id

    def abort(self, request_id: int) -> Completion:
        """End a request at once, return its Completion. Raises ValueError if there is none."""
        request = self.scheduler.requests.get(check_whole("request_id", request_id, 0, 2**64))
        if request is None:
            raise ValueError(f"request_id={request_id}: no such request, or it has ended")
        completion = replace(self._complete(request), finish_reason="abort")
        self.scheduler.finish(request, "abort")
        return completion

    def step(self) -> list[Event]:
        """Run one iteration and return an Event for each new token; [] if there is nothing to do.

        What the model raises passes through, and the next call computes the same batch again."""
        if self._computed is None:
            start = self.clock()
            batch = self.scheduler.next_batch()
            if not batch:
                return []
            self._computed = self._compute(batch, start)
            self.scheduler.observe(batch, self._computed.iteration.end - start)
        events = self._advance(self._computed)
        self._computed = None
        return events

    def _compute(self, batch: Batch, start: float) -> Computed:
        """Forward and sample. `start` is when the step began."""
        spans, params, positions = self._inputs(batch)
        iteration = Iteration.begin(batch, self.schedulers, start)
        flat = self.runner.flatten(spans)
        launch = self.clock()
        logits = self.runner.forward(flat)
        results = sampled_by_chunk(batch, self.runner.fetch(logits, params, positions))
        return Computed(batch, results, iteration._replace(end=self.clock(), launch=launch))

    def _inputs(self, batch: Batch) -> StepInputs:
        """The batch as model and sampler see it."""
        spans, params, positions = [], [], []
        for chunk in batch:
            request, start, length = chunk
            yields_token = chunk.yields_token
            tokens = request.tokens[start : start + length]
            spans.append(Span(request.pages, start, tokens, yields_token))
            if yields_token:
                params.append(request.params)
                positions.append(len(request.tokens) - request.prompt_len)
        return StepInputs(spans, params, positions)

    def _advance(self, computed: Computed) -> list[Event]:
        """Move the requests on. A second call changes nothing more, see Scheduler.advance."""
        batch, sampled, iteration = computed
        tokens = []
        for (request, start, length), result in zip(batch, sampled, strict=True):
            tokens.append(None if result is None else result.token)
            if result is not None and result.logprob is not None and request.params.logprobs:
                position = start + length - request.prompt_len
                request.logprobs[position:] = [result.logprob]
        events = [
            self._event(request, token)
            for request, token in self.scheduler.advance(batch, tokens, iteration.end)
        ]
        self.last_iteration = iteration
        return events

    def _event(self, request: Request, token: int) -> Event:
        """The Event of a request's new token, with its Completion if it is the last."""
        completion = self._complete(request) if request.finish_reason else None
        return Event(
            request_id=request.id,
            token=token,
            logprob=request.logprobs[-1] if request.logprobs else None,
            finish_reason=completion.finish_reason if completion else None,
            completion=completion,
        )

    def _complete(self, request: Request) -> Completion:
        """The request's Completion; with a tokenizer, the output as text, too.

        If the tokenizer fails, it ends the request with an error, and no others."""
        if self.tokenizer is None:
            return Completion.of(request)
        tokens = request.tokens
        if request.finish_reason == "stop":
            tokens = tokens[:-1]  # the stop token is no part of the text
        try:
            with refusing("the tokenizer failed"):
                text = decode_output(self.tokenizer, tokens, request.prompt_len)
        except ValueError as error:
            return replace(Completion.of(request), finish_reason="error", error=str(error))
        return Completion.of(request, text)

    def generate(
        self,
        prompts: Sequence[str | Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        progress: bool = True,
    ) -> list[Completion]:
        """Complete all prompts and return their Completions, in order.

        `params` is one SamplingParams, or one for each. `progress` shows a bar on a terminal.
        Raises what `add_request` raises, before anything is computed, and ValueError while other
        requests run. After any exception none of these requests is left."""
        if self.scheduler.requests or self._computed:
            raise ValueError("generate: other requests are running, step() or abort() them")
        check_type("progress", progress, bool, "True or False")
        prompts = check_list("prompts", prompts, "a list of prompts")
        if params is None or isinstance(params, SamplingParams):
            params = [params or SamplingParams()] * len(prompts)
        params = check_list("params", params, "SamplingParams, or a list of them")
        if len(params) != len(prompts):
            raise ValueError(f"params: {len(params)} given for {len(prompts)} prompts")
        encoded = [self._encode(*pair) for pair in zip(prompts, params, strict=True)]
        first_id = self._next_id
        try:
            ids = [self.add_request(*pair) for pair in zip(encoded, params, strict=True)]
            completions: dict[int, Completion] = {}
            hide_bar = None if progress and sys.stderr else True  # None: unless on a terminal
            with tqdm(total=len(ids), desc="requests", disable=hide_bar) as bar:
                while self.has_work:
                    for event in self.step():
                        if event.completion is not None:
                            completions[event.request_id] = event.completion
                            bar.update()
        except BaseException:  # a Ctrl-C, too: nothing of this stays behind
            self._computed = None
            self.scheduler.torn = True
            self.scheduler.requests.clear()
            self.start_over()
            self._next_id = first_id
            raise
        return [completions[request_id] for request_id in ids]

    def warm_up(self) -> None:
        """Serve a few requests and forget them, so that page faults and compilations are over."""
        self.start_over()  # what the cache holds is lost
        self.runner.cache.data.zero_()
        compile_decodes(self.runner, self.scheduler.max_batch)
        max_output = self.scheduler.max_len - 1
        long_prompt = [0] * max(1, max_output - 1)
        self.generate([long_prompt], SamplingParams(min(2, max_output)), progress=False)
        max_batch = self.scheduler.max_batch
        pages = self.scheduler.pages.total  # a running request has one or more
        count = min(max_batch, pages, self.config.max_waiting or max_batch)
        params = [SamplingParams(min(n + 2, max_output)) for n in range(count)]
        self.generate([[0]] * count, params, progress=False)
        self._next_id = 0
        self.start_over()  # none of this is found later

    # Skip the rest on a first reading: how an interrupt leaves nothing behind.

    def start_over(self, dropped: Iterable[Request] = ()) -> None:
        """Let all requests wait and be computed again, in an empty cache; but end the `dropped`.

        The policy is not asked: it may have failed."""
        self._computed = None
        self.scheduler.torn = True
        for request in dropped:
            request.finish_reason = "abort"
            self.scheduler.requests.pop(request.id, None)
        self.scheduler.mend()
