"""A playground: policies of one's own beside all others, and the rules that every policy keeps.

    python bench.py play my_policy.py:ShortestFirst

serves three loads on a simulated GPU and says what one's own policy wins and what it pays. With
--real the engine on this machine serves smaller ones, without a search for the capacity. Read
first: policies/template.py, policies/referee.py. Read next: simulation.py.
"""

from argparse import Namespace
from dataclasses import replace
from functools import cache
from types import SimpleNamespace

from tqdm import tqdm

from experiments import measure, run
from experiments.metrics import summarize_latencies
from experiments.options import machine_lines, policy_names, write_json, wrote
from experiments.serving import RealMachine
from experiments.tables import print_table, show
from experiments.workload import Arrival, poisson, rescale, sample_lengths
from policies import POLICIES
from policies.config import EngineConfig
from policies.referee import Referee
from simulator.machine import SimulatedMachine

SCORES = {  # what policies are compared by: (heading, format), which is better
    "capacity_qps": (("capacity /s", ".2f"), max),
    "p50_ttft_s": (("P50 TTFT s", ".3g"), min),
    "p99_ttft_s": (("P99 TTFT s", ".3g"), min),
    "p99_tbt_s": (("P99 TBT s", ".3g"), min),
    "longest_stall_s": (("longest stall s", ".3g"), min),
    "unfairness": (("worst / median TTFT", ".1f"), min),
    "tokens_per_s": (("tokens/s", ",.0f"), max),
}
ALIKE = 0.05  # what differs by less is not worth a word
MAX_TTFT_S = 2.0  # P99, for a rate to count as kept up with
# the machines, as in bench.py serve: one A100 that is simulated, and this one, without a GPU
GPU = dict(model="llama3-8b", simulate="a100-80gb", tp=1, pp=1, replicas=1, tp_link=None)
GPU |= dict(pp_link=None, cpu_ms=0.0, chunk=512, batch=32, max_len=4096, requests=100)
HERE = dict(model="llama-tiny", init_from=None, device="cpu", dtype="float64", attention="auto")
HERE |= dict(compile=False, threads=1, seed=0, chunk=64, batch=16, max_len=512, requests=40)


def add_options(parser):
    """The options of `play`."""
    what = "your own with commas, such as my_policy.py:ShortestFirst; without any, sarathi-serve"
    real = "serve smaller loads by the engine, with a small model on this CPU"
    names = dict(nargs="?", default=["sarathi-serve"], type=policy_names(chunks=True))
    parser.add_argument("policies", help=what, **names)
    parser.add("--real", real, False, action="store_true")
    parser.add_files(plot="draw the scoreboards")


def make_loads(base, max_len, count):
    """name -> [Arrival], at rates that mean something on a machine with this Base."""
    chat = sample_lengths("sharegpt4", count, max_len, 0)
    short = sample_lengths("sharegpt4", 3 * count, max_len // 4, 0)
    most = lambda lengths: run.estimated_qps(base, [Arrival(0.0, *pair) for pair in lengths])
    apart_s, long = 20 / (1.6 * most(chat)), poisson(short, 0.6 * most(short), 0)
    long.insert(count, long[count]._replace(prompt_len=max_len - 64, output_len=64))
    return {
        "steady chat": poisson(chat, 0.6 * most(chat), 0),
        "bursts of 20": [Arrival(i // 20 * apart_s, *pair) for i, pair in enumerate(chat)],
        "one long prompt": long,
    }


def check_rules(machine, config, load, arrivals, alone):
    """Serve a load under a referee, and again with an eighth of the memory. Raises ValueError, also
    if tokens are not those of `alone`, the Completions of a policy that is beyond doubt."""
    for pages in (config.pages, config.pages // 8):
        where = f"{config.policy} on {load!r}, {pages} pages"
        watch = lambda schedulers, where=where: [Referee(its, where) for its in schedulers]
        referee = SimpleNamespace(watch=watch, add=lambda iteration: None)
        seen = machine.serve(replace(config, pages=pages), arrivals, recorder=referee)
        for ours, other in zip(seen.completions, alone):
            if ours.tokens != other.tokens:
                rule = f"request {ours.request_id}: breaks the rule 'same tokens in any company'"
                raise ValueError(f"{where}, {rule}: {ours.tokens} instead of {other.tokens}")


def score(machine, config, arrivals, slo_s):
    """What SCORES has of a policy on a load, and more of run.rate_point."""

    @cache  # a simulation need not be repeated
    def run_at_rate(qps):
        seen = machine.serve(config, rescale(arrivals, qps), record=False)
        its = summarize_latencies(seen.completions, seen.seconds)
        return {"met": its["tbt_s"]["p99"] <= slo_s and its["ttft_s"]["p99"] <= MAX_TTFT_S}

    found = run.summarize(machine.serve(config, arrivals), slo_s)
    rate = len(arrivals) / arrivals[-1].time
    row = run.rate_point(rate, found) | {"capacity_qps": None}
    row["unfairness"] = found["ttft_s"]["max"] / found["ttft_s"]["p50"]
    if isinstance(machine, SimulatedMachine):  # in real time a search takes too long
        row["capacity_qps"], _ = run.capacity(run_at_rate, rate, ratio=1.15, most=4)
    return row


def verdict(ours, theirs):
    """What a policy wins and what it pays beside another, from their rows, in words."""
    if ours["busy"] or theirs["busy"]:
        return measure.TOO_BUSY
    wins, pays = [], []
    for key, ((head, spec), better) in SCORES.items():
        a, b = ours[key], theirs[key]
        if a is not None and abs(a - b) > ALIKE * max(a, b):
            its = wins if better(a, b) == a else pays
            its.append(f"{head} ({show(a, spec)} instead of {show(b, spec)})")
    return f"wins {', '.join(wins) or 'nothing'}; pays {', '.join(pays) or 'nothing'}"


def main(args):
    """The command."""
    given = Namespace(**HERE if args.real else GPU)
    sizes = dict(max_batch=given.batch, max_len=given.max_len, page_size=given.max_len // 32)
    config = EngineConfig(chunk=given.chunk, **sizes, pages=16 * 32)  # 16 of the longest fit
    machine = RealMachine(given, config) if args.real else SimulatedMachine(given)
    slo_s, names = run.slo_seconds("strict", machine.base), [*POLICIES, *args.policies]
    configs = run.plan(dict.fromkeys(names), [config.page_size], config, slo_s)
    short = {name: name.split(".py:")[-1] for name in configs}
    if len(set(short.values())) < len(short):  # two files have a class of that name
        short = dict(zip(short, short))
    report, words = {"machine": machine.machine, "slo_s": slo_s, "loads": {}}, []
    print(machine_lines(machine.machine))
    for load, arrivals in make_loads(machine.base, given.max_len, given.requests).items():
        alone = machine.serve(configs["request-level"], arrivals).completions
        for name in args.policies:
            check_rules(machine, configs[name], load, arrivals, alone)
        board = report["loads"][load] = {}
        for name, its in tqdm(configs.items(), load, leave=False, disable=None):
            board[short[name]] = score(machine, its, arrivals, slo_s)
        print(f"{load}: {len(arrivals)} requests that arrive within {arrivals[-1].time:.0f} s\n")
        rows = [[measure.mark(n, its["busy"]), *map(its.get, SCORES)] for n, its in board.items()]
        print_table([("", ""), *(head for head, _ in SCORES.values())], rows)
        print()
        for own in map(short.get, args.policies):
            other = "vllm" if own == "sarathi-serve" else "sarathi-serve"
            words.append(f"{load}, {own} beside {other}: {verdict(board[own], board[other])}")
    print("TTFT: arrival to first token, what one waits for; TBT: between two tokens. The rules in")
    print("policies/referee.py were kept, with little memory too.")
    if not args.real:
        limits = f"P99 TBT within {slo_s:.3g} s and P99 TTFT within {MAX_TTFT_S:g} s"
        print(f"All is at the load's own rate; capacity: the highest with {limits}.")
    print("", *words, sep="\n")
    write_json(args, report | {"words": words})
    if args.plot:
        from views.search import plot_scoreboards

        plot_scoreboards(report["loads"], SCORES, machine.machine, args.plot)
    wrote(args.json, args.plot)
