"""A page to play with: policies, chunk sizes, loads and memory, chosen by sliders.

    python bench.py explore                           writes explore.html, which needs no network
    python bench.py explore my_policy.py:MyPolicy     with one's own policy among the others

All runs are simulated, on the GPU of `bench.py play`. Read first: play.py, views/schedule_page.py.
"""

from argparse import Namespace
from itertools import product

from tqdm import tqdm

from experiments import run
from experiments.options import machine_lines, output_file, policy_names, whole, write_text, wrote
from experiments.workload import Arrival, poisson, sample_lengths
from policies import find_policy, policy_options
from policies.config import EngineConfig
from policies.referee import Referee
from simulator.machine import SimulatedMachine
from simulator.play import GPU
from views.schedule_page import Recorder, page

POLICIES = ("vllm", "sarathi-serve", "request-level", "orca", "sarathi", "dynamic")
CHUNKS = (128, 256, 512, 1024)
LOADS = {"light": 0.4, "steady": 0.7, "heavy": 1.6}  # of the rate that is estimated to be possible
MEMORY = {"ample": 24, "tight": 5}  # requests of the longest that fit
MAX_LEN, PAGE_SIZE = 2048, 64
ANY = "*"  # the chunk size of who does not go by one


class Refereed(Recorder):
    """A Recorder of a policy that must keep the rules of policies/referee.py, `where` it runs."""

    def __init__(self, where):
        super().__init__()
        self.where = where

    def watch(self, schedulers):
        """As that of a Recorder."""
        for scheduler in schedulers:
            Referee(scheduler, self.where)
        super().watch(schedulers)


def add_options(parser):
    """The options of `explore`."""
    what = "your own with commas, such as my_policy.py:ShortestFirst, beside the others"
    parser.add_argument("policies", help=what, nargs="?", default=[], type=policy_names())
    parser.add("--requests", "how many arrive in each run", 60, type=whole(1, 1000))
    parser.add("--html", "the page", "explore.html", metavar="FILE", type=output_file)


def main(args):
    """The command."""
    machine = SimulatedMachine(Namespace(**GPU | {"max_len": MAX_LEN}))
    lengths = sample_lengths("sharegpt4", args.requests, MAX_LEN, 0)
    most = run.estimated_qps(machine.base, [Arrival(0.0, *pair) for pair in lengths])
    slo_s, names, recorders = run.slo_seconds("strict", machine.base), {}, {}
    for policy in (*args.policies, *POLICIES):
        short = policy.split(".py:")[-1]
        names[policy if short in names else short] = policy
    loads = {f"{name}, {share * most:.2g}/s": share * most for name, share in LOADS.items()}
    memories = {f"{name}, {count * MAX_LEN:,} tokens": count for name, count in MEMORY.items()}
    grid = [
        (short, chunk, load, memory)
        for short, name in names.items()
        for chunk in (CHUNKS if run.goes_by_chunk(name) else (ANY,))
        for load, memory in product(loads, memories)
    ]
    for at in tqdm(grid, "runs", leave=False, disable=None):
        short, chunk, load, memory = at
        pages = memories[memory] * MAX_LEN // PAGE_SIZE
        sizes = dict(max_batch=GPU["batch"], max_len=MAX_LEN, page_size=PAGE_SIZE, pages=pages)
        follows_slo = "tbt_slo" in policy_options(find_policy(names[short]))
        budget = CHUNKS[-1] if chunk == ANY else chunk
        options = {"tbt_slo": slo_s} if follows_slo else {}
        config = EngineConfig(names[short], budget, **sizes, options=options)
        name = " | ".join(map(str, at))
        recorders[name] = Refereed(name)
        arrivals = poisson(lengths, loads[load], 0)
        machine.serve(config, arrivals, recorder=recorders[name])
    choices = {"policy": [*names], "chunk": CHUNKS, "load": [*loads], "memory": [*memories]}
    choices = {name: [str(value) for value in values] for name, values in choices.items()}
    title, about = "How an LLM server schedules its work", machine_lines(machine.machine)
    about += f"{args.requests} requests with the lengths of a chat dataset; simulated, in seconds"
    write_text(args.html, page(title, about, recorders, slo_s=slo_s, choices=choices))
    wrote(args.html)
