"""Two ranks with a whole model each give what one gives, and lose nothing that is sent between."""

from policies import POLICIES
from tests.test_parallel import FEW, check
from tests.test_ranks import check_all_end, check_error

TWO = dict(tp=1, pp=1, copies=2, tiny=dict(n_kv_head=2))
CACHED = FEW | dict(policy="sarathi-serve", prefix_caching=True)
SINGLE = FEW | dict(policy="sarathi-serve", page_size=1, pages=32)


def test_replicas_give_what_one_process_gives_under_all_policies(worlds):
    check(worlds, engines=[FEW | dict(policy=policy) for policy in POLICIES], kind="replicas", **TWO)


def test_pools_give_what_one_process_gives(worlds):
    """With pages that are found on the prefill instance, and with preemption."""
    for kind in ("pools", "pools chunks"):
        cached, single = check(worlds, engines=[CACHED, SINGLE], kind=kind, at_once=2, **TWO)
        assert cached["preempted"] and cached["cached"] and single["preempted"], kind


def test_an_abort_on_the_link_frees_the_pages_of_both_sides(worlds):
    job = TWO | dict(program="aborts_on_the_link", kind="pools", engine=CACHED, link_s=0.05)
    assert worlds.result(**job, aborts=3) == 3


def test_an_interrupt_of_two_pools_changes_no_text(worlds):
    job = TWO | dict(program="interrupted", kind="pools", engine=CACHED, link_s=0.005)
    counts = worlds.result(**job, seeds=[1, 2, 3])
    assert counts["interrupts"] >= 20 and counts["waiting"] > 2


FAULTS = {
    "killed in prefill": (0, dict(what="SIGKILL", when="prefill")),
    "killed in decode": (1, dict(what="SIGKILL", when="decode")),
    "killed on the link": (1, dict(what="SIGKILL", when="on the link")),
    "raises": (1, dict(what="raise", when="decode")),
}


def test_when_one_of_two_pools_is_lost_both_end_and_one_line_names_it(worlds):
    jobs = []
    for rank, fault in FAULTS.values():
        fault = fault | dict(rank=rank)
        jobs.append(TWO | dict(program="serve", engines=[CACHED], kind="pools", fault=fault))
    for (name, (rank, _)), ended in zip(FAULTS.items(), worlds.run(*jobs), strict=True):
        check_all_end(ended)
        if rank == 1:
            reason = ["ArithmeticError", "the model fails"] if name == "raises" else ["gone"]
            check_error(ended.errors, "rank 1", *reason)
