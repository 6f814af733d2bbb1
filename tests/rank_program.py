"""The programs that several processes run together in the tests of parallel/.

A job is a dict: `program`, the name of a function here, `tp`, `pp`, and what that function takes.
Each rank finds its job in $RANK_JOB. forked.py starts them."""

import json
import os
import signal
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from cli import console
from cli.loading import ModelOptions, load_model
from engine import no_interrupt
from parallel.ranks import Ranks
from parallel.shard import Shard
from parallel.stages import Stage, engine_for
from sampling import SamplingParams
from tests.helpers import check_integrity, completions_of, tiny_model

PI = [3, 1, 4, 1, 5, 9, 2, 6]
REQUESTS = [
    ([7, 8, 9], SamplingParams(8, logprobs=True)),
    ([1] * 20, SamplingParams(5, 1.5, seed=3, logprobs=True)),
    ([*PI, *PI, 60], SamplingParams(9, 0.9, top_p=0.9, seed=4, logprobs=True)),
    (PI, SamplingParams(14, 1.2, top_k=9, seed=5, logprobs=True)),
    ([4], SamplingParams(16, logprobs=True)),
    ([5, 6], SamplingParams(1)),
]
ENGINE = dict(
    policy="sarathi-serve",
    chunk=6,
    max_batch=3,
    max_len=32,
    page_size=4,
    pages=8,
)


class FaultyStage(Stage):
    """A stage to which something happens as `fault` says: `what`, on `rank`, in the first batch
    with prefill or without, between two parts of a layer.

    Its caches hold big numbers until they are written: nobody may read them."""

    fault = None

    def make_runner(self, key, *sizes):
        super().make_runner(key, *sizes)
        self.runners[key].cache.data.fill_(1e4)

    def run(self, key, sent):
        when = "prefill" if any(len(chunk.tokens) > 1 for chunk in sent) else "decode"
        block = self.model.blocks[-1]
        block.project = partial(self.project, when, block)
        super().run(key, sent)

    def project(self, when, block, *rows):
        fault = self.fault
        if fault and (fault["rank"], fault["when"]) == (self.model.ranks.rank, when):
            self.fault = None
            suffer(fault["what"])
        return type(block).project(block, *rows)


def suffer(what):
    """Wait, raise something, or get a signal."""
    if what == "wait":
        Path(os.environ["RANK_OUT"] + ".waits").touch()
        time.sleep(8)  # a Ctrl-C may be held back until the batch has ended
    if what == "raise":
        raise ArithmeticError("the model fails")
    os.kill(os.getpid(), getattr(signal, what))


def model_of(job):
    """The model of a job, of one process or of several: from `tiny`, arguments of tiny_model; or as
    the command line loads it, from `load`, some ModelOptions."""
    tp, pp = job["tp"], job["pp"]
    if "load" in job:
        options = ModelOptions(
            device="cpu",
            dtype="float64",
            seed=7,
            tp=tp,
            pp=pp,
        )
        return load_model(replace(options, **job["load"]), 32, positions_from="--max-len")
    model = tiny_model(**job["tiny"])
    if tp * pp == 1:
        return model
    FaultyStage.fault = job.get("fault")
    ranks = Ranks(tp, pp)
    return ranks.start(lambda: FaultyStage(shard_of(model, ranks))).model


def shard_of(model, ranks):
    """The part of a model that a rank has."""
    shard = Shard(model.config, ranks, dtype=model.dtype, seed=None)
    for name, parameter in model.named_parameters():
        shard.fill(name, parameter)
    return shard


def engine_of(job, model, settings):
    """An engine of these settings, of which `pages` is of each micro-batch."""
    return engine_for(model)(model, **settings | dict(pages=settings["pages"] * job["pp"]))


def serve(job):
    """The answers to all requests under each of the job's `engines`, and how many tokens were found
    or computed again."""
    model = model_of(job)
    return [serve_all(engine_of(job, model, settings)) for settings in job["engines"]]


def serve_all(engine):
    """The answers to requests that come while others run, then to all at once."""
    engine.warm_up()
    done = {}
    for prompt, params in REQUESTS:
        engine.add_request(prompt, params)
        done |= completions_of(engine.step())
    while engine.has_work:
        done |= completions_of(engine.step())
    requests = [done[i] for i in sorted(done)]
    requests += engine.generate(*zip(*REQUESTS, strict=True), progress=False)
    check_nothing_is_left(engine)
    return dict(
        answers=[(r.output, r.logprobs, r.finish_reason) for r in requests],
        preempted=sum(r.preemptions for r in requests),
        cached=sum(r.cached_tokens for r in requests),
    )


def check_nothing_is_left(engine):
    """Assert that no request is left, and no page is owned."""
    for scheduler in engine.schedulers:
        check_integrity(scheduler.pages, [])
        assert scheduler.pages.num_free == scheduler.pages.total
    assert not engine.has_work
    assert engine.step() == []


def aborts(job):
    """Abort two requests whose batches are on their way: others' texts are the same."""
    engine = engine_of(job, model_of(job), ENGINE)
    expected = engine.generate(*zip(*REQUESTS, strict=True), progress=False)
    ids = [engine.add_request(*request) for request in REQUESTS]
    done = {}
    aborted = []
    while engine.has_work:
        done |= completions_of(engine.step())
        if len(engine.flights) == len(engine.schedulers) and not aborted:
            aborted = [scheduler.running[0].id for scheduler in engine.schedulers]
            for request_id in aborted:
                engine.abort(request_id)
    for request_id, request in zip(ids, expected, strict=True):
        assert request_id in aborted or done[request_id].output == request.output
    check_nothing_is_left(engine)
    return [len(aborted), len(done)]


def be_a_rank(job):
    """Run a job's program, and on rank 0 write what it returns."""
    torch.set_num_threads(1)
    out = os.environ["RANK_OUT"]
    Path(f"{out}.{os.environ['RANK']}.pid").write_text(str(os.getpid()), "utf-8")
    try:
        result = globals()[job["program"]](job)
    except KeyboardInterrupt:
        with no_interrupt():  # torchrun sends another
            Path(f"{out}.kept").touch()
        raise
    Path(out).write_text(json.dumps(result), "utf-8")


def main():
    """Be one process of a world."""
    console.run(partial(be_a_rank, json.loads(os.environ["RANK_JOB"])))


if __name__ == "__main__":
    main()
