"""Exercises 9 and 10, where many solutions are right: an SLO to meet, latencies to reach.

Read first: problems.py, given.py. Read next: catalog.py."""

from collections.abc import Sequence
from statistics import median, quantiles
from typing import Any

from cli.tables import format_table
from exercises.given import TBT_SLO_S, batch_seconds, predict, seconds_without_attention
from exercises.loads import Load, LoadRequest, ample
from exercises.lockstep import Moment, Trial, serve
from exercises.problems import Problem
from policies.iteration_time import BatchShape
from scheduler import Request, SarathiServe, Scheduler

ROUNDING = 1e-9

# Exercise 9.


def misses_the_slo(policy: type[Scheduler], load: Load) -> Problem | None:
    """A batch that takes longer than the SLO, or that leaves time for more of a prompt."""
    trial = Trial(policy, load, batch_seconds)
    for moment in trial.play():
        broken_rule = trial.broken_rule()
        if broken_rule:
            return Problem("rule_of_every_policy", broken_rule, moment)
        problem = _slo_problem(trial, moment)
        if problem:
            return problem
    return None


def _meets_the_slo(shape: BatchShape) -> bool:
    return predict(shape) <= TBT_SLO_S + ROUNDING


def _longest_chunk(decodes: BatchShape, start: int) -> int:
    """The length of the longest chunk beside these decodes that meets the SLO."""
    length = 0
    while _meets_the_slo(decodes.with_chunk(start, length + 1)):
        length += 1
    return length


def _slo_problem(trial: Trial, moment: Moment) -> Problem | None:
    """The problem of the batch that was just made."""
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
        sentence = (
            f"The predicted time is at most the SLO: this batch takes {predict(shape) * 1e3:.1f} "
            f"ms, its decodes alone {predict(decodes) * 1e3:.1f} ms, and {TBT_SLO_S * 1e3:g} ms "
            "are allowed."
        )
        return Problem("too_slow", sentence, moment)
    prompts = [*trial.scheduler.prefilling(), *trial.scheduler.waiting]
    start = max([moment.states[i].num_computed for i in moment.prefills], default=0)
    longest = _longest_chunk(decodes, start)
    length = sum(chunk.length for chunk in chunks)
    has_more = not chunks or not chunks[-1].yields_token
    if length >= longest or not prompts or not has_more:
        return None
    sentence = (
        f"The budget is the largest that meets the SLO: {longest} tokens of prompts would, beside "
        f"these decodes, and there are {length}. The decodes are part of the budget, too."
    )
    return Problem("too_small", sentence, moment)


def misses_the_slo_elsewhere(policy: type[Scheduler]) -> Problem | None:
    """A budget that is wrong where no load leads: two prompts have begun, or one is far."""
    load = ample(LoadRequest(arrival=0, prompt_len=5000, output_len=1), chunk=64)
    scheduler: Any = load.make_scheduler(policy, lambda: 0.0)
    early, late, last = (
        Request(id=i, tokens=[0] * 5000, prompt_len=5000, max_new_tokens=1, num_computed=start)
        for i, start in enumerate((10, 200, 4000))
    )
    decode = Request(id=3, tokens=[0] * 9, prompt_len=8, max_new_tokens=9, num_computed=8)
    decodes = BatchShape.of_decodes([decode])
    longest = _longest_chunk(decodes, 200)
    for prefills in ([early, late], [late, early]):
        budget = scheduler.token_budget([decode], prefills)
        if not longest // 2 < budget <= longest + 1:
            sentence = (
                "Where several prompts have begun, stay on the safe side: after 10 and 200 tokens, "
                f"beside one decode, {longest + 1} is right, and your budget is {budget}."
            )
            return Problem("several", sentence)
    lone_budget = scheduler.token_budget([], [last])
    if lone_budget < 1:
        sentence = (
            f"Where nobody decodes, any budget above 0 will do: yours is {lone_budget} "
            "for a prompt of which 4,000 tokens are computed, and it would never end."
        )
        return Problem("empty", sentence)
    return None


# Exercise 10.

LONG_PROMPT = 1000  # from here on a prompt is a long one
TARGETS = {  # what is allowed, as a multiple of Algorithm 3's value
    "P99 TBT": 1.05,
    "long TTFT": 1.3,
    "median short TTFT": 1 / 3,
}


def misses_the_targets(policy: type[Scheduler], load: Load) -> Problem | None:
    """A target of exercise 10 that is missed, or a rule that is broken on the way."""
    reference = serve(SarathiServe, load, seconds_without_attention)
    (long_one,) = (r for r in reference.requests if r.prompt_len >= LONG_PROMPT)
    disturbed = [
        request.id
        for request in reference.requests
        if request is not long_one and request.arrival < long_one.token_times[0]
    ]
    trial = Trial(policy, load, seconds_without_attention)
    broken_rule = trial.run()
    if broken_rule:
        return Problem("rule_of_every_policy", broken_rule)
    yours = latencies(trial, long_one.id, disturbed)
    algorithm_3 = latencies(reference, long_one.id, disturbed)
    allowed = {name: factor * algorithm_3[name] for name, factor in TARGETS.items()}
    missed = [name for name, limit in allowed.items() if yours[name] > limit]
    if not missed:
        return None
    columns = {"yours": yours, "exercise 6": algorithm_3, "allowed": allowed}
    rows = {
        name: [(head, figures[name], ".3f") for head, figures in columns.items()]
        for name in TARGETS
    }
    head = f"The load in which the long prompt arrives at {long_one.arrival:g} s:"
    table = format_table("seconds", rows)
    sentence = f"The {missed[0]} is above its target."
    return Problem(missed[0], sentence, details=f"{head}\n\n{table}")


def latencies(trial: Trial, long_id: int, short_ids: Sequence[int]) -> dict[str, float]:
    """The values of exercise 10 in a trial, in seconds, by the names of their targets.

    The short ones are those that arrive while the long one is prefilled."""
    ttfts = [request.token_times[0] - request.arrival for request in trial.requests]
    gaps = [gap for request in trial.requests for gap in request.tbt]
    return {
        "P99 TBT": quantiles(gaps, n=100, method="inclusive")[98],
        "long TTFT": ttfts[long_id],
        "median short TTFT": median([ttfts[i] for i in short_ids]),
    }
