"""Exercises 9 and 10, where many solutions are right: an SLO to meet, latencies to reach.

Read first: problems.py, given.py. Read next: catalog.py."""

from collections.abc import Sequence
from itertools import pairwise
from statistics import median, quantiles
from typing import Any, NamedTuple

from cli.tables import format_table
from exercises.given import TBT_SLO_S, batch_seconds, predict, seconds_without_attention
from exercises.guards import guarded
from exercises.loads import Load, LoadRequest, ample
from exercises.lockstep import CALL_LIMIT_S, Moment, Trial, serve
from exercises.problems import Problem
from exercises.rules import amount
from policies.iteration_time import BatchShape
from scheduler import Request, SarathiServe, Scheduler

ROUNDING = 1e-9

# Exercise 9.


def misses_the_slo(policy: type[Scheduler], load: Load) -> Problem | None:
    """A batch that takes longer than the SLO, or that leaves time for more of a prompt."""
    trial = Trial(policy, load, batch_seconds)
    for moment in trial.play():
        problem = _slo_problem(trial, moment)
        if problem:
            return problem
    return None


def _meets_the_slo(shape: BatchShape) -> bool:
    return predict(shape) <= TBT_SLO_S + ROUNDING


def _slo_problem(trial: Trial, moment: Moment) -> Problem | None:
    """The problem of the batch that was just made."""
    broken_rule = trial.broken_rule()
    if broken_rule:
        return Problem("referee", broken_rule, moment)
    if not trial.batch:
        sentence = "The batch is empty: a budget of 0 is not enough where nobody decodes."
        return Problem("empty", sentence, moment)
    decoding = [request for request in trial.scheduler.running if request.is_decoding]
    chunks = [chunk for chunk in trial.batch if not chunk.request.is_decoding]
    if not decoding:
        return None
    shape = BatchShape.of(trial.batch)
    if shape.decodes < len(decoding):
        return Problem("decode_waits", "A running decode never waits: the batch lacks one.", moment)
    decodes = BatchShape.of_decodes(decoding)
    if chunks and not _meets_the_slo(shape):
        return _too_slow(moment, shape, decodes)
    if len(chunks) > 1 or len(moment.prefills) > 1:
        return None  # several prompts share the time: the safe side is allowed
    request = chunks[0].request if chunks else _next_prefill(trial)
    if request is None:
        return None
    start = request.num_computed
    length = chunks[0].length if chunks else 0
    left = len(request.tokens) - start - length
    spare = 0
    while _meets_the_slo(decodes.with_chunk(start, length + spare + 1)):
        spare += 1
    if not left or not spare:
        return None
    text = (
        f"The budget is the largest that meets the SLO: request {request.id} gets "
        f"{amount(length, 'token')}, and with {min(spare, left)} "
        f"more the batch would still take at most {TBT_SLO_S * 1e3:g} ms."
    )
    if spare == len(decoding):
        text += f" It is too small by {spare}, the number of decodes: they are part of it, too."
        return Problem("decodes_not_counted", text, moment)
    return Problem("too_small", text, moment)


def _next_prefill(trial: Trial) -> Request | None:
    """The request whose prompt could have been continued or begun."""
    scheduler = trial.scheduler
    prefills = scheduler.prefilling()
    if prefills:
        return prefills[0]
    head = scheduler.waiting[0] if scheduler.waiting else None
    if head and not scheduler.preempted and scheduler.room_for(head):
        return head
    return None


def _too_slow(moment: Moment, shape: BatchShape, decodes: BatchShape) -> Problem:
    """The problem of a batch that misses the SLO, and what its prediction may have left out."""
    text = (
        f"The predicted time is at most the SLO: this batch takes {predict(shape) * 1e3:.1f} ms, "
        f"and {TBT_SLO_S * 1e3:g} ms are allowed"
    )
    if not _meets_the_slo(decodes):
        text += ". Its decodes alone take longer: then there is no prefill"
        return Problem("decodes_alone", f"{text}.", moment)
    chunks = [chunk for chunk in moment.yours.chunks.values() if not chunk.is_decode]
    if len(chunks) > 1:
        return Problem("too_large", f"{text}.", moment)
    i, start, length, _ = chunks[0]
    if _meets_the_slo(decodes.with_chunk(start, length - 1)):
        return Problem("one_too_many", f"{text}. With a token less it would meet it.", moment)
    earlier = _earlier_length(moment, i)
    if earlier is not None and length > earlier:
        before = amount(earlier, "token")
        text += f". Later chunks of a prompt are smaller: request {i} got {before} before"
        return Problem("grows", f"{text}, and now {length}.", moment)
    # the shapes of wrong predictions: the longest one below the SLO explains it
    mistakes = {
        "decodes_forgotten": BatchShape().with_chunk(start, length),
        "start_ignored": decodes.with_chunk(0, length),
        "keys_ignored": shape._replace(context_tokens=0, prefill_pairs=0),
    }
    believed = {name: predict(s) for name, s in mistakes.items() if _meets_the_slo(s)}
    rule = max(believed, key=believed.__getitem__, default="too_large")
    missing_ms = 1e3 * (predict(shape) - believed.get(rule, 0.0))
    if rule == "decodes_forgotten":
        text += f". Its decodes take {missing_ms:.1f} ms of them: without these it would meet it"
    elif rule == "start_ignored":
        text += (
            f". Each of the {amount(length, 'token')} of request {i} attends to the {start} "
            "before it: at the beginning of the prompt they would meet it"
        )
    elif rule == "keys_ignored":
        text += (
            f". The keys that its tokens attend to take {missing_ms:.1f} ms of them: a time for "
            "each token alone is not enough"
        )
    return Problem(rule, f"{text}.", moment)


def misses_the_slo_elsewhere(policy: type[Scheduler]) -> Problem | None:
    """A budget that is wrong where no load leads: two prompts have begun, or one is far."""
    load = ample(LoadRequest(arrival=0, prompt_len=5000, output_len=1), chunk=64)
    scheduler: Any = load.make_scheduler(policy, lambda: 0.0)
    early, late, last = (
        Request(id=i, tokens=[0] * 5000, prompt_len=5000, max_new_tokens=1, num_computed=start)
        for i, start in enumerate((10, 200, 4000))
    )
    decode = Request(id=3, tokens=[0] * 9, prompt_len=8, max_new_tokens=9, num_computed=8)
    with guarded(CALL_LIMIT_S):
        beside_both = scheduler.token_budget([decode], [early, late])
        lone_budget = scheduler.token_budget([], [last])
    if not _meets_the_slo(BatchShape.of_decodes([decode]).with_chunk(200, beside_both - 1)):
        sentence = (
            "Where several prompts have begun, stay on the safe side: after 10 and 200 tokens of "
            f"theirs, beside one decode, your budget is {beside_both}: too large for the second."
        )
        return Problem("unsafe", sentence)
    if lone_budget < 1:
        sentence = (
            f"Where nobody decodes, any budget above 0 will do: yours is {lone_budget} "
            "for a prompt of which 4,000 tokens are computed, and it would never end."
        )
        return Problem("empty", sentence)
    return None


def _earlier_length(moment: Moment, i: int) -> int | None:
    """The length of the last chunk of a request that had all the time beside some decodes."""
    for decision in reversed(moment.history):
        prompts = [chunk for chunk in decision.chunks.values() if not chunk.is_decode]
        if i in decision.chunks and len(prompts) == 1 < len(decision.chunks):
            return decision.chunks[i].length
    return None


# Exercise 10.

LONG_PROMPT = 1000  # from here on a prompt is a long one


class Target(NamedTuple):
    """A target of exercise 10."""

    name: str
    factor: float  # what is allowed, as a multiple of Algorithm 3's value
    cause: str  # why it may be missed


TARGETS = (
    Target("P99 TBT", 1.05, "Are your batches larger than C, or do decodes wait?"),
    Target("long TTFT", 1.3, "The long prompt has to go on, or to begin, while short ones come."),
    Target(
        "median short TTFT",
        1 / 3,
        "Do short prompts get some of the budget once the long one has begun?",
    ),
)


def misses_the_targets(policy: type[Scheduler], load: Load) -> Problem | None:
    """A target of exercise 10 that is missed, or a rule that is broken on the way."""
    reference = serve(SarathiServe, load, seconds_without_attention)
    (long_one,) = (r for r in reference.requests if r.prompt_len >= LONG_PROMPT)
    disturbed = [
        request.id
        for request in reference.requests
        if request is not long_one and request.arrival < long_one.token_times[0]
    ]
    trial = serve(policy, load, seconds_without_attention)
    yours = latencies(trial, long_one.id, disturbed)
    algorithm_3 = latencies(reference, long_one.id, disturbed)
    allowed = {target.name: target.factor * algorithm_3[target.name] for target in TARGETS}
    missed = [each for each in TARGETS if yours[each.name] > allowed[each.name] + ROUNDING]
    if not missed:
        return None
    rows = {
        name: [
            ("yours", yours[name], ".3f"),
            ("exercise 6", algorithm_3[name], ".3f"),
            ("allowed", limit, ".3f"),
        ]
        for name, limit in allowed.items()
    }
    head = f"The load in which the long prompt arrives at {long_one.arrival:g} s:"
    sentence = f"The {missed[0].name} is above its target. {missed[0].cause}"
    table = format_table("seconds", rows)
    return Problem(missed[0].name, sentence, details=f"{head}\n\n{table}")


def latencies(trial: Trial, long_id: int, short_ids: Sequence[int]) -> dict[str, float]:
    """The values of exercise 10 in a trial, in seconds, by the names of their targets.

    The short ones are those that arrive while the long one is prefilled."""
    ttfts = [request.token_times[0] - request.arrival for request in trial.requests]
    gaps = []
    for request in trial.requests:
        gaps += [after - before for before, after in pairwise(request.token_times)]
    return {
        "P99 TBT": quantiles(gaps, n=100, method="inclusive")[98],
        "long TTFT": ttfts[long_id],
        "median short TTFT": median([ttfts[i] for i in short_ids]),
    }
