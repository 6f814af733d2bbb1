"""The cost of a schedule is that of every policy under load. No timing is asserted here."""

import pytest

import examples.schedule_cost
from lab.measure import schedule_cost
from policies import ALL_POLICIES


@pytest.fixture(autouse=True)
def no_arguments(monkeypatch):
    """The examples read the command line, which is pytest's here."""
    monkeypatch.setattr("sys.argv", ["example"])


def test_every_policy_is_timed_under_load(monkeypatch):
    def repeat(schedule, number, repeat):
        scheduler = schedule.__self__
        assert (len(scheduler.running), len(scheduler.waiting)) == (128, 1000)
        assert scheduler.pages.prefix_caching
        assert all(request.is_decoding for request in scheduler.running)
        assert schedule.__name__ == "schedule" and schedule()
        return [2e-6 * number] * 3 + [1.0] * 2

    monkeypatch.setattr(schedule_cost.timeit, "repeat", repeat)
    assert schedule_cost.schedule_us() == pytest.approx(dict.fromkeys(ALL_POLICIES, 2.0))


def test_the_table_names_the_slowest_policy(monkeypatch, capsys):
    monkeypatch.setattr(examples.schedule_cost, "schedule_us", lambda: {"vllm": 90.0, "orca": 2.0})
    examples.schedule_cost.main()
    lines = capsys.readouterr().out.splitlines()
    assert [line.split() for line in lines[4:6]] == [
        ["|", "vllm", "|", "90", "|"],
        ["|", "orca", "|", "2", "|"],
    ]
    assert lines[-1] == "slowest: vllm, 90 us"
