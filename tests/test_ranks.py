"""Ranks that fail, one or all: everything ends, soon, and one line says why."""

import json
import os
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from datetime import timedelta
from threading import Timer

import httpx2 as httpx
import pytest
import torch
import torch.distributed as dist
import transformers

import sample
from config import EngineConfig
from parallel import meeting, watch
from parallel.ranks import Ranks
from parallel.stages import Stage
from runtime.torchrun import Place
from tests import forked
from tests.forked import ENVIRON, ROOT, free_port
from tests.helpers import tiny_model
from tests.rank_program import ENGINE
from tests.servers import wait_for
from tests.test_checkpoints import llama_like

WORLDS = [dict(tp=2, pp=1), dict(tp=1, pp=2), dict(tp=2, pp=2)]
JOB = dict(
    program="serve",
    engine=ENGINE,
    engines=[ENGINE],
    tiny=dict(n_kv_head=2, n_layer=2),
)
TWO_STAGES = JOB | dict(tp=1, pp=2)
TWO_PARTS = JOB | dict(tp=2, pp=1)
IDLE = JOB | dict(program="idle", tp=2, pp=2)


def struck(job, what, when, rank, **fault):
    """A job in which something happens to a rank: at load, in a batch with prefill or without."""
    return job | dict(fault=dict(what=what, when=when, rank=rank, **fault))


def error_lines(errors):
    """The lines that say why ranks end."""
    return [line for line in errors.splitlines() if line.startswith("error: ")]


def check_error(errors, *parts):
    """One line begins with "error: ", and all `parts` are in it."""
    (line,) = error_lines(errors)
    assert all(part in line for part in parts), line
    assert "Traceback" not in errors


def check_all_end(ended):
    """All ranks end by themselves, and not as if all had gone well."""
    assert ended.result is None
    assert {0, "hangs"}.isdisjoint(ended.statuses.values()), ended


def check_all_is_well(ended):
    """All ranks end as they should, and rank 0 has a result."""
    assert set(ended.statuses.values()) == {0}, ended
    assert ended.result
    assert error_lines(ended.errors) == []


@pytest.mark.parametrize("is_rank_0", [False, True])
def test_when_a_rank_is_killed_all_end_and_one_line_names_it(worlds, is_rank_0):
    ranks = []
    jobs = []
    for world in WORLDS:
        rank = 0 if is_rank_0 else world["tp"] * world["pp"] - 1
        for when in ("load", "prefill", "decode"):
            ranks.append(rank)
            jobs.append(struck(JOB | world, "SIGKILL", when, rank))
    ranks.append(rank)
    jobs.append(IDLE | dict(what="SIGKILL", victim=rank))
    for rank, ended in zip(ranks, worlds.run(*jobs), strict=True):
        check_all_end(ended)
        if not is_rank_0:
            check_error(ended.errors, f"rank {rank} is gone")


def test_when_a_rank_raises_all_end_and_one_line_names_it(worlds):
    last = [world["tp"] * world["pp"] - 1 for world in WORLDS]
    rows = zip(WORLDS, last, strict=True)
    jobs = [struck(JOB | world, "raise", "decode", rank) for world, rank in rows]
    for rank, ended in zip(last, worlds.run(*jobs), strict=True):
        check_all_end(ended)
        check_error(ended.errors, f"rank {rank}: ArithmeticError", "the model fails")


def test_signals_are_for_rank_0(worlds):
    """Others end with it: it may have something to print."""
    names = ("SIGINT", "SIGTERM", "SIGHUP")
    jobs = [struck(TWO_STAGES, name, "decode", rank=1) for name in names]
    undisturbed, *others = worlds.run(TWO_STAGES, *jobs)
    for ended in others:
        check_all_is_well(ended)
        assert ended.result == undisturbed.result


def test_ranks_that_cannot_work_together_say_so(worlds, tmp_path):
    """Rank 1 has other weights; the port is in use; the layers cannot be divided."""
    for seed in (0, 1):
        torch.manual_seed(seed)
        transformers.LlamaForCausalLM(llama_like()).save_pretrained(tmp_path / str(seed))
    unequal = dict(
        program="serve",
        engines=[ENGINE],
        tp=2,
        pp=1,
    )
    unequal["checkpoint"] = [f"{tmp_path}/{seed}" for seed in (0, 1)]
    with socket.create_server(("127.0.0.1", 0)) as busy:
        port = busy.getsockname()[1]
        blocked = TWO_PARTS | dict(port=port, start=[0])
        others, divided, in_use = worlds.run(unequal, JOB | dict(tp=1, pp=3), blocked)
    for ended in (others, divided, in_use):
        assert ended.statuses[0] not in (0, "hangs")
        assert "hangs" not in ended.statuses.values()
    check_error(others.errors, "rank 1 has another model, or other weights, than rank 0")
    check_error(in_use.errors, str(port), "in use")
    assert error_lines(divided.errors) == ["error: pp=3: must divide n_layer=2"]


# ranks that hang, are late, or rest: each world takes some seconds, and all run at the same time


PAUSE_S = 5  # longer than a silence may be
HANGS = {}  # name -> job: rank 0 and the last rank are stopped
for world, when in zip(reversed(WORLDS), ("load", "decode", "prefill"), strict=True):
    for rank in (0, world["tp"] * world["pp"] - 1):
        HANGS[f"rank {rank} in {when}"] = struck(JOB | world, "SIGSTOP", when, rank)
for rank in (0, 3):
    HANGS[f"rank {rank} at rest"] = IDLE | dict(what="SIGSTOP", victim=rank)
LATE = {}
for when in ("load", "decode"):
    for what, seconds in (("be late", PAUSE_S), ("be late in C", 2)):
        LATE[f"{what} in {when}"] = struck(TWO_STAGES, what, when, rank=1, seconds=seconds)
STUCK = {}  # only threads go on, and nobody waits for the rank in a sum
for when, limit in (("load", "LOAD_LIMIT"), ("decode", "COMPUTE_LIMIT")):
    for rank in (0, 1):
        job = struck(TWO_STAGES, "be late", when, rank, seconds=60)
        STUCK[f"rank {rank} stuck in {when}"] = job | dict(limits={limit: 4})
ALONE = {
    f"only rank {rank}": TWO_PARTS | dict(limits=dict(MEETING_LIMIT=4), start=[rank])
    for rank in (0, 1)
}
OTHERS = {
    "at the end": TWO_PARTS | dict(program="idle", what="SIGSTOP", victim=1, seconds=1),
    "suspended": TWO_PARTS | dict(program="paused", stopped=True, seconds=PAUSE_S),
    "two nodes": HANGS["rank 0 at rest"] | dict(node_size=2),
    "rests": TWO_PARTS
    | dict(program="paused", stopped=False, limits=dict(COMPUTE_LIMIT=4), seconds=6),
}


@pytest.fixture(scope="module")
def slow_worlds(worlds):
    """{name: Ended} of all worlds that take long."""
    jobs = HANGS | LATE | STUCK | OTHERS
    return dict(zip(jobs, worlds.run(*jobs.values()), strict=True))


def check_hang_ends(ended, killed, *lines):
    """All ranks end soon: the one that is stopped is killed, and these lines say why."""
    check_all_end(ended)
    assert ended.statuses[killed] == -signal.SIGKILL
    assert error_lines(ended.errors) == [f"error: {line}" for line in lines]
    assert "Traceback" not in ended.errors


@pytest.mark.parametrize("name", HANGS)
def test_when_a_rank_is_stopped_all_end_and_one_line_names_it(slow_worlds, name):
    rank = int(name.split()[1])
    check_hang_ends(slow_worlds[name], rank, f"rank {rank} was silent for 4 s: it hangs")


def test_each_other_node_says_that_rank_0_hangs(slow_worlds):
    line = "rank 0 was silent for 4 s: it hangs"
    check_hang_ends(slow_worlds["two nodes"], 0, line, line)  # of ranks 1 and 2


def test_a_rank_that_does_not_end_makes_rank_0_fail(slow_worlds):
    check_hang_ends(slow_worlds["at the end"], 1, "rank 1 has not ended in 4 s")
    assert slow_worlds["at the end"].statuses[0] == 1


@pytest.mark.parametrize("name", [*LATE, "suspended"])
def test_who_computes_for_long_or_is_stopped_with_all_others_does_not_hang(slow_worlds, name):
    check_all_is_well(slow_worlds[name])


def test_ranks_may_rest_for_longer_than_a_command_may_take(slow_worlds):
    check_all_is_well(slow_worlds["rests"])
    of_rank_0, of_rank_1 = slow_worlds["rests"].result
    assert 0 < of_rank_0 < 6 <= of_rank_1 + 0.1  # for commands, but for the way of the last


@pytest.mark.parametrize("name", STUCK)
def test_a_rank_that_is_stuck_ends_all(slow_worlds, name):
    ended = slow_worlds[name]
    check_all_end(ended)
    reason = "a call took 4 s: it is stuck, or waits for a stuck rank"
    check_error(ended.errors, reason)
    if name != "rank 0 stuck in decode":  # rank 1 waits for it, and may be named
        check_error(ended.errors, f"error: {name[:6]}: ")


def test_who_waits_for_others_in_vain_says_so(worlds):
    """Apart from the other worlds: these have 4 s, in which torch must have started."""
    first, last = worlds.run(*ALONE.values())
    check_error(first.errors, "the ranks do not meet at 127.0.0.1:")  # torch's reason follows
    check_error(last.errors, "nobody listens at 127.0.0.1:", " in 4 s: ")
    assert {*first.statuses.values(), *last.statuses.values()} == {1}


# time


def test_nodes_whose_clocks_differ_agree_on_the_time(worlds):
    times = worlds.result(**TWO_PARTS | dict(program="clocks"))
    assert max(times) - min(times) < 30


def test_a_stage_waits_for_the_one_before(worlds):
    late = struck(TWO_STAGES, "be late", "prefill", rank=0, seconds=3)
    (_, first), (_, second) = worlds.result(**late | dict(program="waits"))
    assert first > 2.9 > second


def test_each_scheduler_learns_how_long_its_own_batches_take(worlds):
    learned, landed = worlds.result(**TWO_STAGES | dict(program="observed"))
    assert learned == landed
    assert {*landed} == {0, 1}


# the parts of it, in this process


def test_a_rank_waits_for_a_port_that_opens_late():
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = free.getsockname()
    servers = []
    opens = Timer(0.5, lambda: servers.append(socket.create_server(address)))
    opens.start()
    meeting.wait_for_port(*address)
    opens.join()
    servers[0].close()


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
    places = [("node", 7), ("node", 7), ("node", 7), ("other", 7), ("node", 8)]
    processes = [watch.Process(*place, 100 + i, 0.0) for i, place in enumerate(places)]
    watching = new_watch(rank=0, processes=processes)
    watching.has_ended.set()
    watching.lost(2)
    killed = []
    monkeypatch.setattr("parallel.watch.os.kill", lambda pid, number: killed.append(pid))
    watching._kill_peers()
    assert killed == [101]


def new_watch(rank, processes=()):
    """What watches on a rank of five, in this process."""
    place = Place(rank, world_size=5, local_rank=0, local_world_size=5)
    return watch.Watch(place, processes, peers=range(1, 5), send=lambda message: None)


@pytest.mark.parametrize(
    "rank, error, is_held_back",
    [(0, RuntimeError, True), (0, ValueError, False), (1, ValueError, True)],
)
def test_an_error_is_held_back_if_others_may_know_better(monkeypatch, rank, error, is_held_back):
    """Those of torch on rank 0, whose cause may be a lost rank; all on others, which it may have,
    too."""
    watching = new_watch(rank)
    watching.has_ended.set()
    sleeps = []
    monkeypatch.setattr("parallel.watch.time.sleep", sleeps.append)
    with pytest.raises(error), watching.limit(timedelta(minutes=1)):
        raise error
    assert bool(sleeps) == is_held_back
    assert watching.timers == list(watching.silence.values())


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


def test_caches_of_runners_that_are_gone_are_free():
    stage = Stage(tiny_model())
    stage.runners = dict.fromkeys((1, 2, 3))
    stage.free_caches_except([2])
    assert [*stage.runners] == [2]
    assert stage.available_pages(EngineConfig(max_batch=2, max_len=32, page_size=16)) == 4


def test_a_request_on_its_way_is_aborted_in_its_micro_batch(worlds):
    assert worlds.result(**TWO_STAGES | dict(program="aborts", aborts=2)) == 2


def test_a_command_that_is_broken_off_is_the_last(worlds):
    job = struck(TWO_STAGES, "raise", "decode", rank=0)
    (ended,) = worlds.run(job | dict(program="broken_off"))
    check_all_end(ended)
    check_error(ended.errors, "the ranks are out of step, as rank 0 broke a command off")


def test_the_smallest_rank_decides_how_many_pages_there_are(worlds):
    """Micro-batches share them, and by default each takes as many requests as it has pages."""
    sizes = dict(sizes=dict(max_len=16, page_size=16), max_batches=[None, 3])
    decided = worlds.result(**TWO_STAGES | dict(program="sizes") | sizes)
    assert decided == [[24, 12, None], [24, 3, 6]]


# programs


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


MODEL = ["--preset", "llama-tiny", "--device", "cpu", "--dtype", "float32"]
GREEDY = ["--temperature", "0", "--max-new-tokens", "9"]
SAMPLE = [*MODEL, *GREEDY, "--prompt", "abc", "--prompt", "d"]


@pytest.mark.slow
def test_torchrun_starts_the_programs_or_is_told_how(capsys):
    world = torchrun("--standalone", "sample.py", *SAMPLE, "--tp", "2", "--pp", "1")
    with pytest.raises(ValueError, match="--tp 2 --pp 1: needs 2 processes, not 1: torchrun "):
        sample.main([*SAMPLE, "--tp", "2"])
    capsys.readouterr()
    sample.main(SAMPLE)
    text, errors = world.communicate(timeout=60)
    assert world.returncode == 0, errors
    assert text == capsys.readouterr().out
    errors = ""
    for rank in ("0", "1"):  # as torchrun starts them
        place = dict(
            RANK=rank,
            LOCAL_RANK=rank,
            WORLD_SIZE="2",
            LOCAL_WORLD_SIZE="2",
        )
        ended = forked.run("sample.py", *SAMPLE, "--tp", "4", "--pp", "1", **place)
        assert (ended.returncode, ended.stdout) == (1, "")
        errors += ended.stderr
    command = "torchrun --nproc-per-node 4 sample.py --preset llama-tiny"
    check_error(errors, f"--tp 4 --pp 1: needs 4 processes, not 2: {command}")


@pytest.mark.slow
@pytest.mark.parametrize("target", ["a rank", "all"])
def test_under_torchrun_nothing_is_left_behind(tmp_path, target):
    """A rank is killed from outside, or a Ctrl-C comes for all: then rank 0 keeps what it has."""
    port = free_port()
    job = struck(TWO_PARTS, "wait", "decode", rank=0)
    environ = dict(RANK_JOB=json.dumps(job), RANK_OUT=str(tmp_path / "out"))
    world = torchrun(f"--master-port={port}", "-m", "tests.rank_program", **environ)
    pids = []
    try:
        wait_for((tmp_path / "out.struck").exists, seconds=60)
        pids = [int((tmp_path / f"out.{rank}.pid").read_text()) for rank in (0, 1)]
        if target == "a rank":
            os.kill(pids[1], signal.SIGKILL)
        else:
            for pid in (world.pid, *pids):
                os.kill(pid, signal.SIGINT)
        _, errors = world.communicate(timeout=60)
    finally:
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
                pytest.fail(f"process {pid} is left behind")
    assert world.returncode != 0
    assert not (tmp_path / "out").exists()
    assert (tmp_path / "out.kept").exists() == (target == "all")
    if target == "a rank":
        (line,) = error_lines(errors)
        assert "rank 1 is gone" in line
    socket.create_server(("127.0.0.1", port)).close()


@pytest.mark.slow
def test_a_server_on_two_ranks_says_what_one_process_says(capsys):
    sample.main([*MODEL, *GREEDY, "--prompt", "abc"])
    expected = capsys.readouterr().out.removeprefix("abc").removesuffix("\n")
    port = free_port()
    server = ["-m", "server", *MODEL, "--max-len", "32", "--pp", "2", f"--port={port}"]
    world = torchrun("--standalone", *server)
    url = f"http://127.0.0.1:{port}/v1/completions"
    body = dict(prompt="abc", max_tokens=9, temperature=0)
    try:
        wait_for(lambda: listens(port) or world.poll() is not None, seconds=60)
        answer = httpx.post(url, json=body, timeout=30).json()
    finally:
        world.send_signal(signal.SIGTERM)
        _, errors = world.communicate(timeout=60)
    assert "forcefully" not in errors  # as torchrun says when it kills who hangs
    assert answer["choices"][0]["text"] == expected
    assert not listens(port)


def listens(port):
    """Whether a server listens at this port."""
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0
