"""How the exercises are checked: a finder returns the Problem of a policy on one load, or None.

    differs_from(Orca, rules)    exercises 1 to 8: the reference decides otherwise
    adds_wrongly(CutAPrompt)     exercise 4, where the loads have found nothing

What a policy raises passes through. Read first: lockstep.py, rules.py. Read next: targets.py, the
finders of exercises 9 and 10."""

import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from exercises.loads import Load, LoadRequest, make_request, shrink
from exercises.lockstep import Moment, compare
from exercises.rules import Rule, first_broken
from scheduler import Scheduler

SHRINK_S = 0.5  # of CPU time: then a load is small enough


@dataclass(frozen=True)
class Problem:
    """What is wrong with a policy."""

    rule: str  # its name, by which two problems can be told apart
    sentence: str
    moment: Moment | None = None  # where it was seen first
    reference: type[Scheduler] | None = None  # the policy that decides otherwise
    details: str = ""  # a table


Finder = Callable[[type[Scheduler], Load], Problem | None]
LastCheck = Callable[[type[Scheduler]], Problem | None]  # of what no load leads to


def check_solution(
    policy: type[Scheduler], finder: Finder, loads: Iterable[Load], last_check: LastCheck | None
) -> Problem | None:
    """The first problem of a policy on these loads. If it has a moment, on the smallest load."""
    for load in loads:
        problem = finder(policy, load)
        if problem and problem.moment:
            smallest = smallest_load(partial(finder, policy), load, problem.rule)
            return finder(policy, smallest)
        if problem:
            return problem
    return last_check(policy) if last_check else None


def smallest_load(find: Callable[[Load], Problem | None], load: Load, rule: str) -> Load:
    """The smallest load near this one on which the same rule is broken."""
    deadline = time.process_time() + SHRINK_S

    def fails_alike(smaller: Load) -> bool:
        problem = None
        if time.process_time() < deadline:
            with suppress(Exception):  # of the policy: on another load it may fail otherwise
                problem = find(smaller)
        return problem is not None and problem.rule == rule

    return shrink(load, fails_alike)


def differs_from(reference: type[Scheduler], rules: Sequence[Rule]) -> Finder:
    """The finder of the first decision that is not the reference's."""

    def find_difference(policy: type[Scheduler], load: Load) -> Problem | None:
        difference = compare(load, policy, reference)
        if difference is None:
            return None
        rule, sentence = first_broken(difference, rules)
        return Problem(rule, sentence, difference, reference=reference)

    return find_difference


def adds_wrongly(policy: Any) -> Problem | None:
    """The problem of a policy of exercise 4 whose batch adds or returns a wrong length.

    No load leads to a budget below 0: with a fixed one no prefill begins where it is used up."""
    request = make_request(0, LoadRequest(arrival=0, prompt_len=4, output_len=1))
    for left, expected in ((9, 4), (3, 3), (0, 0), (-1, 0)):
        batch = policy.batch_class(9)
        batch.left = left
        returned = batch.add(request)
        added = sum(chunk.length for chunk in batch)
        if returned != expected or added != expected:
            sentence = (
                f"A prompt of 4 tokens, where left is {left}: add() adds {expected} and returns "
                f"{expected}. Yours adds {added} and returns {returned!r}."
            )
            return Problem("add", sentence)
    return None
