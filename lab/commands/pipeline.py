"""Real bubbles: a pipeline of processes on this machine, and the same load simulated beside it.

    torchrun --nproc-per-node 2 bench.py pipeline --pp 2

Requests of unequal length are all there at the start (SARATHI §5.3, scaled down). Each stage says
when it computed what; what it waited for is a bubble, of one of three kinds (§3.2). The cost model
is fitted to batches that are timed on each stage while the others work, too. Read first:
simulation.py, parallel/stages.py."""

import json
from statistics import median

from tqdm import tqdm

from cli import options
from config import EngineConfig
from engine import StepInputs
from lab.measure import load_run as run
from lab.measure import timing as measure
from lab.measure import workload
from lab.simulator.cost_model import FittedCost
from lab.simulator.machine import profile_cases
from lab.simulator.simulation import bubble_kinds, simulate
from policies.token_budget import Profiled, hybrid_spans
from sampling import SamplingParams
from views import tables

KINDS = "PB1", "PB2", "PB3"
FOLLOWING, DRAWN = 4, 40  # batches behind each other that are timed; on any stage that are drawn


def add_options(parser):
    """The options of the command."""
    parser.add_table("pipeline", "json")
    parser.add_model_options("llama-13b on a GPU with 40 GB or more, else llama-160m")


def check(parser, args):
    """Exit with a message if there is no pipeline."""
    if args.pp * args.tp < 2:
        parser.error("--pp 1: a pipeline has two stages or more (--tp 2 shows what sums cost)")


def seconds_of(batches):
    """How long a stage takes for one of some batches behind each other, and for what it does in
    between, but for waiting."""
    between = [b[0] - a[1] - b[2] for a, b in zip(batches, batches[1:])]
    return median(end - start for start, end, *_ in batches) + max(0.0, median(between))


def fit(runner, max_len):
    """The FittedCost of the stages of a parallel.stages.ParallelRunner."""
    timed, hops = [], []
    cases = tqdm(profile_cases(max_len)[0], "profile", leave=False, disable=None)
    for case in cases:
        spans = hybrid_spans(runner.cache, *case)
        inputs = StepInputs(spans, [SamplingParams()] * len(spans), [0] * len(spans))
        for _ in range(2):  # of which the first does not count
            commands = [runner.send(inputs) for _ in range(FOLLOWING)]
            seen = [runner.collect(command) for command in commands]
        hops += [b[0] - a[1] for a, b in zip(seen[0], seen[0][1:])]  # to where nothing is
        timed.append([(Profiled(*case, 0.0).shape, seconds_of(its)) for its in zip(*seen)])
    return FittedCost(zip(*timed), max(0.0, median(hops or [0.0])))


def serve(model, config, arrivals, tokens):
    """(`summarize` of a Run, the engine's EngineConfig, its StageRuns), with two more of a stage:
    when it neither computed nor waited, and sums over ranks, as shares of its busy time."""
    engines, ranks = [], model.ranks

    def made(engine):
        engine.micro_batches.reset()
        engine.record = True
        engines.append((engine, ranks.call("seconds")))

    seen = run.serve(model, config, arrivals, tokens, made=made)
    ((engine, before),) = engines
    pairs = zip(before[:: ranks.tp], ranks.call("seconds")[:: ranks.tp])
    found = summarize(seen, engine.micro_batches)
    for its, two in zip(found["stages"], pairs):
        busy_s, (seconds, waited_s, sums_s) = its["busy_s"], (b - a for a, b in zip(*two))
        its |= {"own": (seconds - waited_s - busy_s) / busy_s, "sums": sums_s / busy_s}
    return found, engine.config, engine.micro_batches.stage_runs


def summarize(seen, pipeline):
    """What is known of a Run and its MicroBatches, a dict: in seconds, of stages in lists."""
    kinds, bubbles, busy = dict.fromkeys(KINDS, 0.0), [0.0] * pipeline.pp, pipeline.busy.values()
    for stage_run, kind in bubble_kinds(pipeline.stage_runs):
        kinds[kind] += stage_run.bubble
        bubbles[stage_run.stage] += stage_run.bubble
    its, tokens = seen.seconds, sum(len(c.prompt) + len(c.tokens) for c in seen.completions)
    stages = [dict(busy_s=a, bubble_s=b, idle_s=its - a - b) for a, b in zip(busy, bubbles)]
    found = {"makespan_s": its, "tokens_per_s": tokens / its, "bubbles_s": sum(bubbles)}
    found |= {"median_bubble_s": median(pipeline.bubbles.values()), "stages": stages}
    return found | kinds | {"busy": seen.drift > measure.BUSY}


def print_runs(rows):
    """The tables: {policy: (real, simulated)} as of `summarize`."""
    shown, stages = {}, {}
    for policy, (real, simulated) in rows.items():
        name = measure.mark(policy, real["busy"])
        shown[name] = real | {f"simulated_{key}": its for key, its in simulated.items()}
        for key in ("makespan_s", "bubbles_s"):
            shown[name][f"{key}_off"] = simulated[key] / real[key] - 1 if real[key] else None
        stages |= {f"{name}, {i + 1}": stage for i, stage in enumerate(real["stages"])}
    tables.print_rows("pipeline", shown)
    tables.print_rows("stages", stages)


def pair(rows):
    """Whom to compare: orca-best and the stall-free schedule that is done first; [] if not both."""
    ours = [name for name in rows if name.startswith("sarathi-serve")]
    makespan_s = lambda name: rows[name][0]["makespan_s"]
    return ["orca-best", min(ours, key=makespan_s)] if ours and "orca-best" in rows else []


def conclude(rows):
    """What chunks are for, in a pipeline."""
    if not (names := pair(rows)):
        return "Conclusion: needs orca-best and sarathi-serve."
    a, b = (rows[name][0] for name in names)
    if a["busy"] or b["busy"]:
        return f"Conclusion: {measure.TOO_BUSY}."
    bubble, makespan = (a[key] / (b[key] or 1) for key in ("median_bubble_s", "makespan_s"))
    text = f"{names[1]} beside orca-best: the median bubble of a request is {bubble:.1f}x smaller,"
    return f"{text} the makespan {makespan:.2f}x shorter."


def chrome_trace(stage_runs):
    """{name: StageRuns} as a trace: a process for each name, a track for each stage."""
    events = []
    for name, own in stage_runs.items():
        for i in own:
            said = {"chunks": [f"{who}: {n} from {start}" for who, start, n, _ in i.chunks]}
            its = dict(name=f"micro-batch {i.micro_batch}", tid=f"stage {i.stage + 1}", args=said)
            its |= dict(ph="X", pid=name, ts=1e6 * i.start, dur=1e6 * (i.end - i.start))
            events.append(its)
    return json.dumps({"traceEvents": events})


def main(args):
    """The command. What is done when rank 0 is interrupted is printed and kept."""
    model = options.load_model(args, "max_len")
    machine, size = measure.describe_machine(model, args, args.chunk), min(64, args.max_len)
    pages, fits = -(-args.max_len // size), options.runner_for(model)
    cost = fit(fits(model, 18 * pages, size, args.max_len, args.attention), args.max_len)
    limits = dict(chunk=args.chunk, max_batch=args.batch, max_len=args.max_len, page_size=size)
    limits |= dict(pages=args.pp * args.batch * pages, attention=args.attention)
    configs = run.plan(args.policies, [size], EngineConfig(**limits))
    most = args.max_len // 4, args.max_len, 0.4, args.pd_ratio, args.requests, args.seed
    arrivals = [workload.Arrival(0.0, *pair) for pair in workload.zipf_lengths(*most)]
    tokens = workload.prompts(arrivals, model.config.vocab_size, args.seed)
    print(options.machine_lines(machine))
    rows, stage_runs = {}, {}
    try:
        for name, config in configs.items():
            real, config, its = serve(model, config, arrivals, tokens)
            simulated = simulate(cost, config, arrivals)
            rows[name] = real, summarize(simulated.run, simulated)
            stage_runs |= {name: its, f"{name}, simulated": simulated.stage_runs}
    finally:
        if rows:
            print_runs(rows)
            print(conclusion := conclude(rows))
            report = {"machine": machine, "hop_s": cost.hop_s, "runs": rows}
            options.write_json(args, report | {"conclusion": conclusion})
            if args.chrome_trace:
                options.write_text(args.chrome_trace, chrome_trace(stage_runs))
            options.wrote(args.json, args.chrome_trace)
    if args.plot:  # how two of the runs begin
        from views.pipelines import plot_pipeline  # after all that is long

        names = [f"{name}{side}" for name in pair(rows) or rows for side in ("", ", simulated")]
        end_s = stage_runs[names[0]][:DRAWN][-1].end
        drawn = {name: [i for i in stage_runs[name] if i.end <= end_s] for name in names}
        kinds = {name: bubble_kinds(own) for name, own in drawn.items()}
        plot_pipeline(drawn, kinds, "The beginning of each run", args.plot, machine, "in")
        options.wrote(args.plot)
