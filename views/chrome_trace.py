"""Write what happened as a trace for a browser: drop the file on https://ui.perfetto.dev.

Each run has two groups of lanes. "engine": the iterations, and as curves the tokens of each batch,
the token budget, the free pages, how many requests run and wait. "requests": a lane each, with its
waiting, its prefill chunks and its decodes; a generation stall is a hole in such a lane, and the
iterations above it say why it is there (Sarathi-Serve, Figures 1 and 7). Or a lane is a stage of a
simulated pipeline. Chrome's Trace Event Format: one event a line, times in whole microseconds.
Read first: engine.py for Completion and Iteration, simulator/simulation.py for StageRun.
"""

import json
from itertools import chain

from views.timelines import run_origin


def write_chrome_trace(file, runs):
    """Write a trace of `runs`, {name: (completions, iterations)}, to the path `file`.

    Each run begins at time 0, at its first arrival or iteration. Completions may be those of
    requests that wait, run or were aborted; one that is seen only in iterations has no arrival.
    """
    parts = []
    for number, (name, (completions, iterations)) in enumerate(runs.items()):
        pid, origin = 2 * number + 1, run_origin(completions, iterations)
        iterations = [i._replace(start=i.start - origin, end=i.end - origin) for i in iterations]
        ids = {i for it in iterations for i in (*it.preempted, *(chunk[0] for chunk in it.chunks))}
        ids |= {c.request_id for c in completions}
        batches = sorted({it.micro_batch for it in iterations}) or [0]
        lanes = {n: f"micro-batch {n}" if batches[1:] else "iterations" for n in batches}
        parts += [_names(pid, f"{name}: engine", lanes), _engine_events(pid, iterations)]
        parts.append(_names(pid + 1, f"{name}: requests", {i: f"request {i}" for i in sorted(ids)}))
        parts.append(_request_events(pid + 1, completions, iterations, origin))
    _write(file, parts)


def write_pipeline_trace(file, runs):
    """Write a trace of simulated pipelines to the path `file` (SARATHI, Figures 1 and 5).

    `runs` maps a name to StageRuns in the order in which batches entered. Each replica is a process
    with a lane for each stage: a slice for each batch, and a "bubble" before those waited for.
    """
    parts, pid = [], 0
    for name, stage_runs in runs.items():
        for replica in sorted({run.replica for run in stage_runs}):
            pid, own = pid + 1, [run for run in stage_runs if run.replica == replica]
            lanes = {stage: f"stage {stage + 1}" for stage in sorted({run.stage for run in own})}
            parts += [_names(pid, f"{name}: replica {replica + 1}", lanes), _stage_events(pid, own)]
    _write(file, parts)


def _write(file, parts):
    events = (json.dumps(event) for event in chain.from_iterable(parts))
    with open(file, "w", encoding="utf-8") as out:
        out.write('{"displayTimeUnit": "ms", "traceEvents": [\n' + next(events, ""))
        out.writelines(",\n" + event for event in events)
        out.write("\n]}\n")


def _event(name, pid, lane, start, end=None, **args):
    """A slice, or what happens at once. Slices cannot overlap, as both ends are rounded alike."""
    ts = round(1e6 * start)
    kind = {"ph": "i", "s": "t"} if end is None else {"ph": "X", "dur": round(1e6 * end) - ts}
    return {"name": name, "pid": pid, "tid": lane + 1, "ts": ts, "args": args} | kind


def _names(pid, process, lanes):
    """The name of a process and of its lanes, {lane: name}, which sort by their ids."""
    labels = [("process", pid, {}, process)]
    labels += [("thread", lane + 1, {"tid": lane + 1}, name) for lane, name in lanes.items()]
    for kind, index, tid, name in labels:
        yield dict(ph="M", name=f"{kind}_name", pid=pid, args={"name": name}, **tid)
        yield dict(ph="M", name=f"{kind}_sort_index", pid=pid, args={"sort_index": index}, **tid)


def _batch(chunks):
    """(the kind of a batch, {"prefill_tokens", "decodes"})."""
    prefill = sum(length for _, _, length, is_decode in chunks if not is_decode)
    decodes = sum(is_decode for *_, is_decode in chunks)
    kind = "hybrid" if prefill and decodes else "prefill" if prefill else "decode"
    return kind, {"prefill_tokens": prefill, "decodes": decodes}


def _engine_events(pid, iterations):
    """A slice per iteration, named after its kind of batch, and curves that step at its start."""
    for it in iterations:
        kind, args = _batch(it.chunks)
        yield _event(kind, pid, it.micro_batch, it.start, it.end, **args, chunks=len(it.chunks))
        curves = {
            "tokens": {"prefill": it.prefill_tokens, "decode": it.decode_tokens},
            "free pages": {"pages": it.free_pages},
            "requests": {"running": it.running, "waiting": it.waiting},
        }
        curves |= {} if it.budget is None else {"token budget": {"tokens": it.budget}}
        for name, args in curves.items():
            yield dict(ph="C", name=name, pid=pid, ts=round(1e6 * it.start), args=args)


def _stage_events(pid, stage_runs):
    """A slice for each batch of a replica and each bubble, on the lane of its stage."""
    last = {}  # stage -> end of its last batch: no bubble begins earlier, not even by rounding
    for run in stage_runs:
        kind, args = _batch(run.chunks)
        if run.bubble:
            start = max(last.get(run.stage, 0.0), run.start - run.bubble)
            yield _event("bubble", pid, run.stage, start, run.start)
        args["micro_batch"] = run.micro_batch
        yield _event(kind, pid, run.stage, run.start, run.end, **args)
        last[run.stage] = run.end


def _request_events(pid, completions, iterations, origin):
    """Waiting, chunks and decodes of every request, its preemptions and its end."""
    waiting_since = {c.request_id: c.arrival - origin for c in completions}
    last_seen = dict(waiting_since)  # the end of a request's last iteration, or its last preemption
    for it in iterations:
        for request_id in it.preempted:  # while this batch was made
            yield _event("preempted", pid, request_id, it.start)
            waiting_since[request_id] = last_seen[request_id] = it.start
        for request_id, _, length, is_decode in it.chunks:
            since = waiting_since.pop(request_id, it.start)
            if since < it.start:
                yield _event("waiting", pid, request_id, since, it.start)
            name = "decode" if is_decode else f"prefill chunk of {length}"
            yield _event(name, pid, request_id, it.start, it.end, tokens=length)
            last_seen[request_id] = it.end
    for c in completions:
        lane, end = c.request_id, iterations[-1].end if iterations else 0.0
        if c.finish_reason:  # when it was last seen: nobody wrote down when it was aborted
            name = "aborted" if c.finish_reason == "abort" else "finished"
            yield _event(name, pid, lane, last_seen[lane], reason=c.finish_reason)
        elif waiting_since.get(lane, end) < end:  # it still waits
            yield _event("waiting", pid, lane, waiting_since[lane], end)
