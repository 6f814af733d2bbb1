"""The programs that several processes run together in the tests of parallel/.

A job is a dict: `program`, the name of a function here, `tp`, `pp`, and what that function takes.
Its model is one of rank_stages.py. Each rank finds its job in $RANK_JOB; forked.py starts them."""

import json
import os
import time
from collections import Counter
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch

import bench
import parallel.ranks
from cli import console
from lab.measure import timing
from lab.measure.token_budget import auto_budget
from parallel import engine_for, runner_for
from parallel.ranks import STARTED
from parallel.stages import SentChunk
from request import lone_chunk
from sampling import SamplingParams
from tests.helpers import check_integrity, completions_of
from tests.rank_stages import FaultyStage, model_of, out, size

PI = [3, 1, 4, 1, 5, 9, 2, 6]
PROMPTS = [[7, 8, 9], [1] * 20, [*PI, *PI, 60], [*PI, *PI, 33], PI, [4], [5, 6]]
PARAMS = [
    SamplingParams(8, logprobs=True),
    SamplingParams(5, 1.5, seed=3, logprobs=True),
    SamplingParams(9, 0.9, top_p=0.9, seed=4, logprobs=True),
    SamplingParams(9, 0.8, seed=6),
    SamplingParams(14, 1.2, top_k=9, seed=5, logprobs=True),
    SamplingParams(16, logprobs=True),
    SamplingParams(1),
]
REQUESTS = list(zip(PROMPTS, PARAMS, strict=True))
ENGINE = dict(
    policy="sarathi-serve",
    chunk=6,
    max_batch=3,
    max_len=32,
    page_size=16,
    pages=6,
)
# of these requests, when they come one after another
STOPPED = 0
ABORTED = 3


def engine_of(job, model=None, settings=None):
    """An engine of these settings, of which `pages` is of each micro-batch."""
    model = model or model_of(job)
    settings = dict(settings or job["engine"])
    settings["pages"] *= job["pp"]
    engine = engine_for(model)
    if settings.get("chunk") != "auto":
        return engine(model, **settings)
    del settings["chunk"]
    return engine(model, auto_budget(engine(model, **settings)))


def generate(engine):
    """The Requests of all requests at once."""
    return engine.generate(PROMPTS, PARAMS, progress=False)


def add_all(engine):
    """Add all requests: their ids."""
    return [engine.add_request(*request) for request in REQUESTS]


def check_nothing_is_left(engine):
    """Assert that no request is left, and no page is owned."""
    for scheduler in engine.schedulers:
        check_integrity(scheduler.pages, [])
        assert scheduler.pages.num_free == scheduler.pages.total
        assert not scheduler.running
    assert not engine.has_work
    assert engine.step() == []


def serve(job):
    """The answers to all requests under each of the job's `engines`, with its `fault`, if any."""
    model = model_of(job)
    return [serve_all(engine_of(job, model, settings), job) for settings in job["engines"]]


def serve_all(engine, job):
    """The answers to all requests: as they come, and then as often as the job says all at once; and
    how many were preempted, how many tokens found."""
    if job.get("warm_up"):
        engine.warm_up()
    runs = [serve_as_they_come(engine, job.get("stop"))]
    runs += [generate(engine) for _ in range(job.get("at_once", 0))]
    check_nothing_is_left(engine)
    if size(job) > 1:
        assert engine.runner.ranks.replies.keys() <= {STARTED}  # all were collected
    completions = sum(runs, [])
    return dict(
        answers=[[(c.output, c.logprobs, c.finish_reason) for c in run] for run in runs],
        preempted=sum(c.preemptions for c in completions),
        cached=sum(c.cached_tokens for c in completions),
    )


def serve_as_they_come(engine, stop=None):
    """The Requests that come while others run, the last first. STOPPED has a
    stop token; ABORTED is aborted after two tokens, and another step: the next is on its way."""
    ids = {}  # number -> request id
    done = {}
    tokens = Counter()  # of each request id
    coming = list(range(len(PROMPTS)))
    while coming or engine.has_work:
        if coming and (len(ids) < 3 or tokens.total() > 3):
            number = coming.pop()
            params = PARAMS[number]
            if number == STOPPED and stop is not None:
                params = replace(params, stop_token_ids=[stop])
            ids[number] = engine.add_request(PROMPTS[number], params)
        has_two = ABORTED in ids and tokens[ids[ABORTED]] >= 2
        events = engine.step()
        tokens.update(event.request.id for event in events)
        done |= completions_of(events)
        if has_two and ids[ABORTED] not in done:
            done[ids[ABORTED]] = engine.abort(ids[ABORTED])
    return [done[ids[number]] for number in range(len(PROMPTS))]


def iterations(engine):
    """The Iterations of an engine, until it has served all."""
    while engine.has_work:
        engine.step()
        if engine.last_iteration:
            yield engine.last_iteration


def batches(job):
    """[(micro-batch, chunks)] of each batch of the job's `arrivals` under each of its `engines`."""
    model = model_of(job)
    batches_of_engines = []
    for settings in job["engines"]:
        engine = engine_of(job, model, settings)
        for prompt_len, output_len in job["arrivals"]:
            engine.add_request([1] * prompt_len, SamplingParams(output_len))
        batches_of_engines.append([(i.micro_batch, i.chunks) for i in iterations(engine)])
    return batches_of_engines


def observed(job):
    """(the micro-batches whose schedulers learned how long a batch took, those that had one)."""
    engine = engine_of(job)
    learned = []
    for number, scheduler in enumerate(engine.schedulers):
        scheduler.observe = lambda batch, seconds, number=number: learned.append(number)
    add_all(engine)
    landed = [iteration.micro_batch for iteration in iterations(engine)]
    return learned, landed


def aborts(job):
    """Abort so many requests while batches are on their way: how many were aborted."""
    engine = engine_of(job)
    expected = generate(engine)
    ids = add_all(engine)
    done = {}
    aborted = set()
    while engine.has_work:
        done |= completions_of(engine.step())
        for request_id in on_their_way(engine) - aborted:
            if len(aborted) < job["aborts"]:
                aborted.add(engine.abort(request_id).id)
    for request_id, completion in zip(ids, expected, strict=True):
        if request_id not in aborted:
            assert done[request_id].output == completion.output
    assert len(done) == len(ids) - len(aborted)
    check_nothing_is_left(engine)
    return len(aborted)


def on_their_way(engine):
    """The ids of one request of each micro-batch while all are in flight."""
    in_flight = len(engine.flights) == len(engine.schedulers)
    running = [scheduler.running[:1] for scheduler in engine.schedulers]
    return {r.id for r in sum(running, [])} if in_flight and all(running) else set()


def broken_off(job):
    """Serve, and go on when the job's fault is raised on rank 0."""
    engine = engine_of(job)
    engine.add_request([1, 2, 3], SamplingParams(9))
    while engine.has_work:
        with suppress(ArithmeticError):
            engine.step()


# time


def rested(job):
    """Serve, rest for so many `seconds`, and serve again: how long each rank has waited since."""
    engine = engine_of(job)
    before = serve_as_they_come(engine)
    seconds_before = engine.ranks.call("seconds")
    time.sleep(job["seconds"])
    after = serve_as_they_come(engine)
    assert [c.output for c in before] == [c.output for c in after]
    seconds_after = engine.ranks.call("seconds")
    pairs = zip(seconds_before, seconds_after, strict=True)
    return [after.waited - before.waited for before, after in pairs]


def clocks(job):
    """The time on each rank, of which the last is on a node whose clock began earlier."""
    if int(os.environ["RANK"]) == size(job) - 1:
        perf_counter = time.perf_counter
        time.perf_counter = lambda: perf_counter() + 1000
    return [seconds.now for seconds in model_of(job).ranks.call("seconds")]


def waits(job):
    """How long each stage has waited before each of two batches. Rank 0 is late in the first."""
    model = model_of(job)
    runner = runner_for(model)(model, pages=1, page_size=16, max_len=16)
    waited = []
    for start in (0, 3):
        span = lone_chunk(pages=[0], start=start, tokens=[1, 2, 3])
        results = runner.collect(runner.send([SentChunk.of(span)]))
        waited.append([result.waited for result in results])
    return waited


class UnequalStage(FaultyStage):
    """A stage with room for 40 pages on rank 0, 24 on others."""

    def available_pages(self, config):
        self.max_batch_asked = config.max_batch
        return 40 if self.model.ranks.rank == 0 else 24


def sizes(job):
    """What engines of several `max_batches` have decided, and for how many requests they asked."""
    model = model_of(job, UnequalStage)
    decided = []
    for max_batch in job["max_batches"]:
        config = engine_for(model)(model, max_batch=max_batch, **job["sizes"]).config
        decided.append([config.pages, config.max_batch, model.ranks.work.max_batch_asked])
    return decided


def command(job):
    """bench.py, with the job's `words`. It measures only once, however `busy` the machine is."""
    if job.get("busy"):
        timing.steadily = lambda measure, *_, **__: (measure(), 0.0)
    bench.main(job["words"].split())


def be_a_rank(job):
    """Run a job's program, and on rank 0 write what it returns."""
    torch.set_num_threads(1)
    if "timeout_s" in job:
        parallel.ranks.TIMEOUT = timedelta(seconds=job["timeout_s"])
    out(f"{os.environ['RANK']}.pid").write_text(str(os.getpid()), "utf-8")
    try:
        result = globals()[job["program"]](job)
    except KeyboardInterrupt:
        time.sleep(1)  # it takes a while
        out("kept").touch()
        raise
    Path(os.environ["RANK_OUT"]).write_text(json.dumps(result), "utf-8")


def main():
    """Be one process of a world."""
    console.run(partial(be_a_rank, json.loads(os.environ["RANK_JOB"])))


if __name__ == "__main__":
    main()
