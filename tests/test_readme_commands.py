"""Every command of every README runs: as it stands if time is simulated, else with a tiny model."""

import re
import shlex
import signal
import subprocess
import sys

import pytest

from tests import forked
from tests.helpers import ROOT
from tests.test_readme import POLICIES, TEMPLATE, TEXTS, commands

NOT_RUN = {  # what a command holds -> why no test runs it
    " -m venv ": ".ci/run does",
    "pip install ": ".ci/run does",
    "npm install ": ".ci/run does",
    "pytest ": ".ci/run does",
    ".ci/gpu.sh": "needs a GPU",
    "--nnodes ": "needs several machines",
    "-m tests.beside ": "needs other engines",
    "-m examples.stall": ".ci/run does",
    "sample.py --model smollm2 ": ".ci/run does",
}
MODEL = "--preset llama-tiny --device cpu --dtype float32"
LOAD = "--max-len 256 --chunk 16 --batch 2 --requests 8"
TINY = {  # how a command begins -> options in place of its own, or beside them
    "bench.py": f"{MODEL} --chunk 8 --batch 2 --seq-len 40 --requests 5",
    "bench.py batches": MODEL,
    "bench.py capacity": f"{MODEL} {LOAD} --lengths 20+4 --policies sarathi-serve",
    "bench.py check": "--random-loads 20",
    "bench.py explore": "--requests 12",
    "bench.py paper": MODEL,
    "bench.py serve": f"{MODEL} {LOAD} --lengths 20+4,30+8 --qps 40",
    "bench.py today": "",
    "sample.py": f"{MODEL} --max-new-tokens 4",
    "-m server": f"{MODEL} --max-len 256",
}
SMALLER = {"--long-prompt": "100", "--shared-prefix": "64:2"}  # an option -> its value


def tiny(line):
    """The words of a command, with the options of TINY if it takes real time."""
    words = shlex.split(line)
    if re.search("^bench.py paper( --|$)", line):
        words.insert(2, "S-F3,B-1")  # not all claims
    if re.search("(capacity|serve|ladder) --simulate", line):
        words += ["--batch", "16", "--requests", "64"]
    begins = [begin for begin in TINY if f"{line} ".startswith(f"{begin} ")]
    if begins and not re.search("--simulate|--help|smollm2", line):
        words += shlex.split(TINY[max(begins, key=len)])  # the last of two counts
        for option, value in SMALLER.items():
            words += [option, value] if option in words else []
    return words


LINES = dict.fromkeys(line for text in TEXTS.values() for line in commands(text))
RUN = [line for line in LINES if not any(part in f" {line} " for part in NOT_RUN)]
OF_A_SERVER = [line for line in RUN if re.search("^-m server|^curl ", line)]


@pytest.fixture
def folder(tmp_path):
    """A folder with the files that the commands name."""
    for name in ("policies", "results"):
        (tmp_path / name).mkdir()
    (tmp_path / "policies/template.py").write_text(TEMPLATE, "utf-8")
    for name in ("my_policy.py", "mine.py", "FILE"):
        (tmp_path / name).write_text(POLICIES, "utf-8")
    return tmp_path


def run(line, folder):
    """How a command ends, by torchrun if it says so, in two processes instead of eight."""
    line = line.replace("8 sample.py --tp 8 --model path/or/hub-name", "2 sample.py --tp 2")
    words = tiny(re.sub(r"^torchrun --nproc-per-node \d ", "", line))
    if words[0].endswith(".py"):
        words[0] = str(ROOT / words[0])
    processes = re.findall(r"--nproc-per-node (\d)", line)
    if not processes and not re.match("bench.py (paper|today)", line):  # these start processes
        return forked.run(*words, cwd=folder)
    if processes:
        words = ["-m", "torch.distributed.run", "--nproc-per-node", *processes, *words]
    argv = [sys.executable, *words]
    return subprocess.run(argv, cwd=folder, capture_output=True, encoding="utf-8")


@pytest.mark.slow
@pytest.mark.parametrize("line", [line for line in RUN if line not in OF_A_SERVER])
def test_a_command_runs(line, folder):
    ended = run(line, folder)
    unsolved = 1 if line.startswith("-m exercises") else 0
    assert ended.returncode in (0, unsolved), ended.stdout + ended.stderr


@pytest.mark.slow
def test_a_server_starts_and_what_asks_it_runs(folder, capsys):
    port = str(forked.free_port())
    (start,) = (line for line in OF_A_SERVER if "-m server " in line)
    with forked.Program(*tiny(start.replace("8000", port))) as server:
        assert port in server.stdout.readline()
        for line in OF_A_SERVER:
            if line.startswith("curl "):
                words = shlex.split(line.replace("8000", port))
                answer = subprocess.run([*words, "--fail"], capture_output=True, check=True)
                assert answer.stdout.count(b"data: ") > 20
        (client,) = re.findall(r"```python\n(.*?)```", TEXTS["server/"], flags=re.DOTALL)
        exec(client.replace("8000", port).replace("wide-160m", "llama-tiny"), {})
        assert capsys.readouterr().out
        server.send_signal(signal.SIGTERM)
        assert server.wait() == -signal.SIGTERM
