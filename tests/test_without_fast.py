"""Take the folder fast/ away, and everything still runs: only slower."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
LEFT_OUT = shutil.ignore_patterns("fast", "results", "__pycache__", ".*")
CORE = "plain and (every_chunk_size or hybrid_batch or figure_6)"
JOB = "bench.py --preset llama-tiny --chunk 16 --requests 3 --seq-len 64 --policies orca,vllm"
PROGRAM = """
import json
import torch
from engine import Engine
from model import GPT, FlatBatch, GPTConfig
from request import lone_chunk
from runtime.runner import Runner
from sampling import SamplingParams

config = GPTConfig.preset("llama-tiny")
runner = Runner(GPT(config, dtype=torch.float64), pages=8, page_size=64)
chunks = [
    lone_chunk([4], 0, list(range(60))),
    lone_chunk([2, 5], 0, list(range(100))),
    lone_chunk([4], 60, [7]),
    lone_chunk([2, 5], 100, [9, 8, 7]),
    lone_chunk([3], 0, [1]),
]
logits = []
for batch in (chunks[:2], chunks[2:]):
    flat = FlatBatch.build(batch, runner.attention)
    logits += runner.forward(flat).tolist()
engine = Engine(GPT(config), chunk=16, max_batch=3, max_len=128, page_size=16)
prompts = [list(range(n)) for n in (1, 40, 7, 70)]
done = engine.generate(prompts, SamplingParams(12), progress=False)
print(json.dumps([type(runner.attention).__name__, logits, [each.output for each in done]]))
"""


def run(folder, *arguments):
    """What Python prints there."""
    command = [sys.executable, *arguments]
    result = subprocess.run(
        command,
        cwd=folder,
        capture_output=True,
        text=True,
        encoding="utf-8",
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@pytest.fixture(scope="module")
def without(tmp_path_factory):
    """A copy of the repository without fast/."""
    folder = tmp_path_factory.mktemp("copy") / "repository"
    shutil.copytree(ROOT, folder, ignore=LEFT_OUT)
    return folder


def test_logits_and_greedy_tokens_are_the_same(without):
    backend, logits, tokens = json.loads(run(ROOT, "-c", PROGRAM))
    plain_backend, plain_logits, plain_tokens = json.loads(run(without, "-c", PROGRAM))
    assert (backend, plain_backend) == ("Blocks", "SDPA")
    for row, plain_row in zip(logits, plain_logits, strict=True):
        assert row == pytest.approx(plain_row, rel=0, abs=1e-10)
    assert tokens == plain_tokens


def test_the_equivalence_of_the_core_holds(without):
    run(without, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_equivalence.py", "-k", CORE)


def test_the_main_job_runs(without):
    file = without / "job.json"
    run(without, *JOB.split(), "--json", str(file))
    assert json.loads(file.read_text("utf-8"))["equal_texts"] == 3
