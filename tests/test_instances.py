"""Two ranks with a whole model each give what one process gives; pages sent between are not lost."""

import pytest

from policies import POLICIES
from tests.test_parallel import FEW, check
from tests.test_ranks import check_all_end, check_error

TINY = dict(tiny=dict(n_kv_head=2))
CACHED = FEW | dict(policy="sarathi-serve", prefix_caching=True)
TWO = dict(tp=1, pp=1, copies=2)


def test_replicas_give_what_one_process_gives_under_all_policies(worlds):
    engines = [FEW | dict(policy=policy) for policy in POLICIES]
    check(worlds, engines=engines, **TWO, kind="replicas", **TINY)


def test_pools_give_what_one_process_gives(worlds):
    """In chunks and whole, with pages that are found on the prefill instance; preempted, too."""
    engines = [FEW | dict(policy="vllm"), CACHED, FEW | dict(policy="sarathi-serve", page_size=1, pages=32)]
    whole, cached, pages = check(worlds, engines=engines, **TWO, kind="pools", **TINY, at_once=2)
    assert whole["preempted"] and cached["preempted"] and cached["cached"]
