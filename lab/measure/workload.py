"""Who arrives when, and how long they are: the load that an experiment puts on an engine.

Sarathi-Serve (§5, "Workloads") takes the lengths of two datasets and lets requests arrive as a
Poisson process. A workload is a list of `Arrival`, sorted by time: `poisson(lengths, qps, seed)`,
of `make_lengths` or `zipf_lengths`; or `read_trace`, from the log of a real server; `chats` of
either. The same arguments and seed give the same workload. Read next: run.py, which serves it."""

import csv
import re
import reprlib
from collections import namedtuple
from contextlib import suppress
from statistics import NormalDist
from typing import NamedTuple

import numpy as np


class Arrival(NamedTuple):
    """One request: seconds from the start of the run, tokens, and its class and SLOs in seconds. If
    it `follows` the request of that index, it continues its conversation, comes `time` seconds
    after its last token, and `prompt_len` is of the whole conversation so far."""

    time: float
    prompt_len: int
    output_len: int
    priority: str = "normal"
    ttft_slo: float | None = None
    tbt_slo: float | None = None
    follows: int | None = None


THINK_S = 1.0  # seconds from an answer to the next turn of a chat
# what is published of a dataset, in tokens: (median, 90th percentile) of each, the longest sum
LengthStatistics = namedtuple("LengthStatistics", "prompt output limit")
LENGTHS = {  # Sarathi-Serve, Table 2; the limits are in the text beside it
    "sharegpt4": LengthStatistics(prompt=(1730, 5696), output=(415, 834), limit=8192),
    "arxiv": LengthStatistics(prompt=(7059, 12985), output=(208, 371), limit=16384),
}
# what a column may hold, in words and as a function of a float; seconds may be those since 1970
SECONDS = "a number of seconds from 0 to 4e9", lambda x: 0 <= x <= 4e9
TOKENS = "a whole number of 1 to 1e9", lambda x: 1 <= x <= 1e9 and x.is_integer()
TRACE_COLUMNS = {"arrived_at": SECONDS, "num_prefill_tokens": TOKENS, "num_decode_tokens": TOKENS}


def make_rng(stream, seed):
    """A random generator for one purpose: lengths, gaps and prompts of one seed are independent."""
    return np.random.default_rng([stream, seed])


def make_lengths(asked, count, max_len, seed):
    """`count` pairs (prompt_len, output_len): sampled from the LENGTHS of that name, or those of a
    text like "500+50,20+5", which follow each other in equal shares. Raises ValueError."""
    if asked in LENGTHS:
        return sample_lengths(asked, count, max_len, seed)
    own = [re.fullmatch(r" *(\d{1,15}) *\+ *(\d{1,15}) *", pair) for pair in asked.split(",")]
    own = [tuple(map(int, pair.groups())) if pair else (0, 0) for pair in own]
    if any(min(pair) < 1 or sum(pair) > max_len for pair in own):
        form = f"{', '.join(LENGTHS)} or PROMPT+OUTPUT, as in 500+50,20+5, of at most {max_len}"
        raise ValueError(f"--lengths {asked!r:.60}: must be {form}, --max-len less --shared-prefix")
    if len(own) > count:
        raise ValueError(f"--requests {count}: must be at least {len(own)}, as --lengths has")
    return [own[(i * len(own) - 1) // count] for i in range(1, count + 1)]


def sample_lengths(name, count, max_len, seed):
    """`count` random (prompt_len, output_len) like those of LENGTHS[name]. Prompts and outputs are
    drawn apart, each log-normal, and again if above the limit, as the authors removed such
    requests; their statistics are of what was left: the median prompt falls to 1,623 tokens
    (sharegpt4) and 6,887 (arxiv), its 90th percentile to 4,553 and 11,876. A max_len below the
    limit shrinks all in proportion. Fewer are the first of the same pairs."""
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


def zipf_lengths(shortest, longest, theta, pd_ratio, count, seed):
    """`count` random (prompt_len, output_len), "sampled from a Zipf distribution" (SARATHI §5.3).
    The n-th of the totals from `shortest` to `longest` has a probability that falls as 1 / n**theta
    (0 makes all alike); 1 / (pd_ratio + 1) of a total is output."""
    places = np.arange(1, longest - shortest + 2)
    odds = places ** -float(theta)
    totals = make_rng(4, seed).choice(places + shortest - 1, size=count, p=odds / odds.sum())
    output = np.rint(totals / (pd_ratio + 1)).clip(1, totals - 1).astype(int)
    return list(zip((totals - output).tolist(), output.tolist()))


def poisson(lengths, qps, seed):
    """Arrivals for [(prompt_len, output_len)], in order, as a Poisson process of `qps` per second,
    the first at 0. With one seed, two rates see the same gaps up to a factor."""
    gaps = make_rng(2, seed).exponential(size=len(lengths))
    gaps[:1] = 0
    return [Arrival(time, *pair) for time, pair in zip((gaps.cumsum() / qps).tolist(), lengths)]


def rescale(arrivals, qps):
    """The same at `qps` per second on average, from 0 on. Raises ValueError if all come at once."""
    first, span = arrivals[0].time, arrivals[-1].time - arrivals[0].time
    if not span:
        raise ValueError(f"arrivals: {len(arrivals)}, all at one time, have no rate")
    return [a._replace(time=(a.time - first) / span * (len(arrivals) - 1) / qps) for a in arrivals]


def read_trace(
    file: str, max_len: int, scale: float = 1, count: int = 10**9
) -> tuple[list[Arrival], int]:
    """Read a server's log, CSV with TRACE_COLUMNS. Returns (arrivals, left_out), the first at 0.
    Lengths are multiplied by `scale` and rounded, to at least one token. The first `count` requests
    with prompt + output <= max_len are kept; `left_out` were passed over. ValueError, OSError."""
    rows = sorted(read_columns(file, TRACE_COLUMNS), key=lambda row: row[0])  # ties stay in order
    arrivals, left_out = [], 0
    for time, *lengths in rows:
        if len(arrivals) == count:
            break
        prompt_len, output_len = (max(1, round(length * scale)) for length in lengths)
        if prompt_len + output_len > max_len:
            left_out += 1
        else:
            arrivals.append(Arrival(time, prompt_len, output_len))
    if not arrivals:
        raise ValueError(f"{file}: none of its {len(rows)} requests fits {max_len=} at {scale=}")
    return [a._replace(time=a.time - arrivals[0].time) for a in arrivals], left_out


def read_columns(file, columns):
    """The rows of a CSV file with a header and at least these columns: lists of floats. `columns`
    is {name: (what it may hold, a function that says so of a float)}. ValueError or OSError."""
    rows = []
    with open(file, encoding="utf-8-sig", errors="replace", newline="") as log:
        reader = csv.reader(log, strict=True, skipinitialspace=True)
        try:
            header = [name.strip() for name in next(reader, [])]
            for name in columns:
                if (times := header.count(name)) != 1:
                    given = f"column {name!r} is {times} times in the header {reprlib.repr(header)}"
                    raise ValueError(f"{given}: must have each of {', '.join(columns)} once")
            for fields in filter(None, reader):  # a blank line has no fields
                if len(fields) != len(header):
                    raise ValueError(f"{len(fields)} fields: must be {len(header)}")
                row = dict(zip(header, fields))
                rows.append([parse_field(name, row[name], *its) for name, its in columns.items()])
        except (ValueError, csv.Error) as error:
            raise ValueError(f"{file} line {reader.line_num or 1}: {error}") from error
    if not rows:
        raise ValueError(f"{file}: nothing after the header: must have at least one row")
    return rows


def parse_field(column, text, words, allowed):
    """The number in one field, a float. ValueError if the column may not hold it."""
    with suppress(ValueError):
        if allowed(value := float(text)):
            return value
    raise ValueError(f"{column}={reprlib.repr(text)}: must be {words}")


def chats(arrivals, turns):
    """The same, each as a chat of `turns` requests, which share its prompt and output in nearly
    equal parts, at least a token; of fewer turns where there are not so many. First turns keep
    their places, all others come behind them, each THINK_S after the answer before."""
    made = list(arrivals)
    for i, arrival in enumerate(arrivals):
        count = min(turns, arrival.prompt_len, arrival.output_len)
        for n in range(count):
            answered, end = (arrival.output_len * k // count for k in (n, n + 1))
            prompt_len = arrival.prompt_len * (n + 1) // count + answered
            turn = arrival._replace(prompt_len=prompt_len, output_len=end - answered)
            if n == 0:
                made[i] = turn
            else:
                made.append(turn._replace(time=THINK_S, follows=i if n == 1 else len(made) - 1))
    return made


def prompts(arrivals, vocab_size, seed, shared=(0, 1)):
    """A list of random token ids below `vocab_size` for each arrival: `prompt_len` of them, or, if
    it follows another, those after that one's prompt and output. With `shared`, (length, count),
    all that follow none begin with one of `count` prefixes of `length` tokens, drawn at random."""
    rng, (length, count), made = make_rng(3, seed), shared, []
    drawn = make_rng(5, seed).integers(count, size=len(arrivals)).tolist()
    for arrival, which in zip(arrivals, drawn):
        first = arrival.follows is None
        tokens = make_rng(6 + which, seed).integers(vocab_size, size=length * first).tolist()
        known = length if first else sum(arrivals[arrival.follows][1:3])
        made.append(tokens + rng.integers(vocab_size, size=arrival.prompt_len - known).tolist())
    return made
