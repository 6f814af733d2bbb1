"""How to time, and what to compare the times with.

A time says little without its limit: the matrix products of the same shapes run bare, the bytes
that must be read over the measured bandwidth. Timings are warmed up, synchronised and interleaved
(A B C A B C …): a machine whose speed drifts slows all variants alike. Quoted are medians.
"""

import statistics
import time
from contextlib import ExitStack, contextmanager
from functools import partial
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
    """Time functions without arguments in turn: {name: function} -> {name: Timing}."""
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
    """Bytes per second at which an array much larger than any cache is read, to be summed."""
    array = torch.ones(2**30 if device.type == "cuda" else 2**27, device=device)
    timing = interleaved({"sum": array.sum}, device, repeats=7)["sum"]
    return array.nbytes / (timing.ms / 1e3)


def fastest_cpu_dtype():
    """bfloat16 if this CPU multiplies it faster than float32, else float32. Takes milliseconds."""
    dtypes, shapes = (torch.bfloat16, torch.float32), ((128, 1024), (1024, 1024))
    products = {d: partial(F.linear, *(torch.ones(s, dtype=d) for s in shapes)) for d in dtypes}
    timings = interleaved(products, torch.device("cpu"), repeats=5)
    return min(dtypes, key=lambda dtype: timings[dtype].ms)


def linear_weights(model):
    """The weights of a model's layers in the order of computation, without the output head."""
    layers = [(b.preproj, b.postproj, b.ffn_ln1, b.ffn_ln2) for b in model.blocks]
    return [layer.weight for block in layers for layer in block]


def bare_products(model, num_tokens, num_logits):
    """A function that runs the matrix products of one iteration on its weights, nothing else."""
    weights, head = linear_weights(model), model.head.weight
    like = dict(device=model.device, dtype=model.dtype)
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
    layers = sum(w.numel() for w in linear_weights(model))
    return 2 * (num_tokens * layers + num_logits * model.head.weight.numel())


def attention_alone(runner, spans):
    """A function that runs the attention of one iteration of engine.Runner, nothing else."""
    model, batch = runner.model, runner.flatten(spans)
    shape = (len(batch.tokens), model.config.n_head, model.config.head_dim)
    q = torch.randn(shape, device=model.device, dtype=model.dtype)

    @torch.inference_mode()
    def run():
        for layer in range(model.config.n_layer):
            batch.attend(q, *runner.cache.layer(layer))

    return run


def attention_cost(config, spans, dtype):
    """(flops, bytes) in all layers: two products per visible key, each key and value read once."""
    visible = sum(s.length * s.start + s.length * (s.length + 1) // 2 for s in spans)
    flops = config.n_layer * 4 * visible * config.n_head * config.head_dim
    return flops, sum(span.end for span in spans) * kv_bytes_per_token(config, dtype)


class Stopwatch:
    """Adds up the times from a mark to the next, which stops it. No GPU waits for it."""

    def __init__(self, device):
        self.cuda, self.marks = device.type == "cuda", []

    def mark(self, *_):
        """Start the watch, or stop it. Takes and ignores any arguments, to serve as a hook."""
        mark = torch.cuda.Event(enable_timing=True) if self.cuda else time.perf_counter()
        if self.cuda:
            mark.record()
        self.marks.append(mark)

    def read_ms(self):
        """The sum in milliseconds, and back to zero. On CUDA: synchronise first."""
        marks, self.marks = self.marks, []
        pairs = zip(marks[::2], marks[1::2])
        return sum(a.elapsed_time(b) if self.cuda else (b - a) * 1e3 for a, b in pairs)


@contextmanager
def watch_linear(model):
    """Within the context, yield a Stopwatch that runs while any linear layer of the model does."""
    watch = Stopwatch(model.device)
    with ExitStack() as hooks:
        for layer in model.modules():
            if isinstance(layer, torch.nn.Linear):
                hooks.enter_context(layer.register_forward_pre_hook(watch.mark))
                hooks.enter_context(layer.register_forward_hook(watch.mark))
        yield watch


def watch_attention(batch, watch):
    """The same model.FlatBatch, whose attention runs `watch`."""

    def attend(*args):
        watch.mark()
        out = batch.attend(*args)
        watch.mark()
        return out

    return batch._replace(attend=attend)
