"""Ranks that fail: everything ends. And the programs on ranks that torchrun starts."""

import json
import os
import signal
import socket
import subprocess
import sys
from contextlib import suppress

import httpx2 as httpx
import pytest
import torch
import transformers

import sample
from config import EngineConfig
from parallel.ranks import Ranks, device_of
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


def struck(job, what, when, rank, **fault):
    """A job in which something happens to a rank: at load, in a batch with prefill or without."""
    return job | dict(fault=dict(what=what, when=when, rank=rank, **fault))


def check_all_end(ended):
    """All ranks end by themselves, and not as if all had gone well."""
    assert ended.result is None
    assert {0, "hangs"}.isdisjoint(ended.statuses.values()), ended


def check_all_is_well(ended):
    """All ranks end as they should, and rank 0 has a result."""
    assert set(ended.statuses.values()) == {0}, ended
    assert ended.result


@pytest.mark.parametrize("is_rank_0", [False, True])
def test_when_a_rank_is_killed_all_end(worlds, is_rank_0):
    jobs = []
    for world in WORLDS:
        rank = 0 if is_rank_0 else world["tp"] * world["pp"] - 1
        for when in ("load", "prefill", "decode"):
            jobs.append(struck(JOB | world, "SIGKILL", when, rank))
    for ended in worlds.run(*jobs):
        check_all_end(ended)


def test_when_a_rank_raises_all_end_and_torchrun_is_told_why(worlds):
    last = [world["tp"] * world["pp"] - 1 for world in WORLDS]
    rows = zip(WORLDS, last, strict=True)
    jobs = [struck(JOB | world, "raise", "decode", rank) for world, rank in rows]
    for rank, ended in zip(last, worlds.run(*jobs), strict=True):
        check_all_end(ended)
        assert ended.error_of(rank) == "ArithmeticError: the model fails"


def test_signals_are_for_rank_0(worlds):
    """Others end with it: it may have something to print."""
    names = ("SIGINT", "SIGTERM", "SIGHUP")
    jobs = [struck(TWO_STAGES, name, "decode", rank=1) for name in names]
    undisturbed, *others = worlds.run(TWO_STAGES, *jobs)
    for ended in others:
        check_all_is_well(ended)
        assert ended.result == undisturbed.result


def test_ranks_that_cannot_work_together_say_so(worlds, tmp_path):
    """Rank 1 has another model; the layers cannot be divided."""
    for seed in (0, 1):
        config = llama_like(rms_norm_eps=0.1 + seed)
        transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / str(seed))
    unequal = dict(
        program="serve",
        engines=[ENGINE],
        tp=2,
        pp=1,
    )
    unequal["checkpoint"] = [f"{tmp_path}/{seed}" for seed in (0, 1)]
    others, divided = worlds.run(unequal, JOB | dict(tp=1, pp=3))
    check_all_end(others)
    check_all_end(divided)
    assert "rank 1 has another model, or other weights, than rank 0" in others.errors
    assert "pp=3: must divide n_layer=2" in divided.errors


TIMEOUT_S = 6  # in which all must have met


def test_a_rank_that_hangs_ends_all_but_a_rest_is_no_hang(worlds):
    """Rank 1 is stopped, and goes on when rank 0 has given it up; or rank 0 has nothing to do."""
    limited = [dict(timeout_s=TIMEOUT_S) | job for job in (TWO_PARTS, TWO_STAGES)]
    jobs = [struck(job, "SIGSTOP", "decode", rank=1) for job in limited]
    rests = limited[0] | dict(program="rested", seconds=TIMEOUT_S + 1)
    *hang, rested = worlds.run(*jobs, rests)
    for ended in hang:
        check_all_end(ended)
    check_all_is_well(rested)
    of_rank_0, of_rank_1 = rested.result
    assert 0 < of_rank_0 < TIMEOUT_S < of_rank_1  # for commands


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
    assert device_of("cuda", place) == torch.device("cuda:1")
    assert chosen == [torch.device("cuda:1")]
    assert device_of("cpu", place) == torch.device("cpu")
    with pytest.raises(ValueError, match="^LOCAL_WORLD_SIZE=3: must be at most 2, as many GPUs$"):
        device_of("cuda", place._replace(local_world_size=3))


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
    assert f"--tp 4 --pp 1: needs 4 processes, not 2: {command}" in errors


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
        pids = [int((tmp_path / f"out.{rank}.pid").read_text("utf-8")) for rank in (0, 1)]
        if target == "a rank":
            os.kill(pids[1], signal.SIGKILL)
        else:
            for pid in (world.pid, *pids):
                os.kill(pid, signal.SIGINT)
        world.communicate(timeout=60)
    finally:
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
                pytest.fail(f"process {pid} is left behind")
    assert world.returncode != 0
    assert not (tmp_path / "out").exists()
    assert (tmp_path / "out.kept").exists() or target == "a rank"
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
