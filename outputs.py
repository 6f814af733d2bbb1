"""What an engine returns, real or simulated: Completions, Events and Iterations. Plain Python.

Read next: engine.py."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple, Self

from scheduler import Batch, ChunkRecord, Request, Scheduler


@dataclass
class Completion:
    """The result of a request (Sarathi-Serve §2.4). Times are in seconds, on the engine's clock.

    `tokens` is the output with its stop token, `text` is the output without it. `finish_reason` is
    "stop" (a stop token came), "length" (max_new_tokens reached), "abort", or "error": the
    tokenizer failed, there is no text, and `error` says why."""

    request_id: int
    prompt: Sequence[int]
    arrival: float
    priority: int = 2
    tokens: list[int] = field(default_factory=list)
    text: str | None = None
    logprobs: list[float] | None = None
    finish_reason: str | None = None
    scheduled: float | None = None  # when it was first admitted
    token_times: list[float] = field(default_factory=list)  # when each output token was known
    preemptions: int = 0
    recomputed_tokens: int = 0  # lost with its pages; some are found in the cache again
    cached_tokens: int = 0  # found in the cache and not computed, after preemptions too
    error: str | None = None

    @classmethod
    def of(cls, request: Request, text: str | None = None) -> Self:
        """The completion of a scheduler.Request that has ended."""
        output = request.tokens[request.prompt_len :]
        wants_logprobs = request.params is not None and request.params.logprobs
        return cls(
            request_id=request.id,
            prompt=request.tokens[: request.prompt_len],
            arrival=request.arrival,
            priority=request.priority,
            tokens=output,
            text=text,
            logprobs=request.logprobs[: len(output)] if wants_logprobs else None,
            finish_reason=request.finish_reason,
            scheduled=request.scheduled,
            token_times=request.token_times[: len(output)],
            preemptions=request.preemptions,
            recomputed_tokens=request.recomputed_tokens,
            cached_tokens=request.cached_tokens,
        )

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


class Event(NamedTuple):
    """A new token of a request; with the last one, its `finish_reason` and `completion`."""

    request_id: int
    token: int
    logprob: float | None
    finish_reason: str | None
    completion: Completion | None


class Iteration(NamedTuple):
    """What one step computed, and when. Times are in seconds, on the engine's clock.

    waiting, running, free_pages   how many there were after the batch was decided
    budget, preempted              of the scheduler.Batch: tokens, and request ids"""

    start: float
    end: float  # when its tokens had arrived
    chunks: list[ChunkRecord]
    launch: float | None = None  # when forward was called
    waiting: int = 0
    running: int = 0
    free_pages: int = 0
    budget: int | None = None
    preempted: Sequence[int] = ()
    micro_batch: int = 0  # its number, in a pipeline or with replicas

    @classmethod
    def begin(
        cls, batch: Batch, schedulers: Sequence[Scheduler], start: float, micro_batch: int = 0
    ) -> Self:
        """The iteration of a batch that was just decided; its `end` and `launch` are to come.

        Several schedulers, one for each micro-batch, share one queue."""
        return cls(
            start=start,
            end=start,
            chunks=batch.record(),
            waiting=len(schedulers[0].waiting),
            running=sum(len(scheduler.running) for scheduler in schedulers),
            free_pages=sum(scheduler.pages.num_free for scheduler in schedulers),
            budget=batch.budget,
            preempted=batch.preempted,
            micro_batch=micro_batch,
        )

    @property
    def prefill_tokens(self) -> int:
        """How many tokens of prompts were computed."""
        return sum(chunk.length for chunk in self.chunks if not chunk.is_decode)

    @property
    def decode_tokens(self) -> int:
        """How many decodes there were."""
        return sum(chunk.is_decode for chunk in self.chunks)
