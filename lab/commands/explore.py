"""A page to play with: policies, chunk sizes, loads and memory, chosen by sliders.

    python bench.py explore                           writes explore.html, which needs no network
    python bench.py explore my_policy.py:MyPolicy     with your own policy among the others

All runs are simulated. Read first: policies/template.py, views/page.py."""

from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

from tqdm import tqdm

from cli.options import OptionParser, output_file, policy_names, whole, write_text, wrote_page
from config import EngineConfig
from lab.measure import workload
from lab.measure.capacity import estimated_qps, slo_seconds
from lab.measure.run_plan import goes_by_chunk, run_plan
from lab.simulator.cost_model import CostModel
from lab.simulator.machine import base_of
from lab.simulator.referee import broken_rules, mark_broken
from lab.simulator.simulation import simulate
from views.page import Recorder, page

MODEL = "llama3-8b"  # on one A100
POLICIES = ("vllm", "sarathi-serve", "request-level", "orca", "sarathi", "dynamic")
CHUNKS = ("128", "256", "512", "1024")
NO_CHUNK = "*"  # the chunk size of a policy that has none
LOADS = {"light": 0.4, "steady": 0.7, "heavy": 1.6}  # shares of the rate that should be possible
MEMORY = {"ample": 24, "tight": 5}  # requests of the longest that fit
MAX_BATCH = 32
MAX_LEN = 2048
PAGE_SIZE = 64
BASE_CHUNK = 512  # of the prefill that rates are estimated from


@dataclass(frozen=True)
class ExploreOptions:
    """The options of `bench.py explore`."""

    command: str
    policies: list[str]  # besides POLICIES
    requests: int
    html: str


@dataclass(frozen=True)
class Choice:
    """A policy with a chunk size, as the page's sliders name them."""

    policy: str
    chunk: str
    label: str  # the same as run_plan takes it: "sarathi:128"


def add_options(parser: OptionParser) -> None:
    """Add the options of the command."""
    parser.add_argument(
        "policies",
        help="your own with commas, such as my_policy.py:ShortestFirst, beside the others",
        type=policy_names,
        nargs="?",
        default=[],
    )
    parser.add_option(
        "--requests",
        help="how many arrive in each run",
        type=whole(minimum=1, maximum=1000),
        default=60,
    )
    parser.add_option(
        "--html",
        help="the page",
        type=output_file,
        metavar="FILE",
        default="explore.html",
    )


def resolve(parser: OptionParser, args: Namespace) -> ExploreOptions:
    """The options."""
    return ExploreOptions(
        command=args.command,
        policies=args.policies,
        requests=args.requests,
        html=args.html,
    )


def main(options: ExploreOptions) -> None:
    """Simulate all runs and write the page."""
    cost = CostModel.named(MODEL)
    base = base_of(cost, MAX_LEN, BASE_CHUNK)
    lengths = workload.sample_lengths("sharegpt4", options.requests, MAX_LEN, 0)
    possible_qps = estimated_qps(base, workload.poisson(lengths, 1.0, 0))
    slo_s = slo_seconds("strict", base)
    violations = broken_rules(options.policies)
    policies = {
        mark_broken(short_name, violations[name].rule if name in violations else None): name
        for short_name, name in short_names([*options.policies, *POLICIES]).items()
    }
    rates = {  # what the slider shows -> requests per second
        f"{name}, {share * possible_qps:.2g}/s": share * possible_qps
        for name, share in LOADS.items()
    }
    memories = {  # what the slider shows -> tokens
        f"{name}, {requests * MAX_LEN:,} tokens": requests * MAX_LEN
        for name, requests in MEMORY.items()
    }
    recorders = {}
    runs = list(product(servers(policies), rates, memories))
    for choice, load, memory in tqdm(runs, "runs", leave=False, disable=None):
        name = " | ".join([choice.policy, choice.chunk, load, memory])
        recorders[name] = Recorder()
        simulate(
            cost,
            make_config(choice.label, memories[memory], slo_s),
            workload.poisson(lengths, rates[load], 0),
            recorder=recorders[name],
        )
    text = page(
        "How an LLM server schedules its work",
        f"simulated: 1 x {cost.device.name}, TP 1 x PP 1, 0 ms of CPU per iteration and stage\n"
        f"{MODEL}, 16 bits\n"
        f"{options.requests} requests with the lengths of a chat dataset; simulated, in seconds",
        recorders,
        slo_s=slo_s,
        choices={
            "policy": list(policies),
            "chunk": CHUNKS,
            "load": list(rates),
            "memory": list(memories),
        },
    )
    write_text(options.html, text)
    for violation in violations.values():
        print(violation.sentence)
    wrote_page(options.html)


def short_names(names: Sequence[str]) -> dict[str, str]:
    """{what the page calls a policy: its name}. A class from a file goes without the file, unless
    two have the same name."""
    names = list(dict.fromkeys(names))
    short = [name.split(".py:")[-1] for name in names]
    return {
        name if short.count(short_name) > 1 else short_name: name
        for name, short_name in zip(names, short, strict=True)
    }


def servers(policies: dict[str, str]) -> list[Choice]:
    """Each policy with each chunk size, if it has one."""
    choices = []
    for short_name, name in policies.items():
        if goes_by_chunk(name):
            choices += [Choice(short_name, chunk, f"{name}:{chunk}") for chunk in CHUNKS]
        else:
            choices.append(Choice(short_name, NO_CHUNK, name))
    return choices


def make_config(label: str, tokens: int, slo_s: float) -> EngineConfig:
    """The EngineConfig of a run with so many tokens of memory."""
    config = EngineConfig(
        chunk=int(CHUNKS[-1]),
        max_batch=MAX_BATCH,
        max_len=MAX_LEN,
        page_size=1,
        pages=tokens,
    )
    return run_plan([label], [PAGE_SIZE], config, slo_s)[label]
