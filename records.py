"""What is known of a request when it has ended, of a token when it appears, and of an iteration.

The engine makes these; metrics.py, chrome_trace.py and the plots read them. The definitions of TTFT and TBT are those
of Sarathi-Serve §2.4. All times are in seconds, on the engine's clock.

Read next: engine.py.
"""

from dataclasses import dataclass, field
from typing import NamedTuple


@dataclass
class Completion:
    """What became of a request. Times are in seconds, on the engine's clock.

    prompt           its tokens
    arrival          when it was added, or said to have arrived
    priority         0 realtime, 1 high, 2 normal, 3 low
    finish_reason    "stop" (a stop token came), "length" (max_new_tokens reached), "abort"; None while running
    tokens           the output tokens, a stop token included
    text             the output as text, without the stop token; None without a tokenizer
    logprobs         the log-probability of each output token, or None if they were not asked for
    scheduled        when it was first part of a batch
    token_times      when each output token was known
    preemptions      how often its pages were taken; `recomputed_tokens` says how many tokens these held in all
    """

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
    recomputed_tokens: int = 0

    @property
    def ttft(self):
        """Time to first token: from arrival to the first output token. None if there was none."""
        return self.token_times[0] - self.arrival if self.token_times else None

    @property
    def tbt(self):
        """Times between tokens: the gaps between consecutive output tokens, one fewer than there are tokens."""
        return [later - earlier for earlier, later in zip(self.token_times, self.token_times[1:])]

    @property
    def scheduling_delay(self):
        """From arrival to first being part of a batch. None if it never was."""
        return None if self.scheduled is None else self.scheduled - self.arrival

    @property
    def latency(self):
        """From arrival to the last output token so far, end to end. None if there was none."""
        return self.token_times[-1] - self.arrival if self.token_times else None


class Event(NamedTuple):
    """One new token of one request; `finish_reason` and `completion` are set with the last one."""

    request_id: int
    token: int
    logprob: float | None
    finish_reason: str | None
    completion: Completion | None


class Iteration(NamedTuple):
    """What one step computed, and when. Times are in seconds, on the engine's clock.

    start, end           when the step began, and when its tokens had arrived; `launch` is when forward was called
    chunks               (request_id, length, is_decode) for each chunk
    waiting, running     how many requests there were when the batch had been made; `free_pages` likewise
    budget               the token budget of the batch, None under a policy that has none
    preempted            the ids of the requests that lost their pages to this batch
    micro_batch          which one it was of, in a simulated pipeline or one with replicas (simulator.py)
    """

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
        return sum(length for _, length, is_decode in self.chunks if not is_decode)

    @property
    def decode_tokens(self):
        """How many decodes there were."""
        return sum(length for _, length, is_decode in self.chunks if is_decode)
