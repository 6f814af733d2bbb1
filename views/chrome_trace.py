"""Write what happened as a trace for a browser: drop the file on https://ui.perfetto.dev.

Each run has two groups of lanes: the engine's iterations, with curves of tokens, budget, free pages
and requests, and a lane for each request: its waiting, prefill chunks, decodes, and its generation
stalls, each with who caused it (Sarathi-Serve, Figures 1 and 7). Chrome's Trace Event Format: one
event a line, times in whole microseconds. Read first: engine.py for Completion and Iteration.
"""

import gzip
import json

from experiments.metrics import find_stalls


def write_chrome_trace(file, runs):
    """Write a trace of `runs`, {name: (completions, iterations)}, to the path `file`, compressed if
    that ends in .gz. All requests have ended; some may be seen in iterations only."""
    events = []
    for pid, (name, (completions, iterations)) in enumerate(runs.items()):
        ids = {i for it in iterations for i in (*it.preempted, *(chunk[0] for chunk in it.chunks))}
        ids = sorted(ids | {c.request_id for c in completions})
        batches = sorted({it.micro_batch for it in iterations}) or [0]
        lanes = {n: f"micro-batch {n}" if batches[1:] else "iterations" for n in batches}
        events += _names(2 * pid + 1, f"{name}: engine", lanes)
        events += _engine_events(2 * pid + 1, iterations)
        events += _names(2 * pid + 2, f"{name}: requests", {i: f"request {i}" for i in ids})
        events += _request_events(2 * pid + 2, completions, iterations)
    events.sort(key=lambda event: (event["pid"], event.get("ts", -1)))  # equals stay as they come
    lines = ",\n".join(json.dumps(event, separators=(",", ":")) for event in events)
    with (gzip.open if str(file).endswith(".gz") else open)(file, "wt", encoding="utf-8") as out:
        out.write(f'{{"displayTimeUnit": "ms", "traceEvents": [\n{lines}\n]}}\n')


def _event(name, pid, lane, start, end=None, **args):
    """A slice, or what happens at once. Slices cannot overlap, as both ends are rounded alike."""
    ts = round(1e6 * start)
    kind = {"ph": "i", "s": "t"} if end is None else {"ph": "X", "dur": round(1e6 * end) - ts}
    return dict(name=name, pid=pid, tid=lane + 1, ts=ts) | kind | ({"args": args} if args else {})


def _names(pid, process, lanes):
    """The name of a process and of its lanes, {lane: name}, which sort by their ids."""
    threads = [("thread", lane + 1, {"tid": lane + 1}, name) for lane, name in lanes.items()]
    for kind, index, tid, name in [("process", pid, {}, process), *threads]:
        yield dict(ph="M", name=f"{kind}_name", pid=pid, args={"name": name}, **tid)
        yield dict(ph="M", name=f"{kind}_sort_index", pid=pid, args={"sort_index": index}, **tid)


def _engine_events(pid, iterations):
    """A slice per iteration, named after its kind of batch, and curves that step at its start."""
    last = {}
    for it in iterations:
        prefill, decodes = it.prefill_tokens, it.decode_tokens
        kind = "prefill" if not decodes else "hybrid" if prefill else "decode"
        yield _event(kind, pid, it.micro_batch, it.start, it.end)
        curves = {
            "tokens": {"prefill": prefill, "decode": decodes},
            "free pages": {"pages": it.free_pages},
            "requests": {"running": it.running, "waiting": it.waiting},
        }
        curves |= {} if it.budget is None else {"token budget": {"tokens": it.budget}}
        for name, args in curves.items():
            if last.get(name) != args:
                yield dict(ph="C", name=name, pid=pid, ts=round(1e6 * it.start), args=args)
        last |= curves


def _request_events(pid, completions, iterations):
    """Waiting, chunks, decodes and stalls of every request, its preemptions and its end."""
    waiting_since = {c.request_id: c.arrival for c in completions}
    last_seen = dict(waiting_since)  # the end of a request's last iteration, or its last preemption
    stalls, in_a_row = find_stalls(completions, iterations), {}  # request -> its slice of decodes
    for stall in stalls:  # first: a slice must come before what it holds
        name, tokens = f"stall, caused by {stall.caused_by}", stall.prefill_tokens
        yield _event(name, pid, stall.request_id, stall.start, stall.end, prefill_tokens=tokens)
    stalled = {(stall.request_id, stall.end) for stall in stalls}
    for it in iterations:
        for who in it.preempted:  # while this batch was made
            yield _event("preempted", pid, who, it.start)
            waiting_since[who] = last_seen[who] = it.start
        for who, _, length, is_decode in it.chunks:
            since = waiting_since.pop(who, it.start)
            if since < it.start:
                yield _event("waiting", pid, who, since, it.start)
            last_seen[who] = it.end
            if not is_decode:
                yield _event(f"prefill chunk of {length}", pid, who, it.start, it.end)
            if not is_decode or (who, it.end) in stalled:
                in_a_row.pop(who, None)
                continue
            if who not in in_a_row:
                in_a_row[who] = _event("decodes", pid, who, it.start, it.end, tokens=0)
                yield in_a_row[who]
            in_a_row[who]["dur"] = round(1e6 * it.end) - in_a_row[who]["ts"]
            in_a_row[who]["args"]["tokens"] += 1  # it is not written before all are made
    for c in completions:  # when it was last seen: nobody wrote down when it was aborted
        name = "aborted" if c.finish_reason == "abort" else "finished"
        yield _event(name, pid, c.request_id, last_seen[c.request_id], reason=c.finish_reason)
