"""GPUs, what joins them, and models to be simulated: what devices.toml has. Next: cost_model.py."""

import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from errors import check_one_of
from model import GPTConfig
from pretrained.presets import PRESETS


class Link(NamedTuple):
    """What joins GPUs."""

    bytes_per_s: float
    step_s: float  # what each step of a transfer takes besides
    per_gpu: bool = True  # each GPU of a node has one of its own to other nodes; else they share it


@dataclass(frozen=True)
class Device:
    """One GPU. Rates are those that kernels reach, not those of the data sheet."""

    name: str
    flops_per_s: float  # of matrix products in 16 bits
    bytes_per_s: float  # of their weights, and of all others
    attention_flops_per_s: float  # over chunks
    attention_bytes_per_s: float  # over the cache of decodes
    memory_bytes: float  # all there is, as the data sheet says it
    tile: int = 128  # rows of a matrix product are rounded up to a multiple of it
    units: int = 0  # that compute a tile each, in whole waves; 0: as if tiles could be shared
    riding: float = 1.0  # times longer that attention of decodes takes beside a chunk
    op_s: float = 5e-6  # to start and drain one kernel
    link: str = "nvlink3"  # to others in its node, a name in LINKS
    source: str = ""


_FILE = tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8"))
LINKS = {name: Link(**its) for name, its in _FILE["links"].items()}
DEVICES = {name: Device(**its) for name, its in _FILE["devices"].items()}
A100 = DEVICES["a100-80gb"]
GEOMETRIES = PRESETS | {name: GPTConfig(**its) for name, its in _FILE["geometries"].items()}
PARALLEL_BLOCKS = ("falcon-180b",)  # whose attention and MLP share one all-reduce, side by side


def find(table, what, name):
    """table[name]. Raises ValueError, naming what it should be, if it is not there."""
    check_one_of(what, name, table)
    return table[name]
