"""The cost of a schedule is that of every policy under load. No timing is asserted here."""

import pytest

import examples.schedule_cost
from examples import server_overhead
from examples.server_overhead import ServerCost
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


def test_the_servers_rate_is_printed_beside_the_engines(monkeypatch, capsys):
    monkeypatch.setattr(server_overhead, "measure_server_cost", lambda: ServerCost(2000.0, 1500.0))
    server_overhead.main()
    expected = "engine.generate: 2,000 tokens/s\nserver: 1,500 tokens/s\n25.0% less\n"
    assert capsys.readouterr().out == expected


def test_all_streams_are_read_to_their_end(tiny):
    body = server_overhead.request_body([1]) | {"model": "tiny", "max_tokens": 3}
    port = int(tiny.url.rpartition(":")[2])
    assert server_overhead.stream_all(port, [body] * 4) == 4 * 3  # an event for each token
