"""From what the engine recorded to numbers: latencies, generation stalls, throughput, what the batches were made of.

Pure functions of completions (engine.Completion) and iterations (engine.Iteration, in the order of time), which are on
one clock. They return plain numbers that json can write; a number that does not exist is None, never 0 and never NaN.
The latencies and their percentiles are those of Sarathi-Serve §2.4, generation stalls those of its §3.2 and Figure 1,
the condition for capacity that of its §5.1.

Requests that did not end well: a TTFT, a TBT and a scheduling delay count as soon as they were seen, also of a request
that was aborted or still runs. A latency (arrival to last token) counts only of a request that finished.

Read first: engine.py, for Completion and Iteration. Read next: chrome_trace.py, which draws the same records.
"""

from collections import Counter
from functools import cache
from typing import NamedTuple

import numpy as np

FINISHED = ("stop", "length")  # the reasons of a request that got all its output


class Stall(NamedTuple):
    """A generation stall: a gap between two tokens of a request in which prefill of other requests was computed."""

    request_id: int  # who waited
    start: float  # when its previous token was known, in s
    end: float  # when its next token was known, in s
    prefill_tokens: int  # of others, computed in the gap
    caused_by: int  # the request with most of these tokens; of equals, the one computed first

    @property
    def seconds(self):
        """The whole gap: its share of the time of a hybrid batch cannot be told from the decode's own."""
        return self.end - self.start


def percentiles(values):
    """{"p50", "p90", "p99", "max"} of the values that are not None, linearly interpolated; all None without values."""
    values = [value for value in values if value is not None]
    if not values:
        return {"p50": None, "p90": None, "p99": None, "max": None}
    return dict(zip(("p50", "p90", "p99", "max"), np.quantile(values, [0.5, 0.9, 0.99, 1.0]).tolist()))


def find_stalls(completions, iterations, longer_than=0.0):
    """Every generation stall of more than `longer_than` seconds, as a list of Stall, request by request.

    A gap holds the iterations that began in it: from the request's previous token, until before its next. A request
    that prefills itself again after a preemption does not stall itself. A decode that rides with a chunk waits for
    it, too: under stall-free scheduling stalls are many and short, and it takes a threshold, such as the SLO of TBT,
    to see that they do no harm.
    """
    groups, group_of = {}, {}  # micro-batch -> its (start of each iteration, prefill chunks, how many before each)
    for iteration in iterations:  # request -> micro-batch, of which there are several only in a simulation
        starts, prefills, before = groups.setdefault(iteration.micro_batch, ([], [], [0]))
        starts.append(iteration.start)
        its = [(request_id, length) for request_id, length, is_decode in iteration.chunks if not is_decode]
        group_of |= {request_id: iteration.micro_batch for request_id, _ in its}
        prefills += its
        before.append(len(prefills))
    groups = {number: (np.array(starts), prefills, np.array(before))
              for number, (starts, prefills, before) in groups.items()}

    @cache  # requests that decode together share their gaps, so each is summed once and not for each of them
    def prefilled(group, first, last):
        """Prefill tokens of each request in prefills[first:last], their sum, and who had the most."""
        tokens = {}
        for request_id, length in groups[group][1][first:last]:
            tokens[request_id] = tokens.get(request_id, 0) + length
        return tokens, sum(tokens.values()), max(tokens, key=tokens.get)

    stalls = []
    for completion in completions:
        own, times = completion.request_id, completion.token_times
        group = group_of.get(own, next(iter(groups), None))
        if group is None:
            break
        starts, _, before = groups[group]
        seen = before[np.searchsorted(starts, times)].tolist()  # prefill chunks up to each token
        for start, end, first, last in zip(times, times[1:], seen, seen[1:]):
            if first == last or end - start <= longer_than:
                continue
            tokens, total, cause = prefilled(group, first, last)
            if own in tokens:  # it was preempted and prefilled again
                others = {request_id: n for request_id, n in tokens.items() if request_id != own}
                total, cause = sum(others.values()), max(others, key=others.get, default=None)
            if total:
                stalls.append(Stall(own, start, end, total, cause))
    return stalls


def summarize_latencies(completions, seconds):
    """The part of `summarize_run` that needs no iterations: requests … never_scheduled, latencies, throughput, sums."""
    if not seconds >= 0:
        raise ValueError(f"seconds={seconds}: must be at least 0")
    finished = [c for c in completions if c.finish_reason in FINISHED]
    aborted = sum(c.finish_reason == "abort" for c in completions)
    output = sum(len(c.token_times) for c in completions)
    prompts = sum(len(c.prompt) for c in completions if c.token_times)
    return {
        "requests": len(completions), "finished": len(finished), "aborted": aborted,
        "unfinished": len(completions) - len(finished) - aborted,
        "never_scheduled": sum(c.scheduled is None for c in completions),
        "ttft_s": percentiles(c.ttft for c in completions),
        "tbt_s": percentiles(gap for c in completions for gap in c.tbt),
        "scheduling_delay_s": percentiles(c.scheduling_delay for c in completions),
        "latency_s": percentiles(c.latency for c in finished),
        "tokens_per_s": _ratio(prompts + output, seconds),
        "output_tokens_per_s": _ratio(output, seconds),
        "requests_per_s": _ratio(len(finished), seconds),
        "preemptions": sum(c.preemptions for c in completions),
        "recomputed_tokens": sum(c.recomputed_tokens for c in completions),
    }


def summarize_run(completions, iterations, seconds, tbt_slo_s=None):
    """What the table prints and the JSON holds of one run of `seconds` seconds, as a dict.

    requests, finished, aborted, unfinished, never_scheduled     counts; each request is one of the middle three
    ttft_s, tbt_s, scheduling_delay_s, latency_s     `percentiles`, of TBT over all gaps of all requests
    tokens_per_s, output_tokens_per_s, requests_per_s     over `seconds`: prompt + output tokens, output tokens,
        finished requests. A prompt counts once its first output token is there, an output token always
    preemptions, recomputed_tokens     sums
    stalls     count; over_slo: how many are longer than `tbt_slo_s`, None without it; total_s: their sum over all
        requests; length_s: `percentiles`; longest: the longest Stall, as a dict with its seconds, or None
    iterations, prefill_only, decode_only, hybrid     their number, and which shares of it were batches of that kind
    prefill_tokens_per_iteration, decode_tokens_per_iteration, tokens_per_iteration     means
    running_mean, running_peak     requests running at once; the mean is weighted by the iterations' times, so it
        leaves out the time when the engine was idle
    free_pages_min     the fewest pages that were free when a batch was made

    Raises ValueError if `seconds` is negative.
    """
    prefill = [iteration.prefill_tokens for iteration in iterations]
    decode = [iteration.decode_tokens for iteration in iterations]
    kinds = Counter((p > 0, d > 0) for p, d in zip(prefill, decode))
    times = [iteration.end - iteration.start for iteration in iterations]
    running = [iteration.running for iteration in iterations]
    return summarize_latencies(completions, seconds) | {
        "stalls": _summarize_stalls(find_stalls(completions, iterations), tbt_slo_s),
        "iterations": len(iterations),
        "prefill_only": _ratio(kinds[True, False], len(iterations)),
        "decode_only": _ratio(kinds[False, True], len(iterations)),
        "hybrid": _ratio(kinds[True, True], len(iterations)),
        "prefill_tokens_per_iteration": _ratio(sum(prefill), len(iterations)),
        "decode_tokens_per_iteration": _ratio(sum(decode), len(iterations)),
        "tokens_per_iteration": _ratio(sum(prefill) + sum(decode), len(iterations)),
        "running_mean": _ratio(sum(n * time for n, time in zip(running, times)), sum(times)),
        "running_peak": max(running, default=None),
        "free_pages_min": min((iteration.free_pages for iteration in iterations), default=None),
    }


def _ratio(amount, whole):
    return float(amount / whole) if whole else None


def _summarize_stalls(stalls, tbt_slo_s):
    longest = max(stalls, key=lambda stall: stall.seconds, default=None)
    return {
        "count": len(stalls),
        "over_slo": None if tbt_slo_s is None else sum(stall.seconds > tbt_slo_s for stall in stalls),
        "total_s": float(sum(stall.seconds for stall in stalls)),
        "length_s": percentiles(stall.seconds for stall in stalls),
        "longest": longest and longest._asdict() | {"seconds": longest.seconds},
    }


def request_rows(completions, stalls):
    """A dict for each request, for csv.DictWriter; `stalls` are those of `find_stalls`. What is missing is None."""
    stalls_of = {}
    for stall in stalls:
        stalls_of.setdefault(stall.request_id, []).append(stall)
    rows = []
    for c in completions:
        waited = stalls_of.get(c.request_id, [])
        longest = max(waited, key=lambda stall: stall.seconds, default=None)
        tbt = percentiles(c.tbt)
        rows.append({
            "request_id": c.request_id, "priority": c.priority, "arrival": c.arrival,
            "prompt_tokens": len(c.prompt), "output_tokens": len(c.token_times), "finish_reason": c.finish_reason,
            "scheduling_delay_s": c.scheduling_delay, "ttft_s": c.ttft,
            "p50_tbt_s": tbt["p50"], "p99_tbt_s": tbt["p99"], "max_tbt_s": tbt["max"],
            "latency_s": c.latency if c.finish_reason in FINISHED else None,
            "stalls": len(waited), "longest_stall_s": longest and longest.seconds,
            "caused_by": longest and longest.caused_by,
            "preemptions": c.preemptions, "recomputed_tokens": c.recomputed_tokens,
        })
    return rows


def meets_slo(summary, tbt_slo_s, max_delay_s=2.0):
    """Whether a run has shown that its rate can be kept up: P99 TBT at most `tbt_slo_s`, median delay `max_delay_s`.

    `summary` is that of `summarize_run`. Only a run in which every request finished can show it: in one that was cut
    short, those who were kept waiting are missing from the median, and the longest gaps from the TBTs. Requests of one
    output token have no TBT, and so none that is too long.
    """
    if summary["finished"] < summary["requests"]:
        return False
    tbt, delay = summary["tbt_s"]["p99"], summary["scheduling_delay_s"]["p50"]
    return (tbt is None or tbt <= tbt_slo_s) and delay is not None and delay <= max_delay_s
