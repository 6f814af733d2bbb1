"""How fast keys and values go from one rank to another, while both compute.

Read first: parallel/transfer.py."""

import statistics
import time
from dataclasses import dataclass

from kv_cache import kv_bytes_per_token
from parallel.shard import Shard
from parallel.stages import ParallelRunner, SentChunk
from parallel.transfer import Link
from runtime.lone_chunk import lone_chunk

REPEATS = 5


@dataclass(frozen=True)
class LinkSpeed:
    """The time of a transfer: step_s + bytes / bytes_per_s."""

    step_s: float
    bytes_per_s: float
    token_bytes: int  # keys and values of a token, in all layers


def measure_link(model: Shard, max_len: int, attention: str) -> LinkSpeed:
    """The speed of the link from rank 0 to rank 1, from the medians of a short and a long transfer.
    Each is begun when both ranks begin to prefill max_len tokens."""
    runner = ParallelRunner(model, 2, max_len, max_len, attention)
    link = Link(model.ranks, target=1)
    short = max(1, max_len // 16)
    times = {tokens: _median_s(runner, link, tokens, max_len) for tokens in (short, max_len)}
    token_bytes = kv_bytes_per_token(model.config, model.dtype)
    token_s = max(times[max_len] - times[short], 1e-9) / (max_len - short)
    step_s = max(0.0, times[short] - short * token_s)
    return LinkSpeed(step_s, token_bytes / token_s, token_bytes)


def _median_s(runner: ParallelRunner, link: Link, tokens: int, max_len: int) -> float:
    """The median of the seconds that the keys and values of so many tokens take."""
    ranks = runner.ranks
    seconds = []
    chunk = SentChunk.of(lone_chunk([1], 0, [0] * max_len))
    for _ in range(REPEATS):
        batches = [ranks.tell(rank, "run", runner.key, [chunk]) for rank in (0, 1)]
        number = next(ranks.numbers)
        began = time.perf_counter()
        link.send(number, runner.cache, [0], tokens)
        for command in (number, *batches):
            ranks.wait_for_replies(command, 1)
        seconds.append(ranks.replies.pop(number)[1] - began)
        ranks.tell(1, "write", runner.key, number, [0])
        link.forget_all_but([])
        for command in batches:
            ranks.replies.pop(command)
    return statistics.median(seconds)
