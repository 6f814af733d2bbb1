"""Other engines get the same job as ours, in processes of their own, and say what ours says."""

import os
from dataclasses import replace

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from examples import compare

TURNS = []
JOB = compare.Job(
    dtype="float32",
    device="cpu",
    chunk=16,
    batch=2,
    requests=3,
    prompt=20,
    output=5,
    rounds=2,
)


def test_the_engines_have_equal_outputs_of_all_requests(tmp_path):
    torch.manual_seed(4)
    config = LlamaConfig(
        vocab_size=1000,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    job = replace(JOB, model=str(tmp_path))
    reference = compare.load("transformers", job)()
    assert [len(output) for output in reference] == [5, 5, 5]
    for name in compare.ENGINES:
        assert compare.load(name, job)() == reference


def count_turns(name, job):
    """(the process, how many turns it has had)."""
    TURNS.append(name)
    return os.getpid(), len(TURNS)


def test_each_engine_has_a_process_for_all_its_turns(monkeypatch):
    monkeypatch.setattr(compare, "ENGINES", {"vllm": None, "transformers": None})
    monkeypatch.setattr(compare, "take_turn", count_turns)
    turns = compare.compare(JOB)
    pids = set()
    for of_engine in turns.values():
        assert [count for _, count in of_engine] == [1, 2, 3]
        pids.update(pid for pid, _ in of_engine)
    assert len(pids) == 2


def test_a_line_has_the_median_and_the_range_of_the_rounds(monkeypatch, capsys):
    outputs = [[1]] * 3
    seconds = [100.0, 75 / 2, 75 / 1, 75 / 4]  # of 75 tokens; the first does not count
    turns = {"sarathi-serve": [compare.Turn(second, outputs) for second in seconds]}
    turns["vllm"] = [compare.Turn(1.0, [[1], [1], [2]])] * 4
    monkeypatch.setattr(compare, "compare", lambda job: turns)
    compare.main(["--model=x", "--requests=3", "--prompt=20", "--output=5"])
    _, ours, vllm = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ours[1:] == ["2", "1", "to", "4", "3", "of", "3"]
    assert vllm[1:] == ["75", "75", "to", "75", "2", "of", "3"]
