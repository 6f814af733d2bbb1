"""`.ci/gpu.sh`: steps that are processes, each with a limit, and a folder that says what has ended.

No GPU is needed: Python is pretended."""

import os
import subprocess
from functools import cache
from pathlib import Path

import pytest
import torch

from kv_cache import kv_bytes_per_token
from lab.claims.claims import CLAIMS
from lab.measure.token_budget import BASE_BATCH, base_context
from model import GPT, GPTConfig
from tests.helpers import parse

ROOT = Path(__file__).parents[1]
PRETENDED_PYTHON = """#!/bin/bash
if [ "$1" = -c ]; then
    [[ $2 == *"$LACKS"* ]] && exit 1
    [ -z "$3" ] || printf '%s\\n' "NVIDIA H100" "$MEBIBYTES" 2.13.0
    exit 0
fi
{ printf '%s\\0' "$@"; echo; } >>"$CALLS"
[[ $* == *"$SLOW"* ]] && { echo begun; exec sleep 60; }
[[ $* == *"$FAILS"* ]] && exit 1
echo a table
"""


@pytest.fixture
def run(tmp_path):
    """A function that runs the script: (status, the command lines of its steps)."""
    python = tmp_path / "python"
    python.write_text(PRETENDED_PYTHON)
    python.chmod(0o755)

    def run_script(*paths, **environment):
        calls = tmp_path / "calls"
        calls.write_text("")
        variables = {
            "PYTHON": str(python),
            "CALLS": str(calls),
            "MEBIBYTES": "81037",
            "LACKS": "nothing",
            "FAILS": "none",
            "SLOW": "none",
            **environment,
        }
        folder, *tar = paths or ["out"]
        argv = [ROOT / ".ci/gpu.sh", tmp_path / folder, *(tmp_path / path for path in tar)]
        status = subprocess.run(argv, env=os.environ | variables, capture_output=True).returncode
        lines = calls.read_text().split("\n")[:-1]
        return status, [line.split("\0")[:-1] for line in lines]

    return run_script


@cache
def needed_bytes(preset, max_len):
    """The weights of a model, and the cache of the iteration that SLOs are multiples of."""
    config = GPTConfig.preset(preset)
    weights = GPT(config, device="meta", dtype=torch.bfloat16, seed=None).parameters()
    weight_bytes = sum(each.numel() * each.itemsize for each in weights)
    slots = BASE_BATCH * base_context(max_len)
    return weight_bytes + slots * kv_bytes_per_token(config, torch.bfloat16)


@pytest.mark.parametrize("mebibytes", [81037, 40300, 22500, 14900])
def test_every_step_is_a_command_that_fits_the_gpu(mebibytes, run):
    status, calls = run(MEBIBYTES=str(mebibytes))
    assert status == 0
    claims = []
    for program, *argv in calls:
        if argv[0] == "pytest":
            paths = [word for word in argv if word.endswith(".py")]
            assert paths and all((ROOT / path).exists() for path in paths)
            continue
        assert program == "bench.py"
        argv[argv.index("--device") + 1] = "cpu"
        if "xformers" in argv:
            argv[argv.index("xformers")] = "sdpa"  # as xformers needs a GPU
        options = parse(argv)
        if argv[0] in ("serve", "capacity", "paper"):
            max_len = options.max_len if argv[0] == "paper" else options.options.max_len
            assert needed_bytes(options.model.preset, max_len) < 0.95 * mebibytes * 2**20
        if argv[0] == "paper":
            claims += [claim.id for claim in options.claims]
    assert sorted(claims) == sorted(claim.id for claim in CLAIMS)


def test_a_step_that_ended_is_not_run_again(run, tmp_path):
    status, calls = run(FAILS="capacity", SLOW="-m pytest", LIMIT="1")
    assert status == 1
    out = tmp_path / "out"
    assert (out / "tests.txt").read_text() == (out / "tests-cuda.txt").read_text() == "begun\n"
    assert (out / "capacity-vllm.txt").read_text() == ""
    assert (out / "serve.txt").read_text() == "a table\n"
    assert run() == (0, [])
    (out / "serve.txt").unlink()
    assert [call[1] for call in run()[1]] == ["serve"]
    assert run(PRESET="gpt2") == (2, [])


def test_a_step_without_what_it_needs_is_not_measured(run, tmp_path):
    _, all_calls = run()
    status, calls = run("other", LACKS="import xformers")
    assert (status, len(calls)) == (0, len(all_calls) - 1)
    assert not any("xformers" in call for call in calls)
    assert run("third", LACKS="import sys, torch") == (2, [])


def test_a_tar_takes_the_results_to_another_machine(run, tmp_path):
    assert run("here", "results.tar")[1]
    assert run("there", "results.tar") == (0, [])
