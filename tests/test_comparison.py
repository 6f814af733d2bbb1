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
from experiments import comparison, measure
from experiments.options import OptionParser
from experiments.workload import Arrival, prompts
from model import GPT
from pretrained.presets import PRESETS
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
    return SimpleNamespace(against=against, **own | more | changes)


def test_engines_are_named_with_their_pythons(fake):
    found = comparison.opponents(f"transformers, openvino={fake.python}")
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
        comparison.opponents(text)
    assert message in str(refused.value)


@pytest.mark.parametrize(
    "name, model, refused",
    [
        ("transformers", "gpt2", True),
        ("openvino", "qwen", False),
        ("openvino", "llama-7b", False),
        (None, "gpt2", False),
    ],
)
def test_what_an_engine_cannot_run_is_refused(name, model, refused, tmp_path, capsys):
    args = options(name and {name: "python"}, model=model)
    if model not in PRESETS:
        args.model, args.init_from = None, str(tmp_path)
        sizes = dict(vocab_size=9, num_hidden_layers=1, num_attention_heads=2, hidden_size=8)
        sizes |= dict(model_type="qwen2", max_position_embeddings=32, rms_norm_eps=1e-5)
        (tmp_path / "config.json").write_text(json.dumps(sizes))
    if not refused:
        return comparison.check(OptionParser(prog="bench.py"), args)
    with pytest.raises(SystemExit):
        comparison.check(OptionParser(prog="bench.py"), args)
    assert "--against: random weights like those of gpt2 cannot be saved" in capsys.readouterr().err


@pytest.fixture
def checkpoint(tmp_path):
    """A directory with a random LLaMA."""
    pytest.importorskip("transformers")
    args = options(None, init_from=str(tmp_path / "llama"))
    comparison.save_random(tiny_model().config, args)
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
    rows = comparison.against(model, 15, args)
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

    comparison.print_against(rows, 15, args)
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
        comparison.against(GPT.from_pretrained(checkpoint), 15, args)
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
        comparison.against(GPT.from_pretrained(checkpoint), 15, args)
    with pytest.raises(ProcessLookupError):
        os.kill(json.loads(fake.seen.read_text())["pid"], 0)


def test_a_missing_package_is_named_with_the_engine_in_one_line(tmp_path, checkpoint):
    bare = tmp_path / "python"
    bare.write_text(f"#!/bin/sh\nexec {sys.executable} -S $*\n")  # without any package
    bare.chmod(0o755)
    args = options({"transformers": str(bare)}, init_from=checkpoint)
    message = "^--against transformers: ModuleNotFoundError: No module named 'torch'$"
    with pytest.raises(ChildProcessError, match=message):
        comparison.against(GPT.from_pretrained(checkpoint), 15, args)


PACKAGES = {"transformers": "transformers", "openvino": "openvino_genai"}


@pytest.mark.parametrize("name", comparison.ENGINES)
def test_an_engine_says_what_ours_says(name):
    """Random weights in float32, which leaves no doubt; heads of a size and number of their own."""
    pytest.importorskip(PACKAGES[name])
    engines = comparison.opponents(name)
    sizes = dict(n_kv_head=2, head_dim=16, vocab_size=97)
    model = tiny_model(dtype=torch.float32, n_layer=1, **sizes)
    rows = comparison.against(model, 15, options(engines))
    assert rows.keys() > {"ours, sarathi-serve", "ours, vllm"} and len(rows) in (3, 4)
    assert {row["equal_tokens"] for row in rows.values()} == {1.0}
