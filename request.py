"""What flows: a Request becomes Chunks, a Batch and Events. Plain Python.

A request is a list of tokens and one counter, and a batch is a list of chunks. A whole prefill is a
chunk that covers the prompt. A decode is a chunk of length 1. An engine returns Events, and each
Request that has ended. Read next: scheduler.py."""

import operator
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple, Self


@dataclass(frozen=True)
class Service:
    """What a request may expect, for policies that treat requests differently.

    `priority` is an index of policies.priority.PRIORITIES, the targets are in seconds."""

    priority: int = 2
    ttft_slo: float | None = None
    tbt_slo: float | None = None
    user: str = ""  # who asks


@dataclass(eq=False, slots=True)
class Request:
    """A prompt, and the output that is generated after it.

    Three fields matter to a policy: `tokens`, `num_computed` and `pages`. The rest is bookkeeping.
    While a request waits it has no pages, and nothing of it is computed."""

    id: int
    tokens: list[int]  # the prompt, and the output so far
    num_computed: int = field(default=0, kw_only=True)  # tokens whose keys and values are in pages
    pages: list[int] = field(default_factory=list, kw_only=True)  # its block table, see kv_cache.py

    # What was asked for. Times are in seconds, on the scheduler's clock.
    prompt_len: int
    max_new_tokens: int
    arrival: float = 0.0
    stop: frozenset[int] = frozenset()  # tokens that end it
    params: Any = None  # sampling.SamplingParams: a policy does not look at them
    service: Service = Service()

    # What has happened to it.
    scheduled: float | None = None  # when it was first admitted
    token_times: list[float] = field(default_factory=list)  # when each output token was known
    logprobs: list[float] = field(default_factory=list)  # of the output tokens, if asked for
    finish_reason: str | None = None  # "stop" (a token or a string), "length" or "abort"
    text: str | None = None  # of the output, without what ended it, if there is a tokenizer
    preemptions: int = 0  # how often it lost its pages
    recomputed_tokens: int = 0  # computed tokens that it lost with them, in all
    cached_tokens: int = 0  # tokens that it found in the cache when it was admitted, in all
    page_hashes: list[bytes] = field(default_factory=list)  # of its full pages, see policies/pages

    @property
    def is_decoding(self) -> bool:
        """Whether only its last token is left to compute, and is one that it generated.

            tokens     p p p p o o      prompt_len = 4, 2 output tokens
            computed   x x x x x .      num_computed = 5: it decodes

        After a preemption num_computed is 0, and the same tokens are prefilled again."""
        return self.num_computed + 1 == len(self.tokens) > self.prompt_len

    @property
    def prompt(self) -> list[int]:
        """The tokens that it came with."""
        return self.tokens[: self.prompt_len]

    @property
    def output(self) -> list[int]:
        """The tokens that were generated so far, a stop token too."""
        return self.tokens[self.prompt_len :]

    # Sarathi-Serve §2.4, in seconds.

    @property
    def ttft(self) -> float | None:
        """Time to first token: from arrival to the first output token. None if there was none."""
        return self.token_times[0] - self.arrival if self.token_times else None

    @property
    def tbt(self) -> list[float]:
        """Times between tokens: the gaps between consecutive output tokens."""
        return [later - earlier for earlier, later in pairwise(self.token_times)]

    @property
    def scheduling_delay(self) -> float | None:
        """From arrival to first being scheduled. None if it never was."""
        return None if self.scheduled is None else self.scheduled - self.arrival

    @property
    def latency(self) -> float | None:
        """From arrival to the last output token, end to end. None if there was none."""
        return self.token_times[-1] - self.arrival if self.token_times else None


class Chunk(NamedTuple):
    """Compute request.tokens[start : start + length]."""

    request: Request
    start: int
    length: int

    @property
    def end(self) -> int:
        """The number of keys that its last token attends to: 0, ..., end - 1."""
        return self.start + self.length

    @property
    def pages(self) -> list[int]:
        """The block table of its request."""
        return self.request.pages

    @property
    def tokens(self) -> list[int]:
        """The tokens that are computed: the queries of attention."""
        return self.request.tokens[self.start : self.start + self.length]

    @property
    def yields_token(self) -> bool:
        """Whether it reaches the last known token, so that the next one can be sampled."""
        return self.start + self.length == len(self.request.tokens)

    def used_pages(self, page_size: int) -> list[int]:
        """The pages that hold its keys, in order."""
        return self.pages[: -(-self.end // page_size)]


def lone_chunk(
    pages: list[int], start: int, tokens: Sequence[int], yields_token: bool = True
) -> Chunk:
    """A chunk of no scheduler's request, in these pages: to warm up, to measure or to test with.

    What comes before `start` is computed."""
    all_tokens = [0] * start + list(tokens)
    if not yields_token:
        all_tokens.append(0)
    request = Request(0, all_tokens, prompt_len=len(all_tokens), max_new_tokens=1, pages=pages)
    return Chunk(request, start, len(tokens))


class Batch(list[Chunk]):
    """The chunks of one iteration, at most one for each request.

    `budget` is the number of tokens that it may hold, without one any. `left` is the unused part of
    it, below 0 if there are more decodes than it allows. Raises TypeError for `chunk / 2`."""

    def __init__(self, budget: int = sys.maxsize) -> None:
        super().__init__()
        self.budget = operator.index(budget)
        self.left = self.budget
        self.preempted: list[int] = []  # ids of the requests that lost their pages for it

    def add(self, request: Request, limit: int = sys.maxsize) -> int:
        """Add the next chunk, cut to the budget and to `limit`. Returns its length; 0: none."""
        length = len(request.tokens) - request.num_computed
        if length > self.left or length > limit:
            length = max(0, min(self.left, limit))
        if length:
            self.append(Chunk(request, request.num_computed, length))
            self.left -= length
        return length

    def add_decodes(self, requests: Sequence[Request]) -> None:
        """Add a decode of each of these requests, even beyond the budget."""
        self += [Chunk(request, request.num_computed, 1) for request in requests]
        self.left -= len(requests)


class Event(NamedTuple):
    """A new token of a request, and with its last one the reason why that is the last.

    Then `request` has all of its output, its text and its times. `text` is the text that this token
    completes. Only Engine.stream fills it in."""

    request: Request
    token: int
    logprob: float | None = None
    finish_reason: str | None = None
    text: str = ""

    @classmethod
    def of(cls, request: Request, token: int) -> Self:
        """The event of a request's newest token."""
        logprob = request.logprobs[-1] if request.logprobs else None
        return cls(request, token, logprob, request.finish_reason)
