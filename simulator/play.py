"""A playground: policies of one's own beside all others, and the rules that every policy keeps.

    python bench.py play my_policy.py:ShortestFirst

serves three loads on a simulated GPU and says what one's own policy wins and what it pays. Read
first: policies/template.py, policies/referee.py. Read next: simulation.py, explore.py.
"""

from argparse import Namespace
from dataclasses import replace
from functools import cache

from tqdm import tqdm

from experiments import run
from experiments.metrics import summarize_latencies
from experiments.options import machine_lines, policy_names, write_json, wrote
from experiments.tables import print_table, show
from experiments.workload import poisson, rescale, sample_lengths
from policies import POLICIES
from policies.config import EngineConfig
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
# the machine, as bench.py serve takes it: one A100
GPU = dict(model="llama3-8b", simulate="a100-80gb", tp=1, pp=1, replicas=1, tp_link=None)
GPU |= dict(pp_link=None, cpu_ms=0.0, chunk=512, batch=32, max_len=4096, requests=100)


def add_options(parser):
    """The options of `play`."""
    what = "your own with commas, such as my_policy.py:ShortestFirst; without any, sarathi-serve"
    names = dict(nargs="?", default=["sarathi-serve"], type=policy_names(chunks=True))
    parser.add_argument("policies", help=what, **names)
    parser.add_files()


def short_names(names):
    """{how it is shown: name}: "Mine" for "my_policy.py:Mine", where no other is shown so."""
    shown = {}
    for name in names:
        short = name.split(".py:")[-1]
        shown[name if short in shown else short] = name
    return shown


def make_loads(base, max_len, count):
    """name -> [Arrival], at rates that mean something on a machine with this Base."""
    chat = sample_lengths("sharegpt4", count, max_len, 0)
    short = sample_lengths("sharegpt4", 3 * count, max_len // 4, 0)
    most = lambda lengths: run.estimated_qps(base, poisson(lengths, 1.0, 0))
    apart_s, long = 20 / (1.6 * most(chat)), poisson(short, 0.6 * most(short), 0)
    long.insert(count, long[count]._replace(prompt_len=max_len - 64, output_len=64))
    steady = poisson(chat, 0.6 * most(chat), 0)
    bursts = [arrival._replace(time=i // 20 * apart_s) for i, arrival in enumerate(steady)]
    return {"steady chat": steady, "bursts of 20": bursts, "one long prompt": long}


def score(machine, config, arrivals, slo_s):
    """What SCORES has of a policy on a load, and run.summarize."""

    @cache  # a simulation need not be repeated
    def run_at_rate(qps):
        seen = machine.serve(config, rescale(arrivals, qps), record=False)
        its = summarize_latencies(seen.completions, seen.seconds)
        return {"met": its["tbt_s"]["p99"] <= slo_s and its["ttft_s"]["p99"] <= MAX_TTFT_S}

    found = run.summarize(machine.serve(config, arrivals), slo_s)
    rate = len(arrivals) / arrivals[-1].time
    capacity_qps, _ = run.capacity(run_at_rate, rate, ratio=1.15, most=4)
    unfairness = found["ttft_s"]["max"] / found["ttft_s"]["p50"]
    return found | {"capacity_qps": capacity_qps, "unfairness": unfairness}


def verdict(ours, theirs):
    """What a policy wins and what it pays beside another, from their rows, in words."""
    wins, pays = [], []
    for key, ((head, spec), better) in SCORES.items():
        a, b = ours[key], theirs[key]
        if abs(a - b) > ALIKE * max(a, b):
            its = wins if better(a, b) == a else pays
            its.append(f"{head} ({show(a, spec)} instead of {show(b, spec)})")
    return f"wins {', '.join(wins) or 'nothing'}; pays {', '.join(pays) or 'nothing'}"


def main(args):
    """The command. Raises ValueError if a policy breaks a rule, also with little memory."""
    machine, max_len = SimulatedMachine(Namespace(**GPU)), GPU["max_len"]
    sizes = dict(max_batch=GPU["batch"], max_len=max_len, page_size=max_len // 32)
    config = EngineConfig(chunk=GPU["chunk"], **sizes, pages=16 * 32)  # 16 of the longest fit
    slo_s, shown = run.slo_seconds("strict", machine.base), short_names([*POLICIES, *args.policies])
    configs = run.plan(shown.values(), [config.page_size], config, slo_s)
    report, words = {"machine": machine.machine, "slo_s": slo_s, "loads": {}}, []
    print(machine_lines(machine.machine))
    for load, arrivals in make_loads(machine.base, max_len, GPU["requests"]).items():
        for its in map(configs.get, args.policies):
            for pages in (its.pages, its.pages // 8):
                where = f"{its.policy} on {load!r}, {pages} pages"
                machine.serve(replace(its, pages=pages), arrivals, referee=where)
        board = report["loads"][load] = {}
        for own, name in tqdm(shown.items(), load, leave=False, disable=None):
            board[own] = score(machine, configs[name], arrivals, slo_s)
        print(f"{load}: {len(arrivals)} requests that arrive within {arrivals[-1].time:.0f} s\n")
        rows = [[own, *map(its.get, SCORES)] for own, its in board.items()]
        print_table({"": ""} | dict(head for head, _ in SCORES.values()), rows)
        print()
        for own in (own for own, name in shown.items() if name in args.policies):
            other = "vllm" if own == "sarathi-serve" else "sarathi-serve"
            words.append(f"{load}, {own} beside {other}: {verdict(board[own], board[other])}")
    print("TTFT: arrival to first token; TBT: between two. policies/referee.py saw all rules kept.")
    limits = f"P99 TBT within {slo_s:.3g} s and P99 TTFT within {MAX_TTFT_S:g} s"
    print(f"All is at the load's own rate; capacity: the highest with {limits}.")
    print("", *words, sep="\n")
    write_json(args, report | {"words": words})
    wrote(args.json)
