"""The loop: schedule, forward, sample, record.

    engine = Engine(model, policy="sarathi-serve", chunk=256, max_batch=16, max_len=2048)
    done = engine.generate(prompts, SamplingParams(max_new_tokens=64))      # offline: all prompts at once
    request_id = engine.add_request(prompt, params)                         # online: add, step, abort
    for event in engine.step(): ...                                         # new tokens as they appear

The engine does not know how a policy decides: it asks the scheduler for a batch, lets the model compute it, and
moves each request's `num_computed` forward. A step is atomic. Until the sampled tokens have arrived, requests may
have been admitted but none has advanced, and the cache has changed only where it counts as not computed; if anything
raises before that (out of memory, Ctrl-C), the batch is kept and the next `step()` computes it again.

Read first: scheduler.py and model.py. Read next: measure.py.
"""

import math
import operator
import os
import time
from functools import partial
from numbers import Real
from typing import NamedTuple

import torch
from tqdm import tqdm

from attention import check_backend, make_attention
from kv_cache import KVCache, Pages, kv_bytes_per_token, max_slots
from model import FlatBatch, Span
from profiling import BASE_BATCH, STRICT, base_decode_iteration, choose_budget
from records import Completion, Event, Iteration
from sampling import SamplingParams, sample
from scheduler import POLICIES, PRIORITIES, Request, check_positive, check_whole, make_scheduler

MAX_BATCH = 256  # the most requests at once when the caller names no number, however much memory there is


class QueueFull(ValueError):
    """A request was refused because max_waiting others wait."""


class _Live(NamedTuple):
    """A request that has not ended, with what the scheduler does not need to know of it."""

    request: Request
    params: SamplingParams
    stop: frozenset
    completion: Completion


class _Computed(NamedTuple):
    """A batch whose tokens have been fetched. `sampled` has (token, logprob), or None, for each chunk."""

    batch: list
    lives: list
    sampled: list
    iteration: Iteration


class Engine:
    """Serves requests with one model under one policy.

    model        a GPT, whose device and dtype the cache takes over
    policy       a name in scheduler.POLICIES
    chunk        C, the chunk size or token budget; "auto" takes a few seconds to find the largest that meets `tbt_slo`,
                 or if that is not given the strict SLO (profiling.py), in batches of min(32, max_batch) at max_len / 2
    max_batch    B, the most requests at once; None: as many as fit (SARATHI §4.3.1), but at most 256
    max_len      the longest request, prompt and output, in tokens; None: 2,048, or the model's limit if that is less
    page_size    tokens in a page of the cache; None: max_len, one slot for each request
    pages        pages in the cache; None: enough for max_batch requests of max_len tokens
    max_waiting  the most requests that may wait; None: no limit
    tokenizer    for prompts given as text; its stop tokens end every request
    attention    the backend, see attention.make_attention
    clock        seconds, for the latency records, and for policies that look at it
    options      further options of the policy: prefills of orca; tbt_slo, seconds, of sarathi-serve and priority, which
                 makes the token budget dynamic; ttft_slo and ageing of priority; tile, which is 128 on CUDA

    Raises ValueError for an argument that makes no sense: before anything is allocated, but for what only the attention
    backend (a page size) or the profile of chunk="auto" (an SLO that nothing meets) can tell.
    """

    def __init__(self, model, policy="sarathi-serve", chunk=256, max_batch=None, max_len=None, *, page_size=None,
                 pages=None, max_waiting=None, tokenizer=None, attention="auto", clock=time.perf_counter, **options):
        if max_len is None:
            max_len = min(2048, model.config.max_positions)
        check_whole("max_len", max_len, least=1)
        if max_len > model.config.max_positions:
            raise ValueError(f"max_len={max_len}: must be at most {model.config.max_positions}, "
                             f"this model's limit (max_positions, or its sliding window)")
        check_backend(attention, model.device)
        page_size = max_len if page_size is None else page_size
        for name, value in (("page_size", page_size), ("max_batch", max_batch), ("pages", pages),
                            ("max_waiting", max_waiting)):
            if value is not None:
                check_whole(name, value, least=1)
        if page_size > max_len:
            raise ValueError(f"page_size={page_size}: must be at most max_len={max_len}")
        if pages is None:
            pages = (max_batch or MAX_BATCH) * -(-max_len // page_size)
            pages = pages if max_batch else min(pages, self._pages_that_fit(model, max_len, page_size))
        if max_batch is None:
            max_batch = min(pages, MAX_BATCH)
        if model.device.type == "cuda" and policy in POLICIES and "tile" in POLICIES[policy].options:
            options = {"tile": 128} | options
        scheduler = partial(make_scheduler, policy, Pages(pages, page_size), max_batch=max_batch, max_len=max_len,
                            clock=clock, **options)
        self.scheduler = scheduler(chunk=1 if chunk == "auto" else chunk)
        if chunk == "auto" and not self.scheduler.cuts_prompts:
            raise ValueError(f"chunk='auto': policy {policy!r} does not cut prompts, give a number")
        self.cache = KVCache(model.config, pages, page_size, model.device, model.dtype, max_len)
        self.attention = make_attention(model.config, self.cache, attention)
        if chunk == "auto":
            chunk, profile = self._profile(model, options.get("tbt_slo"), options.get("tile", 32))
            keeps = "profile" in POLICIES[policy].options
            self.scheduler = scheduler(chunk=chunk, **({"profile": profile} if keeps else {}))
        self.model, self.tokenizer, self.clock, self.max_waiting = model, tokenizer, clock, max_waiting
        self.last_iteration = None  # an Iteration, once there was one
        self._live = {}
        self._next_id = 0
        self._batch = None  # scheduled, not yet computed
        self._torn = False  # whether schedule() was interrupted, and left anything half done
        self._preempted = []  # ids of the requests that lost their pages to it
        self._computed = None  # computed, not yet recorded

    @staticmethod
    def _pages_that_fit(model, max_len, page_size):
        weight_bytes = sum(p.numel() * p.element_size() for p in model.parameters())
        if model.device.type == "cuda":  # keep a tenth for activations
            memory = int(0.9 * (torch.cuda.mem_get_info(model.device)[0] + weight_bytes))
        else:  # leave half of the memory to everybody else
            try:
                memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
            except (AttributeError, ValueError, OSError):
                raise ValueError("max_batch=None: this system does not tell its memory, give a number") from None
        per_token = kv_bytes_per_token(model.config, model.dtype)
        pages = max_slots(memory, weight_bytes, page_size, per_token)
        if pages * page_size < max_len:
            raise ValueError(f"max_len={max_len}: one request takes {max_len * per_token / 1e9:.1f} GB of KV cache, "
                             f"{max(0, memory - weight_bytes) / 1e9:.1f} GB are free")
        return pages

    def _profile(self, model, tbt_slo, tile):
        """The largest token budget that meets the SLO, the strict one if it is None, and what was timed to find it."""
        scheduler, on = self.scheduler, (model, self.cache, self.attention)
        if tbt_slo is None:
            tbt_slo = STRICT * base_decode_iteration(*on, scheduler.max_len).seconds
        decodes, contexts = min(BASE_BATCH, scheduler.max_batch), [max(1, scheduler.max_len // 2)]
        budget, rows = choose_budget(*on, tbt_slo, decodes, contexts, tile, scheduler.max_len)
        return budget, [(row.shape, row.seconds) for row in rows]

    # -- online use: add, step, abort ------------------------------------------------------------------

    @property
    def has_work(self):
        """Whether any request has not ended."""
        return bool(self._live)

    def add_request(self, prompt, params=None, arrival=None, *, priority="normal", ttft_slo=None, tbt_slo=None):
        """Queue a prompt (token ids, or text if there is a tokenizer) and return the request's id.

        `arrival` is when it arrived, on the engine's clock; None is now. `priority` is "realtime", "high", "normal" or
        "low"; `ttft_slo` and `tbt_slo` are its targets in seconds, or None. Raises ValueError, with nothing changed, if
        one of these makes no sense, or the prompt is empty, holds a token the model does not know, or does not fit
        max_len with its output; QueueFull if max_waiting requests wait.
        """
        params = SamplingParams() if params is None else params
        tokens = self._encode(prompt, params)
        if priority not in PRIORITIES:
            raise ValueError(f"priority={priority!r}: must be one of {', '.join(PRIORITIES)}")
        for name, value in (("ttft_slo", ttft_slo), ("tbt_slo", tbt_slo)):
            if value is not None:
                check_positive(name, value)
        if arrival is not None and not (isinstance(arrival, Real) and math.isfinite(arrival)):
            raise ValueError(f"arrival={arrival!r}: must be a finite number of seconds")
        self._check_queue(1)
        return self._add(tokens, params, arrival, PRIORITIES.index(priority), ttft_slo, tbt_slo)

    def _check_queue(self, more):
        waiting = len(self.scheduler.waiting)
        if self.max_waiting is not None and waiting + more > self.max_waiting:
            raise QueueFull(f"max_waiting={self.max_waiting}: {waiting} requests wait, no room for {more} more")

    def _encode(self, prompt, params):
        """The prompt as a checked list of token ids."""
        if not isinstance(params, SamplingParams):
            raise ValueError(f"params={params!r:.60}: must be SamplingParams")
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise ValueError(f"prompt={prompt[:40]!r}: this engine has no tokenizer, give token ids")
            prompt = self.tokenizer.encode(prompt)
        try:
            tokens = [operator.index(token) for token in prompt]
        except TypeError:
            raise ValueError(f"prompt={prompt!r:.60}: must be text or a list of token ids") from None
        if not tokens:
            raise ValueError("prompt: must hold at least 1 token")
        vocab_size = self.model.config.vocab_size
        for token in tokens:
            if not 0 <= token < vocab_size:
                raise ValueError(f"prompt: token {token} is out of range, the vocabulary is 0 … {vocab_size - 1}")
        self.scheduler.check_fits(len(tokens), params.max_new_tokens)
        return tokens

    def _add(self, tokens, params, arrival=None, priority=2, ttft_slo=None, tbt_slo=None):
        arrival = self.clock() if arrival is None else arrival
        request = Request(self._next_id, tokens, len(tokens), params.max_new_tokens, priority=priority,
                          arrival=arrival, ttft_slo=ttft_slo, tbt_slo=tbt_slo)
        completion = Completion(request.id, tokens[:], arrival, priority, logprobs=[] if params.logprobs else None)
        stop = frozenset(params.stop_token_ids).union(self.tokenizer.stop_token_ids if self.tokenizer else ())
        self._next_id += 1
        self._live[request.id] = _Live(request, params, stop, completion)
        self.scheduler.add(request)
        return request.id

    def abort(self, request_id):
        """End a request at once and return its Completion. Raises ValueError if there is no such request."""
        if request_id not in self._live:
            raise ValueError(f"request_id={request_id}: no such request, or it has ended")
        live = self._live[request_id]
        self._mend()
        if self._batch is not None:  # left by a step that failed
            self._batch[:] = [chunk for chunk in self._batch if chunk.request is not live.request]
        return self._finish(live, "abort")

    def step(self):
        """Run one iteration and return an Event for each new token. Returns [] if there is nothing to do.

        Whatever the model raises passes through, and the next call computes the same batch again.
        """
        if self._computed is None:
            start = self.clock()
            if not self._batch:
                self._mend()
                before = [(request, request.preemptions) for request in self.scheduler.running]
                self._torn = True
                self._batch = self.scheduler.schedule()
                self._torn = False
                self._preempted += [request.id for request, count in before if request.preemptions > count]
            if not self._batch:
                return []
            self._computed = self._compute(self._batch, start)
            self.scheduler.observe(self._batch, self._computed.iteration.end - start)
        events = self._record(*self._computed)
        self._computed = None
        self._batch = None
        self._preempted = []
        return events

    def _mend(self):
        """After a Ctrl-C in the middle of schedule(), let all requests wait; what was computed of them is so again."""
        if self._torn and self._computed is None:
            self._batch = None
            self.scheduler.restart([live.request for live in self._live.values()])
            self._torn = False

    def _compute(self, batch, start):
        """Schedule's batch -> sampled tokens. Changes nothing but the cache."""
        scheduler = self.scheduler
        state = (len(scheduler.waiting), len(scheduler.running), scheduler.pages.num_free, scheduler.budget,
                 self._preempted)
        lives = [self._live[chunk.request.id] for chunk in batch]
        spans, chunks = [], []
        for request, first, length in batch:
            tokens, end = request.tokens, first + length
            spans.append(Span(request.pages, first, tokens[first:end], end == len(tokens)))
            chunks.append((request.id, length, request.is_decoding))
        flat = FlatBatch.build(spans, self.attention)
        launch = self.clock()
        logits = self.model(flat, self.cache)
        yields = [live for live, span in zip(lives, spans) if span.wants_logits]
        drawn = iter(self._fetch(logits, yields))
        sampled = [next(drawn) if span.wants_logits else None for span in spans]
        return _Computed(list(batch), lives, sampled, Iteration(start, self.clock(), chunks, launch, *state))

    def _fetch(self, logits, lives):
        """Sample on the device and read the result from it, once. Returns (token, logprob) for each row."""
        if not lives:
            if logits.is_cuda:  # or the iteration would seem to end before it does
                torch.cuda.synchronize(logits.device)
            return []
        output_index = [len(live.request.tokens) - live.request.prompt_len for live in lives]
        tokens, logprobs = sample(logits, [live.params for live in lives], output_index)
        if logprobs is None:
            return [(token, None) for token in tokens.tolist()]
        tokens, logprobs = torch.stack([tokens.double(), logprobs.double()]).tolist()
        return [(int(token), logprob) for token, logprob in zip(tokens, logprobs)]

    def _record(self, batch, lives, sampled, iteration):
        """Move the requests forward. Doing it twice is the same as once, should a Ctrl-C come in between."""
        events = []
        for chunk, live, result in zip(batch, lives, sampled):
            request, completion = live.request, live.completion
            if completion.finish_reason == "abort":
                continue  # aborted between two tries at recording
            end = chunk.start + chunk.length
            request.num_computed = end
            if completion.scheduled is None:
                completion.scheduled = iteration.start
            if result is None:
                continue
            token, logprob = result
            n = end - request.prompt_len  # this is output token n
            request.tokens[end:] = [token]
            completion.token_times[n:] = [iteration.end]
            if live.params.logprobs:
                completion.logprobs[n:] = [logprob]
            reason = "stop" if token in live.stop else "length" if n + 1 == request.max_new_tokens else None
            if reason:
                self._finish(live, reason)
            events.append(Event(request.id, token, logprob, reason, completion if reason else None))
        self.last_iteration = iteration
        return events

    def _finish(self, live, reason):
        request, completion = live.request, live.completion
        completion.finish_reason = reason
        completion.preemptions, completion.recomputed_tokens = request.preemptions, request.recomputed
        completion.tokens = request.tokens[request.prompt_len :]
        if self.tokenizer:
            # decoded after the prompt, which decides on the first word's space in some tokenizers
            end = len(request.tokens) - (reason == "stop")
            before, whole = (self.tokenizer.decode(request.tokens[:n]) for n in (request.prompt_len, end))
            completion.text = whole[len(before.rstrip("\ufffd")) :]  # a prompt may end within a character
        self.scheduler.remove(request)
        self._live.pop(request.id, None)
        return completion

    # -- offline use: all prompts at once --------------------------------------------------------------

    def generate(self, prompts, params=None, progress=True):
        """Complete all prompts and return their Completions, in order.

        `params` is one SamplingParams for all, or a list with one for each. All prompts are checked before the first is
        queued. `progress` shows a bar on a terminal. If it is interrupted, its unfinished requests are aborted. Raises
        ValueError while requests of `add_request` run: their events would be lost here.
        """
        if self.has_work:
            raise ValueError(f"generate: {len(self._live)} requests are running, step() or abort() them first")
        if isinstance(prompts, str):
            raise ValueError("prompts: must be a list of prompts, not one text")
        prompts = list(prompts)
        if params is None or isinstance(params, SamplingParams):
            params = [SamplingParams() if params is None else params] * len(prompts)
        if len(params) != len(prompts):
            raise ValueError(f"params: {len(params)} given for {len(prompts)} prompts")
        encoded = [self._encode(prompt, p) for prompt, p in zip(prompts, params)]
        self._check_queue(len(prompts))
        ids = [self._add(tokens, p) for tokens, p in zip(encoded, params)]
        done, unfinished = {}, set(ids)
        try:
            with tqdm(total=len(ids), desc="requests", disable=None if progress else True) as bar:
                while unfinished:
                    for event in self.step():
                        if event.completion and event.request_id in unfinished:  # not of an interrupted run
                            unfinished.remove(event.request_id)
                            done[event.request_id] = event.completion
                            bar.update()
        finally:
            for request_id in unfinished & self._live.keys():
                self.abort(request_id)
        return [done[request_id] for request_id in ids]
