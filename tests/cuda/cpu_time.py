"""CPU time of a layer in a decode-only iteration on CUDA: what bounds a fast GPU.

    python -m tests.cuda.cpu_time

The tensors are tiny and on the CPU, and attention's kernels do nothing. What is left is the time of
Python and torch around about as many kernels as on CUDA. A kernel on the CPU takes the place of a
launch, which costs 3 to 4 us on most hosts. Nothing here is asserted: it depends on the machine."""

import argparse
import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from attention import BACKENDS
from kv_cache import KVCache
from model import GPT, FlatBatch, GPTConfig
from request import Chunk
from runtime.lone_chunk import lone_chunk
from tests.cuda.batches import CUDA_BACKENDS, capability, new_cache, reads_pages

MAX_LEN = 512
PARTS = ("build", "layer", "project", "write", "attend", "finish")


def no_attention(query: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
    """Stands for flash attention's kernel: a result without values."""
    return torch.empty_like(query), *(torch.empty(1) for _ in range(4))


class NoKernel:
    """Stands for a Triton kernel."""

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        return self.launch

    def launch(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing."""


@contextlib.contextmanager
def kernels_that_do_nothing() -> Iterator[None]:
    """Let attention's operators for CUDA run on the CPU, without their kernels."""
    from xformers.ops.fmha import flash, triton_splitk
    from xformers.ops.fmha._triton import splitk_kernels

    library = torch.library.Library("aten", "IMPL")
    library.impl("_flash_attention_forward", no_attention, "CPU")
    flash._flash_fwd.register_kernel("cpu")(flash._flash_fwd._init_fn)
    get_kernel = classmethod(lambda operator: NoKernel())
    with (
        mock.patch.object(triton_splitk.FwOp, "get_kernel", get_kernel),
        mock.patch.object(splitk_kernels, "_splitK_reduce", NoKernel()),
        mock.patch.object(torch.nn.RMSNorm, "forward", lambda norm, x: x * norm.weight),
        capability(8, 0),
        torch.inference_mode(),
    ):
        yield
    library._destroy()


def cpu_us(function: Callable[[], Any], repeats: int) -> float:
    """Microseconds of this thread's CPU for a call: the lower quartile."""
    seconds = []
    for _ in range(repeats + 2):
        start = time.thread_time()
        function()
        seconds.append(time.thread_time() - start)
    return 1e6 * sorted(seconds[2:])[repeats // 4]


def measure(
    attention: str, page_size: int, decodes: int, n_layer: int, repeats: int
) -> list[float]:
    """Microseconds of each of the PARTS, of one layer; "build" is once an iteration."""
    config = GPTConfig(
        vocab_size=16, n_layer=n_layer, n_head=4, n_kv_head=2, n_embd=32, n_inner=16, head_dim=16
    )
    model = GPT(config, dtype=torch.bfloat16)
    width = MAX_LEN // page_size
    cache = new_cache(config, decodes * width, page_size, MAX_LEN, torch.bfloat16)
    backend = BACKENDS[attention](config, cache)
    tables = [list(range(i * width, (i + 1) * width)) for i in range(decodes)]
    spans = [lone_chunk(table, 300, [1]) for table in tables]
    batch = FlatBatch.build(spans, backend)
    return list(time_parts(model, cache, batch, spans, backend, repeats))


def time_parts(
    model: GPT, cache: KVCache, batch: FlatBatch, spans: Sequence[Chunk], backend: Any, repeats: int
) -> Iterator[float]:
    """The times of the PARTS, in their order."""
    block = model.blocks[0]
    x = model.embed(batch)
    rope = model.rope[batch.positions]
    q, kv = block.project(x, rope)
    y = batch.attend(q, *cache.layer(0))
    yield cpu_us(lambda: FlatBatch.build(spans, backend), repeats)
    forward_us = cpu_us(lambda: model.compute_layers(x, batch, cache), repeats)
    yield forward_us / model.config.n_layer
    yield cpu_us(lambda: block.project(x, rope), repeats)
    yield cpu_us(lambda: cache.write(0, kv, batch.slot_mapping), repeats)
    yield cpu_us(lambda: batch.attend(q, *cache.layer(0)), repeats)
    yield cpu_us(lambda: block.finish(x, y), repeats)


def main(argv: Sequence[str] | None = None) -> None:
    """Print a table with a row for each backend and layout of the cache."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--layers", type=int, default=40)
    parser.add_argument("--decodes", type=int, default=6)
    parser.add_argument("--repeats", type=int, default=100)
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    print("us of CPU            page " + "".join(f"{part:>9}" for part in PARTS))
    with kernels_that_do_nothing():
        for attention in ("sdpa", *CUDA_BACKENDS):
            for page_size in (MAX_LEN, 256, 64):
                if attention != "sdpa" and not reads_pages(attention, page_size, MAX_LEN):
                    continue
                times = measure(
                    attention, page_size, options.decodes, options.layers, options.repeats
                )
                row = "".join(f"{microseconds:9.1f}" for microseconds in times)
                print(f"{attention:<20} {page_size:>4} {row}", flush=True)


if __name__ == "__main__":
    main()
