"""The inventions of LLM serving in their order, one load under each: what it cures, what it costs.

    python -m examples.ladder                                                     on this machine
    python -m examples.ladder --simulate a100-80gb --preset llama3-8b --max-len 4096 --qps 8 \
        --kv-tokens 131072

The options are those of a load of `bench.py serve`. Read first: lab/commands/load.py."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from cli.console import make_app, run
from cli.loading import resolve_model
from cli.model import ModelOptions
from cli.tables import Cell, format_table
from config import EngineConfig
from lab.commands.load import (
    Sizes,
    arrivals_of,
    find_sizes,
    half_of_possible_qps,
    make_machine,
)
from lab.commands.options import ServeOptions
from lab.measure import capacity
from lab.measure.metrics import goodput, summarize_run
from lab.measure.run_loop import Run, no_progress
from request import Request
from scheduler import Batch, Orca, Sarathi

app = make_app("python -m examples.ladder", str(__doc__).partition("\n\n")[0])
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


def config_of(rung: Rung, sizes: Sizes, attention: str, slo_s: float) -> EngineConfig:
    """The engine of a rung. All have the same memory, in pages or one piece a request."""
    page_size = min(sizes.page_size) if rung.is_paged else sizes.max_len
    return EngineConfig(
        policy=rung.policy,
        policy_options={"tbt_slo": slo_s} if rung.policy == "dynamic" else {},
        chunk=sizes.chunk,
        max_batch=sizes.batch if rung.is_batched else 1,
        max_len=sizes.max_len,
        attention=attention,
        page_size=page_size,
        pages=sizes.kv_tokens // page_size,
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


@app.default
def climb(
    options: ServeOptions = ServeOptions(), model_options: ModelOptions = ModelOptions()
) -> None:
    """The inventions of LLM serving in their order, one load under each.

    A line for each rung when it has served the load, then the table. --policies do not count."""
    if not options.simulate:
        model_options = resolve_model(model_options, gpu_preset="llama3-8b", gpu_bytes=75e9)
    sizes = find_sizes(options, model_options)
    machine = make_machine(options, sizes, model_options)
    arrivals = arrivals_of(options, sizes, model_options.seed)
    slo_s = capacity.slo_seconds(options.slo, machine.base)
    qps = options.qps or half_of_possible_qps(machine, arrivals)
    arrivals = arrivals_of(options, sizes, model_options.seed, qps)
    print(f"{machine.info.heading()}{len(arrivals)} requests, {qps:g} a second")
    rows: dict[str, list[Cell]] = {}
    before: dict[str, float] = {}
    try:
        for name, rung in LADDER.items():
            config = config_of(rung, sizes, model_options.attention, slo_s)
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


def main(argv: Sequence[str] | None = None) -> None:
    """The command line `argv`, or that of this process."""
    app(argv, exit_on_error=False, print_error=False)


if __name__ == "__main__":
    run(main)
