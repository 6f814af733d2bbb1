"""What a page shows of a run: a record of each request that arrives, and of each iteration.

    recorder = Recorder()
    recorder.watch(server.schedulers)  # before the first request
    ...                                # after each iteration: recorder.add(iteration)

A record of an iteration has the decisions of the policy, the reason why the first request of the
queue waits, and the times. Everything that can be counted from these is counted in the scripts of
web/. Plain Python without a model, as it runs in a browser, too. Read first: engine.py. Read next:
html.py."""

from collections.abc import Sequence
from itertools import islice
from operator import attrgetter
from typing import Any, NotRequired, TypedDict

from parallel.micro_batches import StageRun
from policies.cards import CARDS
from policies.observers import Iteration, Observer, Sent
from scheduler import Batch, Request, Scheduler

MAX_QUEUE = 40  # this many waiting requests are recorded, in their order
POOLS_NOTE = "two pools: prefill on some instances, decodes on others, keys and values sent between"


class RequestInfo(TypedDict):
    """A request as it arrived."""

    id: int
    arrival: float
    prompt_len: int
    max_new_tokens: int
    priority: int


class RequestProgress(RequestInfo):
    """A request that has arrived before the first record."""

    num_computed: int
    pages: list[int]
    output: int  # tokens
    times: list[float]  # of its first and its last token; empty if there is none


class Arrived(TypedDict):
    """The record of a new request."""

    request: RequestInfo


class Snapshot(TypedDict):
    """The record with which a page begins that is opened in the middle of a run."""

    settings: dict[str, Any]
    live: list[RequestProgress]


class Decision(TypedDict):
    """The part of an Iterated that is known once a batch is made."""

    pages: list[list[int]]  # [request, index in its block table, page, page, ...]: the new pages
    queue: list[int]  # the first MAX_QUEUE requests that wait
    why: list[Any] | None  # see why_head_waits


class Iterated(Decision):
    """The record of an iteration. Requests are named by their ids."""

    start: float  # in s, as launch and end: see engine.Iteration
    launch: float | None
    end: float
    micro_batch: int
    budget: int | None  # tokens; None: no limit
    chunks: list[list[int]]  # [request, first token, number of tokens] of each prefill
    decodes: list[int]
    preempted: list[int]
    ended: list[list[Any]]  # [request, finish_reason] since the record before
    waiting: int
    running: int
    free_pages: int
    # of a pipeline, for each stage: [from, to], in s after start, and if a bubble was before it,
    # its seconds and its kind
    stages: NotRequired[list[list[Any]]]


class TransferInfo(TypedDict):
    """A transfer between two pools: a Sent of policies/observers.py."""

    id: int  # of the request
    source: int  # the number of an instance, as Iterated.micro_batch
    target: int
    tokens: int
    prefilled: float
    start: float
    end: float


class Transferred(TypedDict):
    """The record of a transfer."""

    transfer: TransferInfo


Record = Arrived | Snapshot | Iterated | Transferred


class Recorder(Observer):
    """Keeps the records of a run in `records`.

    `settings` are those of the schedulers: policy, chunk, max_batch, max_len, pages, page_size,
    micro_batches; `note` says in a few words what the policy does. Two pools name `instances`,
    of which the first `prefills` prefill. A caller may add `letters`, to name the requests A, B, C
    instead of 0, 1, 2."""

    def __init__(self) -> None:
        self.records: list[Record] = []
        self.settings: dict[str, Any] = {}
        self.live: dict[int, Request] = {}  # requests that have arrived and not ended, by id
        # request id -> its block table, and how many pages of it have been recorded
        self._tables: dict[int, tuple[list[int], int]] = {}
        # micro-batch -> the decision whose iteration has not been added
        self._decisions: dict[int, Decision] = {}

    def watch(self, schedulers: Sequence[Scheduler]) -> None:
        """From here on, look at each batch that these schedulers make. They share one queue."""
        first = schedulers[0]
        name, note = name_and_note(type(first))
        self.settings = {
            "chunk": first.chunk,
            "max_batch": first.max_batch,
            "max_len": first.max_len,
            "policy": name,
            "note": note,
            "micro_batches": len(schedulers),
            "pages": len(schedulers) * first.pages.total,
            "page_size": first.pages.page_size,
        }
        decodes = sum(scheduler.only_decodes for scheduler in schedulers)
        if decodes:
            prefills = len(schedulers) - decodes
            names = instance_names("prefill", prefills) + instance_names("decode", decodes)
            self.settings |= {"note": POOLS_NOTE, "prefills": prefills, "instances": names}
        for scheduler in schedulers:
            scheduler.observers.append(self)

    def decided(self, scheduler: Scheduler, batch: Batch) -> None:
        """Note what was decided with a batch."""
        if not batch:
            return
        micro_batch = scheduler.peers.index(scheduler)
        # if a step failed, the same batch comes again: its pages have been noted already
        earlier = self._decisions.get(micro_batch)
        self._decisions[micro_batch] = {
            "pages": (earlier["pages"] if earlier else []) + self._new_pages(scheduler.running),
            "queue": [request.id for request in islice(scheduler.waiting, MAX_QUEUE)],
            "why": why_head_waits(scheduler, batch),
        }
        for request in scheduler.requests.values():
            if request.id not in self.live:
                self.live[request.id] = request
                self.records.append({"request": describe(request)})

    def _new_pages(self, running: Sequence[Request]) -> list[list[int]]:
        """The pages that these requests got since the last call, as in Iterated.pages."""
        new_pages = []
        for request in running:
            table, recorded = self._tables.get(request.id, (None, 0))
            if table is not request.pages:  # it was admitted again, and has a new table
                recorded = 0
            if len(request.pages) > recorded:
                new_pages.append([request.id, recorded, *request.pages[recorded:]])
                self._tables[request.id] = (request.pages, len(request.pages))
        return new_pages

    def add(self, iteration: Iteration) -> None:
        """Record an iteration: that of the last decision in its micro-batch."""
        decision = self._decisions.pop(iteration.micro_batch, None)
        if decision is None:  # the batch was made before `watch`
            return
        ended = [[r.id, r.finish_reason] for r in self.live.values() if r.finish_reason]
        for request_id, _ in ended:
            del self.live[request_id]
            self._tables.pop(request_id, None)
        launch = iteration.launch
        record: Iterated = {
            "start": round(iteration.start, 6),
            "launch": None if launch is None else round(launch, 6),
            "end": round(iteration.end, 6),
            "micro_batch": iteration.micro_batch,
            "budget": iteration.budget,
            "chunks": [list(chunk[:3]) for chunk in iteration.chunks if not chunk.is_decode],
            "decodes": [chunk.request_id for chunk in iteration.chunks if chunk.is_decode],
            "preempted": list(iteration.preempted),
            "ended": ended,
            "waiting": iteration.waiting,
            "running": iteration.running,
            "free_pages": iteration.free_pages,
            **decision,
        }
        self.records.append(record)

    def add_stages(
        self, stage_runs: Sequence[StageRun], bubbles: Sequence[tuple[StageRun, str]]
    ) -> None:
        """Say when each batch was on the stages of one pipeline, once all iterations are added.

        `bubbles` are those of `stage_runs` with their kinds, from `bubble_kinds`."""
        kinds = {(run.stage, run.start): kind for run, kind in bubbles}
        num_stages = 1 + max(run.stage for run in stage_runs)
        runs: dict[int, list[StageRun]] = {}  # of each micro-batch, in order of time
        for run in stage_runs:
            runs.setdefault(run.micro_batch, []).append(run)
        for record in self.records:
            if "micro_batch" not in record:
                continue
            of_batch = runs[record["micro_batch"]]
            record["stages"] = []
            for run in of_batch[:num_stages]:
                times = [run.start - record["start"], run.end - record["start"]]
                stage = [round(time, 6) for time in times]
                if run.bubble:
                    stage += [round(run.bubble, 6), kinds[run.stage, run.start]]
                record["stages"].append(stage)
            del of_batch[:num_stages]
        self.settings["stages"] = num_stages

    def name_replicas(self, names: Sequence[str]) -> None:
        """Say that each scheduler is that of a replica, once all iterations are added."""
        self.settings["instances"] = list(names)
        self._sort()

    def _sort(self) -> None:
        """Put the records into the order in which they began. Instances begin batches in another
        order than they end them, in which they were added."""
        self.records.sort(key=_place_in_time)

    def add_transfers(self, transfers: Sequence[Sent]) -> None:
        """Add those between two pools, once all iterations are added."""
        self._sort()
        for sent in sorted(transfers, key=attrgetter("start")):
            transfer: TransferInfo = {
                "id": sent.request_id,
                "source": sent.source,
                "target": sent.target,
                "tokens": sent.tokens,
                "prefilled": round(sent.prefilled, 6),
                "start": round(sent.start, 6),
                "end": round(sent.end, 6),
            }
            self.records.append({"transfer": transfer})

    def snapshot(self) -> Snapshot:
        """The state between two steps, for a page that is opened in the middle of a run."""
        requests = [request for request in self.live.values() if not request.finish_reason]
        return {"settings": self.settings, "live": [describe_progress(r) for r in requests]}


def name_and_note(policy: type[Scheduler]) -> tuple[str, str]:
    """The name of a policy, and what it does in an iteration, in a few words. For a custom policy,
    the name of the class and the first line of its docstring, without the marks of code."""
    for name, card in CARDS.items():
        if card.cls is policy:
            return name, card.note
    first_line = (policy.__doc__ or "").strip().partition("\n")[0]
    return policy.__name__, first_line.replace("`", "")


def instance_names(kind: str, count: int) -> list[str]:
    """The names of instances of one kind: "decode", or "decode 1", "decode 2" of several."""
    return [kind] if count == 1 else [f"{kind} {number}" for number in range(1, count + 1)]


def _place_in_time(record: Record) -> tuple[float, int]:
    """Where a record belongs. A request arrives before it is computed, and is preempted before it
    is computed again, at the same time at the earliest."""
    if "request" in record:
        return round(record["request"]["arrival"], 6), 0
    if "preempted" in record:
        return record["start"], 1 if record["preempted"] else 2
    return 0.0, 0  # a page that is opened in the middle begins with a Snapshot


def describe(request: Request) -> RequestInfo:
    """The facts about a request that are known when it arrives."""
    return {
        "id": request.id,
        "arrival": request.arrival,
        "prompt_len": request.prompt_len,
        "max_new_tokens": request.max_new_tokens,
        "priority": request.service.priority,
    }


def describe_progress(request: Request) -> RequestProgress:
    """The facts about a request that is being served."""
    return {
        **describe(request),
        "num_computed": request.num_computed,
        "pages": request.pages,
        "output": len(request.token_times),
        "times": request.token_times[:1] + request.token_times[-1:],
    }


def why_head_waits(scheduler: Scheduler, batch: Batch) -> list[Any] | None:
    """The reason why the first request of the queue is not in the batch, as facts.

    It is one of these, or None if nobody waits, or where only decodes are computed:

    ["batch", how many run]                     max_batch requests run already
    ["pages", needed, free]                     it does not fit into the cache
    ["budget", tokens left, tokens to compute]  the budget is used up
    ["policy"]                                  there would be room, but the policy admits no more
    """
    if not scheduler.waiting or scheduler.only_decodes:
        return None
    head = scheduler.waiting[0]
    pages = scheduler.pages
    if len(scheduler.running) >= scheduler.max_batch:
        return ["batch", len(scheduler.running)]
    if not scheduler.room_for(head):
        cached, new = scheduler.plan_admission(head)
        # a cached page that no request uses counts among the free ones until it is acquired
        return ["pages", new + pages.count_free(cached), pages.num_free]
    uncached = len(head.tokens) - scheduler.cached_tokens_of_head()
    shortest_chunk = 1 if scheduler.cuts_prompts else uncached
    if batch.left >= shortest_chunk:
        return ["policy"]
    return ["budget", max(0, int(batch.left)), uncached]
