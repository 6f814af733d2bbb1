"""The engines of examples/compare.py, held against transformers: equal outputs of one job."""

import torch
from transformers import AutoModelForCausalLM

from examples import compare
from tests.test_checkpoints import GROUPED, small


def test_the_engines_have_equal_outputs_of_all_requests(tmp_path):
    torch.manual_seed(4)
    config = small(vocab_size=1000, **GROUPED)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    job = compare.Job(
        model=str(tmp_path),
        dtype="float32",
        device="cpu",
        chunk=16,
        batch=2,
        requests=3,
        prompt=20,
        output=5,
    )
    reference = compare.load("transformers", job)()
    assert [len(output) for output in reference] == [5, 5, 5]
    for name in compare.ENGINES:
        assert compare.load(name, job)() == reference
