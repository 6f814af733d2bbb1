"""A page to play with: policies, chunk sizes, loads and memory, chosen by sliders.

    python bench.py explore                           writes explore.html, which needs no network
    python bench.py explore my_policy.py:MyPolicy     with one's own policy among the others

All runs are simulated. Read first: policies/template.py, views/page.py."""

from argparse import Namespace
from itertools import product

from tqdm import tqdm

from cli import options
from config import EngineConfig
from lab.measure import load_run as run
from lab.measure import workload
from lab.simulator.machine import SimulatedMachine
from views.page import Recorder, page

POLICIES = ("vllm", "sarathi-serve", "request-level", "orca", "sarathi", "dynamic")
CHUNKS = ("128", "256", "512", "1024")
LOADS = {"light": 0.4, "steady": 0.7, "heavy": 1.6}  # of the rate that is estimated to be possible
MEMORY = {"ample": 24, "tight": 5}  # requests of the longest that fit
BATCH, MAX_LEN, PAGE_SIZE = 32, 2048, 64
ANY = "*"  # the chunk size of who does not go by one
# the machine, as bench.py serve takes it: one A100
GPU = dict(model="llama3-8b", simulate="a100-80gb", tp=1, pp=1, replicas=1, tp_link=None)
GPU |= dict(pp_link=None, cpu_ms=0.0, chunk=512, max_len=MAX_LEN)


def add_options(parser):
    """The options of `explore`."""
    what = "your own with commas, such as my_policy.py:ShortestFirst, beside the others"
    parser.add_argument("policies", help=what, nargs="?", default=[], type=options.policy_names)
    parser.add_table("explore")


def main(args):
    """The command."""
    machine = SimulatedMachine(Namespace(**GPU))
    lengths = workload.sample_lengths("sharegpt4", args.requests, MAX_LEN, 0)
    most = run.estimated_qps(machine.base, workload.poisson(lengths, 1.0, 0))
    slo_s = run.slo_seconds("strict", machine.base)
    names = [*dict.fromkeys([*args.policies, *POLICIES])]
    shorts = [name.split(".py:")[-1] for name in names]
    shown = [name if shorts.count(its) > 1 else its for name, its in zip(names, shorts)]
    servers = {}  # (policy as it is shown, chunk) -> its name
    for short, name in zip(shown, names):
        chunks = CHUNKS if run.goes_by_chunk(name) else [ANY]
        servers |= {(short, c): name if c == ANY else f"{name}:{c}" for c in chunks}
    loads = {f"{name}, {share * most:.2g}/s": share * most for name, share in LOADS.items()}
    memories = {f"{name}, {count * MAX_LEN:,} tokens": count for name, count in MEMORY.items()}
    runs, recorders = [*product(servers, loads, memories)], {}
    for server, load, memory in tqdm(runs, "runs", leave=False, disable=None):
        tokens = dict(page_size=1, pages=memories[memory] * MAX_LEN)
        config = EngineConfig(chunk=int(CHUNKS[-1]), max_batch=BATCH, max_len=MAX_LEN, **tokens)
        (config,) = run.plan([servers[server]], [PAGE_SIZE], config, slo_s).values()
        recorder = recorders[" | ".join((*server, load, memory))] = Recorder()
        machine.serve(config, workload.poisson(lengths, loads[load], 0), recorder=recorder)
    choices = {"policy": shown, "chunk": CHUNKS, "load": [*loads], "memory": [*memories]}
    title, about = "How an LLM server schedules its work", options.machine_lines(machine.machine)
    about += f"{args.requests} requests with the lengths of a chat dataset; simulated, in seconds"
    options.write_text(args.html, page(title, about, recorders, slo_s=slo_s, choices=choices))
    options.wrote(args.html)
