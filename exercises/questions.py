"""The questions of the docstrings: a load, and the answer that a solution gives when it serves it.

Read first: loads.py, lockstep.py. Read next: catalog.py."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise

from exercises.loads import Load, LoadRequest, ample, mixed_loads
from exercises.lockstep import Trial, serve
from exercises.rules import amount
from scheduler import SarathiServe


@dataclass(frozen=True)
class Question:
    """The question of a docstring. Its load is also the one that the page shows."""

    load: Load
    answer: Callable[[Trial], str]  # from a trial of a solution that has served it
    load_beside: Load | None = None  # of the other policy on the page, if it is another one


def iterations_of(trial: Trial, i: int) -> list[int]:
    """The iterations, from 1, with a chunk of request i."""
    return [
        number
        for number, iteration in enumerate(trial.iterations, start=1)
        if any(chunk.request_id == i for chunk in iteration.chunks)
    ]


def prefill_lengths(trial: Trial, i: int) -> list[int]:
    """The lengths of the chunks of the prompt of request i."""
    chunks = [chunk for iteration in trial.iterations for chunk in iteration.chunks]
    return [c.length for c in chunks if c.request_id == i and not c.is_decode]


def when_the_late_one_begins(trial: Trial) -> str:
    """When a late request begins, in exercises 1 and 2."""
    began = iterations_of(trial, 2)[0]
    ended = iterations_of(trial, 0)[-1]
    longest = iterations_of(trial, 1)[-1]
    return (
        f"in iteration {began}. Request 0 ended in iteration {ended}, request 1 in {longest}; "
        "request 2 arrived in iteration 2."
    )


def how_long_the_decode_waits(trial: Trial) -> str:
    """For how many iterations in a row a decode waits, in exercise 3."""
    gaps = [after - before - 1 for before, after in pairwise(iterations_of(trial, 0))]
    return f"{max(gaps)} iterations. More prompts would stall it for longer; there is no limit."


def the_chunks_of_two(trial: Trial) -> str:
    """The chunks of two prompts, in exercise 4."""
    chunks = [" + ".join(str(c.length) for c in it.chunks) for it in trial.iterations]
    return f"{len(chunks)} iterations, with chunks of {', then '.join(chunks)} tokens."


def when_the_prompt_is_done(trial: Trial) -> str:
    """How long a prompt takes beside six decodes, in exercise 5."""
    lengths = prefill_lengths(trial, 6)
    return f"{len(lengths)} iterations, of {', '.join(map(str, lengths))} tokens of the prompt."


def when_three_are_done(trial: Trial) -> str:
    """How long three short prompts take beside three decodes, in exercise 6."""
    first = min(iterations_of(trial, i)[0] for i in (3, 4, 5))
    end = max(iterations_of(trial, i)[0] + len(prefill_lengths(trial, i)) for i in (3, 4, 5))
    return f"{end - first} iterations: short prompts share a batch, and the last one is cut."


def who_was_preempted(trial: Trial) -> str:
    """The preemptions of two requests that grow, in exercise 7."""
    times = sum(len(iteration.preempted) for iteration in trial.iterations)
    ends = [iterations_of(trial, i)[-1] for i in (0, 1)]
    again = trial.requests[1].recomputed_tokens
    return (
        f"{amount(times, 'preemption')}. Request 0 ends in iteration {ends[0]}, request 1 in "
        f"{ends[1]}, after {again} tokens were computed again."
    )


def how_many_are_computed(trial: Trial) -> str:
    """How much of a prompt is computed that comes again, in exercise 8."""
    lengths = prefill_lengths(trial, 1)
    return (
        f"{sum(lengths)}: the last token must be computed, and so must the other ones of its page."
    )


def the_fifth_chunk(trial: Trial) -> str:
    """The chunks of a long prompt, in exercise 9."""
    lengths = prefill_lengths(trial, 4)
    return f"the chunks have {', '.join(map(str, lengths))} tokens; the last one is a rest."


def how_much_slower(trial: Trial) -> str:
    """The TTFT of the long prompt, in exercise 10."""
    beside = serve(SarathiServe, next(mixed_loads()), trial.seconds)
    long_id = max(trial.requests, key=lambda request: request.prompt_len).id
    yours = trial.requests[long_id].token_times[0] - trial.requests[long_id].arrival
    before = beside.requests[long_id].token_times[0] - beside.requests[long_id].arrival
    return f"its TTFT is {yours:.2f} s with yours, and {before:.2f} s under exercise 6."


# The questions.

LATE_ONE = Question(
    ample(LoadRequest(0.0, 8, 2), LoadRequest(0.0, 8, 30), LoadRequest(0.03, 8, 4), chunk=16),
    when_the_late_one_begins,
)
THREE_PROMPTS = Question(
    ample(
        LoadRequest(0.0, 4, 8),
        *(LoadRequest(0.02 + 0.05 * i, 40, 2) for i in range(3)),
        chunk=16,
    ),
    how_long_the_decode_waits,
)
TWO_PROMPTS = Question(
    ample(LoadRequest(0.0, 20, 1), LoadRequest(0.0, 20, 1), chunk=16), the_chunks_of_two
)
SIX_DECODES = Question(
    ample(*(LoadRequest(0.0, 1, 24) for _ in range(6)), LoadRequest(0.2, 40, 2), chunk=16),
    when_the_prompt_is_done,
)
THREE_SHORT = Question(
    ample(
        *(LoadRequest(0.0, 1, 24) for _ in range(3)),
        *(LoadRequest(0.03, 5, 2) for _ in range(3)),
        LoadRequest(0.13, 100, 2),  # which would stall them under other policies
        chunk=16,
    ),
    when_three_are_done,
)
TWO_GROW = Question(
    Load(
        (LoadRequest(0.0, 8, 16), LoadRequest(0.0, 8, 16)),
        chunk=16,
        max_batch=2,
        pages=6,
        page_size=4,
    ),
    who_was_preempted,
)
_same_again = Load(
    (LoadRequest(0.0, 8, 4, shared=8), LoadRequest(0.5, 8, 4, shared=8)),
    chunk=16,
    max_batch=2,
    pages=12,
    page_size=4,
    prefix_caching=True,
)
SAME_AGAIN = Question(
    _same_again, how_many_are_computed, load_beside=replace(_same_again, prefix_caching=False)
)
BESIDE_FOUR = Question(
    ample(*(LoadRequest(0.0, 8, 40) for _ in range(4)), LoadRequest(0.2, 200, 2), chunk=40),
    the_fifth_chunk,
)
ONE_LONG_PROMPT = Question(next(mixed_loads()), how_much_slower)
