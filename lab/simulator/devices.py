"""GPUs, the links that join them, and models that are only simulated: all constants, with sources.

Next: cost_model.py."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from config import GPTConfig
from pretrained.presets import PRESETS

Entry = TypeVar("Entry")


class Link(NamedTuple):
    """A connection between GPUs. A transfer takes `step_s` and its bytes at `bytes_per_s`."""

    bytes_per_s: float
    step_s: float  # the latency of each step of a transfer
    per_gpu: bool = True  # each GPU of a node has its own link to other nodes; else they share one


@dataclass(frozen=True)
class Device:
    """One GPU. Rates are those that kernels reach, not those of the data sheet."""

    name: str
    flops_per_s: float  # of matrix products in 16 bits
    bytes_per_s: float  # of reading their weights, and of all other operations
    attention_flops_per_s: float  # of attention over chunks
    attention_bytes_per_s: float  # of reading the cache for decodes
    memory_bytes: float  # all of it, as in the data sheet
    tile: int = 128  # rows of a matrix product are rounded up to a multiple of it
    skips_masked: bool = True  # attention leaves out the keys after each query, half of a chunk
    riding: float = 1.0  # attention of decodes takes so many times longer beside a chunk
    op_s: float = 5e-6  # to start and drain one kernel
    link: str = "nvlink3"  # to others in its node, a name in LINKS
    source: str = ""


# Those of NVIDIA's A100 and A40 give the medians of all-reduces that Vidur's authors measured and
# published (github.com/microsoft/vidur, data/profiling); how far off they are is in percent.
LINKS = {
    # eight GPUs of a DGX A100, 0.5 to 65 MB: 19 % in the median, 41 % at most
    "nvlink3": Link(bytes_per_s=165e9, step_s=2e-6),
    # that of nvlink3, times 900 / 600 GB/s
    "nvlink4": Link(bytes_per_s=247e9, step_s=2e-6),
    # two A100 of a virtual machine (a100_pairwise_nvlink), up to 530 MB: 2 % in the median, over
    # 8 % at 26 % of the sizes, 32 % of 4 to 8 MB; small ones take 55 us. In another profile
    # (a100_pair_nvlink) these take 6 to 11 us, and 3 MB 39.
    "nvlink3-pair": Link(bytes_per_s=200e9, step_s=25e-6),
    # four A100 in two such pairs, up to 121 MB: 10 % at most
    "nvlink3-pairs": Link(bytes_per_s=22.5e9, step_s=8.5e-6),
    # four A40, 4 to 100 MB: 2 % at most
    "a40-pairs": Link(bytes_per_s=41e9, step_s=5e-6),
    # half of the 32 GB/s of 16 lanes: data goes through host memory
    "pcie4": Link(bytes_per_s=16e9, step_s=5e-6),
    # HDR, 200 Gb/s for each GPU of a DGX A100, at 80 %
    "infiniband": Link(bytes_per_s=20e9, step_s=5e-6),
    # NDR, 400 Gb/s for each GPU of a DGX H100, at 80 %; Splitwise's H100 have it (§VI-A)
    "infiniband-ndr": Link(bytes_per_s=40e9, step_s=5e-6),
    # 25 Gb/s between the nodes of DistServe's testbed (§6.1), at 80 %
    "ethernet-25g": Link(bytes_per_s=2.5e9, step_s=50e-6, per_gpu=False),
    # 100 Gb/s for a whole node: through TCP NCCL reaches 4 to 6 GB/s where it is tuned
    # (NVIDIA/nccl issue 450)
    "ethernet": Link(bytes_per_s=5e9, step_s=50e-6, per_gpu=False),
}

# The rates are rounded from what examples/fit_device.py finds in measured times of a layer of
# LLaMA-2-7B on one A100-80GB (Vidur's profile). Its attention over chunks of 544 to 3,584 tokens
# after 0 to 3,456 takes as long as all pairs of queries and keys at 116 Tflop/s, masked or not: 7 %
# off in the median. Without the masked pairs, half of a chunk's own, no rate comes closer than
# 24 %. The cache of decodes is read as fast as weights.
A100 = Device(
    name="A100-80GB",
    flops_per_s=227e12,
    bytes_per_s=1.66e12,
    attention_flops_per_s=116e12,
    attention_bytes_per_s=1.66e12,
    memory_bytes=80e9,
    skips_masked=False,
    link="nvlink3",
    source="fit to measured products and attention",
)
A100_SHEET_FLOPS_PER_S = 312e12  # of its data sheet
A100_SHEET_BYTES_PER_S = 2.039e12

# LLaMA-13B: 1,024 prefill tokens take 224.8 ms in linear layers and 10 ms in attention; four
# decodes at 1,024 tokens take 44.28 ms and 5.68 ms. These rates give these times.
A6000 = Device(
    name="A6000",
    flops_per_s=116e12,
    bytes_per_s=584e9,
    attention_flops_per_s=43.8e12,
    attention_bytes_per_s=612e9,
    memory_bytes=48e9,
    link="pcie4",
    source="SARATHI, Table 2",
)


def from_data_sheet(
    name: str,
    *,
    flops_per_s: float,
    bytes_per_s: float,
    memory_bytes: float,
    link: str,
) -> Device:
    """A Device of which only the data sheet is known. It reaches the shares of its peak rates that
    an A100 reaches: 227 / 312 in products, 116 / 312 in attention, 1.66 / 2.039 in bandwidth."""
    times_flops = flops_per_s / A100_SHEET_FLOPS_PER_S
    times_bytes = bytes_per_s / A100_SHEET_BYTES_PER_S
    return Device(
        name=name,
        flops_per_s=times_flops * A100.flops_per_s,
        bytes_per_s=times_bytes * A100.bytes_per_s,
        attention_flops_per_s=times_flops * A100.attention_flops_per_s,
        attention_bytes_per_s=times_bytes * A100.attention_bytes_per_s,
        memory_bytes=memory_bytes,
        skips_masked=A100.skips_masked,
        link=link,
        source="data sheet, and the shares of it that an A100 reaches",
    )


DEVICES = {
    "a100-80gb": A100,
    "a6000": A6000,
    "a40": from_data_sheet(
        "A40",
        flops_per_s=149.7e12,
        bytes_per_s=696e9,
        memory_bytes=48e9,
        link="pcie4",
    ),
    "h100": from_data_sheet(
        "H100",
        flops_per_s=989e12,
        bytes_per_s=3.35e12,
        memory_bytes=80e9,
        link="nvlink4",
    ),
    "h200": from_data_sheet(
        "H200",
        flops_per_s=989e12,
        bytes_per_s=4.8e12,
        memory_bytes=141e9,
        link="nvlink4",
    ),
}

# No forward pass here: learned positions, and two matrices in the MLP, as in GPT-2.
GEOMETRIES = {name: GPTConfig.preset(name) for name in PRESETS} | {
    "gpt3-175b": GPTConfig(
        family="gpt2",
        vocab_size=50257,
        n_layer=96,
        n_head=96,
        n_embd=12288,
        max_positions=4096,
        tie_embeddings=True,
    ),
    "falcon-180b": GPTConfig(
        family="gpt2",
        vocab_size=65024,
        n_layer=80,
        n_head=232,
        n_embd=14848,
        n_kv_head=8,
        head_dim=64,
        max_positions=16384,
        tie_embeddings=True,
    ),
}
PARALLEL_BLOCKS = ("falcon-180b",)  # models whose attention and MLP share one all-reduce


def find(table: Mapping[str, Entry], argument: str, name: str) -> Entry:
    """table[name]. Raises ValueError, naming the argument and what is allowed, for another name."""
    if name not in table:
        raise ValueError(f"{argument}={name!r}: must be one of {', '.join(table)}")
    return table[name]
