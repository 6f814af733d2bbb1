"""nanosarathi.ipynb runs top to bottom, and shows what it says."""

import json
from dataclasses import replace
from pathlib import Path

import nbformat
import pytest
import torch
from nbclient import NotebookClient

from examples.compare.engines import save_random
from model import GPTConfig
from tests.test_tokenizers import byte_level_tokenizer

ROOT = Path(__file__).parents[1]
NOTEBOOK = ROOT / "nanosarathi.ipynb"


def save_tiny_checkpoint(folder):
    """A checkpoint of random weights with a tokenizer and a chat template."""
    tokenizer = byte_level_tokenizer()
    config = replace(GPTConfig.preset("llama-tiny"), vocab_size=tokenizer.get_vocab_size())
    save_random(config, folder, 0, torch.float32)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"chat_template": "{% for message in messages %}{{ message.content }}{% endfor %}"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), "utf-8")


@pytest.fixture(scope="module")
def outputs(tmp_path_factory):
    """The outputs of each code cell, with a tiny model in the place of the real one."""
    folder = tmp_path_factory.mktemp("notebook")
    save_tiny_checkpoint(folder)
    for path in ROOT.iterdir():  # as in a clone, but what it writes stays here
        if not path.name.startswith(".") and path.name != "my_policy.py":
            (folder / path.name).symlink_to(path)
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    for cell in notebook.cells:
        cell.source = cell.source.replace('"smollm2"', repr(str(folder)))
    client = NotebookClient(notebook, timeout=200, resources={"metadata": {"path": str(folder)}})
    client.execute()
    return [cell.outputs for cell in notebook.cells if cell.cell_type == "code"]


def kinds(cell):
    """The MIME types of a cell's outputs."""
    return {kind for output in cell for kind in output.get("data", {})}


def test_it_is_short_and_has_no_old_outputs():
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(notebook)
    assert len(notebook.cells) <= 10
    assert not any(cell.get("outputs") for cell in notebook.cells)


def test_it_draws_a_hybrid_batch_the_stall_and_a_policy_of_ones_own(outputs):
    install, batch, stall, policy, schedules = outputs
    assert not kinds(install)
    assert batch[0].text.splitlines() == [
        "request 0: decode, tokens 10 to 10",
        "request 1: decode, tokens 14 to 14",
        "request 2: chunk, tokens 0 to 29",
    ]
    assert "image/png" in kinds(batch) and "image/svg+xml" in kinds(stall)
    text = "".join(output.text for output in stall if output.output_type == "stream")
    assert "\nvllm: longest freeze " in text and "\nsarathi-serve: longest freeze " in text
    assert "my_policy.py" in policy[0].text and "image/png" in kinds(schedules)
