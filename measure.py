"""How to time, and what to compare the times with.

A time says little without its limit: the matrix products of the same shapes run bare, the bytes that must be
read over the measured memory bandwidth. The functions here measure both sides. Timings are warmed up,
synchronised and interleaved (A B C A B C …), so that a machine whose speed drifts slows all variants alike; what
is quoted is the median, and the spread is the distance between the quartiles relative to it.

Read next: experiments.py, which measures SARATHI's claims.
"""

import statistics
import time
from contextlib import contextmanager
from typing import NamedTuple

import torch
import torch.nn.functional as F

from kv_cache import kv_bytes_per_token


WARMUP = 2  # runs that are not counted


class Timing(NamedTuple):
    """A median in milliseconds, and the distance between the quartiles as a fraction of it."""

    ms: float
    spread: float


def synchronize(device):
    """Wait until the device has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def interleaved(variants, device, repeats=9):
    """Time functions in turn. `variants` maps a name to a function without arguments; returns name -> Timing."""
    samples = {name: [] for name in variants}
    for repeat in range(WARMUP + repeats):
        for name, function in variants.items():
            synchronize(device)
            start = time.perf_counter()
            function()
            synchronize(device)
            if repeat >= WARMUP:
                samples[name].append((time.perf_counter() - start) * 1e3)
    return {name: summarize(values) for name, values in samples.items()}


def summarize(values_ms):
    """The Timing of a list of samples in milliseconds, of which there must be at least two."""
    low, median, high = statistics.quantiles(values_ms, n=4, method="inclusive")
    return Timing(median, (high - low) / median if median else 0.0)


def memory_bandwidth(device):
    """Bytes per second at which an array much larger than any cache is read once, measured by summing it."""
    megabytes = 4096 if device.type == "cuda" else 512
    array = torch.ones(megabytes * 2**20 // 4, device=device)
    timing = interleaved({"sum": array.sum}, device, repeats=7)["sum"]
    return array.numel() * 4 / (timing.ms / 1e3)


def fastest_cpu_dtype():
    """bfloat16 if this CPU multiplies it faster than float32, else float32. Takes a few milliseconds."""
    products = {}
    for dtype in (torch.bfloat16, torch.float32):
        x, w = torch.ones(128, 1024, dtype=dtype), torch.ones(1024, 1024, dtype=dtype)
        products[dtype] = lambda x=x, w=w: F.linear(x, w)
    timings = interleaved(products, torch.device("cpu"), repeats=5)
    return min(timings, key=lambda dtype: timings[dtype].ms)


def linear_weights(model):
    """The weights of a model's layers in the order of computation, without the output head."""
    return [layer.weight for block in model.blocks
            for layer in (block.preproj, block.postproj, block.ffn_ln1, block.ffn_ln2)]


def bare_products(model, num_tokens, num_logits):
    """A function that runs the matrix products of one iteration on the model's own weights, and nothing else."""
    weights = linear_weights(model)
    head, like = model.head.weight, dict(device=model.device, dtype=model.dtype)
    x = {n_in: torch.randn(num_tokens, n_in, **like) for n_in in {w.shape[1] for w in weights}}
    last = torch.randn(num_logits, head.shape[1], **like)

    @torch.inference_mode()
    def run():
        for w in weights:
            F.linear(x[w.shape[1]], w)
        if num_logits:
            F.linear(last, head)

    return run


def product_flops(model, num_tokens, num_logits):
    """Floating-point operations of `bare_products`: two for each weight and row."""
    return 2 * (num_tokens * sum(w.numel() for w in linear_weights(model)) + num_logits * model.head.weight.numel())


def attention_cost(config, extents, dtype):
    """(flops, bytes) of attention in all layers: two products per visible key, each key and value read once."""
    flops = keys = 0
    for _, start, length in extents:
        visible = length * start + length * (length + 1) // 2
        flops += 4 * visible * config.n_head * config.head_dim
        keys += start + length
    return config.n_layer * flops, keys * kv_bytes_per_token(config, dtype)


class Stopwatch:
    """Adds up the time between `start()` and `stop()`. On CUDA with events, which do not make the GPU wait."""

    def __init__(self, device):
        self.cuda = device.type == "cuda"
        self.marks = []

    def _mark(self):
        if not self.cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def start(self, *_):
        """Start the watch. Takes and ignores any arguments, to serve as a hook."""
        self.marks.append(self._mark())

    def stop(self, *_):
        """Stop the watch."""
        self.marks.append(self._mark())

    def read_ms(self):
        """The sum in milliseconds, and back to zero. On CUDA: synchronise first."""
        pairs = list(zip(self.marks[::2], self.marks[1::2]))
        self.marks = []
        return sum(a.elapsed_time(b) if self.cuda else (b - a) * 1e3 for a, b in pairs)


@contextmanager
def watch_linear(model):
    """Within the context, yield a Stopwatch that runs while any linear layer of the model does."""
    watch = Stopwatch(model.device)
    hooks = []
    for layer in model.modules():
        if isinstance(layer, torch.nn.Linear):
            hooks += [layer.register_forward_pre_hook(watch.start), layer.register_forward_hook(watch.stop)]
    try:
        yield watch
    finally:
        for hook in hooks:
            hook.remove()


def watch_attention(batch, watch):
    """The same FlatBatch, whose attention runs `watch`."""
    def attend(q, keys, values):
        watch.start()
        out = batch.attend(q, keys, values)
        watch.stop()
        return out

    return batch._replace(attend=attend)
