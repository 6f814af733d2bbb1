"""How the exercises are checked: a finder returns the Problem of a policy on one load, or None.

    differs_from(Orca, rules)    exercises 1 to 8: the reference decides otherwise
    adds_below_zero(CutAPrompt)  exercise 4, where the loads have found nothing

Read first: lockstep.py, rules.py. Read next: targets.py, the finders of exercises 9 and 10."""

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

from exercises.guards import PolicyError, guarded
from exercises.loads import Load, LoadRequest, make_request, shrink
from exercises.lockstep import CALL_LIMIT_S, Moment, compare
from exercises.rules import Rule, first_broken
from scheduler import Batch, Scheduler

SHRINK_S = 0.5  # of CPU time: then a load is small enough


@dataclass(frozen=True)
class Problem:
    """What is wrong with a policy."""

    rule: str  # its name, by which two problems can be told apart
    sentence: str
    moment: Moment | None = None  # where it was seen first
    place: str | None = None  # file and line, where an error came from one
    reference: type[Scheduler] | None = None  # the policy that decides otherwise
    details: str = ""  # a table


Finder = Callable[[type[Scheduler], Load], Problem | None]
LastCheck = Callable[[type[Scheduler]], Problem | None]  # of what no load leads to


def find_problem(
    policy: type[Scheduler], finder: Finder, loads: Iterable[Load], last_check: LastCheck | None
) -> Problem | None:
    """The first problem of a policy on these loads. If it has a moment, on the smallest load."""
    for load in loads:
        problem = find(partial(finder, policy, load))
        if problem and problem.moment:
            smallest = smallest_load(policy, finder, load, problem.rule)
            return find(partial(finder, policy, smallest))
        if problem:
            return problem
    return find(partial(last_check, policy)) if last_check else None


def smallest_load(policy: type[Scheduler], finder: Finder, load: Load, rule: str) -> Load:
    """The smallest load near this one on which a policy breaks the same rule."""
    deadline = time.process_time() + SHRINK_S

    def fails_alike(smaller: Load) -> bool:
        if time.process_time() > deadline:
            return False
        problem = find(partial(finder, policy, smaller))
        return problem is not None and problem.rule == rule

    return shrink(load, fails_alike)


def find(check: Callable[[], Problem | None]) -> Problem | None:
    """The problem that a check finds, an error of the policy included."""
    try:
        return check()
    except PolicyError as error:
        return Problem(rule="error", sentence=str(error), place=error.place)


def differs_from(reference: type[Scheduler], rules: Sequence[Rule]) -> Finder:
    """The finder of the first decision that is not the reference's."""

    def find_difference(policy: type[Scheduler], load: Load) -> Problem | None:
        difference = compare(load, policy, reference)
        if difference is None:
            return None
        rule, sentence = first_broken(difference, rules)
        return Problem(rule, sentence, difference, reference=reference)

    return find_difference


def adds_below_zero(policy: type[Scheduler]) -> Problem | None:
    """The problem of a policy of exercise 4 whose batch adds a chunk where `left` is below 0.

    No load leads to such a batch: with a fixed budget no prefill begins where it is used up."""
    batch_class: type[Batch] = getattr(policy, "batch_class", Batch)
    request = make_request(0, LoadRequest(arrival=0, prompt_len=4, output_len=1))
    with guarded(CALL_LIMIT_S):
        batch = batch_class(1)
        batch.left = -1
        returned = batch.add(request)
    if returned == 0 and not batch:
        return None
    added = [chunk.length for chunk in batch]
    return Problem(
        "below_zero",
        "Where left is -1, because more requests decode than the budget allows, add() adds "
        f"nothing and returns 0: yours returned {returned!r}, and added chunks of {added} tokens.",
    )
