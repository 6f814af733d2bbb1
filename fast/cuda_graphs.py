"""Batches of decodes alone on CUDA, replayed as CUDA graphs.

A decode-only iteration of a large model launches hundreds of small kernels, and the CPU needs about
as long to launch them as a fast GPU to run them. A CUDA graph of all layers is recorded once for
each size of batch, and then launched as a whole. It reads the tensors that it was recorded with:
each batch is copied into them first. What differs between two batches of decodes is only

    tokens, positions, slot_mapping     of FlatBatch
    seqused_k                           how many keys each decode attends to
    cu_seqlens_k, or block_table        where these keys are

while cu_seqlens_q counts 0, 1, 2, ... in all of them. The head is computed after the graph, on the
rows whose logits are wanted: logits take far more memory than the rows that a graph must keep.

Sizes are padded (padding.py). The rows that are added hold any token at any place.
They write their keys and values to the cache's scratch slot, attend to one key, and nobody reads
them.

Read first: model.py, flash.py."""

import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attention.plan import AttentionBackend
from fast.flash import FlashPlan
from fast.padding import padded_size
from kv_cache import KVCache
from model import GPT, FlatBatch
from request import lone_chunk


class Recording(NamedTuple):
    """A recorded computation: `replay` computes `output` again, in the same memory."""

    replay: Callable[[], None]
    output: Tensor


def record(compute: Callable[[], Tensor], stream: Any, pool: Any) -> Recording:
    """Record a computation on a CUDA stream.

    cuBLAS keeps memory for each stream, so there is one for all recordings. Those with one `pool`
    share their temporary memory."""
    caller = torch.cuda.current_stream(stream.device)
    stream.wait_stream(caller)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):  # on its device
        compute()  # libraries allocate what they keep, which they cannot while recording
        # thread_local: what other threads do on CUDA meanwhile does not break the recording
        with torch.cuda.graph(graph, pool, stream, capture_error_mode="thread_local"):
            output = compute()
    caller.wait_stream(stream)
    return Recording(graph.replay, output)


class DecodeGraph(NamedTuple):
    """The recording of a batch of some size."""

    batch: FlatBatch  # whose tensors it reads
    plan: FlashPlan  # the batch's
    recording: Recording  # its output is what the layers compute, (size, n_embd)
    rope: Tensor | None  # which it reads, also after the model has made a longer one


class DecodeGraphs:
    """Computes batches: those of decodes alone by CUDA graphs, where attention is flash's."""

    has_failed = False  # in this process: torch's allocator does not get over a broken recording

    def __init__(self, model: GPT, cache: KVCache, attention: AttentionBackend) -> None:
        self.model = model
        self.cache = cache
        self.attention = attention
        self.graphs: dict[int, DecodeGraph] = {}  # by size, recorded when it is first needed
        self.pool: Any = None
        self.stream: Any = None

    @torch.inference_mode()
    def forward(self, batch: FlatBatch) -> Tensor:
        """Logits, as of GPT.forward."""
        plan = batch.attend
        if isinstance(plan, FlashPlan) and all(call.max_q == 1 for call in plan.calls):
            graph = self.graph_of(padded_size(len(batch.tokens)))
            if graph is not None:
                self.copy_into(graph, batch, plan)
                graph.recording.replay()
                return self.model.logits(graph.recording.output, batch)
        return self.model(batch, self.cache)

    def graph_of(self, size: int) -> DecodeGraph | None:
        """The graph of a size. None if recording fails; then a warning says why, once."""
        if size not in self.graphs and not self.has_failed:
            try:
                self.graphs[size] = self.record_size(size)
            except torch.OutOfMemoryError:
                raise
            except Exception as error:  # libraries that cannot be recorded have no type in common
                DecodeGraphs.has_failed = True
                cause = error.__context__ or error  # before the end of the recording failed, too
                reason = f"{type(cause).__name__}: {cause}".partition("\n")[0]
                warnings.warn(f"decodes run without CUDA graphs, slower: {reason}", stacklevel=5)
        return self.graphs.get(size)

    def record_size(self, size: int) -> DecodeGraph:
        """Record a batch of that many decodes, all of which are padding."""
        batch = FlatBatch.build(size * [lone_chunk([0], 0, [0])], self.attention)
        batch.slot_mapping.fill_(self.cache.scratch_slot)
        if self.pool is None and self.cache.data.is_cuda:
            self.pool = torch.cuda.graph_pool_handle()
            self.stream = torch.cuda.Stream(self.cache.data.device)
        assert isinstance(batch.attend, FlashPlan)

        def compute() -> Tensor:
            return self.model.compute_layers(self.model.embed(batch), batch, self.cache)

        recording = record(compute, self.stream, self.pool)
        return DecodeGraph(batch, batch.attend, recording, self.model.rope)

    def copy_into(self, graph: DecodeGraph, batch: FlatBatch, plan: FlashPlan) -> None:
        """Let the graph's first rows be those of a batch, and the others padding."""
        decodes = len(batch.tokens)
        static = graph.batch
        (static_call,) = graph.plan.calls
        (call,) = plan.calls
        static.tokens[:decodes].copy_(batch.tokens)
        static.positions[:decodes].copy_(batch.positions)
        static.slot_mapping[:decodes].copy_(batch.slot_mapping)
        static.slot_mapping[decodes:].fill_(self.cache.scratch_slot)
        static_call.seqused_k[:decodes].copy_(call.seqused_k)
        static_call.seqused_k[decodes:].fill_(1)
        if call.block_table is None:
            static_call.cu_seqlens_k[:decodes].copy_(call.cu_seqlens_k[:decodes])
        else:
            assert static_call.block_table is not None
            static_call.block_table[:decodes].copy_(call.block_table)
