"""nanosarathi.ipynb runs top to bottom, shows what it says, and its saved outputs are its own."""

import json
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

ROOT = Path(__file__).parents[1]
NOTEBOOK = ROOT / "nanosarathi.ipynb"
READERS_POLICY = "class Mine: ...\n"
VALUES = """
import json
longest = {name: max(g for c in run.completions for g in c.tbt) for name, run in runs.items()}
print(json.dumps([batches, list(equal.values()), longest, violation, results]))
"""


@pytest.fixture(scope="module")
def saved():
    """The notebook as it is saved."""
    return nbformat.read(NOTEBOOK, as_version=4)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder as a clone, with a policy of the reader's; what the notebook writes stays there."""
    folder = tmp_path_factory.mktemp("notebook")
    for path in ROOT.iterdir():
        if not path.name.startswith(".") and path.name != "my_policy.py":
            (folder / path.name).symlink_to(path)
    (folder / "my_policy.py").write_text(READERS_POLICY)
    return folder


@pytest.fixture(scope="module")
def executed(folder):
    """The notebook, executed there, and after its last cell one that prints VALUES."""
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    notebook.cells.append(nbformat.v4.new_code_cell(VALUES))
    resources = {"metadata": {"path": str(folder)}}
    NotebookClient(notebook, timeout=250, coalesce_streams=True, resources=resources).execute()
    return notebook


def outputs(notebook):
    """The outputs of each code cell: what it printed, and the MIME types of what it drew."""
    return [
        [output.get("text") or sorted(output.data) for output in cell.outputs]
        for cell in notebook.cells
        if cell.cell_type == "code"
    ]


def test_its_saved_outputs_are_those_of_its_cells(saved, executed):
    nbformat.validate(saved)
    assert outputs(saved) == outputs(executed)[:-1]


def test_it_shows_a_hybrid_batch_equality_a_stall_and_a_policy_of_ones_own(executed):
    batches, equal, longest, violation, results = json.loads(executed.cells[-1].outputs[0].text)
    assert batches[0] == [[0, 0, 10, False], [1, 0, 14, False]]
    assert batches[1] == [[0, 10, 1, True], [1, 14, 1, True], [2, 0, 30, False]]
    assert equal == [True] * 4
    assert longest["vllm"] > 0.1
    assert longest["sarathi-serve"] < 0.05
    assert violation is None
    vllm, sarathi_serve, gentle = results.values()  # TTFT P50, P99, TBT P99, longest
    assert vllm[2] > sarathi_serve[2] > gentle[2]
    assert gentle[0] > sarathi_serve[0]


def test_it_leaves_a_readers_policy_alone_and_writes_no_other(folder, executed):
    assert (folder / "my_policy.py").read_text() == READERS_POLICY
    names = {path.name for path in folder.glob("*.py")}
    assert names == {path.name for path in ROOT.glob("*.py")} | {"my_policy.py"}
