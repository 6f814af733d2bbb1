"""Programs that are forked from a process which has imported torch: that takes no time."""

import multiprocessing
import os
import runpy
import sys
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.reduction import DupFd
from subprocess import CompletedProcess, TimeoutExpired

from tests.worlds import ENVIRON, ROOT

forks = multiprocessing.get_context("forkserver")
forks.set_forkserver_preload(["torch._dynamo", "tokenizers", "tiktoken", "pydantic", "uvicorn"])


class Program:
    """A program that runs, as a subprocess.Popen: `words` are what follows python."""

    def __init__(self, *words, cwd=ROOT, **environment):
        streams = [os.pipe() for _ in range(2)]
        self.stdout, self.stderr = (os.fdopen(reader) for reader, _ in streams)
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
        with ThreadPoolExecutor() as threads:
            output, errors = threads.map(lambda file: file.read(), files)
        return CompletedProcess(words, program.wait(), output, errors)


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
    if words[0] == "-m":
        sys.argv = [*words[1:]]
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    elif words[0] == "-c":
        sys.argv = ["-c", *words[2:]]
        exec(words[1], {"__name__": "__main__"})
    else:
        runpy.run_path(words[0], run_name="__main__")
