"""torchrun's environment variables: a value of no sense is one line that names the variable."""

import pytest
import torch

from runtime.memory import check_memory, free_bytes
from runtime.torchrun import Place, find_place
from tests import forked

NAMES = "RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE".split()


@pytest.fixture(autouse=True)
def no_torchrun(monkeypatch):
    """A process that torchrun has not started."""
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)


def set_all(monkeypatch, text):
    """Set the variables in a text like "RANK=1 WORLD_SIZE=2"."""
    for assignment in text.split():
        name, _, value = assignment.partition("=")
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize(
    "environ, place",
    [
        ("", (0, 1, 0, 1)),
        ("RANK=3 WORLD_SIZE=4", (3, 4, 3, 4)),  # of one node
        ("RANK=3 WORLD_SIZE=4 LOCAL_WORLD_SIZE=2", (3, 4, 1, 2)),
        ("RANK=3 WORLD_SIZE=4 LOCAL_RANK=0 LOCAL_WORLD_SIZE=1", (3, 4, 0, 1)),
    ],
)
def test_a_process_finds_its_place(monkeypatch, environ, place):
    set_all(monkeypatch, environ)
    assert find_place() == Place(*place)


WHOLE = "must be a whole number of at least"


WRONG_PLACES = [
    ("RANK=x", f"RANK='x': {WHOLE} 0"),
    ("RANK=-1", f"RANK=-1: {WHOLE} 0"),
    ("RANK=1.0", f"RANK='1.0': {WHOLE} 0"),
    (f"RANK={10**20}", f"RANK={10**20}: {WHOLE} 0 and at most {2**63 - 1}"),
    ("WORLD_SIZE=", f"WORLD_SIZE='': {WHOLE} 1"),
    ("WORLD_SIZE=0", f"WORLD_SIZE=0: {WHOLE} 1"),
    ("LOCAL_WORLD_SIZE=0", f"LOCAL_WORLD_SIZE=0: {WHOLE} 1"),
    ("LOCAL_RANK=-1", f"LOCAL_RANK=-1: {WHOLE} 0"),
    ("RANK=5 WORLD_SIZE=2", "RANK=5: must be below WORLD_SIZE=2"),
    ("RANK=2 WORLD_SIZE=2", "RANK=2: must be below WORLD_SIZE=2"),
    ("LOCAL_RANK=2 LOCAL_WORLD_SIZE=2", "LOCAL_RANK=2: must be below LOCAL_WORLD_SIZE=2"),
]


@pytest.mark.parametrize("environ, message", WRONG_PLACES)
def test_what_makes_no_sense_is_one_line(monkeypatch, environ, message):
    set_all(monkeypatch, environ)
    with pytest.raises(ValueError) as error:
        find_place()
    assert str(error.value) == message


def test_processes_of_a_node_share_its_memory(monkeypatch):
    monkeypatch.setattr("runtime.memory._free_in_container", lambda: 1200)
    device = torch.device("cpu")
    assert free_bytes(device) == 1200
    set_all(monkeypatch, "LOCAL_WORLD_SIZE=3 WORLD_SIZE=6 RANK=4")
    assert free_bytes(device) == 400
    with pytest.raises(ValueError, match="a cache: takes"):
        check_memory("a cache", 401, device)


SAMPLE = ["sample.py", "--preset", "llama-tiny", "--prompt", "a"]


@pytest.mark.parametrize(
    "argv, variables, message",
    [
        (["bench.py", "--model", "llama-tiny"], dict(RANK="x"), f"RANK='x': {WHOLE} 0"),
        (SAMPLE, dict(LOCAL_WORLD_SIZE="0"), f"LOCAL_WORLD_SIZE=0: {WHOLE} 1"),
        (
            ["-m", "server", "--preset", "llama-tiny"],
            dict(WORLD_SIZE="2", RANK="5"),
            "RANK=5: must be below WORLD_SIZE=2",
        ),
    ],
)
def test_every_program_says_it_in_one_line(argv, variables, message):
    ended = forked.run(*argv, **variables)
    assert (ended.returncode, ended.stdout, ended.stderr) == (1, "", f"error: {message}\n")
