"""Who arrives when, and how long they are: the load that an experiment puts on an engine.

Sarathi-Serve (§5, "Workloads") takes the lengths of two datasets and lets requests arrive as a
Poisson process. A workload is a list of `Arrival`, sorted by time: `poisson(lengths, qps, seed)`,
of `sample_lengths`, `fixed_lengths` or `zipf_lengths`; or `read_trace`, from the log of a real
server. The same arguments and seed give the same workload. Read next: run.py, which serves it.
"""

import csv
import io
import math
import reprlib
from collections import namedtuple
from contextlib import suppress
from statistics import NormalDist
from typing import NamedTuple

import numpy as np
import torch

from checks import check_number, check_one_of, check_positive, check_whole
from policies.config import check_memory


class Arrival(NamedTuple):
    """One request: seconds from the start of the run, tokens, and its class and SLOs in seconds."""

    time: float
    prompt_len: int
    output_len: int
    priority: str = "normal"
    ttft_slo: float | None = None
    tbt_slo: float | None = None


# what is published of a dataset, in tokens: (median, 90th percentile) of each, the longest sum
LengthStatistics = namedtuple("LengthStatistics", "prompt output limit")
LENGTHS = {  # Sarathi-Serve, Table 2; the limits are in the text beside it
    "sharegpt4": LengthStatistics(prompt=(1730, 5696), output=(415, 834), limit=8192),
    "arxiv": LengthStatistics(prompt=(7059, 12985), output=(208, 371), limit=16384),
}
SECONDS = "a finite number of seconds, 0 or more", lambda x: 0 <= x < math.inf
TOKENS = "a whole number of 1 to 1e9", lambda x: 1 <= x <= 1e9 and x.is_integer()
# and what each may hold, in words and as a function of a float
TRACE_COLUMNS = {"arrived_at": SECONDS, "num_prefill_tokens": TOKENS, "num_decode_tokens": TOKENS}
MAX_BYTES = 2**26  # of a CSV file: two million requests; /dev/zero has no end


def make_rng(stream, seed):
    """A random generator for one purpose: lengths, gaps and prompts of one seed are independent."""
    check_whole("seed", seed, least=0)
    return np.random.default_rng([stream, seed])


def sample_lengths(name, count, max_len, seed):
    """`count` random pairs (prompt_len, output_len) like those of LENGTHS[name], up to max_len.

    Prompts and outputs are drawn apart, each from the log-normal that its median and 90th
    percentile fix, and again if above the limit, as the authors removed such requests; clipping
    would pile them up there. Their statistics are of what was left, so this cuts the tail twice:
    the median prompt falls to 1,623 tokens (sharegpt4) and 6,887 (arxiv), its 90th percentile to
    4,553 and 11,876, those of outputs by less than 1 %. A max_len below the limit shrinks all
    lengths in proportion, to at least one token. A smaller `count` gives the first of the same
    pairs.
    """
    check_one_of("name", name, LENGTHS)
    check_whole("count", count, least=1)
    check_whole("max_len", max_len, least=2)
    prompt, output, limit = LENGTHS[name]
    median, p90 = np.transpose([prompt, output])
    rng, z = make_rng(1, seed), NormalDist().inv_cdf(0.9)  # standard deviations, median to p90
    pairs = np.empty((0, 2))
    while missing := count - len(pairs):
        drawn = np.rint(median * (p90 / median) ** (rng.standard_normal((missing, 2)) / z))
        pairs = np.concatenate([pairs, drawn[drawn.sum(axis=1) <= limit]])  # (count - missing, 2)
    prompt, output = np.rint(pairs * (min(max_len, limit) / limit)).T
    output = output.clip(1, max_len - 1)
    prompt = prompt.clip(1, max_len - output)  # both may have been rounded up
    return list(zip(prompt.astype(int).tolist(), output.astype(int).tolist()))


def fixed_lengths(prompt_len, output_len, count, max_len):
    """The pair (prompt_len, output_len) `count` times. ValueError if below 1 or above max_len."""
    for name, value in (("prompt_len", prompt_len), ("output_len", output_len), ("count", count)):
        check_whole(name, value, least=1)
    if prompt_len + output_len > max_len:
        raise ValueError(f"{prompt_len=} + {output_len=}: must not exceed {max_len=}")
    return [(prompt_len, output_len)] * count


def zipf_lengths(shortest, longest, theta, pd_ratio, count, seed):
    """`count` random (prompt_len, output_len), "sampled from a Zipf distribution" (SARATHI §5.3).

    Totals of `shortest` to `longest` tokens, the n-th of them with a probability that falls as
    1 / n**theta; theta = 0 makes all alike. Of each total, 1 / (pd_ratio + 1) is output.
    """
    check_whole("shortest", shortest, least=2)
    check_whole("longest", longest, least=shortest)
    check_whole("count", count, least=1)
    check_positive("pd_ratio", pd_ratio)
    theta = check_number("theta", theta, "a finite number of at least 0", least=0)
    places = np.arange(1, longest - shortest + 2)
    odds = places**-theta  # a float: numpy refuses whole numbers to the power of -1
    totals = make_rng(4, seed).choice(places + shortest - 1, size=count, p=odds / odds.sum())
    output = np.rint(totals / (pd_ratio + 1)).clip(1, totals - 1).astype(int)
    return list(zip((totals - output).tolist(), output.tolist()))


def poisson(lengths, qps, seed):
    """Arrivals for [(prompt_len, output_len)], in order, as a Poisson process of `qps` per second.

    The gaps are unit exponentials divided by `qps`: with one seed, two rates see the same requests
    and the same gaps up to a factor, so that a search for the capacity compares like with like. The
    first arrives at 0, as in a trace: an engine that waits for it would measure nothing.
    """
    check_positive("qps", qps)
    gaps = make_rng(2, seed).exponential(size=len(lengths))
    gaps[:1] = 0
    return [Arrival(time, *pair) for time, pair in zip((gaps.cumsum() / qps).tolist(), lengths)]


def rescale(arrivals, qps):
    """The same requests, all gaps times a constant: `qps` per second on average, the first at 0.

    The rate of n arrivals is n - 1 over the time from first to last. ValueError if that is none.
    """
    check_positive("qps", qps)
    if not arrivals or arrivals[0].time == arrivals[-1].time:
        raise ValueError(f"arrivals: {len(arrivals)}, all at one time, have no rate")
    first, span, gaps = arrivals[0].time, arrivals[-1].time - arrivals[0].time, len(arrivals) - 1
    return [a._replace(time=(a.time - first) / span * gaps / qps) for a in arrivals]


def read_trace(file, max_len, scale=1, count=10**9):
    """Read a server's log. Returns (arrivals, left_out), sorted by time, the first at 0.

    `file` is CSV in UTF-8 whose first line names the columns: TRACE_COLUMNS in any order, others
    are ignored. Lengths are multiplied by `scale`, in (0, 1], and rounded, to at least one token.
    The first `count` requests with prompt + output <= max_len are kept; `left_out` were passed
    over. Raises ValueError, naming file, line, column and value, if the file is not such a trace or
    nothing in it fits; OSError if it cannot be read.
    """
    check_whole("max_len", max_len, least=2)
    check_positive("scale", scale, most=1)
    check_whole("count", count, least=1)
    arrivals, left_out, shortest = [], 0, math.inf
    rows = sorted(read_columns(file, TRACE_COLUMNS), key=lambda row: row[0])  # ties stay in order
    for time, *lengths in rows:
        if len(arrivals) == count:
            break
        lengths = [max(1, round(length * scale)) for length in lengths]
        shortest = min(shortest, sum(lengths))
        if sum(lengths) > max_len:
            left_out += 1
        else:
            arrivals.append(Arrival(time, *lengths))
    if not arrivals:
        given = f"none of its {len(rows)} requests fits {max_len=} at {scale=}"
        raise ValueError(f"{file}: {given}: the shortest has {shortest:.15g} tokens")
    return [a._replace(time=a.time - arrivals[0].time) for a in arrivals], left_out


def read_columns(file, columns):
    """The rows of a CSV file whose first line names at least these columns: lists of floats.

    `columns` is {name: (what it may hold, a function that says so of a float)}. Raises ValueError,
    naming file, line, column and value, if the file is not such a one; OSError.
    """
    try:
        with open(file, "rb") as log:
            data = log.read(MAX_BYTES + 1)
        if len(data) > MAX_BYTES:
            raise ValueError(f"{file}: must be at most {MAX_BYTES:,} bytes long")
        text = data.decode("utf-8-sig")  # with or without a byte order mark
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        raise ValueError(f"{file} line {line}: must be UTF-8 text: {error}") from error
    reader, rows = csv.reader(io.StringIO(text, newline=""), strict=True), []
    try:
        header = [name.strip() for name in next(reader, [])]
        for name in columns:
            if (times := header.count(name)) != 1:
                given = f"column {name!r} is {times} times in the header {reprlib.repr(header)}"
                raise ValueError(f"{given}: must have each of {', '.join(columns)} once")
        for fields in filter(None, reader):  # a blank line has no fields
            if len(fields) != len(header):
                given = f"{len(fields)} fields {reprlib.repr(fields)}"
                raise ValueError(f"{given}: must be {len(header)}, as in the header")
            row = dict(zip(header, fields))
            rows.append([parse_field(name, row[name], *its) for name, its in columns.items()])
    except (ValueError, csv.Error) as error:
        must = "must be CSV: " if isinstance(error, csv.Error) else ""
        line = reader.line_num or 1  # an empty file has no line
        raise ValueError(f"{file} line {line}: {must}{error}") from error
    if not rows:
        raise ValueError(f"{file}: nothing after the header: must have at least one row")
    return rows


def parse_field(column, text, words, allowed):
    """The number in one field, a float. ValueError if the column may not hold it."""
    with suppress(ValueError):
        value = float(text)
        if allowed(value):
            return value
    raise ValueError(f"{column}={reprlib.repr(text)}: must be {words}")


def prompts(arrivals, vocab_size, seed):
    """One list of `prompt_len` random token ids below `vocab_size` for each arrival.

    Raises ValueError if they do not fit the memory.
    """
    check_whole("vocab_size", vocab_size, least=1)
    count = sum(arrival.prompt_len for arrival in arrivals)
    check_memory(f"prompts of {count:,} tokens", 40 * count, torch.device("cpu"))
    rng = make_rng(3, seed)
    return [rng.integers(vocab_size, size=arrival.prompt_len).tolist() for arrival in arrivals]
