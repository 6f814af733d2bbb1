"""All policies by name: the papers', those beyond them, those of today's engines, and custom ones.

    make_scheduler("sarathi-serve", Pages(64, 16), chunk=256, max_batch=16, max_len=512)
    make_scheduler("my_policy.py:ShortestFirst", ...)       a Scheduler subclass in that file

Plain Python, like scheduler.py. Read next: dynamic.py, priority.py; today.py, what today's engines
decide."""

import time
from collections.abc import Callable, Mapping
from inspect import getfullargspec, signature
from typing import Any

from errors import check_type, shorten
from kv_cache import Pages
from policies import ablations, dynamic, priority, remedies, today  # noqa: F401 (enter policies)
from policies.cards import CARDS
from policies.custom import MissingPolicyError, PolicyError, guard, guarded, load_policy
from scheduler import Scheduler

ALL_POLICIES = {name: card.cls for name, card in CARDS.items()}
# what engines decide today, and what their users ask for
TODAY = {name: card.cls for name, card in CARDS.items() if card.engine}
POLICIES = {name: cls for name, cls in ALL_POLICIES.items() if name not in TODAY}


def find_policy(name: str) -> type[Scheduler]:
    """The class of a policy: a name in ALL_POLICIES, or "path/to/file.py:ClassName".

    Raises ValueError if there is no such policy. An error in the file passes through."""
    allowed = f"one of {', '.join(POLICIES)}, FILE.py:Class, or in policies/today.py"
    check_type("policy", name, str, allowed)
    if name in ALL_POLICIES:
        return ALL_POLICIES[name]
    file, _, class_name = name.rpartition(":")
    if not file.endswith(".py"):
        raise ValueError(f"policy={shorten(name)}: must be {allowed}")
    try:
        return load_policy(file, class_name)
    except MissingPolicyError as error:
        raise ValueError(f"policy={shorten(name)}: {error}") from None


def policy_options(policy: type[Scheduler]) -> set[str]:
    """The options that a policy adds: the keyword-only arguments of its __init__ methods."""
    return {name for cls in policy.__mro__ for name in getfullargspec(cls.__init__).kwonlyargs}


def check_options(policy: str, options: Mapping[str, Any], arguments: tuple[str, ...] = ()) -> None:
    """Raise ValueError unless `options` are options of this policy, by their names.

    `arguments` are those that all policies have, and that are allowed, too."""
    check_type("policy_options", options, Mapping, "a dict from names to values")
    allowed = {*policy_options(find_policy(policy)), *arguments}
    for option, value in options.items():
        if option not in allowed:
            reason = f"policy {policy!r} has no such option, only {sorted(allowed)}"
            raise ValueError(f"{option}={shorten(value)}: {reason}")


def make_scheduler(policy: str, pages: Pages, **options: Any) -> Scheduler:
    """A scheduler of the policy `policy`. Raises ValueError for an unknown policy or option."""
    cls = find_policy(policy)
    check_options(policy, options, ("chunk", "max_batch", "max_len", "clock"))
    try:
        signature(cls).bind(pages, **options)
    except TypeError as error:
        reason = f"its __init__ must take pages and {list(options)}: {error}"
        raise ValueError(f"policy={policy!r}: cannot be made: {reason}") from error
    check_type("pages", pages, Pages, "the kv_cache.Pages of a cache")
    clock = options.get("clock", time.monotonic)
    check_type("clock", clock, Callable, "a function that returns seconds")
    if guard(cls) is cls:
        return cls(pages, **options)
    with guarded():
        scheduler = guard(cls)(pages, **options)
        if "observers" not in vars(scheduler):
            raise PolicyError(f"{cls.__name__}.__init__() must call super().__init__()")
        return scheduler
