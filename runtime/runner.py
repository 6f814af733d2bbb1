"""A model with its cache, and all that makes it fast on this device.

    runner = Runner(model, pages=16, page_size=2048)
    logits = runner.forward(FlatBatch.build(chunks, runner.attention))
    tokens = runner.sample(logits, chunks)

Read first: engine.py, which calls it. Read next: fast/__init__.py."""

from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from attention.plan import AttentionBackend
from attention.sdpa import SDPA
from kv_cache import KVCache
from model import GPT, FlatBatch
from request import Chunk
from sampling import SamplingParams, sample

Sampled = tuple[int, float | None]  # a token; its logprob, if a request in the batch wants it


def find_fast() -> Any:
    """The folder fast/, imported, or None if it was taken away."""
    return import_module("fast") if find_spec("fast") else None


class Runner:
    """Launches batches, and fetches their tokens."""

    def __init__(
        self,
        model: GPT,
        pages: int,
        page_size: int,
        max_len: int | None = None,
        attention: str = "auto",
    ) -> None:
        """`attention` is a name in fast.BACKENDS: without the folder, "auto" and "sdpa"."""
        self.model = model
        self.cache = KVCache(model.config, pages, page_size, model.device, model.dtype, max_len)
        self.attention: AttentionBackend = SDPA(model.config, self.cache)
        self.fast = find_fast()
        if self.fast is not None:
            self.fast.pack(model)
            self.fast.cut_long_batches(model)
            self.attention = self.fast.make_attention(model.config, self.cache, attention)
            self.graphs = self.fast.DecodeGraphs(model, self.cache, self.attention)
        elif attention not in ("auto", "sdpa"):
            raise ValueError(f"attention={attention!r}: needs the folder fast/")

    def forward(self, batch: FlatBatch) -> Tensor:
        """Compute a batch: its logits, as of GPT.forward."""
        if self.fast is not None:
            return self.graphs.forward(batch)
        return self.model(batch, self.cache)

    def greedy(self, chunks: Sequence[Chunk]) -> list[int]:
        """The likeliest next token of each chunk that yields one. Waits for a GPU."""
        logits = self.forward(FlatBatch.build(chunks, self.attention))
        if len(logits) == 0:
            self.wait()
        return logits.argmax(dim=-1).tolist()

    def sample(self, logits: Tensor, batch: Sequence[Chunk]) -> list[int | None]:
        """The token after each chunk, None for one that yields none, see tokens_of."""
        requests = [chunk.request for chunk in batch if chunk.yields_token]
        params = [request.params for request in requests]
        positions = [len(request.tokens) - request.prompt_len for request in requests]
        return tokens_of(batch, self.fetch(logits, params, positions))

    def fetch(
        self, logits: Tensor, params: Sequence[SamplingParams], positions: Sequence[int]
    ) -> list[Sampled]:
        """Sample on the device and read the tokens from it, in one transfer.

        Row i of logits decides output token positions[i] of a request with params[i]."""
        if not params:
            self.wait()
            return []
        tokens, logprobs = sample(logits, params, positions)
        if logprobs is None:
            return [(token, None) for token in tokens.tolist()]
        pairs = torch.stack([tokens.double(), logprobs.double()], dim=1).tolist()
        return [(int(token), logprob) for token, logprob in pairs]

    def wait(self) -> None:
        """Wait for a GPU, or an iteration would seem to end before it does."""
        if self.cache.data.is_cuda:
            torch.cuda.current_stream(self.cache.data.device).synchronize()

    def warm_up(self, max_batch: int) -> None:
        """Clear the cache, and let fast/ compile what it needs for max_batch decodes."""
        self.cache.data.zero_()
        if self.fast is not None:
            self.fast.compile_decodes(self.attention, self.greedy, max_batch, self.cache.pages)


def tokens_of(batch: Sequence[Chunk], sampled: Sequence[Sampled]) -> list[int | None]:
    """The token of each chunk, None for a chunk that yields none. Requests learn their logprobs."""
    results = iter(sampled)
    tokens: list[int | None] = []
    for chunk in batch:
        if not chunk.yields_token:
            tokens.append(None)
            continue
        token, logprob = next(results)
        tokens.append(token)
        request = chunk.request
        if logprob is not None and request.params.logprobs:
            # a step that is repeated writes it again
            request.logprobs[chunk.end - request.prompt_len :] = [logprob]
    return tokens
