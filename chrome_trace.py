"""Write what the engine did as a trace that a browser opens: drop the file on https://ui.perfetto.dev.

    write_chrome_trace("trace.json", {"vllm": (completions, iterations), "sarathi-serve": (completions, iterations)})

For each run there are two groups of lanes. "engine": the iterations, and as curves the tokens of each batch, the token
budget, the free pages, how many requests run and wait. "requests": a lane per request, with its waiting, its prefill
chunks and its decodes; a generation stall is a hole in such a lane, and the iterations above it say why it is there
(Sarathi-Serve, Figures 1 and 7). The Trace Event Format of Chrome, one event a line.

`write_pipeline_trace` does the same for the stages of a simulated pipeline and their bubbles (SARATHI, Figure 1).

Read first: engine.py, for Completion and Iteration, and simulator.py, for StageRun. Read next: metrics.py, which turns
the same records into numbers.
"""

import json
from itertools import chain


def write_chrome_trace(file, runs):
    """Write a trace of `runs`, which maps a name to (completions, iterations), to the path `file`.

    Each run begins at time 0, at its first arrival or iteration. Completions may be those of requests that wait, run
    or were aborted; a request that is seen only in iterations has a lane without its arrival.
    """
    parts = []
    for number, (name, (completions, iterations)) in enumerate(runs.items()):
        engine, requests = 2 * number + 1, 2 * number + 2  # process ids, from 1: 0 is the idle process
        times = [c.arrival for c in completions] + [iteration.start for iteration in iterations]
        origin = min(times, default=0.0)
        parts += [_names(name, engine, requests, completions, iterations), _engine_events(engine, iterations, origin),
                  _request_events(requests, completions, iterations, origin)]
    _write(file, parts)


def write_pipeline_trace(file, runs):
    """Write a trace of simulated pipelines to the path `file` (SARATHI, Figures 1 and 5; Sarathi-Serve, Figure 8).

    `runs` maps a name to simulator.StageRuns in the order in which batches entered. Each replica is a process of its
    own, with a lane for each stage: a slice for each batch, and one, "bubble", before each batch that was waited for.
    Time 0 is the start of the simulation.
    """
    parts, pid = [], 0
    for name, stage_runs in runs.items():
        for replica in sorted({run.replica for run in stage_runs}):
            pid += 1
            own = [run for run in stage_runs if run.replica == replica]
            lanes = [(pid, stage + 1, f"stage {stage + 1}") for stage in sorted({run.stage for run in own})]
            parts += [_labels([(pid, f"{name}: replica {replica + 1}")], lanes), _stage_events(pid, own)]
    _write(file, parts)


def _write(file, parts):
    """Write the events of all `parts`, iterables of dicts, one a line."""
    with open(file, "w", encoding="utf-8") as out:
        out.write('{"displayTimeUnit": "ms", "traceEvents": [')
        separator = "\n"
        for event in chain.from_iterable(parts):
            out.write(separator + json.dumps(event))
            separator = ",\n"
        out.write("\n]}\n")


def _us(time, origin):
    """Whole microseconds: rounded like this, events that follow each other cannot overlap."""
    return round(1e6 * (time - origin))


def _slice(name, pid, tid, start, end, origin, **args):
    """Something that lasts, on lane `tid` of process `pid`."""
    begin = _us(start, origin)
    return {"ph": "X", "name": name, "pid": pid, "tid": tid, "ts": begin, "dur": _us(end, origin) - begin, "args": args}


def _instant(name, pid, tid, time, origin, **args):
    """Something that happens, on one lane ("s": "t")."""
    return {"ph": "i", "s": "t", "name": name, "pid": pid, "tid": tid, "ts": _us(time, origin), "args": args}


def _lane(request_id):
    return request_id + 1  # thread ids, from 1


def _names(name, engine, requests, completions, iterations):
    """The names of processes and lanes, and their order from top to bottom."""
    ids = {c.request_id for c in completions}
    ids |= {request_id for iteration in iterations for request_id, _, _ in iteration.chunks}
    ids |= {request_id for iteration in iterations for request_id in iteration.preempted}
    micro_batches = sorted({iteration.micro_batch for iteration in iterations}) or [0]
    lanes = [(engine, n + 1, f"micro-batch {n}" if len(micro_batches) > 1 else "iterations") for n in micro_batches]
    lanes += [(requests, _lane(i), f"request {i}") for i in sorted(ids)]
    return _labels([(engine, f"{name}: engine"), (requests, f"{name}: requests")], lanes)


def _labels(processes, lanes):
    """The names of processes, (id, name), and of lanes, (process id, lane id, name), which sort by their ids."""
    for pid, label in processes:
        yield {"ph": "M", "name": "process_name", "pid": pid, "args": {"name": label}}
        yield {"ph": "M", "name": "process_sort_index", "pid": pid, "args": {"sort_index": pid}}
    for pid, tid, label in lanes:
        yield {"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": label}}
        yield {"ph": "M", "name": "thread_sort_index", "pid": pid, "tid": tid, "args": {"sort_index": tid}}


def _kind(prefill_tokens, decodes):
    return "hybrid" if prefill_tokens and decodes else "prefill" if prefill_tokens else "decode"


def _engine_events(pid, iterations, origin):
    """A slice per iteration, named after its kind of batch, and the curves: they step at each iteration's start."""
    for iteration in iterations:
        prefill, decode = iteration.prefill_tokens, iteration.decode_tokens
        yield _slice(_kind(prefill, decode), pid, iteration.micro_batch + 1, iteration.start, iteration.end, origin,
                     prefill_tokens=prefill, decodes=decode, chunks=len(iteration.chunks))
        curves = {"tokens": {"prefill": prefill, "decode": decode}, "free pages": {"pages": iteration.free_pages},
                  "requests": {"running": iteration.running, "waiting": iteration.waiting}}
        if iteration.budget is not None:
            curves["token budget"] = {"tokens": iteration.budget}
        for name, values in curves.items():
            yield {"ph": "C", "name": name, "pid": pid, "ts": _us(iteration.start, origin), "args": values}


def _stage_events(pid, stage_runs):
    """A slice for each batch of a replica, named after its kind, and for each bubble, on the lane of its stage."""
    last = {}  # stage -> when its last batch ended: a bubble does not begin earlier, not even by rounding
    for run in stage_runs:
        lane, decodes = run.stage + 1, sum(is_decode for _, _, is_decode in run.chunks)
        prefill = sum(length for _, length, is_decode in run.chunks if not is_decode)
        if run.bubble:
            yield _slice("bubble", pid, lane, max(last.get(lane, 0.0), run.start - run.bubble), run.start, 0.0)
        yield _slice(_kind(prefill, decodes), pid, lane, run.start, run.end, 0.0, prefill_tokens=prefill,
                     decodes=decodes, micro_batch=run.micro_batch)
        last[lane] = run.end


def _request_events(pid, completions, iterations, origin):
    """Waiting, chunks and decodes of every request, its preemptions and its end."""
    waiting_since = {c.request_id: c.arrival for c in completions}
    last_seen = dict(waiting_since)  # the end of a request's last iteration, or its last preemption
    for iteration in iterations:
        start, end = iteration.start, iteration.end
        for request_id in iteration.preempted:  # while this batch was made
            yield _instant("preempted", pid, _lane(request_id), start, origin)
            waiting_since[request_id] = last_seen[request_id] = start
        for request_id, length, is_decode in iteration.chunks:
            since = waiting_since.pop(request_id, start)
            if since < start:
                yield _slice("waiting", pid, _lane(request_id), since, start, origin)
            name = "decode" if is_decode else f"prefill chunk of {length}"
            yield _slice(name, pid, _lane(request_id), start, end, origin, tokens=length)
            last_seen[request_id] = end
    for c in completions:
        lane, since = _lane(c.request_id), waiting_since.get(c.request_id)
        if c.finish_reason == "abort":  # the last that is known of it: nobody wrote down when it was aborted
            yield _instant("aborted", pid, lane, last_seen[c.request_id], origin)
        elif c.finish_reason is not None:
            yield _instant("finished", pid, lane, last_seen[c.request_id], origin, reason=c.finish_reason)
        elif since is not None and iterations and since < iterations[-1].end:  # it still waits
            yield _slice("waiting", pid, lane, since, iterations[-1].end, origin)
