"""Write what happened as a trace for a browser: drop the file on https://ui.perfetto.dev.

Each run has two groups of lanes. "engine": the iterations, and as curves the tokens of each batch,
the token budget, the free pages, how many requests run and wait. "requests": a lane each, with its
waiting, its prefill chunks, its decodes, those in a row as one slice, and its generation stalls,
from token to token, each with the request that caused it (Sarathi-Serve, Figures 1 and 7). Chrome's
Trace Event Format: one event a line, times in whole microseconds; a curve has a point where it
changes. A file that ends in .gz is compressed. Read first: engine.py for Completion and Iteration.
"""

import gzip
import json

from experiments.metrics import find_stalls
from views.timelines import run_origin


def write_chrome_trace(file, runs):
    """Write a trace of `runs`, {name: (completions, iterations)}, to the path `file`.

    Each run begins at time 0, at its first arrival or iteration. All requests have ended; of one
    that is seen in iterations only, neither arrival nor end are known.
    """
    parts = []
    for number, (name, (completions, iterations)) in enumerate(runs.items()):
        pid, origin = 2 * number + 1, run_origin(completions, iterations)
        stalls = find_stalls(completions, iterations)
        iterations = [i._replace(start=i.start - origin, end=i.end - origin) for i in iterations]
        ids = {i for it in iterations for i in (*it.preempted, *(chunk[0] for chunk in it.chunks))}
        ids |= {c.request_id for c in completions}
        batches = sorted({it.micro_batch for it in iterations}) or [0]
        lanes = {n: f"micro-batch {n}" if batches[1:] else "iterations" for n in batches}
        parts += [_names(pid, f"{name}: engine", lanes), _engine_events(pid, iterations)]
        parts.append(_names(pid + 1, f"{name}: requests", {i: f"request {i}" for i in sorted(ids)}))
        parts.append(_request_events(pid + 1, completions, iterations, stalls, origin))
    begun = lambda event: event.get("ts", -1)  # equals stay as they come
    events = (event for part in parts for event in sorted(part, key=begun))
    lines = (json.dumps(event, separators=(",", ":")) for event in events)
    with (gzip.open if str(file).endswith(".gz") else open)(file, "wt", encoding="utf-8") as out:
        out.write('{"displayTimeUnit": "ms", "traceEvents": [\n' + next(lines, ""))
        out.writelines(",\n" + line for line in lines)
        out.write("\n]}\n")


def _event(name, pid, lane, start, end=None, **args):
    """A slice, or what happens at once. Slices cannot overlap, as both ends are rounded alike."""
    ts = round(1e6 * start)
    kind = {"ph": "i", "s": "t"} if end is None else {"ph": "X", "dur": round(1e6 * end) - ts}
    event = {"name": name, "pid": pid, "tid": lane + 1, "ts": ts} | kind
    return event | ({"args": args} if args else {})


def _names(pid, process, lanes):
    """The name of a process and of its lanes, {lane: name}, which sort by their ids."""
    labels = [("process", pid, {}, process)]
    labels += [("thread", lane + 1, {"tid": lane + 1}, name) for lane, name in lanes.items()]
    for kind, index, tid, name in labels:
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


def _request_events(pid, completions, iterations, stalls, origin):
    """Waiting, chunks, decodes and stalls of every request, its preemptions and its end."""
    waiting_since = {c.request_id: c.arrival - origin for c in completions}
    last_seen = dict(waiting_since)  # the end of a request's last iteration, or its last preemption
    stalled, in_a_row = set(), {}  # (request, when it ends); request -> its last slice of decodes
    for stall in stalls:  # first: a slice must come before what it holds
        who, name, end = stall.request_id, f"stall, caused by {stall.caused_by}", stall.end - origin
        yield _event(name, pid, who, stall.start - origin, end, prefill_tokens=stall.prefill_tokens)
        stalled.add((who, end))
    for it in iterations:
        for request_id in it.preempted:  # while this batch was made
            yield _event("preempted", pid, request_id, it.start)
            waiting_since[request_id] = last_seen[request_id] = it.start
        for request_id, _, length, is_decode in it.chunks:
            since = waiting_since.pop(request_id, it.start)
            if since < it.start:
                yield _event("waiting", pid, request_id, since, it.start)
            last_seen[request_id] = it.end
            if not is_decode or (request_id, it.end) in stalled:
                in_a_row.pop(request_id, None)
                if not is_decode:
                    yield _event(f"prefill chunk of {length}", pid, request_id, it.start, it.end)
            elif slice_ := in_a_row.get(request_id):  # nothing is written before all are made
                slice_["dur"] = round(1e6 * it.end) - slice_["ts"]
                slice_["args"]["tokens"] += 1
            else:
                slice_ = _event("decodes", pid, request_id, it.start, it.end, tokens=1)
                in_a_row[request_id] = slice_
                yield slice_
    for c in completions:  # when it was last seen: nobody wrote down when it was aborted
        name = "aborted" if c.finish_reason == "abort" else "finished"
        yield _event(name, pid, c.request_id, last_seen[c.request_id], reason=c.finish_reason)
