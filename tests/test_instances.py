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


FAULTS = {
    "killed in prefill": (0, dict(what="SIGKILL", when="prefill")),
    "killed in decode": (1, dict(what="SIGKILL", when="decode")),
    "killed on the link": (1, dict(what="SIGKILL", when="on the link")),
    "raises": (1, dict(what="raise", when="decode")),
}


def test_when_one_of_two_pools_is_lost_both_end_and_one_line_names_it(worlds):
    jobs = []
    for rank, fault in FAULTS.values():
        job = dict(program="serve", engines=[CACHED], kind="pools", fault=fault | dict(rank=rank))
        jobs.append(job | TWO | TINY)
    for (name, (rank, _)), ended in zip(FAULTS.items(), worlds.run(*jobs), strict=True):
        check_all_end(ended)
        if rank == 1:
            reason = ["ArithmeticError", "the model fails"] if name == "raises" else ["gone"]
            check_error(ended.errors, "rank 1", *reason)
