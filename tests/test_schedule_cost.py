"""The cost of a schedule is that of every policy under load. No timing is asserted here."""

import pytest

from policies import POLICIES, make_scheduler
from tests import schedule_cost


def test_every_policy_is_timed_under_load_and_the_slowest_is_named(monkeypatch, capsys):
    seen, us = {}, {name: 2 + i for i, name in enumerate(POLICIES)} | {"vllm": 90}

    def spy(policy, *args, **options):
        seen[policy] = make_scheduler(policy, *args, **options)
        return seen[policy]

    def repeat(schedule, number, repeat):
        its = schedule.__self__
        assert (len(its.running), len(its.waiting)) == (128, 1000) and its.pages.prefix_caching
        assert all(request.is_decoding for request in its.running)
        assert schedule.__name__ == "schedule" and schedule()
        (policy,) = (name for name, other in seen.items() if other is its)
        return [1e-6 * us[policy] * number] * 3 + [1.0] * 2

    monkeypatch.setattr(schedule_cost, "make_scheduler", spy)
    monkeypatch.setattr(schedule_cost.timeit, "repeat", repeat)
    assert schedule_cost.schedule_us() == pytest.approx(us)
    assert [*seen] == [*POLICIES]
    schedule_cost.main()
    text = capsys.readouterr().out
    rows = [line.strip("| ").split("|") for line in text.splitlines() if line.startswith("| ")]
    assert {name.strip(): cost.strip() for name, cost in rows[1:]} == {
        name: f"{its}" for name, its in us.items()
    }
    assert text.endswith("slowest: vllm, 90 us\n")
