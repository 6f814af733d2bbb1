"""Results of other engines are told as they were; a missing package is named."""

import json
import os
import re
import signal
import sys
from argparse import ArgumentTypeError
from dataclasses import asdict
from types import SimpleNamespace

import pytest
import torch
from tqdm import tqdm

from engine import Engine
from examples.compare import __main__ as compare
from examples.compare.__main__ import engines
from examples.compare.engines import (
    PACKAGES,
    ComparisonInterrupted,
    EngineResult,
    compare_engines,
    no_report,
    save_random,
)
from examples.compare.worker import ENGINES
from lab.measure import timing
from lab.measure.offline_load import OfflineLoad
from lab.measure.workload import Arrival, prompts
from model import GPT
from tests.helpers import machine_info, tiny_model

FAKE = """#!{python}
import json, os, sys
if "-c" in sys.argv:
    sys.exit()
job = json.loads(sys.stdin.readline())
with open({seen!r}, "w") as file:
    json.dump(job | {{"pid": os.getpid()}}, file)
print(json.dumps({{"vllm": job["dtype"], "orca": "float64"}}), flush=True)
for line in sys.stdin:
    policy, count = json.loads(line)
    texts = [list(prompt[:5]) for prompt in job["prompts"][:count]]
    print(json.dumps([text if policy == "vllm" else [-1] * 5 for text in texts]), flush=True)
"""
LOAD = OfflineLoad(seq_len=20, pd_ratio=3, batch=3, requests=7, seed=4)  # 15 + 5 tokens
CHUNK = 12


@pytest.fixture
def fake(tmp_path):
    """A Python in which every package is, and where every program is one that parrots."""
    path = tmp_path / "python"
    seen = tmp_path / "seen.json"
    path.write_text(FAKE.format(python=sys.executable, seen=str(seen)), "utf-8")
    path.chmod(0o755)
    return SimpleNamespace(python=str(path), seen=seen)


@pytest.fixture
def checkpoint(tmp_path):
    """A directory with a random LLaMA."""
    folder = tmp_path / "llama"
    save_random(tiny_model().config, folder, seed=4, dtype=torch.float32)
    return str(folder)


def compare_with(checkpoint, report=no_report, **pythons):
    """compare_engines with the weights of a checkpoint, on LOAD."""
    model = GPT.from_pretrained(checkpoint)
    return compare_engines(model, checkpoint, pythons, LOAD, chunk=CHUNK, report=report)


def test_engines_are_named_with_their_pythons(fake):
    pythons = engines(f"transformers, openvino={fake.python}")
    assert pythons == {"transformers": sys.executable, "openvino": fake.python}
    assert PACKAGES.keys() == ENGINES.keys()


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
        engines(text)
    assert message in str(refused.value)


@pytest.fixture
def parse(fake):
    """A function that parses a command line against that Python."""

    def parse_words(words, *more):
        argv = [f"--against=openvino={fake.python}", *words.split(), *more]
        return compare.parse_args(argv)

    return parse_words


LOADS = {
    "--batch 1 --chunk 32 --seq-len 160": OfflineLoad(
        seq_len=160, pd_ratio=32, batch=1, requests=2
    ),
    "--chunk 100": OfflineLoad(seq_len=1000, pd_ratio=20, batch=6, requests=12),
    "--preset llama-7b --batch 4 --chunk 8 --requests 9": OfflineLoad(
        seq_len=1000, pd_ratio=8 / 3, batch=4, requests=9
    ),
}


@pytest.mark.parametrize("words", LOADS)
def test_two_full_batches_are_a_load_unless_others_are_asked_for(words, parse):
    options = parse(words)
    assert options.load(options.requests or 2 * options.batch) == LOADS[words]


WRONG = {
    "--chunk 5": "--chunk 5: must be at least --batch 6",
    "--batch 0": "--batch 0: must",
    "--preset gpt2": "--against: random weights like those of gpt2 cannot be saved",
}


@pytest.mark.parametrize("words", WRONG)
def test_options_that_make_no_sense_are_refused_in_one_line(words, parse, capsys):
    with pytest.raises(SystemExit):
        parse(words)
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and f"compare: error: {WRONG[words]}" in error


def test_a_checkpoint_need_not_be_saved_and_an_engine_is_required(parse, tmp_path, capsys):
    assert parse("", f"--model={tmp_path}").model.model == str(tmp_path)
    with pytest.raises(SystemExit):
        compare.parse_args([])
    assert "--against" in capsys.readouterr().err


def test_the_command_prints_machine_and_table_and_writes_both(fake, tmp_path, monkeypatch, capsys):
    result = EngineResult(
        dtype="float64",
        tokens_per_s=9,
        sarathi_serve_gain=1,
        vllm_gain=1,
        equal_tokens=1,
        busy=False,
    )
    calls = []

    def fake_compare(model, checkpoint, pythons, load, **settings):
        saved = GPT.from_pretrained(checkpoint)  # what others would load
        assert torch.equal(saved.token_embedding.weight, model.token_embedding.weight)
        calls.append((load.prompt_len, load.output_len, pythons, settings))
        if len(calls) > 1:
            raise ComparisonInterrupted({"ours, orca": result})
        return {"ours, vllm": result}

    monkeypatch.setattr(compare, "compare_engines", fake_compare)
    monkeypatch.setattr(compare, "measure_machine", lambda *_: machine_info(device="here"))
    file = tmp_path / "report.json"
    words = "--preset llama-tiny --dtype float32 --device cpu --chunk 12 --batch 3 --seq-len 21"
    argv = [*words.split(), f"--against=openvino={fake.python}", f"--json={file}"]
    compare.main(argv)
    text = capsys.readouterr().out
    report = json.loads(file.read_text("utf-8"))
    settings = {"chunk": 12, "attention": "auto", "report": tqdm.write}
    assert calls == [(18, 3, {"openvino": fake.python}, settings)]  # P:D = 12 / 2
    assert text.startswith("here, ") and "| ours, vllm " in text
    assert text.endswith(f" s\nwrote {file}\n")
    assert report["against"] == {"ours, vllm": asdict(result)}
    assert report["machine"]["device"] == "here"
    assert report["options"]["chunk"] == 12 and report["seconds"] > 0
    with pytest.raises(KeyboardInterrupt):
        compare.main(argv)
    assert "| ours, orca " in capsys.readouterr().out
    assert json.loads(file.read_text("utf-8"))["against"] == {"ours, orca": asdict(result)}


def test_rates_gains_and_equal_tokens_are_reported(fake, checkpoint, monkeypatch, capsys):
    """The fake repeats five tokens of each prompt, sarathi-serve three, vllm one."""
    ms = {
        "ours, sarathi-serve": 100.0,
        "ours, vllm": 50.0,
        "openvino, vllm": 200.0,
        "openvino, orca": 400.0,
    }
    served = []  # how many requests, by our engines
    lines = []

    def generate(engine, prompts, params, progress):
        served.append(len(prompts))
        config = engine.config
        assert params.max_new_tokens == 5 and config.max_len == 20
        assert (config.chunk, config.max_batch) == (12, 3)
        n = 3 if config.policy == "sarathi-serve" else 1
        return [SimpleNamespace(output=prompt[:n] + [-2] * (5 - n)) for prompt in prompts]

    def interleaved(variants, device, repeats, title, warmup):
        assert warmup == 0
        for serve in variants.values():
            for _ in range(repeats):
                serve()
        spread = {"ours, vllm": 0.5}
        return {key: timing.Timing(ms[key], spread.get(key, 0.0)) for key in variants}

    monkeypatch.setattr(Engine, "generate", generate)
    monkeypatch.setattr(timing, "interleaved", interleaved)
    monkeypatch.setattr(timing.Probe, "take", lambda self, *_: 0.0)
    results = compare_with(checkpoint, report=lines.append, openvino=fake.python)
    assert served == [3, 3] + [6] * 6  # a batch to warm up, then all, three times
    assert list(results) == list(ms)
    assert list(results.values()) == [  # two whole batches: 6 * 20 tokens
        EngineResult("float32", 1200.0, 1.0, 2.0, equal_tokens=1.0, busy=False),
        EngineResult("float32", 2400.0, 0.5, 1.0, equal_tokens=0.6, busy=True),
        EngineResult("float32", 600.0, 2.0, 4.0, equal_tokens=0.6, busy=False),
        EngineResult("float64", 300.0, 4.0, 8.0, equal_tokens=0.0, busy=False),
    ]
    assert [re.sub("after .* s", "after", line) for line in lines] == [
        "openvino: loaded",
        *[f"{name}: warm after" for name in ms],
        *[f"{name}: served 6 requests 3 times" for name in ms],
    ]
    job = json.loads(fake.seen.read_text("utf-8"))
    assert job["prompts"] == prompts([Arrival(0.0, 15, 5)] * 6, tiny_model().config.vocab_size, 4)
    assert job["threads"] == torch.get_num_threads() and job["checkpoint"] == checkpoint
    expected = dict(output_len=5, max_batch=3, seq_len=20, chunk=12)
    expected |= dict(dtype="float32", engine="openvino", device="cpu")
    assert expected.items() <= job.items()

    compare.print_results(results, LOAD, CHUNK)
    text = " ".join(capsys.readouterr().out.split())
    assert "6 requests of 15 + 5 tokens, in batches of 3, chunk 12; medians of 3" in text
    assert "| ours, vllm (busy) " in text
    assert "| openvino, vllm | float32 | 600 | 2.00x | 4.00x | 60% |" in text


@pytest.mark.parametrize("turns", [1, 2])
def test_an_interrupt_keeps_what_two_turns_of_each_have_shown(turns, fake, checkpoint, monkeypatch):
    """And no process: one that was idle did not spin."""

    def interleaved(variants, *_, **__):
        for serve in turns * [*variants.values()]:
            serve()
        pid = json.loads(fake.seen.read_text("utf-8"))["pid"]
        stopped = os.waitid(os.P_PID, pid, os.WSTOPPED | os.WNOWAIT)  # waits until it is
        assert stopped.si_status == signal.SIGSTOP
        raise KeyboardInterrupt

    monkeypatch.setattr(timing, "interleaved", interleaved)
    with pytest.raises(KeyboardInterrupt) as interrupt:
        compare_with(checkpoint, openvino=fake.python)
    results = getattr(interrupt.value, "results", {})
    names = ["ours, sarathi-serve", "ours, vllm", "openvino, vllm", "openvino, orca"]
    assert list(results) == (names if turns == 2 else [])
    assert all(result.tokens_per_s > 0 for result in results.values())
    job = json.loads(fake.seen.read_text("utf-8"))
    assert not os.path.exists(job["folder"])
    with pytest.raises(ProcessLookupError):
        os.kill(job["pid"], 0)


def test_a_missing_package_is_named_with_the_engine_in_one_line(tmp_path, checkpoint):
    bare = tmp_path / "python"
    bare.write_text(f"#!/bin/sh\nexec {sys.executable} -S $*\n", "utf-8")  # without any package
    bare.chmod(0o755)
    message = "^--against transformers: ModuleNotFoundError: No module named 'torch'$"
    with pytest.raises(ChildProcessError, match=message):
        compare_with(checkpoint, transformers=str(bare))


@pytest.mark.slow
def test_an_engine_says_what_ours_says(tmp_path):
    """Random weights in float32, which leaves no doubt; heads of a size and number of their own."""
    small = tiny_model(dtype=torch.float32, n_layer=1, n_kv_head=2, head_dim=16, vocab_size=97)
    save_random(small.config, tmp_path, seed=4, dtype=torch.float32)
    results = compare_with(str(tmp_path), **engines("transformers"))
    assert results.keys() > {"ours, sarathi-serve", "ours, vllm"} and len(results) in (3, 4)
    assert {result.equal_tokens for result in results.values()} == {1.0}
