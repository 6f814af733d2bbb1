"""The programs that several processes run together in the tests of parallel/, and their start.

    python -m tests.rank_program           read jobs, run each in a world of processes, say how
    torchrun ... -m tests.rank_program     be one process of a world, whose job is $RANK_JOB

A job is a dict: `program`, the name of a function here, `tp`, `pp`, and what that function takes;
with `copies` there are so many whole models, and `kind` is a key of KINDS. Its model is one of
rank_stages.py. Worlds that are started here are forked after torch was imported: that takes no
time, torchrun does.
"""

import atexit
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from contextlib import suppress
from dataclasses import asdict, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from random import Random

import torch
import torch.distributed as dist

import bench
import parallel.instances
import parallel.meeting
import parallel.ranks
import parallel.stages
import parallel.transfer
import policies.pools
from cli import console
from lab.measure import timing
from lab.measure.link import measure_link
from lab.measure.token_budget import auto_budget
from parallel import engine_for, runner_for
from parallel.instances import ChunkedPoolsEngine, PoolsEngine, ReplicasEngine
from parallel.ranks import STARTED, Ranks
from parallel.stages import SentChunk
from parallel.transfer import Link
from sampling import SamplingParams
from speedups.lone_chunk import lone_chunk
from tests.helpers import check_integrity, tiny_model
from tests.rank_stages import LIMIT_S, Faulty, FaultyStage, SpoiltStage, model_of, size
from tests.test_interrupt import FILES, NEVER, Interrupt

KINDS = {"pools": PoolsEngine, "pools chunks": ChunkedPoolsEngine, "replicas": ReplicasEngine}
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
# of these requests, when they come one after another
STOPPED = 0
ABORTED = 3


def serve(job):
    """The answers to all requests under each of the job's `engines`, with its `fault`, if any."""
    Faulty.fault = job.get("fault")
    model = model_of(job, FaultyStage if "fault" in job else SpoiltStage)
    return [serve_all(engine_of(model, job, settings), job) for settings in job["engines"]]


def engine_of(model, job, settings):
    """An engine of these settings, of which `pages` is of each micro-batch."""
    pages = settings["pages"] * job["pp"]
    engine = KINDS[job["kind"]] if job.get("copies", 1) > 1 else engine_for(model)
    settings = settings | dict(pages=pages)
    if settings.get("chunk") != "auto":
        return engine(model, **settings)
    del settings["chunk"]
    return engine(model, auto_budget(engine(model, **settings)))


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
    if size(job) > 1:
        assert engine.runner.ranks.replies.keys() <= {STARTED}  # all were collected
    answers = {}
    for way, completions in done.items():
        answers[way] = [(c.tokens, c.logprobs, c.finish_reason) for c in completions]
    every = [completion for completions in done.values() for completion in completions]
    answers["preempted"] = sum(completion.preemptions for completion in every)
    answers["cached"] = sum(completion.cached_tokens for completion in every)
    return answers


def serve_as_they_come(engine, stop=None):
    """The Completions of requests that come while others run, the last first. STOPPED has a
    stop token; ABORTED is aborted after two tokens, and another step: the next is on its way."""
    ids = {}  # number -> request id
    done = {}
    tokens = Counter()  # of each request id
    coming = list(enumerate(PROMPTS))
    while coming or engine.has_work:
        if coming and (len(ids) < 3 or tokens.total() > 3):
            number, prompt = coming.pop()
            params = PARAMS[number]
            if number == STOPPED and stop is not None:
                params = replace(params, stop_token_ids=[stop])
            ids[number] = engine.add_request(prompt, params)
        has_two = ABORTED in ids and tokens[ids[ABORTED]] >= 2
        for event in engine.step():
            tokens[event.request_id] += 1
            if event.completion:
                done[event.request_id] = event.completion
        if has_two and ids[ABORTED] not in done:
            done[ids[ABORTED]] = engine.abort(ids[ABORTED])
    return [done[ids[number]] for number in range(len(PROMPTS))]


def batches(job):
    """[(micro-batch, chunks)] of each batch of the job's `arrivals` under each of its `engines`,
    in order."""
    model = model_of(job)
    all_batches = []
    for settings in job["engines"]:
        engine = engine_of(model, job, settings)
        for prompt_len, output_len in job["arrivals"]:
            engine.add_request([1] * prompt_len, SamplingParams(output_len))
        iterations = []
        while engine.has_work:
            engine.step()
            if engine.last_iteration:
                iterations.append(engine.last_iteration)
        all_batches.append([(i.micro_batch, i.chunks) for i in iterations])
    return all_batches


def observed(job):
    """(the micro-batches whose schedulers learned how long a batch took, those that had one)."""
    engine = engine_of(model_of(job), job, job["engine"])
    learned = []
    for number, scheduler in enumerate(engine.schedulers):
        scheduler.observe = partial(note, learned, number)
    add_all(engine)
    landed = []
    while engine.has_work:
        engine.step()
        if engine.last_iteration:
            landed.append(engine.last_iteration.micro_batch)
    return learned, landed


def note(learned, number, batch, seconds):
    """As Scheduler.observe, of the scheduler with this number."""
    learned.append(number)


INTERRUPTED = [parallel.stages, parallel.instances, parallel.transfer, policies.pools]


def interrupted(job):
    """Serve while KeyboardInterrupt is raised again and again. Returns its counts of the last seed.

    It is raised wherever rank 0 decides or waits, but not while all ranks are given a command.
    """
    FILES.update(str(Path(module.__file__)) for module in INTERRUPTED)
    model = model_of(job)
    params = [replace(each, logprobs=True) for each in PARAMS]
    expected = engine_of(model, job, job["engine"]).generate(PROMPTS, params, progress=False)
    for seed in job["seeds"]:
        engine = engine_of(model, job, job["engine"])
        done, counts = serve_interrupted(engine, params, Random(seed))
        assert [c.tokens for c in done] == [c.tokens for c in expected]
        for completion, same in zip(done, expected, strict=True):
            pairs = zip(completion.logprobs, same.logprobs, strict=True)
            assert max(abs(a - b) for a, b in pairs) < 1e-10
    return counts


def serve_interrupted(engine, params, random):
    """(Completions of PROMPTS, how often what was interrupted)."""
    counts = Counter()
    for number, request in enumerate(zip(PROMPTS, params, strict=True)):
        while len(engine.scheduler.requests) == number:
            counted(engine.add_request, request, random, counts)
    reply_arrived = engine.runner.ranks.reply_arrived
    wait_for = reply_arrived.wait_for
    reply_arrived.wait_for = partial(impatient, wait_for, random, counts)
    done = {}
    while engine.has_work:
        for event in counted(engine.step, (), random, counts) or ():
            if event.completion:
                done[event.request_id] = event.completion
    reply_arrived.wait_for = wait_for
    return [done[request_id] for request_id in sorted(done)], counts


def interrupted_at_each_place(job):
    """Serve one request again and again, each time with KeyboardInterrupt at the next place where
    rank 0 decides. Returns how many there are."""
    parallel.instances.WAIT_S = 10.0  # a step that waits in vain would be more places
    FILES.update(str(Path(module.__file__)) for module in INTERRUPTED)
    engine = engine_of(model_of(job), job, job["engine"])
    request = ([1, 2, 3], SamplingParams(2, logprobs=True))
    (expected,) = engine.generate([request[0]], request[1], progress=False)
    place = 0
    is_interrupted = True
    while is_interrupted:
        place += 1
        completion, is_interrupted = serve_interrupted_at(engine, place, request)
        assert completion, f"lost by an interrupt at place {place}"
        assert completion.tokens == expected.tokens
        assert len(completion.logprobs) == len(expected.tokens)
        for scheduler in engine.schedulers:
            check_integrity(scheduler.pages, [])
    if engine.ranks.copies > 1:  # nothing was sent twice
        assert engine.ranks.call("num_received") == [0] * engine.ranks.copies
    return place - 1


def serve_interrupted_at(engine, place, request):
    """(Completion of one request, whether an interrupt came at this place of what is called)."""
    completion = None
    places_left = place

    def interrupted_once(function, *arguments):
        nonlocal places_left
        interrupt = OutsideOfCommands(places_left if places_left > 0 else NEVER)
        value = interrupt(function, *arguments)
        places_left -= interrupt.events
        return value

    while not engine.has_work:
        interrupted_once(engine.add_request, *request)
    while engine.has_work:
        for event in interrupted_once(engine.step) or []:
            completion = event.completion or completion
    return completion, places_left <= 0


def impatient(wait_for, random, counts, *arguments):
    """wait_for(*arguments), or KeyboardInterrupt."""
    if random.random() < 0.2:
        counts["waiting"] += 1
        raise KeyboardInterrupt
    return wait_for(*arguments)


def counted(function, arguments, random, counts):
    """function(*arguments), interrupted at random, 30 times and then no more; its result."""
    interrupt = OutsideOfCommands(random.randint(1, 600 if counts["interrupts"] < 30 else NEVER))
    try:
        return interrupt(function, *arguments)
    finally:
        counts["interrupts"] += interrupt.raised


COMMANDS = (Ranks.command.__code__, Ranks.tell.__code__, Link.send.__code__)


class OutsideOfCommands(Interrupt):
    """Interrupts while no command is given."""

    def profile(self, frame, event, arg):
        caller = frame
        while caller and caller.f_code not in COMMANDS:
            caller = caller.f_back
        if caller is None:
            super().profile(frame, event, arg)


def aborts(job):
    """Abort a request of each micro-batch while batches are on their way: how many were aborted."""
    model = model_of(job)
    expected = engine_of(model, job, job["engine"]).generate(PROMPTS, PARAMS, progress=False)
    engine = engine_of(model, job, job["engine"])
    ids = add_all(engine)

    def all_run():
        in_flight = len(engine.flights) == job["pp"]
        return in_flight and all(scheduler.running for scheduler in engine.schedulers)

    while not all_run():
        engine.step()
    aborted = [engine.abort(s.running[0].id).request_id for s in engine.schedulers]
    done = {}
    while engine.has_work:
        for event in engine.step():
            if event.completion:
                done[event.request_id] = event.completion.tokens
    expected_tokens = {i: c.tokens for i, c in zip(ids, expected, strict=True)}
    assert done == {i: tokens for i, tokens in expected_tokens.items() if i not in aborted}
    for scheduler in engine.schedulers:
        check_integrity(scheduler.pages, [])
        assert not scheduler.running
    return len(aborted)


def aborts_on_the_link(job):
    """Abort so many requests while their keys and values are sent: how many were aborted."""
    model = model_of(job)
    engine = engine_of(model, job, job["engine"])
    expected = engine.generate(PROMPTS, PARAMS, progress=False)
    ids = add_all(engine)
    done = {}
    aborted = set()
    while engine.has_work:
        for event in engine.step():
            if event.completion:
                done[event.request_id] = event.completion.tokens
        on_the_link = {sending.transfer.request.id for sending in engine.sending.values()} - aborted
        if on_the_link and len(aborted) < job["aborts"]:
            aborted.add(engine.abort(min(on_the_link)).request_id)
    expected_tokens = {i: c.tokens for i, c in zip(ids, expected, strict=True)}
    assert done == {i: tokens for i, tokens in expected_tokens.items() if i not in aborted}
    for scheduler in engine.schedulers:
        check_integrity(scheduler.pages, [])
        assert scheduler.pages.num_free == scheduler.pages.total and not scheduler.running
    return len(aborted)


def link_speed(job):
    """The speed of the link between two ranks, and how many batches they computed meanwhile."""
    model = model_of(job)
    ranks = model.ranks
    tell = ranks.tell
    methods = Counter()

    def counted_tell(rank, method, *arguments):
        methods[method] += 1
        return tell(rank, method, *arguments)

    ranks.tell = counted_tell
    speed = measure_link(model, job["max_len"], "auto")
    return asdict(speed) | dict(batches=methods["run"])


def add_all(engine):
    """Add all requests: their ids."""
    return [
        engine.add_request(prompt, params) for prompt, params in zip(PROMPTS, PARAMS, strict=True)
    ]


def policy_raises(job):
    """Serve, while the policy raises once: the message."""
    model = model_of(job)
    engine = engine_of(model, job, job["engine"])
    expected = [c.tokens for c in engine.generate(PROMPTS, PARAMS, progress=False)]
    add_all(engine)
    for _ in range(5):
        engine.step()
    scheduler = engine.schedulers[-1]
    schedule = scheduler.schedule
    scheduler.schedule = fail
    message = None
    tokens = {}
    while engine.has_work:
        try:
            events = engine.step()
        except ArithmeticError as error:
            message = str(error)
            scheduler.schedule = schedule
            continue
        for event in events:
            if event.completion:
                tokens[event.request_id] = event.completion.tokens
    in_order = [tokens[request_id] for request_id in sorted(tokens)]
    assert in_order[-len(PROMPTS) :] == expected
    return message


def fail():
    raise ArithmeticError("my policy")


def idle(job):
    """Send `what` to a rank, which may be this one, while all have nothing to do."""
    model_of(job)
    os.kill(pid_of(job, job["victim"]), getattr(signal, job["what"]))
    time.sleep(LIMIT_S)


def rests(job):
    """Serve, rest for so many `seconds`, and serve again: how long each rank has waited since."""
    model = model_of(job)
    ranks = model.ranks
    engine = engine_of(model, job, job["engines"][0])
    serve_as_they_come(engine)
    before = ranks.call("seconds")
    time.sleep(job["seconds"])
    serve_as_they_come(engine)
    return [b.waited - a.waited for a, b in zip(before, ranks.call("seconds"), strict=True)]


def clocks(job):
    """The time on each rank, of which the last is on a node whose clock began earlier."""
    if int(os.environ["RANK"]) == job["tp"] * job["pp"] - 1:
        perf_counter = time.perf_counter
        time.perf_counter = lambda: perf_counter() + 1000
    return [seconds.now for seconds in model_of(job).ranks.call("seconds")]


class UnequalStage(SpoiltStage):
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
        asked = model.ranks.work.max_batch_asked
        decided.append(dict(pages=config.pages, max_batch=config.max_batch, asked=asked))
    return decided


def loads(job):
    """How long rank 0 has waited until all had loaded."""
    Faulty.fault = job["fault"]
    return model_of(job, FaultyStage).ranks.waited


def waits(job):
    """How long each stage has waited before each of two batches. Rank 0 is late in the first."""
    Faulty.fault = job["fault"]
    model = model_of(job, FaultyStage)
    runner = runner_for(model)(model, pages=1, page_size=16, max_len=16)
    waited = []
    for start in (0, 3):
        span = lone_chunk(pages=[0], start=start, tokens=[1, 2, 3])
        command = runner.send([SentChunk.of(span)])
        waited.append([result.waited for result in runner.collect(command)])
        runner.forget(command)
    return waited


def stopped_at_the_end(job):
    """Stop a rank, and end."""
    model_of(job)
    os.kill(pid_of(job, job["victim"]), signal.SIGSTOP)
    time.sleep(1)  # until all of its threads stand still


def suspended(job):
    """Serve; then stop all ranks for so many `seconds`, as Ctrl-Z does, and serve again."""
    engine = engine_of(model_of(job), job, job["engines"][0])
    before = serve_as_they_come(engine)
    pids = [pid_of(job, rank) for rank in range(job["tp"] * job["pp"])]
    numbers = " ".join(map(str, pids))
    wakes = subprocess.Popen(["sh", "-c", f"sleep {job['seconds']}; kill -CONT {numbers}"])
    for pid in reversed(pids):  # this one is the last
        os.kill(pid, signal.SIGSTOP)
    wakes.wait()
    time.sleep(3 * parallel.ranks.BEAT_S)
    after = serve_as_they_come(engine)
    return [c.tokens for c in before] == [c.tokens for c in after]


def pid_of(job, rank):
    """The process of a rank."""
    return int(Path(f"{job['out']}.{rank}.pid").read_text())


def command_broken_off(job):
    """The model raises on rank 0 while it serves, and rank 0 goes on."""
    Faulty.fault = dict(what="raise", when="decode", rank=0)
    engine = engine_of(model_of(job, FaultyStage), job, job["engine"])
    engine.add_request([1, 2, 3], SamplingParams(9))
    while engine.has_work:
        with suppress(ArithmeticError):
            engine.step()


def transfer_broken_off(job):
    """Ctrl-C comes between the two messages of a transfer, and rank 0 goes on."""
    engine = engine_of(model_of(job), job, job["engine"])
    engine.add_request([1, 2, 3], SamplingParams(9))
    isend = dist.isend

    def broken(tensor, *arguments, **options):
        if tensor.dtype == engine.runner.model.dtype:
            dist.isend = isend
            raise KeyboardInterrupt
        return isend(tensor, *arguments, **options)

    dist.isend = broken
    while engine.has_work:
        with suppress(KeyboardInterrupt):
            engine.step()


def command(job):
    """bench.py, with the job's `words`. It measures only once, however `busy` the machine is."""
    if job.get("busy"):
        timing.steadily = lambda measure, device, **_: (measure(), 0.0)
    bench.main(job["words"].split())


def be_a_rank(job):
    """Run a job's program, and on rank 0 write what it returns to the job's `out`."""
    torch.set_num_threads(1)
    parallel.ranks.BEAT_S /= 5  # what the tests wait for
    parallel.ranks.SILENCE_LIMIT_S //= 5
    parallel.ranks.GRACE_S /= 3
    for name, seconds in job.get("limits", {}).items():
        module = parallel.meeting if name == "MEETING_LIMIT" else parallel.ranks
        setattr(module, name, timedelta(seconds=seconds))
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
    """Start a job's world: [(pid, rank)], or None in its processes, which are to be ranks."""
    world = size(job)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    environ = dict(WORLD_SIZE=world, MASTER_ADDR="127.0.0.1", MASTER_PORT=job.get("port", port))
    pids = []
    for rank in job.get("start", range(world)):
        pid = os.fork()
        if pid > 0:
            pids.append((pid, rank))
            continue
        node_size = job.get("node_size", world)
        environ |= dict(RANK=rank, LOCAL_RANK=rank % node_size, LOCAL_WORLD_SIZE=node_size)
        os.environ.update({name: str(value) for name, value in environ.items()})
        error = os.open(f"{job['out']}.{rank}", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
        for stream, file in enumerate([os.open(os.devnull, os.O_RDONLY), error, error]):
            os.dup2(file, stream)
        return None
    return pids


def wait(worlds):
    """[{rank: (status, seconds after the first had ended, or was stopped)}] of each world.

    A rank that is stopped goes on when all others of its world have ended. One that hangs is
    killed."""
    pids = [pid for world in worlds for pid, _ in world]
    started = time.monotonic()
    ended = {}  # pid -> (status, when)
    stopped = {}  # pid -> when
    while len(ended) < len(pids):
        is_late = time.monotonic() > started + LIMIT_S
        for pid in set(pids) - ended.keys():
            if is_late:
                os.kill(pid, signal.SIGKILL)
            changed, status = os.waitpid(pid, 0 if is_late else os.WNOHANG | os.WUNTRACED)
            now = time.monotonic()
            if changed and os.WIFSTOPPED(status):
                stopped[pid] = now
            elif changed:
                ended[pid] = "hangs" if is_late else os.waitstatus_to_exitcode(status), now
        for world in worlds:
            left = {pid for pid, _ in world} - ended.keys()
            if left <= stopped.keys() and len(left) == 1:
                os.kill(*left, signal.SIGCONT)
        time.sleep(0.01)
    results = []
    for world in worlds:
        first = min(stopped.get(pid, ended[pid][1]) for pid, _ in world)
        results.append({rank: (ended[pid][0], ended[pid][1] - first) for pid, rank in world})
    return results


def main():
    """As the heading says; each line has jobs whose worlds run at the same time."""
    if job := os.environ.get("RANK_JOB"):
        console.run(partial(be_a_rank, json.loads(job)))
        return
    tiny_model()  # what torch imports late is imported before the forks
    for line in sys.stdin:
        worlds = []
        for job in json.loads(line):
            pids = fork(job)
            if pids is None:
                console.run(partial(be_a_rank, job))
                return
            worlds.append(pids)
        print(json.dumps(wait(worlds)), flush=True)


if __name__ == "__main__":
    main()
