"""Programs that are forked from a process which has imported torch: that takes no time.

A *world* is the ranks of one job of rank_program.py."""

import atexit
import json
import multiprocessing
import os
import random
import runpy
import socket
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from multiprocessing.reduction import DupFd
from multiprocessing.util import get_temp_dir
from pathlib import Path
from subprocess import CompletedProcess, TimeoutExpired
from typing import Any, NamedTuple
from unittest.mock import patch

ROOT = Path(__file__).resolve().parent.parent
# Of the fork server, too: what is forked from a process with threads of OpenMP waits for them.
os.environ["OMP_NUM_THREADS"] = "1"
ENVIRON = dict(os.environ)
RUN_LIMIT_S = 800  # a program that hangs is a failure
WORLD_LIMIT_S = 60  # a world that hangs is a failure
with patch.object(tempfile, "tempdir", "/tmp"):
    get_temp_dir()  # for the sockets of multiprocessing, whose paths must be short
forks = multiprocessing.get_context("forkserver")
PACKAGES = ["torch._dynamo", "tokenizers", "tiktoken", "pydantic", "uvicorn"]
forks.set_forkserver_preload([*PACKAGES, "tests.rank_program"])


class Program:
    """A program that runs, as a subprocess.Popen: `words` are what follows python."""

    def __init__(self, *words, cwd=ROOT, **environment):
        streams = [os.pipe() for _ in range(2)]
        self.stdout, self.stderr = (
            os.fdopen(reader, encoding="utf-8", errors="replace") for reader, _ in streams
        )
        ends = [DupFd(writer) for _, writer in streams]
        environ = ENVIRON | {"HF_HUB_OFFLINE": "1"} | environment
        self.process = forks.Process(target=become, args=(words, cwd, environ, ends), daemon=True)
        self.process.start()
        for _, writer in streams:
            os.close(writer)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.kill()

    @property
    def returncode(self):
        return self.process.exitcode

    def poll(self):
        return self.returncode

    def wait(self, timeout=120):
        self.process.join(timeout)
        if self.returncode is None:
            raise TimeoutExpired("a program", timeout)
        return self.returncode

    def kill(self):
        self.process.kill()
        self.process.join()

    def send_signal(self, number):
        os.kill(self.process.pid, number)


def run(*words, **options):
    """How a program ended."""
    with Program(*words, **options) as program:
        files = program.stdout, program.stderr
        with ThreadPoolExecutor() as threads, killing_late(program):
            output, errors = threads.map(lambda file: file.read(), files, timeout=RUN_LIMIT_S)
        return CompletedProcess(words, program.wait(), output, errors)


@contextmanager
def killing_late(program):
    """Kill a program that has not ended in time: or its pipes stay open."""
    try:
        yield
    except TimeoutError:
        program.kill()
        raise


def become(words, cwd, environ, streams):
    """Be a program."""
    os.environ.clear()
    os.environ.update(environ)
    os.chdir(cwd)
    for number, stream in enumerate(streams, 1):
        os.dup2(stream.detach(), number)
    sys.stdout = sys.__stdout__ = os.fdopen(1, "w")
    sys.stderr = sys.__stderr__ = os.fdopen(2, "w", buffering=1)
    sys.argv = [*words]
    try:
        if words[0] == "-m":
            sys.argv = [*words[1:]]
            runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        elif words[0] == "-c":
            sys.argv = ["-c", *words[2:]]
            exec(words[1], {"__name__": "__main__"})
        else:
            runpy.run_path(words[0], run_name="__main__")
    finally:
        atexit._run_exitfuncs()  # which multiprocessing does not do


class Ended(NamedTuple):
    """How a world ended."""

    result: Any  # what rank 0 made of its job; None if nothing
    statuses: dict[int, int | str]  # rank -> its exit status, or "hangs"
    errors: str  # what all ranks wrote to stderr
    out: str  # the path of the world's files

    def error_of(self, rank):
        """The exception that a rank has left for torchrun."""
        return json.loads(Path(f"{self.out}.{rank}.error").read_text("utf-8"))["message"]["message"]


def free_port():
    """A port that no system gives to a client, as it may with those from 32,768 on."""
    while True:
        port = random.SystemRandom().randrange(15_000, 32_000)
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port


class World:
    """The ranks of a job that run, and how they end. `out` is a path for what they write."""

    def __init__(self, job, out):
        self.out = out
        self.statuses = {}
        size = job["tp"] * job["pp"]
        port = free_port()
        self.programs = {}
        for rank in range(size):
            place = dict(
                WORLD_SIZE=size,
                RANK=rank,
                LOCAL_RANK=rank,
                LOCAL_WORLD_SIZE=size,
                MASTER_ADDR="127.0.0.1",
                MASTER_PORT=port,
                RANK_OUT=out,
                TORCHELASTIC_ERROR_FILE=f"{out}.{rank}.error",
            )
            environ = {name: str(value) for name, value in place.items()}
            program = "from tests import rank_program; rank_program.main()"
            self.programs[rank] = Program("-c", program, RANK_JOB=json.dumps(job), **environ)

    @property
    def running(self):
        """{rank: Program} of those that have not ended."""
        return {rank: p for rank, p in self.programs.items() if rank not in self.statuses}

    def look(self, is_late):
        """See who has ended. One that hangs is killed."""
        for rank, program in self.running.items():
            if program.poll() is not None:
                self.statuses[rank] = program.returncode
            elif is_late:
                program.kill()
                self.statuses[rank] = "hangs"

    def ended(self):
        """How all ranks ended."""
        result = Path(self.out)
        return Ended(
            result=json.loads(result.read_text("utf-8")) if result.exists() else None,
            statuses=self.statuses,
            errors="".join(program.stderr.read() for program in self.programs.values()),
            out=self.out,
        )


class Worlds:
    """Runs worlds. `folder` is for their files."""

    def __init__(self, folder):
        self.folder = folder
        self.count = 0

    def run(self, *jobs):
        """How the worlds of some jobs ended that ran at the same time."""
        worlds = []
        for job in jobs:
            self.count += 1
            worlds.append(World(job, str(self.folder / f"{self.count}.json")))
        end = time.monotonic() + WORLD_LIMIT_S
        while any(world.running for world in worlds):
            for world in worlds:
                world.look(is_late=time.monotonic() > end)
            time.sleep(0.01)
        return [world.ended() for world in worlds]

    def result(self, **job):
        """What rank 0 made of a job in which all goes well."""
        (ended,) = self.run(job)
        assert set(ended.statuses.values()) == {0}, ended.errors
        return ended.result
