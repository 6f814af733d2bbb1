"""All policies by name: the papers', those beyond them, those of today's engines, and custom ones.

    make_scheduler("sarathi-serve", Pages(64, 16), chunk=256, max_batch=16, max_len=512)
    make_scheduler("my_policy.py:ShortestFirst", ...)       a Scheduler subclass in that file

Plain Python, like scheduler.py. Read next: dynamic.py, priority.py; today.py, what today's engines
decide."""

from collections.abc import Callable
from dataclasses import replace
from inspect import getfullargspec
from typing import Any

from config import EngineConfig
from kv_cache import Pages
from policies import ablations, dynamic, priority, remedies, today  # noqa: F401 (enter policies)
from policies.cards import CARDS
from policies.custom import load_policy
from policies.pages import make_pages
from scheduler import Scheduler

ALL_POLICIES = {name: card.cls for name, card in CARDS.items()}
# what engines decide today, and what their users ask for
TODAY = {name: card.cls for name, card in CARDS.items() if card.engine}
POLICIES = {name: cls for name, cls in ALL_POLICIES.items() if name not in TODAY}


def find_policy(name: str) -> type[Scheduler]:
    """The class of a policy: a name in ALL_POLICIES, or "path/to/file.py:ClassName".

    Raises ValueError if there is no such policy, and as load_policy."""
    if name in ALL_POLICIES:
        return ALL_POLICIES[name]
    file, _, class_name = name.rpartition(":")
    if not file.endswith(".py"):
        allowed = f"one of {', '.join(POLICIES)}, FILE.py:Class, or in policies/today.py"
        raise ValueError(f"policy={name!r}: must be {allowed}")
    return load_policy(file, class_name)


def policy_options(policy: type[Scheduler]) -> set[str]:
    """The options that a policy adds: the keyword-only arguments of its __init__ methods."""
    return {name for cls in policy.__mro__ for name in getfullargspec(cls.__init__).kwonlyargs}


def make_scheduler(policy: str, pages: Pages, **options: Any) -> Scheduler:
    """A scheduler of the policy `policy`, with its sizes and its own `options`."""
    return find_policy(policy)(pages, **options)


# Of an EngineConfig whose sizes are filled in.


def scheduler_of(config: EngineConfig, clock: Callable[[], float], parts: int = 1) -> Scheduler:
    """A scheduler of the config's policy, with one of `parts` equal parts of the cache."""
    return make_scheduler(
        config.policy,
        pages_of(config, parts),
        chunk=config.chunk,
        max_batch=config.max_batch,
        max_len=config.max_len,
        clock=clock,
        **config.policy_options,
    )


def pages_of(config: EngineConfig, parts: int = 1) -> Pages:
    """The Pages of one of `parts` equal parts of the cache, all free. Raises ValueError if they do
    not hold max_len tokens, or if one holds more."""
    total, page_size, max_len = config.cache_sizes
    pages = total // parts
    if page_size > max_len or pages * page_size < max_len:
        sizes = f"pages={pages} of page_size={page_size}"
        raise ValueError(f"{sizes}: must hold max_len={max_len} tokens, and one page no more")
    return make_pages(pages, page_size, config.prefix_caching)


def with_tile(config: EngineConfig, tile: int) -> EngineConfig:
    """The same, with the option `tile` for a policy that has it and was not given one."""
    if "tile" not in policy_options(find_policy(config.policy)):
        return config
    return replace(config, policy_options={"tile": tile, **config.policy_options})
