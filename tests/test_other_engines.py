"""Other engines get the same job as ours, in processes of their own, and say what ours says."""

import os
from dataclasses import replace

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from examples import compare

TURNS = []
JOB = compare.Job(dtype="float32", device="cpu", chunk=16, batch=2, requests=3, prompt=20, output=5)


@pytest.fixture
def job(tmp_path):
    """A job for a small LLaMA with random weights."""
    sizes = dict(num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2)
    torch.manual_seed(4)
    config = LlamaConfig(vocab_size=1000, hidden_size=32, intermediate_size=48, **sizes)
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    return replace(JOB, model=str(tmp_path), rounds=2)


def test_the_engines_have_equal_outputs_of_all_requests(job):
    reference = compare.load("sarathi-serve", job)()
    assert [len(output) for output in reference] == [5, 5, 5]
    for name in compare.ENGINES:
        assert compare.load(name, job)() == reference


def test_each_engine_has_a_process_that_loads_once_and_takes_all_turns(job, monkeypatch):
    monkeypatch.setattr(compare, "ENGINES", {"vllm": None, "transformers": None})
    monkeypatch.setattr(compare, "take_turn", count_turns)
    turns = compare.compare(job)
    assert list(turns) == ["vllm", "transformers"]
    pids = {name: {pid for pid, _ in of_engine} for name, of_engine in turns.items()}
    assert len(set.union(*pids.values())) == 2
    counts = [count for of_engine in turns.values() for _, count in of_engine]
    assert counts == [1, 2, 3] * 2


def count_turns(name, job):
    """(the process, how many turns it has had)."""
    TURNS.append(name)
    return os.getpid(), len(TURNS)


def test_a_line_has_the_median_and_the_range_of_the_rounds(monkeypatch, capsys):
    seconds = [100.0, 75 / 2, 75 / 1, 75 / 4]  # of 75 tokens; the first does not count
    same, other = [[1]] * 3, [[1], [1], [2]]
    turns = {
        "sarathi-serve": [compare.Turn(second, same) for second in seconds],
        "vllm": [compare.Turn(second / 1000, other) for second in seconds],
    }
    monkeypatch.setattr(compare, "compare", lambda job: turns)
    compare.main(["--model=x", "--requests=3", "--prompt=20", "--output=5"])
    ours, vllm = [line.split() for line in capsys.readouterr().out.splitlines()[1:]]
    assert ours == ["sarathi-serve", "2", "1", "to", "4", "3", "of", "3"]
    assert vllm == ["vllm", "2,000", "1,000", "to", "4,000", "2", "of", "3"]
