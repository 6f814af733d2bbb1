"""What several processes run together in the tests of parallel/, and who starts them.

    python -m tests.rank_program           read jobs, run each in a world of processes, say how
    torchrun ... -m tests.rank_program     be one process of a world, whose job is $RANK_JOB

A job is a dict: `program`, the name of a function here, `tp`, `pp`, and what that function takes.
Worlds that are started here are forked after torch was imported: that takes no time, torchrun does.
"""

import atexit
import json
import os
import signal
import socket
import sys
import time
from collections import Counter
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from random import Random
from types import SimpleNamespace

import torch

import bench
import parallel.stages
from cli import console, options
from model import GPT, GPTConfig
from parallel.ranks import Ranks
from parallel.shard import Shard
from parallel.stages import Stage
from sampling import SamplingParams
from tests.helpers import check_integrity, tiny_model
from tests.test_interrupt import FILES, NEVER, Interrupt

LIMIT_S = 40  # for a job: a world that hangs is a failure
PI = [3, 1, 4, 1, 5, 9, 2, 6]
PROMPTS = [[7, 8, 9], [1] * 20, [*PI, *PI, 60], [*PI, *PI, 33], PI, [4], [5, 6]]
PARAMS = [
    *(SamplingParams(8, logprobs=True), SamplingParams(5, 1.5, seed=3, logprobs=True)),
    *(SamplingParams(9, 0.9, top_p=0.9, seed=4, logprobs=True), SamplingParams(9, 0.8, seed=6)),
    *(SamplingParams(14, 1.2, top_k=9, seed=5, logprobs=True), SamplingParams(16, logprobs=True)),
    SamplingParams(1),
]
STOPPED, ABORTED = 0, 3  # of these requests, when they come one after another


def shard_of(model, ranks):
    """What a rank has of a GPT, as a Shard."""
    shard = Shard(model.config, ranks, dtype=model.dtype, seed=None)
    whole = dict(model.named_parameters(remove_duplicate=False))
    for name, p in shard.named_parameters():
        source, dim, ranges = shard.slices_of(name)
        parts = [whole[source].narrow(dim, a, b - a) for a, b in ranges]
        p.zero_()
        if parts:
            parts = torch.cat(parts, dim)
            p.narrow(dim, 0, parts.shape[dim]).copy_(parts)
    return shard


class SpoiltStage(Stage):
    """Whose caches hold big numbers until they are written: nobody may read them."""

    def make_runner(self, key, *sizes):
        made = super().make_runner(key, *sizes)
        self.runners[key].cache.data.fill_(1e4)
        return made


class FaultyStage(SpoiltStage):
    """A stage that fails as `fault` says: `what` happens on `rank` in the first batch that has
    prefill, or else the first that has none, between two parts of a layer."""

    fault = None

    def run(self, key, spans, *more):
        kind = "prefill" if any(span.length > 1 for span in spans) else "decode"
        if self.fault and (self.fault["rank"], self.fault["when"]) == (self.model.ranks.rank, kind):
            block, self.fault["project"] = self.model.blocks[-1], self.model.blocks[-1].project
            block.project = self.strike
        return super().run(key, spans, *more)

    def strike(self, *rows):
        """Be killed, interrupted or late, or raise something, once."""
        what, self.model.blocks[-1].project = self.fault["what"], self.fault["project"]
        self.fault = None
        if what == "wait":
            Path(os.environ["STRUCK"]).touch()
            time.sleep(LIMIT_S)
        if what == "raise":
            raise ArithmeticError("the model fails")
        os.kill(os.getpid(), getattr(signal, what))
        return self.model.blocks[-1].project(*rows)


def model_of(job, stage=SpoiltStage):
    """The model of a job: that of one process, or of this one of several; from `tiny`, arguments of
    tiny_model, from `random`, a GPTConfig whose weights have a seed, or from a `checkpoint`, which
    may be one for each rank."""
    tp, pp, alone = job["tp"], job["pp"], job["tp"] * job["pp"] == 1
    if directory := job.get("checkpoint"):
        if isinstance(directory, list):
            directory = directory[int(os.environ["RANK"])]
        args = dict(tp=tp, pp=pp, init_from=directory, model=None, device="cpu", dtype="float64")
        args |= dict(attention="auto", compile=False, threads=1, seed=0, max_len=32)
        return options.load_model(SimpleNamespace(**args), "max_len")
    tiny = lambda: tiny_model(**job["tiny"])
    if "random" in job:
        config, how = GPTConfig(**job["random"]), dict(dtype=torch.float64, seed=7)
        make = lambda ranks: Shard(config, ranks, **how) if ranks else GPT(config, **how)
    else:
        make = lambda ranks: shard_of(tiny(), ranks) if ranks else tiny()
    if alone:
        return make(None)
    ranks = Ranks(tp, pp)
    return ranks.start(lambda: stage(make(ranks))).model


def serve(job):
    """What requests get under each of the job's `engines`, with the job's `fault`, if any."""
    FaultyStage.fault = job.get("fault")
    model = model_of(job, FaultyStage if "fault" in job else SpoiltStage)
    return [serve_all(engine_of(model, job, settings), job) for settings in job["engines"]]


def engine_of(model, job, settings):
    """An engine of these settings, of which `pages` is of each micro-batch."""
    pages = settings["pages"] * job["pp"]
    return options.engine_for(model)(model, **settings | dict(pages=pages))


def serve_all(engine, job):
    """{way: [(tokens, logprobs, finish_reason)] of each request}: as they come, once or as often as
    the job says all at once; and how many were preempted, how many tokens found."""
    if job.get("warm_up"):
        engine.warm_up()
    done = {"as they come": serve_as_they_come(engine, job.get("stop"))}
    for n in range(job.get("at_once", 0)):
        done[f"at once, {n}"] = engine.generate(PROMPTS, PARAMS, progress=False)
    for scheduler in engine.schedulers:
        check_integrity(scheduler.pages, [])
        assert scheduler.pages.num_free == scheduler.pages.total and not scheduler.running
    assert not engine.has_work and engine.step() == []
    its = [completion for way in done.values() for completion in way]
    counts = sum(c.preemptions for c in its), sum(c.cached_tokens for c in its)
    got = {way: [(c.tokens, c.logprobs, c.finish_reason) for c in done[way]] for way in done}
    return got | dict(zip(("preempted", "cached"), counts))


def serve_as_they_come(engine, stop=None):
    """The Completions of requests that come while others run, the last first. STOPPED has a
    stop token; ABORTED is aborted after two tokens, and another step: the next is on its way."""
    ids, done, seen, coming = {}, {}, Counter(), list(enumerate(PROMPTS))
    while coming or engine.has_work:
        if coming and (len(ids) < 3 or seen.total() > 3):
            number, prompt = coming.pop()
            params = PARAMS[number]
            if number == STOPPED and stop is not None:
                params = replace(params, stop_token_ids=[stop])
            ids[number] = engine.add_request(prompt, params)
        two = ABORTED in ids and seen[ids[ABORTED]] >= 2
        for event in engine.step():
            seen[event.request_id] += 1
            if event.completion:
                done[event.request_id] = event.completion
        if two and ids[ABORTED] not in done:
            done[ids[ABORTED]] = engine.abort(ids[ABORTED])
    return [done[ids[number]] for number in range(len(PROMPTS))]


def batches(job):
    """[(micro-batch, chunks)] of each batch of the job's `arrivals` under each of its `engines`,
    in order."""
    model, all_batches = model_of(job), []
    for settings in job["engines"]:
        engine, found = engine_of(model, job, settings), []
        for prompt_len, output_len in job["arrivals"]:
            engine.add_request([1] * prompt_len, SamplingParams(output_len))
        while engine.has_work:
            engine.step()
            if its := engine.last_iteration:
                found.append((its.micro_batch, its.chunks))
        all_batches.append(found)
    return all_batches


def interrupted(job):
    """Serve while KeyboardInterrupt is raised again and again, anywhere in what rank 0 decides or
    waits for, but not while all ranks are given an order. How many there were, of the last seed."""
    FILES.add(str(Path(parallel.stages.__file__)))
    model = model_of(job)
    params = [replace(its, logprobs=True) for its in PARAMS]
    expected = engine_of(model, job, job["engine"]).generate(PROMPTS, params, progress=False)
    wait_for = model.ranks.reply_arrived.wait_for
    for seed in job["seeds"]:
        engine, random = engine_of(model, job, job["engine"]), Random(seed)
        done, counts = {}, Counter()
        for n, its in enumerate(zip(PROMPTS, params)):
            while len(engine.scheduler.requests) == n:
                counted(engine.add_request, its, random, counts)
        model.ranks.reply_arrived.wait_for = partial(impatient, wait_for, random, counts)
        while engine.has_work:
            for event in counted(engine.step, (), random, counts) or ():
                if event.completion:
                    done[event.request_id] = event.completion
        model.ranks.reply_arrived.wait_for = wait_for
        done = [its for _, its in sorted(done.items())]
        assert [its.tokens for its in done] == [its.tokens for its in expected]
        for its, same in zip(done, expected):
            assert max(abs(a - b) for a, b in zip(its.logprobs, same.logprobs)) < 1e-10
    return counts


def impatient(wait_for, random, counts, *given):
    """wait_for(*given), or KeyboardInterrupt."""
    if random.random() < 0.1:
        counts["waiting"] += 1
        raise KeyboardInterrupt
    return wait_for(*given)


def counted(function, given, random, counts):
    """function(*given), interrupted at random, 30 times and then no more; what it returned."""
    interrupt = OutsideOfOrders(random.randint(1, 600 if counts["interrupts"] < 30 else NEVER))
    try:
        return interrupt(function, *given)
    finally:
        counts["interrupts"] += interrupt.raised


class OutsideOfOrders(Interrupt):
    """Interrupts while no order is given."""

    def profile(self, frame, event, arg):
        its = frame
        while its and its.f_code is not Ranks.command.__code__:
            its = its.f_back
        if not its:
            super().profile(frame, event, arg)


def aborts(job):
    """Abort a request of each micro-batch while batches are on their way: how many were aborted."""
    model, done = model_of(job), {}
    expected = engine_of(model, job, job["engine"]).generate(PROMPTS, PARAMS, progress=False)
    engine = engine_of(model, job, job["engine"])
    ids = [engine.add_request(*its) for its in zip(PROMPTS, PARAMS)]
    while (
        not all(its.running for its in engine.schedulers) or len(engine.state.flights) < job["pp"]
    ):
        engine.step()
    aborted = [engine.abort(its.running[0].id).request_id for its in engine.schedulers]
    while engine.has_work:
        done |= {e.request_id: e.completion.tokens for e in engine.step() if e.completion}
    assert done == {i: its.tokens for i, its in zip(ids, expected) if i not in aborted}
    for scheduler in engine.schedulers:
        check_integrity(scheduler.pages, [])
        assert not scheduler.running
    return len(aborted)


def policy_raises(job):
    """Serve, while the policy raises once: what it raised."""
    model = model_of(job)
    engine = engine_of(model, job, job["engine"])
    expected = [its.tokens for its in engine.generate(PROMPTS, PARAMS, progress=False)]
    for its in zip(PROMPTS, PARAMS):
        engine.add_request(*its)
    for _ in range(5):
        engine.step()
    scheduler, tokens, why = engine.schedulers[-1], {}, None
    schedule, scheduler.schedule = scheduler.schedule, fail
    while engine.has_work:
        try:
            events = engine.step()
        except ArithmeticError as error:
            why, scheduler.schedule, events = str(error), schedule, []
        tokens |= {its.request_id: its.completion.tokens for its in events if its.completion}
    assert [its for _, its in sorted(tokens.items())][-len(PROMPTS) :] == expected
    return why


def fail():
    raise ArithmeticError("my policy")


def idle(job):
    """Kill a rank, which may be this one, while all have nothing to do."""
    model_of(job)
    os.kill(int(Path(f"{job['out']}.{job['victim']}.pid").read_text()), signal.SIGKILL)
    time.sleep(LIMIT_S)


def order_broken_off(job):
    """The model raises on rank 0 while it serves, and whoever serves goes on."""
    FaultyStage.fault = dict(what="raise", when="decode", rank=0)
    engine = engine_of(model_of(job, FaultyStage), job, job["engine"])
    engine.add_request([1, 2, 3], SamplingParams(9))
    while engine.has_work:
        with suppress(ArithmeticError):
            engine.step()


def command(job):
    """bench.py, with the job's `words`."""
    bench.main(job["words"].split())


def be_a_rank(job):
    """Run a job's program, and on rank 0 write what it returns to the job's `out`."""
    torch.set_num_threads(1)
    Path(f"{job['out']}.{os.environ['RANK']}.pid").write_text(str(os.getpid()))
    try:
        result = globals()[job["program"]](job)
    except KeyboardInterrupt:
        time.sleep(1)  # it takes a while
        Path(f"{job['out']}.kept").touch()
        raise
    Path(job["out"]).write_text(json.dumps(result))
    if not os.environ.get("TORCHELASTIC_RUN_ID"):
        atexit._run_exitfuncs()
        os._exit(0)  # at once: to take all modules apart takes a second


def fork(job):
    """Start a job's world: [(pid, rank)], or None in its processes, which are to be ranks now."""
    world, pids = job["tp"] * job["pp"], []
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    its = dict(WORLD_SIZE=world, MASTER_ADDR="127.0.0.1", MASTER_PORT=job.get("port", port))
    for rank in range(job.get("start", world)):
        if pid := os.fork():
            pids.append((pid, rank))
            continue
        its |= dict(RANK=rank, LOCAL_RANK=rank)
        os.environ.update({name: str(value) for name, value in its.items()})
        error = os.open(f"{job['out']}.{rank}", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
        for stream, file in enumerate([os.open(os.devnull, os.O_RDONLY), error, error]):
            os.dup2(file, stream)
        return None
    return pids


def wait(worlds):
    """[{rank: (status, seconds after the first had ended)}] of each world; who hangs is killed."""
    waiting, started = {pid: its for its in worlds for pid, _ in its}, time.monotonic()
    ended = {}
    while len(ended) < len(waiting):
        late = time.monotonic() > started + LIMIT_S
        for pid in waiting.keys() - ended.keys():
            if late:
                os.kill(pid, signal.SIGKILL)
            found, status = os.waitpid(pid, 0 if late else os.WNOHANG)
            if found:
                status = "hangs" if late else os.waitstatus_to_exitcode(status)
                ended[pid] = status, time.monotonic()
        time.sleep(0.01)
    said = []
    for its in worlds:
        first = min(ended[pid][1] for pid, _ in its)
        said.append({rank: (ended[pid][0], ended[pid][1] - first) for pid, rank in its})
    return said


def main():
    """As the heading says; each line has jobs whose worlds run at the same time."""
    if job := os.environ.get("RANK_JOB"):
        return console.run(lambda: be_a_rank(json.loads(job)))
    tiny_model()  # what torch imports late is imported before the forks
    for line in sys.stdin:
        worlds = []
        for job in json.loads(line):
            if (pids := fork(job)) is None:
                return console.run(lambda: be_a_rank(job))  # noqa: B023
            worlds.append(pids)
        print(json.dumps(wait(worlds)), flush=True)


if __name__ == "__main__":
    main()
