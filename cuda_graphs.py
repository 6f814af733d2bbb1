"""Batches of decodes alone on CUDA: their sizes are few, and all is compiled before it is timed.

Read first: model.py. Read next: engine.py."""

import sys
from collections.abc import Sequence
from typing import Protocol

from tqdm import tqdm

from attention.decode_sizes import padded_sizes
from attention.flash import Flash
from attention.plan import AttentionBackend
from attention.xformers import XFormers
from kv_cache import KVCache, Span


class DecodeRunner(Protocol):
    """What can compute spans, such as an engine.Runner."""

    cache: KVCache
    attention: AttentionBackend

    def greedy(self, spans: Sequence[Span]) -> list[int]: ...


def compile_decodes(runner: DecodeRunner, max_batch: int) -> None:
    """Compute a batch of decodes of each size, so that no kernel is left to be compiled.

    Spoils the first slot of up to max_batch pages. Where decodes are not padded to a size, as on a
    CPU, nothing is done."""
    if not isinstance(runner.attention, Flash | XFormers):
        return
    hide_bar = None if sys.stderr else True  # None: unless on a terminal
    with tqdm(padded_sizes(max_batch), desc="compile decodes", disable=hide_bar) as bar:
        for size in bar:
            bar.set_postfix_str(f"batch of {size}")
            decodes = min(size, max_batch)
            runner.greedy([Span([i % runner.cache.pages], 0, [0]) for i in range(decodes)])
