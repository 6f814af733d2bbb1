"""Other engines get the same job as ours, and say what ours says."""

from dataclasses import replace

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from examples import compare

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
