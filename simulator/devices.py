"""GPUs, what joins them, and models to be simulated, with sources. Read next: cost_model.py."""

from dataclasses import dataclass
from typing import NamedTuple

from checks import check_one_of
from model import GPTConfig
from pretrained.presets import PRESETS


class Link(NamedTuple):
    """What joins GPUs."""

    bytes_per_s: float
    step_s: float  # what each step of a transfer takes besides
    per_gpu: bool = True  # each GPU of a node has one of its own to other nodes; else they share it


LINKS = {
    "nvlink3": Link(230e9, 2.5e-6),  # nccl-tests on a DGX A100: large all-reduces; 40 us for small
    "nvlink4": Link(345e9, 2.5e-6),  # that of nvlink3, times 900 / 600 GB/s
    "pcie4": Link(16e9, 5e-6),  # half of the 32 GB/s of 16 lanes: data goes through host memory
    "infiniband": Link(20e9, 5e-6),  # HDR, 200 Gb/s for each GPU of a DGX A100, at 80 %
    "ethernet": Link(10e9, 50e-6, per_gpu=False),  # 100 Gb/s for a whole node, at 80 %, through TCP
}


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
    op_s: float = 5e-6  # to start and drain one kernel
    link: str = "nvlink3"  # to others in its node, a name in LINKS
    source: str = ""


# What `calibration.fit_products` finds, rounded, in measured times of a LLaMA-2-7B layer on one
# A100-80GB (Vidur's profile); the data sheet says 312 TFLOP/s and 2.04 TB/s. Chunks reach what
# FlashAttention-2 (Dao 2023, Figure 5) does with causal masks of about 1K keys; the cache of
# decodes is read as fast as weights.
SOURCE = "fit to measured products; FlashAttention-2"
A100 = Device("A100-80GB", 227e12, 1.66e12, 120e12, 1.66e12, 80e9, source=SOURCE)


def _like_a100(name, flops_per_s, bytes_per_s, memory_bytes, link):
    """A device of which only the data sheet is known: it reaches the same share as an A100."""
    compute, memory = flops_per_s / 312e12, bytes_per_s / 2.039e12
    rates = compute * A100.flops_per_s, memory * A100.bytes_per_s
    rates += compute * A100.attention_flops_per_s, memory * A100.attention_bytes_per_s
    source = "data sheet, and the shares of it that an A100 reaches"
    return Device(name, *rates, memory_bytes, link=link, source=source)


# 1,024 prefill tokens take 224.8 ms in linear layers and 10 ms in attention, four decodes at 1,024
# tokens 44.28 ms and 5.68 ms (LLaMA-13B); the A6000's rates are what gives these times.
TABLE_2 = "SARATHI, Table 2"
DEVICES = {
    "a100-80gb": A100,
    "a40": _like_a100("A40", 149.7e12, 696e9, 48e9, "pcie4"),
    "a6000": Device("A6000", 116e12, 584e9, 43.8e12, 612e9, 48e9, link="pcie4", source=TABLE_2),
    "h100": _like_a100("H100", 989e12, 3.35e12, 80e9, "nvlink4"),
    "h200": _like_a100("H200", 989e12, 4.8e12, 141e9, "nvlink4"),
}

# No forward pass here: learned positions and two matrices in the MLP, as in GPT-2. Falcon's
# attention and MLP stand side by side and share one all-reduce.
TIED = {"tie_embeddings": True}
GEOMETRIES = PRESETS | {
    "gpt3-175b": GPTConfig("gpt2", 50257, 96, 96, 12288, max_positions=4096, **TIED),
    "falcon-180b": GPTConfig("gpt2", 65024, 80, 232, 14848, 8, 64, max_positions=16384, **TIED),
}
PARALLEL_BLOCKS = ("falcon-180b",)


def find(table, what, name):
    """table[name]. Raises ValueError, naming what it should be, if it is not there."""
    check_one_of(what, name, table)
    return table[name]
