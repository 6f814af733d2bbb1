"""What makes the engine as fast as the machine: take this folder away, and all still runs.

    cpu_blocks, cpu_matmul, flash, xformers    attention's other backends, beside attention/sdpa.py
    packed_linear                              weights as a CPU multiplies them fastest
    pieces                                     long batches, some rows at a time
    cuda_graphs                                decodes on CUDA, launched as one

runtime/runner.py asks whether the folder is there, and nobody else does.

**Types and packings are chosen by rule**, not by a stopwatch, so that two starts on a busy machine
choose alike. On a CPU that is bfloat16 where the processor multiplies it (avx512_bf16, amx_bf16),
packed by oneDNN; else float32, packed by MKL on Intel's and by oneDNN elsewhere. Without these
instructions oneDNN's bfloat16 is a seventh as fast as float32, on an AMD EPYC without AVX-512. On
one that has both, a product of 256 rows with 1536 x 8192 weights takes one thread

    bfloat16    oneDNN 30 ms    plain 31 ms
    float32     oneDNN 60 ms    plain 80 ms    MKL 77 ms

and with 6 rows 1.9 and 3.0 ms, or 4.0, 9.6 and 7.2 ms. Not measured: what the rule costs on a CPU
that is neither Intel's nor AMD's."""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from tqdm import tqdm

from attention.plan import AttentionBackend
from config import GPTConfig
from fast.cpu_blocks import Blocks
from fast.cpu_matmul import Matmul
from fast.cuda_graphs import DecodeGraphs as DecodeGraphs
from fast.fallback import SIXTEEN_BITS, first_that_runs
from fast.flash import Flash
from fast.packed_linear import multiplies_bfloat16
from fast.packed_linear import pack as pack
from fast.padding import padded_sizes
from fast.pieces import cut_long_batches as cut_long_batches
from fast.xformers import XFormers
from kv_cache import KVCache
from model import GPT
from request import Chunk, lone_chunk

BY_MATMUL = (torch.bfloat16,)  # on a CPU; the scores of float16 could overflow
ON_CUDA = {"flash": Flash, "xformers": XFormers, "sdpa": Blocks}  # the fastest first


def fastest_backend(config: GPTConfig, cache: KVCache) -> AttentionBackend:
    """Of ON_CUDA the first that runs; on a CPU matmul for bfloat16; elsewhere sdpa."""
    if cache.data.is_cuda and cache.data.dtype in SIXTEEN_BITS:
        return first_that_runs(ON_CUDA, config, cache)
    if not cache.data.is_cuda and cache.data.dtype in BY_MATMUL:
        return Matmul(config, cache)
    return Blocks(config, cache)


BACKENDS: dict[str, Callable[[GPTConfig, KVCache], AttentionBackend]] = {
    "auto": fastest_backend,
    "matmul": Matmul,
    "xformers-split-k": partial(XFormers, split_k=True),
    **ON_CUDA,
}
DEVICES = {"matmul": "cpu", "flash": "cuda", "xformers": "cuda", "xformers-split-k": "cuda"}


def make_attention(config: GPTConfig, cache: KVCache, backend: str = "auto") -> AttentionBackend:
    """The backend of that name, for a cache. Raises ValueError for an unknown name, or one that is
    not for this device, and as `XFormers`."""
    if backend not in BACKENDS:
        raise ValueError(f"attention={backend!r}: must be one of {', '.join(BACKENDS)}")
    device = cache.data.device.type
    needed = DEVICES.get(backend, device)
    if device != needed:
        raise ValueError(f"attention={backend!r}: runs on {needed} alone, 'sdpa' anywhere")
    return BACKENDS[backend](config, cache)


def fastest_dtype(device: torch.device) -> torch.dtype:
    """The type of weights that a device computes fastest with, by the rule above.

    On a GPU it is bfloat16 if the tensor cores multiply it, as from Ampere on, else float16: before
    (V100, T4) bfloat16 is emulated in float32."""
    if device.type == "cuda":
        has_bfloat16 = torch.cuda.get_device_capability(device) >= (8, 0)
        return torch.bfloat16 if has_bfloat16 else torch.float16
    return torch.bfloat16 if multiplies_bfloat16() else torch.float32


def compile_layers(model: GPT) -> None:
    """torch.compile each layer around attention, which fuses what lies between the products."""
    model.compiled = True
    for block in model.blocks:
        block.project = torch.compile(block.project, dynamic=True)
        block.finish = torch.compile(block.finish, dynamic=True)


def compile_decodes(
    attention: AttentionBackend,
    greedy: Callable[[Sequence[Chunk]], object],
    max_batch: int,
    pages: int,
) -> None:
    """Compute a batch of decodes of each size up to max_batch: nothing is left to be compiled or
    recorded.

    Begins with the largest, whose memory the others share. Spoils the first slots of pages."""
    if not isinstance(attention, Flash | XFormers):
        return  # whose sizes are not padded
    # disable=None: unless on a terminal
    for size in tqdm(padded_sizes(max_batch)[::-1], desc="compile decodes", disable=None):
        tables = [[i % pages] for i in range(min(size, max_batch))]
        greedy([lone_chunk(table, 0, [0]) for table in tables])
