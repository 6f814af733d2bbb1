"""From records to numbers: latencies, generation stalls, throughput, what the batches were made of.

Pure functions of completions and iterations (engine.py; in the order of time), in seconds on one
clock. They return plain numbers that json can write; what does not exist is None, never 0 or NaN.
Latencies are those of Sarathi-Serve §2.4, stalls those of §3.2 and Figure 1, the condition for
capacity that of §5.1. A TTFT, TBT or scheduling delay counts as soon as it was seen, a latency only
of a request that finished. Read next: run.py."""

from bisect import bisect_left
from collections import Counter, defaultdict
from operator import attrgetter
from typing import NamedTuple

import numpy as np

from policies.priority import PRIORITIES
from policies.token_budget import MAX_DELAY_S

FINISHED = ("stop", "length")  # the reasons of a request that got all its output
COUNTS = ("preemptions", "recomputed_tokens", "cached_tokens")  # that a Completion has


class Stall(NamedTuple):
    """A generation stall: a gap between two tokens of a request that holds prefill of others."""

    request_id: int  # who waited
    start: float  # when its previous token was known, in s
    end: float  # when its next token was known, in s
    prefill_tokens: int  # of others, computed in the gap
    caused_by: int  # the request with most of these tokens; of equals, the one computed first
    seconds: float  # all of it: a hybrid batch does not tell the chunk's time from the decode's own


def percentiles(values):
    """{"p50", "p90", "p99", "max"} of the values that are not None, interpolated linearly."""
    values = [value for value in values if value is not None]
    found = np.quantile(values, [0.5, 0.9, 0.99, 1.0]).tolist() if values else [None] * 4
    return dict(zip(("p50", "p90", "p99", "max"), found))


def find_stalls(completions, iterations):
    """Every generation stall, as [Stall], request by request. A gap holds the iterations that began
    in it: from a token until before the next. Who prefills itself again after a preemption does not
    stall itself. A decode waits for a chunk that it rides with, too: an SLO tells if that harms."""
    stalls, group_of = [], {}  # request -> the micro-batch that computes it
    groups = defaultdict(list)  # micro-batch -> its prefills, (start of the iteration, who, tokens)
    for its in iterations:
        prefills = [(its.start, who, n) for who, _, n, is_decode in its.chunks if not is_decode]
        groups[its.micro_batch] += prefills
        group_of |= {who: its.micro_batch for _, who, _ in prefills}
    for completion in completions:
        own, times = completion.request_id, completion.token_times
        prefills = groups[group_of.get(own, 0)]
        begun = [bisect_left(prefills, (time,)) for time in times]  # until a token
        for start, end, first, last in zip(times, times[1:], begun, begun[1:]):
            tokens = Counter()  # of prefill by request, in the order of computation
            for _, who, length in prefills[first:last]:
                tokens[who] += length
            del tokens[own]
            if tokens:
                cause = max(tokens, key=tokens.get)
                stalls.append(Stall(own, start, end, tokens.total(), cause, end - start))
    return stalls


def _ratio(amount, whole):
    return float(amount / whole) if whole else None


def summarize_queue(completions, offered_per_s=None):
    """Whether the queue `grew`: the last quarter of the requests waited for longer than the second,
    in the median, and more arrive, or are `offered_per_s` where arrivals wait for answers, than
    the server can do: how many it schedules per second while others wait, counted if half of them
    do, but not in the first quarter, as few decode yet."""
    seen = sorted((c.arrival, c.scheduled) for c in completions if c.scheduled is not None)
    n, delays = len(seen) // 4, [scheduled - arrival for arrival, scheduled in seen]
    early, late = (percentiles(quarter)["p50"] for quarter in (delays[n : 2 * n], delays[-n:]))
    arrived, in_turn = np.sort(np.reshape(seen, (-1, 2)), axis=0).T  # (requests,), each in order
    waits = (arrived[1:] <= in_turn[:-1])[n:]  # the next is there when one is scheduled
    rate, can = offered_per_s or _ratio(len(seen) - 1, np.diff(arrived).sum()), None
    if 2 * waits.sum() >= max(8, len(waits)):
        can = _ratio(waits.sum(), np.diff(in_turn)[n:][waits].sum())
    delays = {"second_quarter_s": early, "last_quarter_s": late}
    grew = bool(rate and can and can < rate and early < late)
    return delays | {"arrived_per_s": rate, "scheduled_per_s": can, "grew": grew}


def summarize_latencies(completions, seconds, offered_per_s=None):
    """The part of `summarize_run` that needs no iterations."""
    finished = [c for c in completions if c.finish_reason in FINISHED]
    tokens = sum(len(c.prompt) + len(c.token_times) for c in completions if c.token_times)
    return {
        "requests": len(completions),
        "finished": len(finished),
        "aborted": sum(c.finish_reason == "abort" for c in completions),
        "ttft_s": percentiles(c.ttft for c in completions),
        "tbt_s": percentiles(gap for c in completions for gap in c.tbt),  # all gaps of all requests
        "scheduling_delay_s": percentiles(c.scheduling_delay for c in completions),
        "queue": summarize_queue(completions, offered_per_s),
        "latency_s": percentiles(c.latency for c in finished),
        "tokens_per_s": _ratio(tokens, seconds),  # of prompts too, computed or found
    }


def steady(iterations, B, rounds=None):
    """A run while its pipeline of requests was full: (iterations, tokens per second, seconds), or
    ([], None, None) if there were fewer than 2 B + 1 requests. It goes from the iteration that lets
    in request B, counted from 0, to that which lets in the last whose number is a multiple of B; or
    only over the last `rounds` of B: every B requests of one length a policy repeats itself."""
    let_in = {who: n for n, i in [*enumerate(iterations)][::-1] for who, *_ in i.chunks}  # first
    numbers = sorted(let_in.values())
    last = (len(numbers) - 1) // B
    if last < 2:
        return [], None, None
    first, end = numbers[max(1, last - (rounds or last)) * B], numbers[last * B]
    seconds, its = iterations[end].start - iterations[first].start, iterations[first:end]
    return its, sum(i.prefill_tokens + i.decode_tokens for i in its) / seconds, seconds


def summarize_run(completions, iterations, seconds, tbt_slo_s=None, offered_per_s=None):
    """What the table prints and the JSON holds of a run, a dict: `summarize_latencies`, generation
    stalls (`over_slo`: longer than `tbt_slo_s`) and what the iterations were made of, None where
    they are not known; `cached`: the share of what was to prefill, again too, that was found."""
    stalls, count = find_stalls(completions, iterations), len(iterations)
    kinds = Counter((i.prefill_tokens > 0, i.decode_tokens > 0) for i in iterations)
    tokens = sum(i.prefill_tokens + i.decode_tokens for i in iterations)
    busy_s = sum(i.end - i.start for i in iterations)
    longest = max(stalls, key=attrgetter("seconds"), default=None)
    over_slo = sum(s.seconds > tbt_slo_s for s in stalls) if count and tbt_slo_s else None
    stalled = {"count": len(stalls) if count else None, "longest": longest and longest._asdict()}
    stalled |= {"over_slo": over_slo, "length_s": percentiles(stall.seconds for stall in stalls)}
    begun = [c for c in completions if c.scheduled is not None and count]
    counts = {key: sum(getattr(c, key) for c in begun) if count else None for key in COUNTS}
    prefill = sum(len(c.prompt) + c.recomputed_tokens for c in begun)
    its = summarize_latencies(completions, seconds, offered_per_s)
    its |= {f"{p}_{key}": its[key][p] for key in ("ttft_s", "tbt_s") for p in ("p50", "p99")}
    return its | {
        **counts,
        "p50_delay_s": its["scheduling_delay_s"]["p50"],
        "longest_stall_s": longest.seconds if longest else 0.0 if count else None,
        "cached": _ratio(counts["cached_tokens"], prefill),
        "stalls": stalled,
        "iterations": count,
        "prefill_only": _ratio(kinds[True, False], count),
        "decode_only": _ratio(kinds[False, True], count),
        "hybrid": _ratio(kinds[True, True], count),
        "tokens_per_iteration": _ratio(tokens, count),
        "running_mean": _ratio(sum(i.running * (i.end - i.start) for i in iterations), busy_s),
        "running_peak": max((i.running for i in iterations), default=None),
    }


def request_rows(completions, iterations):
    """A dict for each request of a run, for csv.DictWriter."""
    stalls_of = defaultdict(list)
    for stall in find_stalls(completions, iterations):
        stalls_of[stall.request_id].append(stall)
    for c in completions:
        tbt, its = percentiles(c.tbt), stalls_of[c.request_id]
        longest = max(its, key=attrgetter("seconds"), default=None)
        yield {
            "request_id": c.request_id,
            "class": PRIORITIES[c.priority],
            "arrival": c.arrival,
            "prompt_tokens": len(c.prompt),
            "output_tokens": len(c.token_times),
            "finish_reason": c.finish_reason,
            "scheduling_delay_s": c.scheduling_delay,
            "ttft_s": c.ttft,
            **{f"{p}_tbt_s": tbt[p] for p in ("p50", "p99", "max")},
            "latency_s": c.latency if c.finish_reason in FINISHED else None,
            "stalls": len(its) if iterations else None,
            "longest_stall_s": longest and longest.seconds,
            "caused_by": longest and longest.caused_by,
            **{key: getattr(c, key) if iterations else None for key in COUNTS},
        }


def missed(summary, tbt_slo_s):
    """What of the SLO a run missed, in words; "" if its rate can be kept up: P99 TBT and median
    delay are within limits, the queue does not grow, which would lift the median only in a long
    run, and every request has finished. `summary` is that of `summarize_latencies`."""
    tbt, delay = summary["tbt_s"]["p99"] or 0.0, summary["scheduling_delay_s"]["p50"] or 0.0
    finished, count, queue = summary["finished"], summary["requests"], summary["queue"]
    wrong = {f"{finished} of {count} requests finished": finished < count or not count}
    wrong |= {f"P99 TBT of {tbt:,.3f} s": tbt > tbt_slo_s}
    wrong |= {f"median delay of {delay:,.2f} s": delay > MAX_DELAY_S}
    early, late = (queue[key] or 0.0 for key in ("second_quarter_s", "last_quarter_s"))
    delays = f"{early:,.2f} s in the second quarter and {late:,.2f} s in the last"
    wrong |= {f"the queue grew: median delay of {delays}": queue["grew"]}
    return ", ".join(what for what, so in wrong.items() if so)
