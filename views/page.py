"""The schedule as a page to step through, recorded or live: one HTML file that needs no network.

    recorder = Recorder()
    recorder.watch(server.schedulers)  # before the first request
    ...                                # after each iteration: recorder.add(iteration)
    text = page(title, machine, {"vllm": recorder}, slo_s=slo_s)

A record is what JSON takes: {"request": ...} when one is first seen, and for each iteration what
was decided, and why the head of the queue was not let in, both seen when the policy had decided it,
and how long it took. What can be counted from these is counted in schedule_page.html, which also
saves it all as a trace for https://ui.perfetto.dev. Read first: engine.py."""

import base64
import gzip
import json
import math
from functools import partial
from itertools import islice
from pathlib import Path

LINE = 40  # of those who wait, so many are recorded in order


class Recorder:
    """Keeps the records of a run in `records`. `settings` are what the schedulers were told:
    policy, chunk, max_batch, max_len, pages, page_size, micro_batches."""

    def __init__(self):
        self.records, self.settings, self.live = [], {}, {}  # live: id -> Request
        self._tables = {}  # request id -> (its block table, how many pages of it were recorded)
        self._decided = {}  # micro-batch -> what was decided, until its iteration is known

    def watch(self, schedulers):
        """From here on, look at each batch that these schedulers make. They share one line."""
        its, count = schedulers[0], len(schedulers)
        self.settings = dict(chunk=its.chunk, max_batch=its.max_batch, max_len=its.max_len)
        self.settings |= dict(policy=type(its).__name__, micro_batches=count)
        self.settings |= dict(pages=count * its.pages.total, page_size=its.pages.page_size)
        for number, scheduler in enumerate(schedulers):
            scheduler.next_batch = partial(self._decide, number, scheduler, scheduler.next_batch)

    def _decide(self, number, scheduler, next_batch):
        if not (batch := next_batch()):
            return batch
        before = self._decided.get(number, {})  # the same batch once more, if a step failed
        pages = before.get("pages", [])  # [request id, place in its block table, page, ...]
        for r in scheduler.running:
            table, first = self._tables.get(r.id, (None, 0))
            first = first if table is r.pages else 0  # admitted once more
            if len(r.pages) > first:
                pages.append([r.id, first, *r.pages[first:]])
                self._tables[r.id] = r.pages, len(r.pages)
        line, why = list(islice(scheduler.waiting, LINE)), why_head_waits(scheduler, batch)
        self._decided[number] = {"pages": pages, "line": [r.id for r in line], "why": why}
        for request in (its for its in scheduler.requests.values() if its.id not in self.live):
            self.live[request.id] = request
            self.records.append({"request": describe(request)})
        return batch

    def add(self, iteration):
        """Record an engine.Iteration, the one that was decided last in its micro-batch."""
        if not (its := self._decided.pop(iteration.micro_batch, None)):
            return  # of a batch that was made before `watch`
        ended = [[i, r.finish_reason] for i, r in self.live.items() if r.finish_reason]
        for request_id, _ in ended:
            del self.live[request_id]
            self._tables.pop(request_id, None)
        its |= iteration._asdict() | {"ended": ended}
        its |= {name: round(its[name], 6) for name in ("start", "launch", "end")}
        its["chunks"] = [[i, start, n] for i, start, n, decodes in iteration.chunks if not decodes]
        its["decodes"] = [request_id for request_id, *_, decodes in iteration.chunks if decodes]
        its["budget"] = None if its["budget"] in (None, math.inf) else int(its["budget"])
        self.records.append(its)

    def snapshot(self):
        """A record of what is, between two steps, for who begins to look in the middle of a run:
        of each request how far it has come, too, and the `times` of its first and last token."""
        live = []
        for r in (request for request in self.live.values() if not request.finish_reason):
            how_far = dict(num_computed=r.num_computed, pages=r.pages, output=len(r.token_times))
            live.append(describe(r) | how_far | {"times": r.token_times[:1] + r.token_times[-1:]})
        return {"settings": self.settings, "live": live}


def describe(request):
    """What is known of a scheduler.Request when it arrives."""
    names = "id", "arrival", "prompt_len", "max_new_tokens", "priority"
    return {name: getattr(request, name) for name in names}


def why_head_waits(scheduler, batch):
    """Why the head of the queue is not in the batch, as facts: None if nobody waits, or ["batch",
    how many run], ["pages", needed, free], ["budget", left, tokens to compute], ["policy"]."""
    if not scheduler.waiting:
        return None
    head, pages = scheduler.waiting[0], scheduler.pages
    if len(scheduler.running) >= scheduler.max_batch:
        return ["batch", len(scheduler.running)]
    if not scheduler.room_for(head):
        found, more = scheduler.plan_admission(head)  # what was found may be among the free
        return ["pages", more + pages.count_free(found), pages.num_free]
    whole, left = len(head.tokens) - scheduler.cached_tokens_of_head(), batch.left
    least = 1 if scheduler.cuts_prompts else whole
    return ["policy"] if left >= least else ["budget", max(0, int(left)), whole]


def page(title, machine="", runs=(), *, live=None, slo_s=None, choices=None):
    """The page as text. `runs` is {name: Recorder}, or `live` the address that is asked for records
    (server/engine_thread.py, `look`); `slo_s` what a gap between tokens must not exceed, in
    seconds; `choices` for many runs: {slider: values}, which joined by " | " are a run's name."""
    packed = []
    for name, recorder in dict(runs).items():
        text = json.dumps(recorder.records, separators=(",", ":"))
        data = base64.b64encode(gzip.compress(text.encode(), 6, mtime=0)).decode()
        packed.append({"name": name, "settings": recorder.settings, "data": data})
    data = dict(title=title, machine=machine, slo_s=slo_s, live=live, choices=choices, runs=packed)
    template = Path(__file__).with_name("page.html").read_text("utf-8")
    return template.replace("{{data}}", json.dumps(data).replace("<", "\\u003c"))
