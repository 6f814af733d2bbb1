"""The load that an experiment puts on an engine: when requests arrive, and how long they are.

Sarathi-Serve (§5, "Workloads") takes the lengths of two datasets and lets requests arrive as a
Poisson process. A workload is a list of `Arrival`, sorted by time:

    arrivals = poisson(make_lengths("sharegpt4", 100, 8192, seed=0), qps=1.5, seed=0)
    arrivals, left_out = read_trace("log.csv", max_len=8192)    the log of a real server

The same arguments and seed give the same workload. Read next: run_loop.py, which serves it."""

import csv
from collections.abc import Sequence
from pathlib import Path
from statistics import NormalDist

import numpy as np

from lab.measure.arrival import LENGTHS, Arrival


def make_rng(stream: int, seed: int) -> np.random.Generator:
    """A random generator for one purpose: lengths, gaps and prompts of one seed are independent."""
    return np.random.default_rng([stream, seed])


# ---- Lengths ------------------------------------------------------------------------------------


def make_lengths(text: str, count: int, max_len: int, seed: int) -> list[tuple[int, int]]:
    """`count` pairs (prompt_len, output_len), by the text of --lengths.

    Those of a name in LENGTHS are sampled. Those of a text like "500+50,20+5" follow each other in
    equal shares. Raises ValueError."""
    if text in LENGTHS:
        return sample_lengths(text, count, max_len, seed)
    pairs = []
    for part in text.split(","):
        prompt_len, _, output_len = part.partition("+")
        pairs.append((int(prompt_len), int(output_len)))
    if any(min(pair) < 1 or sum(pair) > max_len for pair in pairs):
        form = f"PROMPT+OUTPUT, of at most {max_len} tokens"
        raise ValueError(f"--lengths {text}: must be {form}, --max-len less --shared-prefix")
    if len(pairs) > count:
        raise ValueError(f"--requests {count}: must be at least {len(pairs)}, as --lengths has")
    return [pairs[(i * len(pairs) - 1) // count] for i in range(1, count + 1)]


def sample_lengths(name: str, count: int, max_len: int, seed: int) -> list[tuple[int, int]]:
    """`count` random (prompt_len, output_len) like those of LENGTHS[name].

    Prompts and outputs are drawn apart, each log-normal. A pair above the limit is drawn again, as
    the authors removed such requests. Their statistics are of what was left: the median prompt
    falls to 1,623 tokens (sharegpt4) and 6,887 (arxiv), its 90th percentile to 4,553 and 11,876.
    A max_len below the limit shrinks all in proportion. Fewer are the first of the same pairs."""
    statistics = LENGTHS[name]
    limit = statistics.limit
    median, p90 = np.transpose([statistics.prompt, statistics.output])
    rng = make_rng(1, seed)
    p90_deviations = NormalDist().inv_cdf(0.9)  # standard deviations from the median to the p90
    pairs = np.empty((0, 2))
    while left := count - len(pairs):
        deviations = rng.standard_normal((left, 2)) / p90_deviations
        candidates = np.rint(median * (p90 / median) ** deviations)
        fitting = candidates[candidates.sum(axis=1) <= limit]
        pairs = np.concatenate([pairs, fitting])  # (count - left, 2)
    prompt, output = np.rint(pairs * (min(max_len, limit) / limit)).T
    output = output.clip(1, max_len - 1)
    prompt = prompt.clip(1, max_len - output)  # both may have been rounded up
    return list(zip(prompt.astype(int).tolist(), output.astype(int).tolist(), strict=True))


def zipf_lengths(
    shortest: int, longest: int, theta: float, pd_ratio: float, count: int, seed: int
) -> list[tuple[int, int]]:
    """`count` random (prompt_len, output_len), "sampled from a Zipf distribution" (SARATHI §5.3).

    The n-th of the totals from `shortest` to `longest` has a probability that falls as 1 / n**theta
    (0 makes all alike). A share of 1 / (pd_ratio + 1) of a total is output."""
    ranks = np.arange(1, longest - shortest + 2)
    weights = ranks ** -float(theta)
    probabilities = weights / weights.sum()
    totals = make_rng(4, seed).choice(ranks + shortest - 1, size=count, p=probabilities)
    output = np.rint(totals / (pd_ratio + 1)).clip(1, totals - 1).astype(int)
    return list(zip((totals - output).tolist(), output.tolist(), strict=True))


# ---- Arrivals -----------------------------------------------------------------------------------


def poisson(lengths: Sequence[tuple[int, int]], qps: float, seed: int) -> list[Arrival]:
    """Arrivals for [(prompt_len, output_len)], in order, as a Poisson process of `qps` per second.

    The first comes at 0. With one seed, two rates see the same gaps up to a factor."""
    gaps = make_rng(2, seed).exponential(size=len(lengths))
    gaps[:1] = 0
    times = (gaps.cumsum() / qps).tolist()
    return [
        Arrival(time, prompt_len, output_len)
        for time, (prompt_len, output_len) in zip(times, lengths, strict=True)
    ]


def rescale(arrivals: Sequence[Arrival], qps: float) -> list[Arrival]:
    """The same at `qps` per second on average, from 0 on. They may not all come at once."""
    first = arrivals[0].time
    span = arrivals[-1].time - first
    return [a._replace(time=(a.time - first) / span * (len(arrivals) - 1) / qps) for a in arrivals]


def read_trace(
    file: str | Path, max_len: int, count: int | None = None
) -> tuple[list[Arrival], int]:
    """Read a server's log: (arrivals, left_out). It is a CSV file with the columns `arrived_at`, in
    seconds, `num_prefill_tokens` and `num_decode_tokens`.

    The first arrives at 0. The first `count` requests with prompt + output <= max_len are kept;
    `left_out` were passed over. Raises ValueError if none is kept."""
    with open(file, encoding="utf-8-sig", newline="") as log:
        rows = [
            Arrival(
                time=float(row["arrived_at"]),
                prompt_len=int(row["num_prefill_tokens"]),
                output_len=int(row["num_decode_tokens"]),
            )
            for row in csv.DictReader(log, skipinitialspace=True)
        ]
    rows.sort(key=lambda arrival: arrival.time)  # ties stay in order
    arrivals: list[Arrival] = []
    left_out = 0
    for arrival in rows:
        if len(arrivals) == count:
            break
        if arrival.prompt_len + arrival.output_len > max_len:
            left_out += 1
        else:
            arrivals.append(arrival)
    if not arrivals:
        raise ValueError(f"{file}: none of its {len(rows)} requests fits {max_len=}")
    return [a._replace(time=a.time - arrivals[0].time) for a in arrivals], left_out


# ---- Prompts ------------------------------------------------------------------------------------


def prompts(
    arrivals: Sequence[Arrival], vocab_size: int, seed: int, shared: tuple[int, int] = (0, 1)
) -> list[list[int]]:
    """A list of random token ids below `vocab_size` for each arrival, `prompt_len` of them.

    With `shared`, (length, count), all begin with one of `count` prefixes of `length` tokens, drawn
    at random."""
    rng = make_rng(3, seed)
    length, count = shared
    prefix_of = make_rng(5, seed).integers(count, size=len(arrivals)).tolist()
    token_ids = []
    for arrival, prefix_number in zip(arrivals, prefix_of, strict=True):
        prefix_rng = make_rng(6 + prefix_number, seed)
        prefix = prefix_rng.integers(vocab_size, size=length).tolist()
        own_tokens = rng.integers(vocab_size, size=arrival.prompt_len - length).tolist()
        token_ids.append(prefix + own_tokens)
    return token_ids
