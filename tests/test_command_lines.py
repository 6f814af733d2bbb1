"""bench.py and sample.py, held against their exit status, files and defaults: what options do."""

import json
import subprocess
import sys
from datetime import date
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console

import bench
import sample
from cli.columns import Columns
from cli.console import run, visible
from cli.files import write_json
from cli.loading import load_model, resolve_model
from cli.model import ModelOptions, split_names
from lab.commands.options import OfflineOptions
from tests.helpers import ROOT

TINY_MODEL = ModelOptions(preset="llama-tiny", device="cpu", dtype="float32")


def ending(main):
    """The exit status of a program, None if it comes to its end."""
    try:
        run(main)
    except SystemExit as end:
        return end.code


HELPS = """\
import sys, bench, sample
for command in bench.COMMANDS:
    bench.main([command, "--help"])
bench.main(["--help"])
sample.app(["--help"])
assert "torch" not in sys.modules
"""


def test_helps_do_not_wait_for_torch():
    done = subprocess.run([sys.executable, "-c", HELPS], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("Usage: ") == len(bench.COMMANDS) + 2


def test_without_a_command_it_is_offline():
    command, bound, _ = bench.app.parse_args(bench.command_line(["--chunk", "64"]))
    assert command.__module__ == "lab.commands.offline"
    assert bound.arguments["options"] == OfflineOptions(chunk=64)
    assert bench.command_line(["--help"]) == ["--help"]
    assert bench.command_line(["check", "x"]) == ["check", "x"]


WRONG = [
    "--chunk 0",
    "--chunk 4 --batch 6",
    "--no-such 1",
    "--policies dynamic",
    "--preset gpt2 --model x",
    "--preset gpt2 --device cpu --seq-len 2000",
    "--pp 2",
    "sevre",
    "batches 1@0",
    "check no_such.py:Mine",
    "explore --pyodide x",
]


@pytest.mark.parametrize("words", WRONG)
def test_what_makes_no_sense_is_one_line_and_status_2(words, capsys):
    assert ending(lambda: bench.main(words.split())) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1


def test_how_a_program_ends(monkeypatch, capsys):
    def fail(error):
        raise error

    assert ending(lambda: fail(OSError("a\nb"))) == 2
    assert ending(lambda: fail(KeyboardInterrupt())) == 130
    assert ending(lambda: None) is None
    with pytest.raises(KeyError):  # an error of ours has its traceback
        run(lambda: fail(KeyError("x")))
    assert capsys.readouterr().err == "error: a b\n"
    monkeypatch.setattr("sys.stdout", sys.stdout)
    monkeypatch.setenv("RANK", "1")
    assert ending(lambda: fail(ValueError(print("x")))) == 2
    assert capsys.readouterr() == ("", "")


def test_a_terminal_does_not_obey_the_text_of_a_model():
    assert visible("é\ta\x1b[2J\x07b\x9b\r\n😀") == "é\ta\\x1b[2J\\x07b\\x9b\\r\n😀"


def test_columns_are_drawn_in_a_terminal_and_printed_at_the_end_elsewhere(capsys):
    with Columns(["[/one]", "two"]) as columns:
        columns.draw(["a", "b"])
        columns.draw(["a\nc", "b"])
    assert capsys.readouterr().out == "--- [/one]\na\nc\n--- two\nb\n"
    columns.live.console = Console(force_terminal=True, width=40)
    with columns:
        columns.draw(["从前有座山" * 9, "b\x1b[2J"])
    out = capsys.readouterr().out
    assert "[/one]" in out and out.count("从") == 18 and "\x1b[2J" not in out


def test_a_file_that_cannot_be_written_stays_as_it_was(tmp_path):
    file = tmp_path / "report.json"
    write_json(file, {"a": tmp_path})
    with pytest.raises(TypeError):
        write_json(file, {"a": {1: object()}})
    report = json.loads(file.read_text("utf-8"))
    assert report == {"commit": report["commit"], "date": report["date"], "a": str(tmp_path)}
    assert date.fromisoformat(report["date"]) <= date.today()


def test_names_in_a_text():
    assert split_names(" vllm, sarathi:64,,vllm ") == ["vllm", "sarathi:64"]


def test_a_model_has_the_positions_that_it_must():
    assert load_model(TINY_MODEL, 9000, positions_from="").config.max_positions == 9000
    gpt2 = ModelOptions(
        preset="gpt2",
        device="cpu",
        dtype="float32",
        layers=1,
    )
    assert load_model(gpt2, 1024, positions_from="").config.n_layer == 1
    with pytest.raises(ValueError, match="--max-len 1025"):
        load_model(gpt2, 1025, positions_from="--max-len")
    with pytest.raises(ValueError, match="GB are free"):
        load_model(TINY_MODEL, 10**12, positions_from="")


@pytest.mark.parametrize(
    "capability, gpu_bytes, preset, dtype",
    [
        ((7, 5), 16e9, "wide-160m", "float16"),  # T4
        ((8, 0), 40e9, "wide-160m", "bfloat16"),  # A100
        ((9, 0), 80e9, "llama-13b", "bfloat16"),  # H100
    ],
)
def test_what_was_left_open_depends_on_the_gpu(capability, gpu_bytes, preset, dtype, monkeypatch):
    properties = SimpleNamespace(total_memory=gpu_bytes)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    options = resolve_model(ModelOptions())
    assert (options.device, options.preset, options.dtype) == ("cuda", preset, dtype)
    assert resolve_model(TINY_MODEL) == TINY_MODEL


def test_several_processes_are_started_by_torchrun_and_do_not_compile(monkeypatch):
    with pytest.raises(ValueError, match="torchrun --nproc-per-node 4"):
        resolve_model(ModelOptions(tp=2, pp=2))
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="--compile"):
        resolve_model(ModelOptions(tp=2, compile=True))


def test_sample_needs_a_prompt():
    with pytest.raises(ValueError, match="--prompt, --chat"):
        sample.app([])
