"""Ranks that fail, one or all: everything ends, soon, and one line says why. Steps are atomic."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from threading import Thread, Timer, current_thread
from urllib.error import URLError
from urllib.request import Request, urlopen

import pytest
import torch
import torch.distributed as dist
import transformers

import sample
from config import EngineConfig
from hardware.torchrun import Place
from parallel import meeting, ranks
from parallel.ranks import Ranks
from parallel.stages import Stage
from tests import forked
from tests.helpers import tiny_model
from tests.test_checkpoints import llama_like
from tests.worlds import ENVIRON, ROOT

LIMIT_S = 15
ENGINE = dict(policy="sarathi-serve", chunk=6, max_batch=3, max_len=32, page_size=16, pages=6)
JOB = dict(program="serve", engines=[ENGINE], tiny=dict(n_kv_head=2, n_layer=2))
IDLE = JOB | dict(program="idle", what="SIGKILL")
FAULTS = {  # of a rank, in a batch with prefill or one without
    "killed in load": dict(what="SIGKILL", when="load"),
    "killed in prefill": dict(what="SIGKILL", when="prefill"),
    "killed in decode": dict(what="SIGKILL", when="decode"),
    "raises": dict(what="raise", when="decode"),
}


def check_error(errors, *parts):
    """One line begins with "error: ", and all `parts` are in it."""
    (line,) = [line for line in errors.splitlines() if line.startswith("error: ")]
    assert all(part in line for part in parts), line
    assert "Traceback" not in errors


def test_when_a_rank_is_lost_all_end_and_one_line_names_it(worlds):
    jobs = {}
    for name, fault in FAULTS.items():
        for tp, pp in ((2, 1), (1, 2), (2, 2)):
            rank = tp * pp - 1
            jobs[name, rank, tp, pp] = JOB | dict(tp=tp, pp=pp, fault=fault | dict(rank=rank))
    worlds_ended = worlds.run(*jobs.values())
    for (name, rank, *_), ended in zip(jobs, worlds_ended, strict=True):
        check_all_end(ended)
        reason = ["ArithmeticError", "the model fails"] if name == "raises" else ["gone"]
        check_error(ended.errors, f"rank {rank}", *reason)


def test_signals_are_for_rank_0(worlds):
    """Others end with it: it may have something to print."""
    job = JOB | dict(tp=1, pp=2)
    jobs = [job]
    for signal_name in ("SIGINT", "SIGTERM", "SIGHUP"):
        jobs.append(job | dict(fault=dict(what=signal_name, when="decode", rank=1)))
    undisturbed, *others = worlds.run(*jobs)
    for ended in others:
        assert ended.result == undisturbed.result and set(ended.statuses.values()) == {0}


def test_a_rank_is_missed_while_nobody_has_anything_to_do(worlds):
    (ended,) = worlds.run(IDLE | dict(tp=2, pp=2, victim=3))
    check_all_end(ended)
    check_error(ended.errors, "rank 3 is gone")


def check_all_end(ended):
    """All ranks end soon, and not as if all had gone well."""
    assert ended.result is None and 0 not in ended.statuses.values(), ended
    assert "hangs" not in ended.statuses.values() and max(ended.seconds.values()) < LIMIT_S, ended


def test_when_rank_0_is_lost_all_end(worlds):
    jobs = []
    for when in ("load", "prefill", "decode"):
        for tp, pp in ((2, 1), (1, 2), (2, 2)):
            fault = dict(what="SIGKILL", when=when, rank=0)
            jobs.append(JOB | dict(tp=tp, pp=pp, fault=fault))
    jobs.append(IDLE | dict(tp=2, pp=1, victim=0))
    for ended in worlds.run(*jobs):
        check_all_end(ended)


def test_ranks_that_cannot_work_together_say_so(worlds, tmp_path):
    """Rank 1 has other weights; the port is in use; the layers cannot be divided."""
    for seed in (0, 1):
        torch.manual_seed(seed)
        transformers.LlamaForCausalLM(llama_like()).save_pretrained(tmp_path / str(seed))
    both = dict(program="serve", engines=[ENGINE], checkpoint=[f"{tmp_path}/{n}" for n in (0, 1)])
    with socket.create_server(("127.0.0.1", 0)) as busy:
        port = busy.getsockname()[1]
        alone = JOB | dict(tp=2, pp=1, port=port, start=[0])
        jobs = both | dict(tp=2, pp=1), JOB | dict(tp=1, pp=3), alone
        others, divided, in_use = worlds.run(*jobs)
    for ended in (others, in_use, divided):
        assert ended.statuses[0] not in (0, "hangs") and max(ended.seconds.values()) < LIMIT_S
    check_error(others.errors, "rank 1 has another model, or other weights, than rank 0")
    check_error(in_use.errors, str(port), "in use")
    assert error_lines(divided) == ["error: pp=3: must divide n_layer=2"]


HANGS = {}  # name -> job: rank 0 and the last rank are stopped
for when, tp, pp in (("load", 2, 2), ("prefill", 2, 1), ("decode", 1, 2)):
    for rank in (0, tp * pp - 1):
        fault = dict(what="SIGSTOP", when=when, rank=rank)
        HANGS[f"rank {rank} in {when}"] = JOB | dict(tp=tp, pp=pp, fault=fault)
for rank in (0, 3):
    at_rest = IDLE | dict(what="SIGSTOP", tp=2, pp=2, victim=rank)
    HANGS[f"rank {rank} at rest"] = at_rest
PAUSE_S = 5  # longer than a silence may be
LATE = {}  # name -> job
for when in ("load", "decode"):
    for what, seconds in (("be late", PAUSE_S), ("be late in C", 2)):
        fault = dict(what=what, seconds=seconds, when=when, rank=1)
        LATE[f"{what} in {when}"] = JOB | dict(tp=1, pp=2, fault=fault)
AT_THE_END = JOB | dict(program="stopped_at_the_end", tp=2, pp=1, victim=1)
SUSPENDED = JOB | dict(program="suspended", tp=2, pp=1, seconds=PAUSE_S)


STUCK = {}  # name -> job: only threads go on, and nobody waits for the rank in a sum
for when, limit in (("load", "LOAD_LIMIT"), ("decode", "COMPUTE_LIMIT")):
    for rank in (0, 1):
        fault = dict(what="be late", seconds=60, when=when, rank=rank)
        STUCK[f"rank {rank} in {when}"] = JOB | dict(tp=1, pp=2, limits={limit: 4}, fault=fault)
ALONE = {}  # name -> job: one rank of two
for rank in (0, 1):
    alone = dict(tp=2, pp=1, limits=dict(MEETING_LIMIT=4), start=[rank])
    ALONE[f"only rank {rank}"] = JOB | alone
TWO_NODES = HANGS["rank 0 at rest"] | dict(node_size=2)
RESTS = JOB | dict(program="rests", tp=2, pp=1, limits=dict(COMPUTE_LIMIT=4), seconds=6)


@pytest.fixture(scope="module")
def slow_worlds(worlds):
    """{name: Ended} of all worlds that take long, which they do at the same time."""
    jobs = HANGS | LATE | ALONE | {"at the end": AT_THE_END, "suspended": SUSPENDED}
    jobs |= {"two nodes": TWO_NODES, "rests": RESTS}
    jobs |= {f"stuck {name}": job for name, job in STUCK.items()}
    return dict(zip(jobs, worlds.run(*jobs.values()), strict=True))


def error_lines(ended):
    """The lines of all ranks that say why they end."""
    return [line for line in ended.errors.splitlines() if line.startswith("error: ")]


def check_hang_ends(ended, killed):
    """All ranks end soon: the one that is stopped is killed."""
    assert ended.statuses[killed] == -signal.SIGKILL and max(ended.seconds.values()) < 30, ended
    assert ended.result is None and 0 not in ended.statuses.values()
    assert "Traceback" not in ended.errors


@pytest.mark.parametrize("name", HANGS)
def test_when_a_rank_is_stopped_all_end_and_one_line_names_it(slow_worlds, name):
    ended = slow_worlds[name]
    rank = int(name.split()[1])
    check_hang_ends(ended, killed=rank)
    assert error_lines(ended) == [f"error: rank {rank} was silent for 4 s: it hangs"]


def test_each_other_node_says_that_rank_0_hangs(slow_worlds):
    ended = slow_worlds["two nodes"]
    check_hang_ends(ended, killed=0)
    lines = ["error: rank 0 was silent for 4 s: it hangs"] * 2  # of ranks 1 and 2
    assert error_lines(ended) == lines


def test_a_rank_that_does_not_end_makes_rank_0_fail(slow_worlds):
    ended = slow_worlds["at the end"]
    check_hang_ends(ended, killed=1)
    assert ended.statuses[0] == 1
    assert error_lines(ended) == ["error: rank 1 has not ended in 4 s"]


@pytest.mark.parametrize("name", LATE)
def test_who_loads_or_computes_for_long_does_not_hang(slow_worlds, name):
    ended = slow_worlds[name]
    assert set(ended.statuses.values()) == {0} and ended.result, ended
    assert error_lines(ended) == []


def test_ranks_that_are_stopped_together_go_on_together(slow_worlds):
    ended = slow_worlds["suspended"]
    assert ended.result is True and set(ended.statuses.values()) == {0}, ended


def test_ranks_may_rest_for_longer_than_a_command_may_take(slow_worlds):
    ended = slow_worlds["rests"]
    assert set(ended.statuses.values()) == {0}, ended
    of_rank_0, of_rank_1 = ended.result
    assert of_rank_0 < 6 <= of_rank_1 + 0.1  # for commands, but for the way of the last


def test_nodes_whose_clocks_differ_agree_on_the_time(worlds):
    job = dict(program="clocks", tp=2, pp=1, tiny=dict(n_kv_head=2, n_layer=2))
    times = worlds.result(**job)
    assert max(times) - min(times) < 30


def test_a_stage_waits_for_the_one_before_and_rank_0_until_all_have_loaded(worlds):
    late = dict(what="be late", seconds=3)
    waits = dict(program="waits", tp=1, pp=2, fault=late | dict(when="prefill", rank=0))
    loads = dict(program="loads", tp=2, pp=1, fault=late | dict(when="load", rank=1))
    waited, loaded = worlds.run(JOB | waits, JOB | loads)
    (_, first), (_, second) = waited.result
    assert second < 2.9 < first < 20
    assert loaded.result > 2


@pytest.mark.parametrize("name", STUCK)
def test_a_rank_that_is_stuck_ends_all(slow_worlds, name):
    ended = slow_worlds[f"stuck {name}"]
    check_all_end(ended)
    (line,) = error_lines(ended)
    why = "a call took 4 s: it is stuck, or waits for a stuck rank"
    assert line == f"error: {name[:6]}: {why}" or name == "rank 0 in decode"  # rank 1 waits for it
    assert line.endswith(why)


def test_who_waits_for_others_in_vain_says_so(slow_worlds):
    first, last = (slow_worlds[name] for name in ALONE)
    check_error(first.errors, "the ranks do not meet at 127.0.0.1:", "1/2 clients joined")
    check_error(last.errors, "nobody listens at 127.0.0.1:", " in 4 s: ")
    assert {*first.statuses.values(), *last.statuses.values()} == {1}


def test_a_rank_waits_for_a_port_that_opens_late():
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    servers = []
    opens = Timer(0.5, lambda: servers.append(socket.create_server(("127.0.0.1", port))))
    opens.start()
    meeting.wait_for_port("127.0.0.1", port)
    opens.join()
    servers[0].close()


def test_a_timer_counts_beats():
    timer = ranks.Timer(limit_s=3 * ranks.BEAT_S)
    assert [timer.beat() for _ in range(3)] == [False, False, True]


def test_the_rank_that_does_not_come_is_named(monkeypatch):
    store = dist.HashStore()
    monkeypatch.setattr(meeting, "rendezvous", lambda *_, **__: iter([(store, 0, 3)]))
    monkeypatch.setattr(meeting, "MEETING_LIMIT", timedelta(seconds=1))
    place = Place(rank=0, world_size=3, local_rank=0, local_world_size=3)
    store.set("rank 1", "is here")
    with pytest.raises(ConnectionError, match="^rank 2 has not come to node:29500 in 1 s$"):
        meeting.meet(place, "node", 29500, timedelta(hours=1))
    store.set("rank 2", "is here")
    assert meeting.meet(place, "node", 29500, timedelta(hours=1)) is store
    assert store.timeout == timedelta(hours=1)


def test_only_living_ranks_of_the_same_torchrun_are_killed(monkeypatch):
    here, there = ("node", 7), ("other", 7)
    this = object.__new__(Ranks)
    this.rank = 0
    places = [here, here, here, there, ("node", 8)]
    this.processes = [ranks.Process(*place, pid=100 + i) for i, place in enumerate(places)]
    alive = current_thread()
    this.receivers = {1: alive, 2: Thread(), 3: alive, 4: alive}
    killed = []
    monkeypatch.setattr("parallel.ranks.os.kill", lambda pid, number: killed.append(pid))
    this._kill_peers()
    assert killed == [101]


@pytest.mark.parametrize(
    "rank, error, is_held_back",
    [(0, RuntimeError, True), (0, ValueError, False), (1, ValueError, True)],
)
def test_an_error_is_held_back_if_others_may_know_better(monkeypatch, rank, error, is_held_back):
    """Those of torch on rank 0, whose cause may be a lost rank; all on others, which it may have,
    too."""
    this = object.__new__(Ranks)
    this.rank = rank
    this.call_times = []
    sleeps = []
    monkeypatch.setattr("parallel.ranks.time.sleep", sleeps.append)

    def fail():
        assert this.call_times[0].limit_s == 60
        raise error

    with pytest.raises(error):
        this._call_patiently(timedelta(minutes=1), fail)
    assert bool(sleeps) == is_held_back and this.call_times == []


def test_another_number_of_processes_is_an_error(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "3")
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(ValueError, match="^tp=2, pp=2: needs 4 processes, not 3$"):
        Ranks(2, 2)


def test_each_process_of_a_node_has_a_gpu_of_its_own(monkeypatch):
    chosen = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    place = Place(rank=5, world_size=6, local_rank=1, local_world_size=2)
    assert meeting.device_of("cuda", place) == torch.device("cuda:1")
    assert chosen == [torch.device("cuda:1")]
    assert meeting.device_of("cpu", place) == torch.device("cpu")
    with pytest.raises(ValueError, match="^LOCAL_WORLD_SIZE=3: must be at most 2, as many GPUs$"):
        meeting.device_of("cuda", place._replace(local_world_size=3))


def torchrun(*argv, world=2, **environ):
    """torchrun of so many processes, in a session of its own."""
    return subprocess.Popen(
        [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={world}", *argv],
        cwd=ROOT,
        env=ENVIRON | environ,
        start_new_session=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


SAMPLE = [
    *("sample.py", "--preset", "llama-tiny", "--device", "cpu", "--dtype", "float32"),
    *("--temperature", "0", "--prompt", "abc", "--prompt", "d", "--max-new-tokens", "9"),
]


@pytest.mark.slow
def test_torchrun_starts_the_programs_or_is_told_how(capsys):
    world = torchrun("--standalone", *SAMPLE, "--tp", "2", "--pp", "1")
    with pytest.raises(ValueError, match="--tp 2 --pp 1: needs 2 processes, not 1: torchrun "):
        sample.main([*SAMPLE[1:], "--tp", "2"])
    capsys.readouterr()
    sample.main(SAMPLE[1:])
    text, errors = world.communicate(timeout=60)
    assert world.returncode == 0 and text == capsys.readouterr().out, errors
    wrong = ""
    for rank in ("0", "1"):  # as torchrun starts them
        place = dict(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE="2", LOCAL_WORLD_SIZE="2")
        ended = forked.run(*SAMPLE, "--tp", "4", "--pp", "1", **place)
        assert ended.returncode == 1 and not ended.stdout
        wrong += ended.stderr
    command = "torchrun --nproc-per-node 4 sample.py --preset llama-tiny"
    assert wrong.count("error: ") == 1
    assert f"--tp 4 --pp 1: needs 4 processes, not 2: {command}" in wrong


def wait_for_file(file):
    """Wait until a rank has been struck, which makes this file."""
    end = time.monotonic() + 60
    while not file.exists():
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.mark.slow
@pytest.mark.parametrize("target", ["a rank", "all"])
def test_under_torchrun_nothing_is_left_behind(tmp_path, target):
    """A rank is killed from outside, or a Ctrl-C comes for all: then rank 0 keeps what it has."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    out = tmp_path / "out"
    mark = tmp_path / "struck"
    job = JOB | dict(tp=2, pp=1, out=str(out), fault=dict(what="wait", when="decode", rank=0))
    environ = dict(RANK_JOB=json.dumps(job), STRUCK=str(mark))
    world = torchrun(f"--master-port={port}", "-m", "tests.rank_program", **environ)
    pids = []
    try:
        wait_for_file(mark)
        pids = [int((tmp_path / f"out.{rank}.pid").read_text()) for rank in (0, 1)]
        began = time.monotonic()
        if target == "a rank":
            os.kill(pids[1], signal.SIGKILL)
        else:
            for pid in (world.pid, *pids):
                os.kill(pid, signal.SIGINT)
        _, errors = world.communicate(timeout=60)
        assert time.monotonic() - began < LIMIT_S
    finally:
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
                pytest.fail(f"process {pid} is left behind")
    assert world.returncode != 0 and not out.exists()
    assert Path(f"{out}.kept").exists() == (target == "all")
    if target == "a rank":
        (line,) = [line for line in errors.splitlines() if line.startswith("error: ")]
        assert "rank 1 is gone" in line
    socket.create_server(("127.0.0.1", port)).close()


@pytest.mark.slow
def test_an_interrupt_while_rank_0_decides_or_waits_changes_no_text(worlds):
    for tp, pp, seeds in ((2, 1, [1]), (1, 4, [1, 2])):
        job = dict(program="interrupted", tp=tp, pp=pp, tiny=dict(n_kv_head=2, n_layer=pp))
        counts = worlds.result(**job, seeds=seeds, engine=ENGINE | dict(page_size=4, pages=8))
        assert counts["interrupts"] >= 20 and counts["waiting"] > 2


@pytest.mark.slow
def test_an_interrupt_at_any_place_loses_no_completion(worlds):
    job = dict(program="interrupted_at_each_place", tp=1, pp=2, tiny=dict(n_layer=2))
    assert worlds.result(**job, engine=ENGINE) > 100


@pytest.mark.parametrize("sizes", [dict(pp=2), dict(pp=1, copies=2, kind="replicas")])
def test_each_scheduler_learns_how_long_its_own_batches_take(worlds, sizes):
    job = dict(program="observed", tp=1, tiny=dict(n_layer=2), engine=ENGINE)
    learned, landed = worlds.result(**job, **sizes)
    assert learned == landed and {*landed} == {0, 1}


def test_a_request_on_its_way_is_aborted_in_its_micro_batch(worlds):
    job = dict(program="aborts", tp=1, pp=2, tiny=dict(n_layer=2), engine=ENGINE)
    assert worlds.result(**job) == 2


def test_a_policy_may_raise_but_a_command_broken_off_is_the_last(worlds):
    job = dict(tp=1, pp=2, tiny=dict(n_layer=2), engine=ENGINE)
    assert worlds.result(program="policy_raises", **job) == "my policy"
    (ended,) = worlds.run(dict(program="command_broken_off") | job)
    check_all_end(ended)
    check_error(ended.errors, "the ranks are out of step, as rank 0 broke a command off")


def test_the_smallest_rank_decides_how_many_pages_there_are(worlds):
    """Micro-batches share them, and by default each takes as many requests as it has pages."""
    job = JOB | dict(program="sizes", tp=1, pp=2, sizes=dict(max_len=16, page_size=16))
    by_default, given = worlds.result(**job, max_batches=[None, 3])
    assert by_default == dict(pages=24, max_batch=12, asked=None)
    assert given == dict(pages=24, max_batch=3, asked=6)


def test_caches_of_runners_that_are_gone_are_free():
    stage = Stage(tiny_model())
    stage.runners = dict.fromkeys((1, 2, 3))
    stage.free_caches_except([2])
    assert [*stage.runners] == [2]
    assert stage.available_pages(EngineConfig(max_batch=2, max_len=32, page_size=16)) == 4


@pytest.mark.slow
def test_a_server_on_two_ranks_says_what_one_process_says(capsys):
    sample.main([*SAMPLE[1:-6], "--prompt", "abc", "--max-new-tokens", "9"])
    expected = capsys.readouterr().out.removeprefix("abc").removesuffix("\n")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = "-m server --preset llama-tiny --device cpu --dtype float32 --max-len 32 --pp 2"
    world = torchrun("--standalone", *command.split(), f"--port={port}")
    body = json.dumps(dict(model="llama-tiny", prompt="abc", max_tokens=9, temperature=0))
    url = f"http://127.0.0.1:{port}/v1/completions"
    headers = {"content-type": "application/json"}
    try:
        for left in range(300, -1, -1):
            try:
                request = Request(url, body.encode(), headers)
                answer = json.load(urlopen(request, timeout=30))
                break
            except URLError:  # not yet
                assert left and world.poll() is None
                time.sleep(0.1)
    finally:
        world.send_signal(signal.SIGTERM)
        _, errors = world.communicate(timeout=60)
    assert "forcefully" not in errors  # as torchrun says when it kills who hangs
    assert answer["choices"][0]["text"] == expected
    with pytest.raises(URLError):
        urlopen(url, timeout=5)
