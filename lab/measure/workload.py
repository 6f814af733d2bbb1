"""The load that an experiment puts on an engine: when requests arrive, and how long they are.

Sarathi-Serve (§5, "Workloads") takes the lengths of two datasets and lets requests arrive as a
Poisson process. A workload is a list of `Arrival`, sorted by time:

    arrivals = poisson(make_lengths("sharegpt4", 100, 8192, seed=0), qps=1.5, seed=0)
    arrivals, left_out = read_trace("log.csv", max_len=8192)    the log of a real server

The same arguments and seed give the same workload. Read next: run_loop.py, which serves it."""

import csv
import re
import reprlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from statistics import NormalDist
from typing import NamedTuple

import numpy as np

from lab.measure.arrival import Arrival


class LengthStatistics(NamedTuple):
    """The published lengths of a dataset, in tokens."""

    prompt: tuple[int, int]  # the median, and the 90th percentile
    output: tuple[int, int]
    limit: int  # of prompt + output


class FieldType(NamedTuple):
    """The numbers that a field of a CSV file may hold."""

    description: str
    allows: Callable[[float], bool]


def _is_time(value: float) -> bool:
    """Whether a number is a time. It may count from 1970."""
    return 0 <= value <= 4e9


def _is_token_count(value: float) -> bool:
    """Whether a number is a number of tokens."""
    return 1 <= value <= 1e9 and value.is_integer()


LENGTHS = {  # Sarathi-Serve, Table 2; the limits are in the text beside it
    "sharegpt4": LengthStatistics(prompt=(1730, 5696), output=(415, 834), limit=8192),
    "arxiv": LengthStatistics(prompt=(7059, 12985), output=(208, 371), limit=16384),
}
SECONDS = FieldType("a number of seconds from 0 to 4e9", _is_time)
TOKENS = FieldType("a whole number of 1 to 1e9", _is_token_count)
TRACE_COLUMNS = {"arrived_at": SECONDS, "num_prefill_tokens": TOKENS, "num_decode_tokens": TOKENS}


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
    pairs = [_parse_pair(part) for part in text.split(",")]
    if any(min(pair) < 1 or sum(pair) > max_len for pair in pairs):
        form = f"{', '.join(LENGTHS)} or PROMPT+OUTPUT, as in 500+50,20+5, of at most {max_len}"
        raise ValueError(f"--lengths {text!r:.60}: must be {form}, --max-len less --shared-prefix")
    if len(pairs) > count:
        raise ValueError(f"--requests {count}: must be at least {len(pairs)}, as --lengths has")
    return [pairs[(i * len(pairs) - 1) // count] for i in range(1, count + 1)]


def _parse_pair(text: str) -> tuple[int, int]:
    """The pair of a text like "500+50". (0, 0) if it is none."""
    pair = re.fullmatch(r" *(\d{1,15}) *\+ *(\d{1,15}) *", text)
    if not pair:
        return 0, 0
    return int(pair[1]), int(pair[2])


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
    """The same at `qps` per second on average, from 0 on. Raises ValueError if all come at once."""
    first = arrivals[0].time
    span = arrivals[-1].time - first
    if not span:
        raise ValueError(f"arrivals: {len(arrivals)}, all at one time, have no rate")
    return [a._replace(time=(a.time - first) / span * (len(arrivals) - 1) / qps) for a in arrivals]


def read_trace(
    file: str | Path, max_len: int, scale: float = 1, count: int = 10**9
) -> tuple[list[Arrival], int]:
    """Read a server's log, a CSV file with TRACE_COLUMNS. Returns (arrivals, left_out).

    The first arrives at 0. Lengths are multiplied by `scale` and rounded, to at least one token.
    The first `count` requests with prompt + output <= max_len are kept; `left_out` were passed
    over. Raises ValueError and OSError."""
    rows = read_columns(file, TRACE_COLUMNS)
    rows.sort(key=lambda row: row[0])  # ties stay in order
    arrivals: list[Arrival] = []
    left_out = 0
    for time, prompt_tokens, output_tokens in rows:
        if len(arrivals) == count:
            break
        prompt_len = max(1, round(prompt_tokens * scale))
        output_len = max(1, round(output_tokens * scale))
        if prompt_len + output_len > max_len:
            left_out += 1
        else:
            arrivals.append(Arrival(time, prompt_len, output_len))
    if not arrivals:
        raise ValueError(f"{file}: none of its {len(rows)} requests fits {max_len=} at {scale=}")
    return [a._replace(time=a.time - arrivals[0].time) for a in arrivals], left_out


def read_columns(file: str | Path, columns: Mapping[str, FieldType]) -> list[list[float]]:
    """The rows of a CSV file that has a header and at least these columns, in their order.

    Raises ValueError or OSError."""
    rows = []
    with open(file, encoding="utf-8-sig", errors="replace", newline="") as log:
        reader = csv.reader(log, strict=True, skipinitialspace=True)
        try:
            header = [name.strip() for name in next(reader, [])]
            _check_header(header, columns)
            for fields in reader:
                if not fields:  # a blank line
                    continue
                if len(fields) != len(header):
                    raise ValueError(f"{len(fields)} fields: must be {len(header)}")
                row = dict(zip(header, fields, strict=True))
                rows.append(
                    [parse_field(name, row[name], field) for name, field in columns.items()]
                )
        except (ValueError, csv.Error) as error:
            raise ValueError(f"{file} line {reader.line_num or 1}: {error}") from error
    if not rows:
        raise ValueError(f"{file}: nothing after the header: must have at least one row")
    return rows


def _check_header(header: Sequence[str], columns: Mapping[str, FieldType]) -> None:
    """Raises ValueError unless each of the columns is once in the header."""
    for name in columns:
        times = header.count(name)
        if times != 1:
            counted = f"column {name!r} is {times} times in the header {reprlib.repr(header)}"
            raise ValueError(f"{counted}: must have each of {', '.join(columns)} once")


def parse_field(column: str, text: str, field: FieldType) -> float:
    """The number in a field. Raises ValueError if the column may not hold it."""
    with suppress(ValueError):
        value = float(text)
        if field.allows(value):
            return value
    raise ValueError(f"{column}={reprlib.repr(text)}: must be {field.description}")


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
