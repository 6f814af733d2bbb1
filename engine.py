"""The loop: schedule, forward, sample, advance.

    engine = Engine(model, policy="sarathi-serve", chunk=256, max_batch=16, max_len=2048)
    done = engine.generate(prompts, SamplingParams(max_new_tokens=64))    # offline: all at once
    request_id = engine.add_request(prompt, params)                       # online: add, step, abort
    for event in engine.step(): ...                                       # tokens as they appear

A step is atomic: until the sampled tokens are there no request has advanced, and if anything raises
before that (out of memory, Ctrl-C), the batch is kept and the next `step()` computes it again. An
interrupt anywhere else is mended by whoever comes next, see Scheduler.mend."""

import operator
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Self

import torch
from tqdm import tqdm

from attention import check_backend, make_attention
from config import EngineConfig, check_memory
from errors import check_number, check_whole, shorten
from kv_cache import KVCache, Pages, Span, kv_bytes_per_token
from model import GPT, FlatBatch
from packed_linear import pack
from policies.priority import check_promise
from policies.token_budget import auto_budget
from sampling import SamplingParams, sample
from scheduler import Request


class QueueFull(ValueError):
    """A request was refused because max_waiting others wait."""


@dataclass
class Completion:
    """What became of a request (Sarathi-Serve §2.4). Times are in seconds, on the engine's clock.
    `tokens` is the output, a stop token included, `text` is without that one; `finish_reason` is
    "stop" (a stop token came), "length" (max_new_tokens reached) or "abort"."""

    request_id: int
    prompt: list
    arrival: float
    priority: int = 2
    tokens: list = field(default_factory=list)
    text: str | None = None
    logprobs: list | None = None
    finish_reason: str | None = None
    scheduled: float | None = None
    token_times: list = field(default_factory=list)
    preemptions: int = 0
    recomputed_tokens: int = 0  # lost with its pages, some of which may be found again
    cached_tokens: int = 0  # found in the cache and not computed, after preemptions too

    @classmethod
    def of(cls, request, text=None):
        """That of a scheduler.Request that has ended."""
        r, n, output = request, request.prompt_len, request.tokens[request.prompt_len :]
        logprobs = r.logprobs[: len(output)] if r.params and r.params.logprobs else None
        return cls(
            *(r.id, r.tokens[:n], r.arrival, r.priority, output, text, logprobs, r.finish_reason),
            *(
                r.scheduled,
                r.token_times[: len(output)],
                r.preemptions,
                r.recomputed_tokens,
                r.cached_tokens,
            ),
        )

    @property
    def ttft(self):
        """Time to first token: from arrival to the first output token. None if there was none."""
        return self.token_times[0] - self.arrival if self.token_times else None

    @property
    def tbt(self):
        """Times between tokens: the gaps between consecutive output tokens, a list."""
        return [later - earlier for earlier, later in zip(self.token_times, self.token_times[1:])]

    @property
    def scheduling_delay(self):
        """From arrival to first being scheduled. None if it never was."""
        return None if self.scheduled is None else self.scheduled - self.arrival

    @property
    def latency(self):
        """From arrival to the last output token, end to end. None if there was none."""
        return self.token_times[-1] - self.arrival if self.token_times else None


class Event(NamedTuple):
    """A new token of a request; with the last one, its `finish_reason` and `completion`."""

    request_id: int
    token: int
    logprob: float | None
    finish_reason: str | None
    completion: Completion | None


class Iteration(NamedTuple):
    """What one step computed, and when. Times are in seconds, on the engine's clock.

    start, end      when it began and when its tokens had arrived; `launch`: when forward was called
    chunks          (request_id, start, length, is_decode) for each
    waiting, running, free_pages   how many there were; `budget`, `preempted`: of scheduler.Batch
    micro_batch     which one it was of, in a simulated pipeline or one with replicas"""

    start: float
    end: float
    chunks: list
    launch: float | None = None
    waiting: int = 0
    running: int = 0
    free_pages: int = 0
    budget: int | None = None
    preempted: list = ()
    micro_batch: int = 0

    @property
    def prefill_tokens(self):
        """How many tokens of prompts were computed."""
        return sum(length for _, _, length, is_decode in self.chunks if not is_decode)

    @property
    def decode_tokens(self):
        """How many decodes there were."""
        return sum(is_decode for *_, is_decode in self.chunks)


def state_of(schedulers, batch):
    """What an Iteration says of when its batch was decided. Several schedulers share one queue."""
    running = sum([len(its.running) for its in schedulers])
    free_pages = sum([its.pages.num_free for its in schedulers])
    return len(schedulers[0].waiting), running, free_pages, batch.budget, batch.preempted


class Runner:
    """A model, its cache and its attention: what launches a batch, and what fetches its tokens."""

    def __init__(self, model, pages, page_size, max_len=None, attention="auto"):
        check_backend(attention, model.device)
        page_bytes = page_size * kv_bytes_per_token(model.config, model.dtype)
        check_memory(f"pages={pages}, page_size={page_size}", pages * page_bytes, model.device)
        self.cache = KVCache(model.config, pages, page_size, model.device, model.dtype, max_len)
        self.attention = make_attention(model.config, self.cache, attention)
        self.model = pack(model)

    def flatten(self, spans):
        """The model.FlatBatch of these Spans, on the device."""
        return FlatBatch.build(spans, self.attention)

    def greedy(self, spans):
        """The likeliest token of each span that wants one, a list. Waits for a GPU."""
        logits = self.model(self.flatten(spans), self.cache)
        return logits.argmax(dim=-1).tolist() if len(logits) else self.fetch(logits, [], [])

    def fetch(self, logits, params, positions):
        """Sample on the device and read from it, once: (token, logprob or None) for each row i,
        which is output token positions[i] of a request with the SamplingParams params[i]."""
        if not params:
            if logits.is_cuda:  # or the iteration would seem to end before it does
                torch.cuda.current_stream(logits.device).synchronize()
            return []
        tokens, logprobs = sample(logits, params, positions)
        if logprobs is None:
            return [(token, None) for token in tokens.tolist()]
        tokens, logprobs = torch.stack([tokens.double(), logprobs.double()]).tolist()
        return [(int(token), logprob) for token, logprob in zip(tokens, logprobs)]


class Engine:
    """Serves requests with one model under one policy.

    Takes the fields of an EngineConfig (config.py) as keywords, or one to `from_config`;
    a tokenizer for prompts given as text, whose stop tokens end every request; a clock, in seconds.
    Raises ValueError: before anything is allocated, but for what only the attention backend (a
    page size) or chunk="auto" (an SLO that nothing meets) can tell."""

    make_runner = Runner
    schedulers = property(lambda self: [self.scheduler])  # of each micro-batch, in a pipeline

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
        tokenizer: Any = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """The keywords are the fields of config.EngineConfig, which explains them."""
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
            policy_options=dict(policy_options or {}),
        )
        self._start(model, config, tokenizer, clock)

    @classmethod
    def from_config(
        cls,
        model: GPT,
        config: EngineConfig,
        *,
        tokenizer: Any = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> Self:
        """An engine with the fields of an EngineConfig."""
        return cls(model, **vars(config), tokenizer=tokenizer, clock=clock)

    def _start(
        self, model: GPT, config: EngineConfig, tokenizer: Any, clock: Callable[[], float]
    ) -> None:
        """Allocate the cache, and begin with no requests."""
        config = config.for_model(model)
        memory, auto = (config.pages, config.page_size), config.chunk == "auto"
        pages = Pages(*memory, config.prefix_caching)
        self.scheduler = config.scheduler(pages, clock, **{"chunk": 1} if auto else {})
        self.runner = self.make_runner(model, *memory, config.max_len, config.attention)
        if auto:
            config = auto_budget(self.runner, config)
            self.scheduler = config.scheduler(pages, clock)
        self.config, self.tokenizer, self.clock = config, tokenizer, clock
        self.last_iteration, self._next_id = None, 0  # an Iteration, once there was one
        self._computed = None  # (Batch, what was sampled, Iteration), until it was recorded

    def warm_up(self):
        """Let nothing happen for the first time later on: page faults, kernels of a batch size."""
        config, longest = self.config, self.config.max_len - 1
        self.start_over()  # what the cache holds is lost
        self.runner.cache.data.zero_()
        self.generate([[0] * max(1, longest - 1)], SamplingParams(min(2, longest)), progress=False)
        max_batch = self.scheduler.max_batch
        sizes = range(min(max_batch, config.max_waiting or max_batch))
        params = [SamplingParams(min(n + 2, longest)) for n in sizes]
        self.generate([[0] for _ in sizes], params, progress=False)
        self._next_id = 0
        self.start_over()  # none of this is found later

    def start_over(self):
        """Let all requests wait and be computed again, in a cache where nothing is found."""
        self._computed, self.scheduler.torn = None, True
        self.scheduler.mend()

    @property
    def has_work(self):
        """Whether any request has not ended, or did in a step() that was interrupted."""
        return bool(self.scheduler.requests or self._computed)

    def add_request(self, prompt, params=None, arrival=None, *, request_id=None, **promised):
        """Queue a prompt (token ids, or text if there is a tokenizer) and return the request's id.

        `arrival` is when it arrived, on the engine's clock, None is now; `request_id` a number that
        no other has, None the next; `promised` are priority="normal", ttft_slo=None and
        tbt_slo=None, see policies/priority.py. Raises ValueError, with nothing changed, if one of
        these makes no sense, or the prompt is empty, holds a token the model does not know, or does
        not fit max_len with its output; QueueFull if max_waiting requests wait."""
        params = SamplingParams() if params is None else params
        tokens, promised = self._encode(prompt, params), check_promise(**promised)
        arrival = self.clock() if arrival is None else arrival
        arrival = check_number("arrival", arrival, "a finite number of seconds")
        if request_id is not None:
            request_id = check_whole("request_id", request_id, least=0)
            unseen = self._computed[0] if self._computed else ()  # some of these have ended
            if request_id in {*self.scheduler.requests, *(c.request.id for c in unseen)}:
                raise ValueError(f"request_id={request_id}: is the id of another request")
        self.scheduler.mend()
        most = self.config.max_waiting
        if most is not None and len(self.scheduler.waiting) >= most:
            raise QueueFull(f"max_waiting={most}: as many requests wait")
        number = self._next_id if request_id is None else request_id
        stop = {*params.stop_token_ids, *(self.tokenizer.stop_token_ids if self.tokenizer else ())}
        its = len(tokens), params.max_new_tokens, arrival, frozenset(stop), params
        self._next_id = max(self._next_id, number + 1)
        self.scheduler.add(Request(number, tokens, *its, **promised))
        return number

    def _encode(self, prompt, params):
        """The prompt as a checked list of token ids."""
        if not isinstance(params, SamplingParams):
            raise ValueError(f"params={shorten(params)}: must be SamplingParams")
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise ValueError(f"prompt={shorten(prompt)}: no tokenizer here, give token ids")
            prompt = self.tokenizer.encode(prompt)
        try:
            tokens = [operator.index(token) for token in prompt]
        except TypeError:
            raise ValueError(f"prompt={shorten(prompt)}: must be text or token ids") from None
        if not tokens:
            raise ValueError("prompt: must hold at least 1 token")
        size = self.runner.model.config.vocab_size
        if wrong := [token for token in tokens if not 0 <= token < size]:
            limit = f"the vocabulary is 0 … {size - 1}"
            raise ValueError(f"prompt: token {shorten(wrong[0])} is out of range, {limit}")
        self.scheduler.check_fits(len(tokens), params.max_new_tokens)
        return tokens

    def abort(self, request_id):
        """End a request at once, return its Completion. Raises ValueError if there is none."""
        request = self.scheduler.requests.get(check_whole("request_id", request_id, 0, 2**64))
        if request is None:
            raise ValueError(f"request_id={request_id}: no such request, or it has ended")
        completion = replace(self._complete(request), finish_reason="abort")
        self.scheduler.finish(request, "abort")
        return completion

    def drop(self, requests):
        """End requests without asking the policy, which may have failed; others begin anew."""
        self._computed, self.scheduler.torn = None, True
        for request in requests:
            request.finish_reason = "abort"
            self.scheduler.requests.pop(request.id, None)
        self.start_over()

    def step(self):
        """Run one iteration and return an Event for each new token; [] if there is nothing to do.
        What the model raises passes through, and the next call computes the same batch again."""
        if not self._computed:
            start, batch = self.clock(), self.scheduler.next_batch()
            if not batch:
                return []
            self._computed = self._compute(batch, start)
            self.scheduler.observe(batch, self._computed[-1].end - start)
        events = self._advance(*self._computed)
        self._computed = None
        return events

    def _compute(self, batch, start):
        """The batch, (token, logprob) of each chunk, None where it yields none; the Iteration."""
        runner, (spans, *drawn) = self.runner, self._inputs(batch)
        state = state_of(self.schedulers, batch)
        flat, launch = runner.flatten(spans), self.clock()
        sampled = iter(runner.fetch(runner.model(flat, runner.cache), *drawn))
        sampled = [next(sampled) if span.wants_logits else None for span in spans]
        return batch, sampled, Iteration(start, self.clock(), batch.record(), launch, *state)

    def _inputs(self, batch):
        """The Spans of a batch, and of each that yields a token the SamplingParams and which output
        token it is: what a Runner computes and fetches."""
        spans = [
            Span(r.pages, start, r.tokens[start : start + length], start + length == len(r.tokens))
            for r, start, length in batch
        ]
        requests = [chunk.request for chunk in batch if chunk.yields_token]
        return spans, [r.params for r in requests], [len(r.tokens) - r.prompt_len for r in requests]

    def _advance(self, batch, sampled, iteration):
        """Move the requests on. Doing it twice is as good as once, see Scheduler.advance."""
        for (request, start, length), drawn in zip(batch, sampled):
            if drawn and request.params.logprobs:
                request.logprobs[start + length - request.prompt_len :] = (drawn[1],)
        tokens, events = [drawn and drawn[0] for drawn in sampled], []
        for request, token in self.scheduler.advance(batch, tokens, iteration.end):
            logprob = request.logprobs[-1] if request.logprobs else None
            ended = request.finish_reason and self._complete(request)
            events.append(Event(request.id, token, logprob, request.finish_reason, ended))
        self.last_iteration = iteration
        return events

    def _complete(self, request):
        """Its Completion; with a tokenizer, the output as text too, without the stop token."""
        if not self.tokenizer:
            return Completion.of(request)
        # decoded after the prompt, which decides on the first word's space in some tokenizers
        decode, end = self.tokenizer.decode, len(request.tokens) - (request.finish_reason == "stop")
        before, whole = (decode(request.tokens[:n]) for n in (request.prompt_len, end))
        text = whole[len(before.rstrip("\ufffd")) :]  # a prompt may end within a character
        return Completion.of(request, text)

    def generate(self, prompts, params=None, progress=True):
        """Complete all prompts and return their Completions, in order.

        `params` is one SamplingParams, or one for each. `progress` shows a bar on a terminal.
        Raises what `add_request` raises, before anything is computed: then, and after an interrupt,
        none of them is left. And ValueError while others run: it would lose their events."""
        if self.scheduler.requests or self._computed:
            running = len(self.scheduler.requests)
            raise ValueError(f"generate: {running} requests are running, step() or abort() them")
        if isinstance(prompts, str):
            raise ValueError("prompts: must be a list of prompts, not one text")
        prompts, params = list(prompts), SamplingParams() if params is None else params
        if isinstance(params, SamplingParams):
            params = [params] * len(prompts)
        if len(params) != len(prompts):
            raise ValueError(f"params: {len(params)} given for {len(prompts)} prompts")
        done, shown, next_id = {}, progress and sys.stderr, self._next_id
        try:
            ids = [self.add_request(prompt, p) for prompt, p in zip(prompts, params)]
            with tqdm(total=len(ids), desc="requests", disable=None if shown else True) as bar:
                while self.has_work:
                    ended = [event.completion for event in self.step() if event.completion]
                    done |= {completion.request_id: completion for completion in ended}
                    bar.update(len(ended))
        except BaseException:  # wherever it came from, nothing of this stays behind
            self._computed, self.scheduler.torn = None, True
            self.scheduler.requests.clear()
            self.start_over()
            self._next_id = next_id
            raise
        return [done[request_id] for request_id in ids]
