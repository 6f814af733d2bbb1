"""Who arrives when, and how long they are: the load that an experiment puts on an engine.

Sarathi-Serve (§5, "Workloads") takes the lengths of two datasets, described in its Table 2, and lets requests arrive
at random, as a Poisson process. A workload is a list of `Arrival`, sorted by time, and is made in two steps,

    lengths     sample_lengths (Table 2), fixed_lengths or zipf_lengths: a list of (prompt_len, output_len)
    arrivals    poisson(lengths, qps, seed)

or in one by read_trace, from the log of a real server. `prompts` fills the prompts with random tokens. The same
arguments and seed give the same workload, so that policies and rates can be compared on it.

Read next: engine.py, which serves it.
"""

import csv
import io
import math
import reprlib
from numbers import Real
from pathlib import Path
from statistics import NormalDist
from typing import NamedTuple

import numpy as np

from scheduler import check_positive, check_whole


class Arrival(NamedTuple):
    """One request: its arrival in seconds from the start of the run, its prompt and its output in tokens."""

    time: float
    prompt_len: int
    output_len: int


class LengthStatistics(NamedTuple):
    """What is published of a dataset: medians and 90th percentiles, and the longest prompt + output, all in tokens."""

    prompt_median: int
    prompt_p90: int
    output_median: int
    output_p90: int
    limit: int


# Sarathi-Serve, Table 2; the limits are in the text beside it
LENGTHS = {
    "sharegpt4": LengthStatistics(1730, 5696, 415, 834, limit=8192),
    "arxiv": LengthStatistics(7059, 12985, 208, 371, limit=16384),
}

# columns of a trace, and what each may hold
TRACE_COLUMNS = {
    "arrived_at": "a finite number of seconds, 0 or more",
    "num_prefill_tokens": "a whole number of at least 1",
    "num_decode_tokens": "a whole number of at least 1",
}


def make_rng(stream, seed):
    """A random generator for one purpose, so that lengths, gaps and prompts of one seed are independent."""
    check_whole("seed", seed, least=0)
    return np.random.default_rng([stream, seed])


# -----------------------------------------------------------------------------------------------------
# lengths


def sample_lengths(name, count, max_len, seed):
    """`count` random pairs (prompt_len, output_len) like those of LENGTHS[name], prompt + output <= max_len.

    Prompts and outputs are drawn apart, each from the log-normal that its median and 90th percentile fix. A pair above
    the dataset's limit is drawn again, as the authors removed such requests; clipping would pile up prompts at the
    limit. Their statistics are of what was left, so this cuts the tail twice: it redraws 5 % of the pairs of sharegpt4
    and 4 % of arxiv, takes 6 % and 2 % off the median prompt (1,623 and 6,887 tokens), 20 % and 9 % off its 90th
    percentile (4,553 and 11,876), and less than 1 % off those of the output.

    Where max_len is below the limit, all lengths shrink by max_len / limit, to no less than one token. A smaller
    `count` gives the first of the same pairs. Raises ValueError for an unknown name and for count < 1 or max_len < 2.
    """
    if name not in LENGTHS:
        raise ValueError(f"name={name!r}: must be one of {', '.join(LENGTHS)}")
    check_whole("count", count, least=1)
    check_whole("max_len", max_len, least=2)
    prompt_median, prompt_p90, output_median, output_p90, limit = LENGTHS[name]
    median, p90 = np.array([prompt_median, output_median]), np.array([prompt_p90, output_p90])
    rng, deviations = make_rng(1, seed), NormalDist().inv_cdf(0.9)  # of the 90th percentile from the median
    pairs = np.empty((0, 2))
    while (missing := count - len(pairs)):
        drawn = np.rint(median * (p90 / median) ** (rng.standard_normal((missing, 2)) / deviations))
        pairs = np.concatenate([pairs, drawn[drawn.sum(axis=1) <= limit]])  # (count - missing, 2)
    prompt, output = np.rint(pairs * min(1.0, max_len / limit)).T
    output = output.clip(1, max_len - 1)
    prompt = prompt.clip(1, max_len - output)  # both may have been rounded up
    return list(zip(prompt.astype(int).tolist(), output.astype(int).tolist()))


def fixed_lengths(prompt_len, output_len, count, max_len):
    """The pair (prompt_len, output_len) `count` times. Raises ValueError if one is below 1 or they exceed max_len."""
    for name, value in (("prompt_len", prompt_len), ("output_len", output_len), ("count", count)):
        check_whole(name, value, least=1)
    if prompt_len + output_len > max_len:
        raise ValueError(f"prompt_len={prompt_len} + output_len={output_len}: must not exceed max_len={max_len}")
    return [(prompt_len, output_len)] * count


def zipf_lengths(shortest, longest, theta, pd_ratio, count, seed):
    """`count` random pairs (prompt_len, output_len): SARATHI §5.3, "sampled from a Zipf distribution".

    Totals of `shortest` to `longest` tokens, the n-th of them with a probability that falls as 1 / n**theta; theta = 0
    makes all alike. Of each total, 1 / (pd_ratio + 1) is output.
    """
    check_whole("shortest", shortest, least=2)
    check_whole("longest", longest, least=shortest)
    check_whole("count", count, least=1)
    check_positive("pd_ratio", pd_ratio)
    if not isinstance(theta, Real) or not 0 <= theta < math.inf:
        raise ValueError(f"theta={theta!r}: must be a finite number of at least 0")
    places = np.arange(1, longest - shortest + 2)
    odds = places ** -float(theta)  # of a float: numpy refuses whole numbers to the power of -1
    totals = make_rng(4, seed).choice(places + shortest - 1, size=count, p=odds / odds.sum())
    output = np.rint(totals / (pd_ratio + 1)).clip(1, totals - 1).astype(int)
    return list(zip((totals - output).tolist(), output.tolist()))


# -----------------------------------------------------------------------------------------------------
# arrivals


def poisson(lengths, qps, seed):
    """Arrivals for [(prompt_len, output_len)], in that order, as a Poisson process of `qps` requests per second.

    The gaps between arrivals are unit exponentials divided by `qps`: with one seed, two rates see the same requests
    in the same order, and the same gaps up to a factor, so that a search for the capacity compares like with like. The
    first request arrives at 0, as in a trace, because an engine that waits for it would measure nothing. Raises
    ValueError unless qps is finite and above 0.
    """
    check_positive("qps", qps)
    gaps = make_rng(2, seed).exponential(size=len(lengths))
    gaps[:1] = 0
    return [Arrival(time, *pair) for time, pair in zip((gaps.cumsum() / qps).tolist(), lengths)]


def rescale(arrivals, qps):
    """The same requests with all gaps times a constant, so that `qps` arrive per second on average, the first at 0.

    The rate of n arrivals is n - 1 over the time from the first to the last. Raises ValueError unless qps is finite
    and above 0, and if all arrive at once.
    """
    check_positive("qps", qps)
    if not arrivals or arrivals[0].time == arrivals[-1].time:
        raise ValueError(f"arrivals: {len(arrivals)}, all at one time, have no rate; must be at two times at least")
    first, span = arrivals[0].time, arrivals[-1].time - arrivals[0].time
    return [arrival._replace(time=(arrival.time - first) / span * (len(arrivals) - 1) / qps) for arrival in arrivals]


def read_trace(file, max_len, scale=1, count=None):
    """Read a server's log. Returns (arrivals, left_out), sorted by time, the first at 0.

    `file` is CSV in UTF-8, its first line names the columns: those of TRACE_COLUMNS, in any order; others are ignored.
    All lengths are multiplied by `scale`, above 0 and at most 1, and rounded, to no less than one token. Requests
    with prompt + output > max_len are then left out: `left_out` says how many. With `count`, only the first `count`
    arrivals that fit are kept, and `left_out` counts those that were passed over on the way.

    Raises ValueError, naming file, line, column and value, if the file is not such a trace, or if nothing in it fits,
    and OSError if it cannot be read.
    """
    check_whole("max_len", max_len, least=2)
    check_positive("scale", scale, most=1)
    if count is not None:
        check_whole("count", count, least=1)
    rows = sorted(parse_trace(file), key=lambda row: row[0])  # by time alone: ties stay in the order of the file
    requests = [Arrival(time, *(max(1, round(length * scale)) for length in lengths)) for time, *lengths in rows]
    arrivals, left_out = [], 0
    for request in requests:
        if len(arrivals) == count:
            break
        if request.prompt_len + request.output_len > max_len:
            left_out += 1
        else:
            arrivals.append(request)
    if not arrivals:
        shortest = min(request.prompt_len + request.output_len for request in requests)
        raise ValueError(f"{file}: none of its {len(requests)} requests fits max_len={max_len} at scale={scale}: "
                         f"the shortest has {shortest} tokens")
    return [arrival._replace(time=arrival.time - arrivals[0].time) for arrival in arrivals], left_out


def parse_trace(file):
    """The rows of a trace, as [(arrived_at, num_prefill_tokens, num_decode_tokens)], in the order of the file."""
    try:
        text = Path(file).read_bytes().decode("utf-8-sig")  # with or without a byte order mark
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        raise ValueError(f"{file} line {line}: byte {error.object[error.start]:#x}: must be UTF-8 text") from error
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    rows = []
    try:
        header = [name.strip() for name in next(reader, [])]
        for name in TRACE_COLUMNS:
            if header.count(name) != 1:
                raise ValueError(f"{file} line 1: column {name!r} is {header.count(name)} times in the header "
                                 f"{reprlib.repr(header)}: must have each of {', '.join(TRACE_COLUMNS)} once")
        for fields in filter(None, reader):  # a blank line has no fields
            if len(fields) != len(header):
                raise ValueError(f"{file} line {reader.line_num}: {len(fields)} fields {reprlib.repr(fields)}: "
                                 f"must be {len(header)}, as in the header")
            row = dict(zip(header, fields))
            rows.append([parse_field(f"{file} line {reader.line_num}", name, row[name]) for name in TRACE_COLUMNS])
    except csv.Error as error:
        raise ValueError(f"{file} line {reader.line_num}: must be CSV: {error}") from error
    if not rows:
        raise ValueError(f"{file}: no requests after the header: must have at least one")
    return rows


def parse_field(where, column, text):
    """The number in one field of a trace, a float. Raises ValueError if the column may not hold it."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    allowed = 0 <= value < math.inf if column == "arrived_at" else value >= 1 and value.is_integer()
    if not allowed:
        raise ValueError(f"{where}: {column}={reprlib.repr(text)}: must be {TRACE_COLUMNS[column]}")
    return value


def prompts(arrivals, vocab_size, seed):
    """One list of `prompt_len` random token ids below `vocab_size` for each arrival."""
    check_whole("vocab_size", vocab_size, least=1)
    rng = make_rng(3, seed)
    return [rng.integers(vocab_size, size=arrival.prompt_len).tolist() for arrival in arrivals]
