"""The cost of a schedule is that of every policy under load. No timing is asserted here."""

import json
import socket
import threading

import pytest

import examples.schedule_cost
from examples import server_overhead
from examples.server_overhead import ServerCost
from lab.measure import schedule_cost
from policies import ALL_POLICIES, make_scheduler


@pytest.fixture(autouse=True)
def no_arguments(monkeypatch):
    """The examples read the command line, which is pytest's here."""
    monkeypatch.setattr("sys.argv", ["example"])


@pytest.fixture
def known_us(monkeypatch):
    """The times that schedule_us is to find, {policy: us}; it checks what is timed."""
    us = {name: 2 + i for i, name in enumerate(ALL_POLICIES)}
    us["vllm"] = 90
    schedulers = {}

    def spy(policy, *args, **options):
        schedulers[policy] = make_scheduler(policy, *args, **options)
        return schedulers[policy]

    def repeat(schedule, number, repeat):
        scheduler = schedule.__self__
        assert (len(scheduler.running), len(scheduler.waiting)) == (128, 1000)
        assert scheduler.pages.prefix_caching
        assert all(request.is_decoding for request in scheduler.running)
        assert schedule.__name__ == "schedule" and schedule()
        (policy,) = (name for name, other in schedulers.items() if other is scheduler)
        return [1e-6 * us[policy] * number] * 3 + [1.0] * 2

    monkeypatch.setattr(schedule_cost, "make_scheduler", spy)
    monkeypatch.setattr(schedule_cost.timeit, "repeat", repeat)
    return us


def test_the_table_names_the_slowest_policy(known_us, capsys):
    examples.schedule_cost.main()
    text = capsys.readouterr().out
    rows = [line.strip("| ").split("|") for line in text.splitlines() if line.startswith("| ")]
    assert {name.strip(): cost.strip() for name, cost in rows[1:]} == {
        name: str(us) for name, us in known_us.items()
    }
    assert text.endswith("slowest: vllm, 90 us\n")


def test_the_servers_rate_is_printed_beside_the_engines(monkeypatch, capsys):
    monkeypatch.setattr(server_overhead, "measure_server_cost", lambda: ServerCost(2000.0, 1500.0))
    server_overhead.main()
    expected = "engine.generate: 2,000 tokens/s\nserver: 1,500 tokens/s\n25.0% less\n"
    assert capsys.readouterr().out == expected


def test_all_events_of_all_streams_are_counted():
    bodies = [{"prompt": [i], "stream": True} for i in range(3)]
    requests = []

    def answer(listener):
        for _ in bodies:
            connection, _ = listener.accept()
            with connection:
                head, _, body = connection.recv(2**16).partition(b"\r\n\r\n")
                requests.append((head, json.loads(body)))
                connection.sendall(b'HTTP/1.1 200 OK\r\n\r\ndata: {"text": "x"}\n\ndata: {}\n\n')

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=answer, args=[listener], daemon=True)
        thread.start()
        events = server_overhead.stream_all(listener.getsockname()[1], bodies)
        thread.join()
    assert events == 6 and [body for _, body in requests] == bodies
    assert all(head.startswith(b"POST /v1/completions HTTP/1.1\r\n") for head, _ in requests)
