"""The inventions of LLM serving in their order, one load under each: what it cures, what it costs.

    python -m examples.ladder                                                     on this machine
    python -m examples.ladder --simulate a100-80gb --preset llama3-8b --max-len 4096 --qps 8 \
        --kv-tokens 131072

The options are those of a load of `bench.py serve`. Read first: lab/commands/serve.py."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from cli.console import run
from cli.options import OptionParser
from cli.tables import Cell, format_table
from config import EngineConfig
from lab.commands import serve_options
from lab.commands.serve import half_of_possible_qps, make_machine, make_workload
from lab.commands.serve_options import ServeOptions
from lab.measure import capacity
from lab.measure.metrics import goodput, summarize_run
from lab.measure.run_loop import Run, no_progress
from request import Request
from scheduler import Batch, Orca, Sarathi

FIXED = {  # options of `bench.py serve` that are none here
    "policies": [],
    "prefix_caching": "off",
    "max_waiting": None,
    "pools": None,
    "kv_link": "infiniband",
    "kv_send": "layers",
    "plot": None,
    "html": None,
    "json": None,
}
CHANGE = 0.1  # a number that changes by less is as it was
SMALLEST = 0.01  # less counts as nothing


@dataclass(frozen=True)
class Rung:
    """An invention: a policy, whether requests run together, and whether memory is in pages."""

    policy: str
    is_batched: bool = True
    is_paged: bool = True


class PagedOrca(Orca):
    """Orca whose requests get pages as they grow, and are preempted when there are none."""

    def reserved(self, request: Request) -> int:
        return len(request.tokens)

    def schedule(self) -> Batch:
        batch = Batch()
        batch.add_decodes(self.grow_decodes())
        while request := self.admit():
            batch.add(request)
        return batch


class PagedSarathi(Sarathi):
    """SARATHI with pages: its own system reserved memory for the longest request."""

    def reserved(self, request: Request) -> int:
        return len(request.tokens)


LADDER = {
    "one at a time": Rung("request-level", is_batched=False, is_paged=False),
    "request-level": Rung("request-level", is_paged=False),
    "iteration-level (Orca)": Rung("orca", is_paged=False),
    "paged memory": Rung(f"{__file__}:PagedOrca"),
    "prefills first (vLLM)": Rung("vllm"),
    "chunks apart": Rung("chunked-only"),
    "decode-maximal (SARATHI)": Rung(f"{__file__}:PagedSarathi"),
    "stall-free (Sarathi-Serve)": Rung("sarathi-serve"),
    "a budget by SLO": Rung("dynamic"),
}
LESS_IS_BETTER = ("TTFT P50", "TTFT P99", "TBT P99", "longest stall")
HEADS = {
    "TTFT P50": ",.2f",
    "TTFT P99": ",.2f",
    "TBT P99": ",.3f",
    "longest stall": ",.3f",
    "tokens/s": ",.0f",
    "goodput": ",.2f",
}
NOTE = """
goodput: requests a second with a TTFT of at most {ttft_slo_s:g} s and 99 % of their TBTs within
{tbt_slo_s:.3f} s; cures, costs: the number that this rung improves most, and the one that it
worsens most, beside the rung above"""


def config_of(rung: Rung, options: ServeOptions, slo_s: float) -> EngineConfig:
    """The engine of a rung. All have the memory of `options`, in pages or one piece a request."""
    page_size = min(options.page_size) if rung.is_paged else options.max_len
    return EngineConfig(
        policy=rung.policy,
        policy_options={"tbt_slo": slo_s} if rung.policy == "dynamic" else {},
        chunk=options.chunk,
        max_batch=options.batch if rung.is_batched else 1,
        max_len=options.max_len,
        attention=options.model.attention,
        page_size=page_size,
        pages=options.kv_tokens // page_size,
    )


def numbers_of(served: Run, ttft_slo_s: float, tbt_slo_s: float) -> dict[str, float]:
    """What a rung makes of the load, in seconds and per second."""
    completions = served.completions
    summary = summarize_run(completions, served.iterations, served.seconds)
    good = goodput(completions, served.seconds, ttft_slo_s=ttft_slo_s, tbt_slo_s=tbt_slo_s)
    return {
        "TTFT P50": summary.ttft_s.p50 or 0.0,
        "TTFT P99": summary.ttft_s.p99 or 0.0,
        "TBT P99": summary.tbt_s.p99 or 0.0,
        "longest stall": summary.longest_stall_s or 0.0,
        "tokens/s": summary.tokens_per_s or 0.0,
        "goodput": good or 0.0,
    }


def changes(before: Mapping[str, float], after: Mapping[str, float]) -> tuple[str, str]:
    """The number that became better most, and the one that became worse most, in words."""
    gains = {}
    for name, value in after.items():
        old = max(before[name], SMALLEST)
        new = max(value, SMALLEST)
        gains[name] = old / new if name in LESS_IS_BETTER else new / old
    best = max(gains, key=lambda name: gains[name])
    worst = min(gains, key=lambda name: gains[name])

    def change(name: str) -> str:
        return f"{name} {before[name]:,.3g} to {after[name]:,.3g}"

    cures = change(best) if gains[best] > 1 + CHANGE else ""
    costs = change(worst) if gains[worst] < 1 / (1 + CHANGE) else ""
    return cures, costs


def parse_args(argv: Sequence[str]) -> ServeOptions:
    """The options of `bench.py serve` but for those that are FIXED."""
    parser = OptionParser(
        prog="python -m examples.ladder", description=str(__doc__).partition("\n\n")[0]
    )
    parser.set_defaults(command="serve")
    serve_options.add_options(parser, FIXED)
    return serve_options.resolve(parser, parser.parse_args(argv))


def main(argv: Sequence[str] | None = None) -> None:
    """Climb: a line for each rung when it has served the load, then the table."""
    options = parse_args(sys.argv[1:] if argv is None else argv)
    machine = make_machine(options)
    arrivals_at, load = make_workload(options)
    slo_s = capacity.slo_seconds(options.slo, machine.base)
    options = replace(options, qps=options.qps or half_of_possible_qps(machine, arrivals_at(1.0)))
    print(f"{machine.info.heading()}load: {load}, {options.qps:g} a second")
    rows: dict[str, list[Cell]] = {}
    before: dict[str, float] = {}
    try:
        for name, rung in LADDER.items():
            config = config_of(rung, options, slo_s)
            arrivals = arrivals_at(options.qps)
            served = machine.serve(config, arrivals, progress=no_progress, recorder=None)
            print(f"{name}: {served.seconds:,.1f} s")
            numbers = numbers_of(served, options.ttft_slo, slo_s)
            cures, costs = changes(before, numbers) if before else ("", "")
            cells: list[Cell] = [(head, numbers[head], spec) for head, spec in HEADS.items()]
            rows[name] = [*cells, ("cures", cures, ""), ("costs", costs, "")]
            before = numbers
    finally:
        print(f"\n{format_table('seconds', rows)}")
        print(NOTE.format(ttft_slo_s=options.ttft_slo, tbt_slo_s=slo_s))


if __name__ == "__main__":
    run(main)
