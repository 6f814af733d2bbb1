"""Ranks that fail, held against what is then left: every process ends, also under torchrun."""

import json
import os
import signal
import subprocess
import sys

import pytest

from parallel.ranks import Ranks
from tests.forked import ENVIRON, ROOT, free_port
from tests.rank_program import ENGINE
from tests.servers import wait_for

JOB = dict(
    program="serve",
    engines=[ENGINE],
    tiny=dict(n_kv_head=2, n_layer=2),
    tp=1,
    pp=2,
)


def struck(what, rank, when="decode", **job):
    """A job in which something happens to a rank."""
    return JOB | dict(fault=dict(what=what, when=when, rank=rank)) | job


def check_all_end(ended):
    """All ranks end by themselves, and rank 0 has no result."""
    assert ended.result is None
    assert "hangs" not in ended.statuses.values(), ended
    assert set(ended.statuses.values()) != {0}


def test_when_a_rank_is_killed_or_raises_all_end(worlds):
    jobs = [struck("SIGKILL", rank, "prefill", tp=2, pp=2) for rank in (0, 1, 2, 3)]
    *killed, raised = worlds.run(*jobs, struck("raise", rank=1))
    for ended in (*killed, raised):
        check_all_end(ended)
    assert raised.error_of(1) == "ArithmeticError: the model fails"


def test_requests_on_their_way_are_aborted_in_their_micro_batches(worlds):
    assert worlds.result(**JOB | dict(program="aborts")) == [2, 4]


def test_another_number_of_processes_is_an_error(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(ValueError, match="needs 4 processes, not 3"):
        Ranks(2, 2)


@pytest.mark.slow
@pytest.mark.parametrize("target", [0, "all"])
def test_under_torchrun_all_end(tmp_path, target):
    """A rank is killed from outside, or a Ctrl-C comes for all: rank 0 keeps what it has then."""
    job = struck("wait", rank=0, tp=2, pp=1)
    environ = dict(RANK_JOB=json.dumps(job), RANK_OUT=str(tmp_path / "out"))
    options = f"--nproc-per-node=2 --master-port={free_port()} -m tests.rank_program"
    world = subprocess.Popen(
        [sys.executable, "-m", "torch.distributed.run", *options.split()],
        cwd=ROOT,
        env=ENVIRON | environ,
        start_new_session=True,
    )
    wait_for((tmp_path / "out.waits").exists, seconds=60)
    pids = [int((tmp_path / f"out.{rank}.pid").read_text("utf-8")) for rank in (0, 1)]
    if target == "all":
        for pid in (world.pid, *pids):
            os.kill(pid, signal.SIGINT)
    else:
        os.kill(pids[target], signal.SIGKILL)
    world.wait(timeout=100)
    assert world.returncode != 0
    assert (tmp_path / "out.kept").exists() == (target == "all")
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
