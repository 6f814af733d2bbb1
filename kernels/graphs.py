"""CUDA graphs of decode-only batches: an iteration is one copy to the GPU and one launch.

A decode-only iteration of a 13B model is 5.4 ms of reading on an H200, less than Python takes to
launch its kernels. A graph remembers kernels with the addresses they were called with. So what
differs from batch to batch lies in tensors that stay, and batches are filled up to sizes that there
are graphs for. Read first: model.py and xformers.py.
"""

import warnings
from array import array

import torch

from kv_cache import Span, slot_mapping
from model import FlatBatch


def graph_size(decodes):
    """How many rows the graph for so many decodes has: 1, 2, 4, 8, 16, 24, 32, …"""
    return next((size for size in (1, 2, 4) if decodes <= size), -(-decodes // 8) * 8)


def wants_graphs(model):
    """Whether decodes of a model run in graphs: if it is compiled, and on CUDA."""
    return model.compiled and model.device.type == "cuda"


class DecodeGraphs:
    """The graphs of one model and its cache, by their size: made by `warm_up`, or when needed. Rows
    that fill a batch up are decodes in the first slot of the last page, which nobody may own."""

    def __init__(self, model, cache, attention):
        self.model, self.cache, self.attention = model, cache, attention
        self.idle = Span([cache.pages - 1], 0, [0])
        self.graphs, self.pool = {}, None  # size -> what `make` returns, or None if it failed

    def warm_up(self, max_batch):
        """Make all graphs for up to `max_batch` decodes, the largest first: they share memory."""
        for size in sorted({graph_size(n + 1) for n in range(max_batch)}, reverse=True):
            self.of(size)

    @torch.inference_mode()
    def prepare(self, spans):
        """Copy a batch to the GPU: a function that launches it and returns what GPT.forward does.
        None, and nothing is done, if a span is longer than a token or there can be no graph."""
        size = graph_size(len(spans))
        if any(span.length > 1 for span in spans) or not (made := self.of(size)):
            return None
        static, graph, logits, _ = made
        numbers = self.numbers([*spans, *[self.idle] * (size - len(spans))])
        static[: len(numbers)].copy_(numbers, non_blocking=True)
        rows = sum(span.wants_logits for span in spans)

        def launch():
            graph.replay()
            return logits[:rows].clone()  # the next launch, of any size, may write there

        return launch

    def of(self, size):
        """The graph of a size, made if there was none yet; None if it could not be made."""
        if size not in self.graphs:
            try:
                self.graphs[size] = self.make(size)
            except RuntimeError as error:  # of CUDA: too little memory, what cannot be captured
                self.graphs[size], why = None, str(error).partition("\n")[0]
                warnings.warn(f"no CUDA graphs of decodes: {why}", stacklevel=3)
        return self.graphs[size]

    def numbers(self, spans):
        """All that decodes differ in, int64, where the GPU can copy it from while others work."""
        rows = [i for i, span in enumerate(spans) if span.wants_logits] + [0] * len(spans)
        tokens, positions = [span.tokens[0] for span in spans], [span.start for span in spans]
        slots = [slot_mapping(s.pages, self.cache.page_size, s.start, s.end)[0] for s in spans]
        numbers = tokens + positions + slots + rows[: len(spans)]
        numbers = array("q", numbers + self.attention.decode_numbers(spans))
        numbers = torch.frombuffer(numbers, dtype=torch.int64)  # faster than from a list
        return numbers.pin_memory() if self.cache.data.is_cuda else numbers

    def make(self, size):
        """(static, graph, logits, owner): `numbers` on the GPU, what computes `logits` from them,
        and what owns the tensors that it reads."""
        if not hasattr(self.attention, "static_plan"):
            raise RuntimeError("they need attention by xformers, not by torch alone")
        attend, masks = self.attention.static_plan([self.idle] * size)
        rows = self.numbers([self.idle] * size)[: 4 * size].to(self.cache.data.device)
        static = torch.cat([rows, *(mask.flatten() for mask in masks)])
        *rows, lengths, where = static.split([size] * 4 + [mask.numel() for mask in masks])

        def compute():
            for mask, numbers in zip(masks, (lengths, where)):
                mask.copy_(numbers.view_as(mask))  # as int32
            return self.model(FlatBatch(*rows, attend), self.cache)

        with torch.cuda.stream(torch.cuda.current_stream(static.device)):  # restored if this fails
            compute()  # what it compiles and loads cannot be captured
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self.pool):
                logits = compute()
        self.pool = graph.pool()
        return static, graph, logits, compute
