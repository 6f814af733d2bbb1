"""`.ci/gpu.sh`: steps that are processes, each with a limit, and a folder that says what is done.

No GPU is needed: nvidia-smi and Python are pretended."""

import os
import subprocess
from pathlib import Path

import pytest

import bench

ROOT = Path(__file__).parents[1]
PRETENDED_SMI = """#!/bin/bash
[[ $* == *id=9* ]] && exit 6
case $* in *memory.total*) echo "$MEBIBYTES";; *driver*) echo 550.1;; *) echo NVIDIA H100;; esac
"""
PRETENDED_PYTHON = """#!/bin/bash
{ printf '%s\\0' "$@"; echo; } >>"$CALLS"
[[ $* == *"$SLOW"* ]] && { echo begun; exec sleep 60; }
[[ $* == *"$FAILS"* ]] && { echo half; echo "error: no memory" >&2; exit 1; }
echo a table
"""
NAMES = [
    *("tests", "chunk-256", "table-2", "serve", "capacity"),
    *("batches", "batches-compiled", "paper"),
]


@pytest.fixture
def run(tmp_path):
    """A function that runs the script with pretended programs: (status, output, command lines)."""
    for name, text in (("nvidia-smi", PRETENDED_SMI), ("python", PRETENDED_PYTHON)):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)

    def run_script(**environment):
        calls = tmp_path / "calls"
        calls.write_text("")
        variables = {
            "PATH": f"{tmp_path}:{os.environ['PATH']}",
            "PYTHON": str(tmp_path / "python"),
            "CALLS": str(calls),
            "MEBIBYTES": "81559",
            "FAILS": "none",
            "SLOW": "none",
            **environment,
        }
        done = subprocess.run(
            [ROOT / ".ci/gpu.sh", tmp_path / "out"],
            env=os.environ | variables,
            capture_output=True,
            text=True,
        )
        lines = [line.split("\0")[:-1] for line in calls.read_text().split("\n")[:-1]]
        return done.returncode, done.stdout + done.stderr, lines

    return run_script


@pytest.mark.parametrize(
    "mebibytes, preset",
    [("81559", "llama-13b"), ("24564", "llama3-8b"), ("15360", "gpt2-xl"), ("6000", "llama-160m")],
)
def test_every_step_is_a_command_of_the_largest_preset(mebibytes, preset, run, tmp_path):
    status, output, calls = run(MEBIBYTES=mebibytes)
    assert status == 0 and len(calls) == len(NAMES)
    assert {path.stem for path in (tmp_path / "out").glob("*.txt")} == set(NAMES)
    assert calls[0][:2] == ["-m", "pytest"]
    assert all((ROOT / path).exists() for path in calls[0][4:])
    for program, *argv in calls[1:]:
        assert program == "bench.py"
        assert argv[argv.index("--preset") + 1] == preset
        argv[argv.index("--device") + 1] = "cpu"
        _, options = bench.parse_args(argv)
        assert options.model.preset == preset
        assert options.model.compile == ("--compile" in argv)
    assert options.max_len == (1024 if preset == "gpt2-xl" else 4096) and not options.quick
    assert output.splitlines()[-1].startswith("look at ")


def test_a_step_that_fails_or_hangs_is_named_and_the_next_run_goes_on(run, tmp_path):
    status, output, calls = run(FAILS="capacity", SLOW="-rs tests", LIMIT="5")
    assert status == 1 and len(calls) == len(NAMES)
    assert "- tests: status 124 after " in output and "- capacity: status 1 after " in output
    readme = (tmp_path / "out/README.md").read_text()
    assert readme.startswith("# NVIDIA H100, llama-13b, driver 550.1\n") and "- paper: s" in readme
    assert (tmp_path / "out/tests.part.txt").read_text() == "begun\n"
    assert (tmp_path / "out/capacity.log").read_text() == "error: no memory\n"
    status, _, calls = run()
    assert status == 0 and [call[1] for call in calls] == ["pytest", "capacity"]


def test_no_gpu_and_a_folder_of_another_preset_are_refused(run):
    assert run(DEVICE="cuda:9") == (2, "DEVICE=cuda:9: nvidia-smi knows no such GPU\n", [])
    run()
    status, output, calls = run(PRESET="gpt2")
    assert status == 2 and "another machine or preset" in output and not calls
