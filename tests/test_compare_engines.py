"""What others make of the same requests is told as it was; without their packages it is said so."""

import json
import os
import sys
from argparse import ArgumentTypeError
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from engine import Engine
from lab.measure import timing as measure
from lab.measure.workload import Arrival, prompts
from model import GPT
from pretrained.presets import PRESETS
from tests import compare_engines
from tests.helpers import tiny_model

FAKE = """#!{python}
import json, os, sys
if "-c" in sys.argv:
    sys.exit()
job = json.loads(sys.stdin.readline())
with open({seen!r}, "w") as file:
    json.dump(job | {{"pid": os.getpid()}}, file)
print(json.dumps(["vllm", "orca"]), flush=True)
for line in sys.stdin:
    if line == "orca\\n" and os.environ.get("FAILS"):
        raise ValueError("one word\\nand the last")
    texts = [list(prompt[:5]) for prompt in job["prompts"]]
    print(json.dumps([text if line == "vllm\\n" else [-1] * 5 for text in texts]), flush=True)
"""


@pytest.fixture
def fake(tmp_path):
    """A Python in which every package is, and where every program is one that parrots."""
    path, seen = tmp_path / "python", tmp_path / "seen.json"
    path.write_text(FAKE.format(python=sys.executable, seen=str(seen)))
    path.chmod(0o755)
    return SimpleNamespace(python=str(path), seen=seen)


def options(against, **changes):
    """What is read of the command line."""
    own = dict(batch=3, chunk=12, seq_len=20, requests=7, seed=4, attention="auto", device="cpu")
    more = dict(dtype="float32", model=None, init_from=None, threads=None, compile=False)
    return SimpleNamespace(against=against, tp=1, pp=1, **own | more | changes)


def test_engines_are_named_with_their_pythons(fake):
    found = compare_engines.opponents(f"transformers, openvino={fake.python}")
    assert found == {"transformers": sys.executable, "openvino": fake.python}


@pytest.mark.parametrize(
    "text, message",
    [
        ("", "'': must be one of transformers, openvino"),
        ("vllm", "'vllm': must be one of"),
        ("openvino=/no/python", "openvino: /no/python is no Python with openvino_genai"),
        (f"openvino={sys.executable}", f"{sys.executable} is no Python with openvino_genai"),
    ],
)
def test_an_engine_that_is_not_there_is_refused_at_once(text, message):
    with pytest.raises(ArgumentTypeError) as refused:
        compare_engines.opponents(text)
    assert message in str(refused.value)


@pytest.mark.parametrize("model, refused", [("gpt2", True), ("qwen", False), ("llama-7b", False)])
def test_random_weights_that_cannot_be_saved_are_refused(model, refused, fake, tmp_path, capsys):
    which = ["--model", model] if model in PRESETS else ["--init-from", str(tmp_path)]
    words = ["--against", f"openvino={fake.python}", *which]
    if not refused:
        assert compare_engines.parse_args(words).against == {"openvino": fake.python}
        return
    with pytest.raises(SystemExit):
        compare_engines.parse_args(words)
    assert "--against: random weights like those of gpt2 cannot be saved" in capsys.readouterr().err


def test_options_that_make_no_sense_are_refused_in_one_line(fake, capsys):
    its = ["--against", f"openvino={fake.python}"]
    wrong = {"--chunk 5": "--chunk 5: must be at least --batch 6", "--batch 1": "--batch 1: must"}
    for words, message in wrong.items():
        with pytest.raises(SystemExit):
            compare_engines.parse_args([*its, *words.split()])
        error = capsys.readouterr().err
        assert f"compare_engines: error: {message}" in error and error.count("\n") == 1
    with pytest.raises(SystemExit):
        compare_engines.parse_args([])
    assert "--against" in capsys.readouterr().err
    args = compare_engines.parse_args([*its, "--chunk", "100"])
    assert (args.requests, args.pd_ratio, args.seq_len) == (19, 20, 1000)


def test_the_program_prints_the_machine_and_the_table_and_writes_both(
    fake, tmp_path, monkeypatch, capsys
):
    row = dict(tokens_per_s=9, sarathi_serve_gain=1, vllm_gain=1, equal_tokens=1, busy=False)
    here = dict(device="here", threads=2, torch="2", model="m", parameters=3, dtype="float32")
    seen, file = [], tmp_path / "report.json"
    against = lambda model, prompt_len, args: seen.append(prompt_len) or {"ours, vllm": row}
    monkeypatch.setattr(compare_engines, "against", against)
    machine = lambda *_: here | {"compiled": False}
    monkeypatch.setattr(measure, "describe_machine", machine)
    words = "--model llama-tiny --dtype float32 --device cpu --chunk 12 --batch 3 --seq-len 21"
    words = f"{words} --against openvino={fake.python} --json {file}"
    compare_engines.main(words.split())
    text, report = capsys.readouterr().out, json.loads(file.read_text())
    assert text.startswith("here, threads: 2, torch 2\n") and seen == [18]  # P:D = 12 / 2
    assert "| ours, vllm " in text and text.endswith(f" s\nwrote {file}\n")
    assert report["against"] == {"ours, vllm": row} and report["machine"]["device"] == "here"
    assert report["options"]["chunk"] == 12 and report["seconds"] > 0


@pytest.fixture
def checkpoint(tmp_path):
    """A directory with a random LLaMA."""
    pytest.importorskip("transformers")
    args = options(None, init_from=str(tmp_path / "llama"))
    compare_engines.save_random(tiny_model().config, args)
    return args.init_from


def test_rates_gains_and_equal_tokens_are_what_was_seen(fake, checkpoint, monkeypatch, capsys):
    """The fake repeats five tokens of each prompt, sarathi-serve three, vllm one."""
    ms = {"ours, sarathi-serve": 100.0, "ours, vllm": 50.0}
    ms |= {"openvino, vllm": 200.0, "openvino, orca": 400.0}

    def generate(engine, prompts, params, progress):
        assert params.max_new_tokens == 5 and engine.config.max_len == 20
        assert (engine.config.chunk, engine.config.max_batch) == (12, 3)
        n = 3 if engine.config.policy == "sarathi-serve" else 1
        return [SimpleNamespace(tokens=prompt[:n] + [-2] * (5 - n)) for prompt in prompts]

    def interleaved(variants, device, repeats, title):
        for serve in variants.values():
            serve()
        spread = {"ours, vllm": 0.5}
        return {key: measure.Timing(ms[key], spread.get(key, 0.0)) for key in variants}

    monkeypatch.setattr(Engine, "generate", generate)
    monkeypatch.setattr(measure, "interleaved", interleaved)
    monkeypatch.setattr(measure.Probe, "take", lambda self, *_: 0.0)
    args = options({"openvino": fake.python}, init_from=checkpoint)
    model = GPT.from_pretrained(checkpoint)
    rows = compare_engines.against(model, 15, args)
    assert {key: row["tokens_per_s"] for key, row in rows.items()} == pytest.approx(
        {key: 6 * 20 / (its / 1e3) for key, its in ms.items()}  # two whole batches
    )
    assert [row["sarathi_serve_gain"] for row in rows.values()] == [1.0, 0.5, 2.0, 4.0]
    assert [row["vllm_gain"] for row in rows.values()] == [2.0, 1.0, 4.0, 8.0]
    assert [row["equal_tokens"] for row in rows.values()] == [1.0, 0.6, 0.6, 0.0]
    assert [row["busy"] for row in rows.values()] == [False, True, False, False]

    job = json.loads(fake.seen.read_text())
    assert job["prompts"] == prompts([Arrival(0.0, 15, 5)] * 6, model.config.vocab_size, seed=4)
    assert job["threads"] == torch.get_num_threads() and job["checkpoint"] == checkpoint
    expected = dict(output=5, batch=3, seq_len=20, chunk=12, dtype="float32", engine="openvino")
    assert expected.items() <= job.items()

    compare_engines.print_against(rows, 15, args)
    text = capsys.readouterr().out
    assert "3 requests of 15 + 5 tokens,\nchunk 12" in text and "| ours, vllm (busy) " in text
    cells = [line.split("|")[1:-1] for line in text.splitlines() if "openvino, vllm" in line]
    assert [cell.strip() for cell in cells[0][1:]] == ["600", "2.00x", "4.00x", "60%"]


def test_a_process_that_fails_is_told_with_its_last_words_and_none_is_left(
    fake, checkpoint, monkeypatch
):
    monkeypatch.setenv("FAILS", "1")
    args = options({"openvino": fake.python}, init_from=checkpoint)
    with pytest.raises(ChildProcessError, match="--against openvino: and the last"):
        compare_engines.against(GPT.from_pretrained(checkpoint), 15, args)
    job = json.loads(fake.seen.read_text())
    assert not os.path.exists(job["folder"])


def test_an_idle_process_is_stopped_and_none_outlives_an_interrupt(fake, checkpoint, monkeypatch):
    def interrupted(*_, **more):
        pid = json.loads(fake.seen.read_text())["pid"]
        assert Path(f"/proc/{pid}/stat").read_text().split()[2] == "T"  # stopped: it does not spin
        raise KeyboardInterrupt

    monkeypatch.setattr(measure, "interleaved", interrupted)
    args = options({"openvino": fake.python}, init_from=checkpoint)
    with pytest.raises(KeyboardInterrupt):
        compare_engines.against(GPT.from_pretrained(checkpoint), 15, args)
    with pytest.raises(ProcessLookupError):
        os.kill(json.loads(fake.seen.read_text())["pid"], 0)


def test_a_missing_package_is_named_with_the_engine_in_one_line(tmp_path, checkpoint):
    bare = tmp_path / "python"
    bare.write_text(f"#!/bin/sh\nexec {sys.executable} -S $*\n")  # without any package
    bare.chmod(0o755)
    args = options({"transformers": str(bare)}, init_from=checkpoint)
    message = "^--against transformers: ModuleNotFoundError: No module named 'torch'$"
    with pytest.raises(ChildProcessError, match=message):
        compare_engines.against(GPT.from_pretrained(checkpoint), 15, args)


PACKAGES = {"transformers": "transformers", "openvino": "openvino_genai"}


@pytest.mark.parametrize("name", compare_engines.ENGINES)
def test_an_engine_says_what_ours_says(name):
    """Random weights in float32, which leaves no doubt; heads of a size and number of their own."""
    pytest.importorskip(PACKAGES[name])
    engines = compare_engines.opponents(name)
    sizes = dict(n_kv_head=2, head_dim=16, vocab_size=97)
    model = tiny_model(dtype=torch.float32, n_layer=1, **sizes)
    rows = compare_engines.against(model, 15, options(engines))
    assert rows.keys() > {"ours, sarathi-serve", "ours, vllm"} and len(rows) in (3, 4)
    assert {row["equal_tokens"] for row in rows.values()} == {1.0}
