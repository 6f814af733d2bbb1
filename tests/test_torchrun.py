"""torchrun's environment variables, and the memory that processes share."""

import pytest
import torch

from runtime.memory import check_memory, free_bytes
from runtime.torchrun import Place, find_place

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


def test_processes_of_a_node_share_its_memory(monkeypatch):
    monkeypatch.setattr("runtime.memory._free_in_container", lambda: 1200)
    device = torch.device("cpu")
    assert free_bytes(device) == 1200
    set_all(monkeypatch, "LOCAL_WORLD_SIZE=3 WORLD_SIZE=6 RANK=4")
    assert free_bytes(device) == 400
    with pytest.raises(ValueError, match="a cache: takes"):
        check_memory("a cache", 401, device)
