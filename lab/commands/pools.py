"""Chunks or two pools? Goodput per GPU of both, simulated, and where each wins.

    python bench.py pools --quick                   half a minute
    python bench.py pools --plot pools.png          finer rates, longer runs

Sweeps the targets and the split, the P:D ratio, the link and the number of GPUs, then checks what
DistServe and Splitwise have found. Read first: lab/simulator/goodput.py, lab/claims/pools.py."""

import json
from argparse import Namespace
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from cli.options import (
    OptionParser,
    file_option,
    from_args,
    json_option,
    nonempty_text,
    option,
    plain,
    plot_option,
    whole,
    write_text,
    wrote,
)
from cli.tables import Cell, format_table
from lab.claims.pools import LinkRow, Row, check_findings, describe
from lab.commands.frame import reporting
from lab.commands.pipeline import trace_event
from lab.commands.simulate import Workers, processes_option
from lab.simulator import goodput
from lab.simulator.cost_model import CostModel
from lab.simulator.goodput import Cluster, Job, Load, Search, Targets
from lab.simulator.simulation import Simulated
from policies.pools import Pools

CHUNKS = (128, 256, 512, 1024)  # replicas: the best of these counts
TARGETS = [Targets(ttft_s, tbt_s) for tbt_s in (0.02, 0.03, 0.05, 0.1) for ttft_s in (0.5, 1, 4)]
LINK_TARGETS = Targets(ttft_s=4.0, tbt_s=0.1)
MIDDLE = Targets(ttft_s=1.0, tbt_s=0.03)
CHAT = "sharegpt4"
RATIOS = ("2048+64", CHAT, "128+512")  # P:D of 32, about 4, and 1/4
LINKS_SWEPT = ("nvlink3", "infiniband", "pcie4", "ethernet", "ethernet-25g")
LARGE_CACHE = "llama-13b"  # a token's keys and values have 0.8 MB, not the 0.1 MB of llama3-8b
SIZES = (2, 4, 8)  # GPUs
MAX_LEN = 8192
LOW_RATE = 0.5  # requests per second and GPU: nobody waits

FIGURE_1 = "512+64"  # DistServe, Figure 1: a model of 13B parameters on A100
FIGURE_1_TARGETS = Targets(ttft_s=0.4, tbt_s=0.04, all_gaps=False)  # as we read its lines


@dataclass(frozen=True, kw_only=True)
class PoolsOptions:
    """The options of `bench.py pools`."""

    command: str
    device: str = option(
        "the device", name="--simulate", type=nonempty_text, default="a100-80gb", metavar="DEVICE"
    )
    preset: str = option("the model", type=nonempty_text, default="llama3-8b")
    gpus: int = option(
        "where the number is not swept", type=whole(minimum=2, maximum=16), default=4
    )
    quick: bool = option("shorter runs at fewer rates: half a minute", action="store_true")
    processes: int = processes_option("simulate so many runs at once")
    plot: str | None = plot_option("draw the sweeps")
    chrome_trace: str | None = file_option(
        "write what each instance and link did when in a short run, for Perfetto"
    )
    json: str | None = json_option()
    seconds: float  # that requests arrive
    steps: int  # rates for each cluster


def add_options(parser: OptionParser) -> None:
    """Add the options of the command."""
    parser.add_fields(PoolsOptions)


def resolve(parser: OptionParser, args: Namespace) -> PoolsOptions:
    """The options. Raises ValueError for unknown names."""
    CostModel.named(args.preset, args.device)
    seconds = 20.0 if args.quick else 120.0
    return from_args(PoolsOptions, args, seconds=seconds, steps=9 if args.quick else 24)


class Sweep:
    """Runs clusters on loads at all their rates, each once."""

    def __init__(self, options: PoolsOptions) -> None:
        self.options = options
        self.workers = Workers(options.processes)

    def load(self, lengths: str, max_len: int = MAX_LEN) -> Load:
        """Requests of these lengths, for the time that the options say."""
        return Load(lengths, self.options.seconds, max_len)

    def clusters(self, gpus: int) -> list[Cluster]:
        """Replicas with each chunk size, and all splits, or five of many."""
        first = Cluster(self.options.preset, self.options.device, gpus)
        step = max(1, gpus // 4)
        splits = [Pools(p, gpus - p) for p in range(step, gpus, step)]
        chunked = [replace(first, chunk=chunk) for chunk in CHUNKS]
        return chunked + [replace(first, pools=pools) for pools in splits]

    def goodputs(
        self, clusters: Sequence[Cluster], load: Load, targets: Sequence[Targets]
    ) -> list[dict[Cluster, float]]:
        """For each of the targets the goodput of each cluster."""
        self.workers.name = f"{clusters[0].instances} GPUs, {load.lengths}"
        searches = [Search(each, load, targets, self.options.steps) for each in clusters]
        rates = self.workers(goodput.find_goodputs, searches)
        return [dict(zip(clusters, row, strict=True)) for row in zip(*rates, strict=True)]

    def rows(self, gpus: int, lengths: str, targets: Sequence[Targets]) -> list[Row]:
        """The Row of so many GPUs and a load for each of the targets."""
        goodputs = self.goodputs(self.clusters(gpus), self.load(lengths), targets)
        return [row_of(rates) for rates in goodputs]

    def by_link(self, preset: str) -> dict[str, LinkRow]:
        """A LinkRow for each link, for prompts of 1,500 tokens of a model."""
        load = self.load("1500+100", 2048)
        replicas = Cluster(preset, self.options.device, 2, chunk=MAX_LEN)
        pools = {link: replace(replicas, pools=Pools(1, 1), link=link) for link in LINKS_SWEPT}
        at_end = {link: replace(pools[link], layer_wise=False) for link in LINKS_SWEPT}
        clusters = [replicas, *at_end.values(), *pools.values()]
        jobs = [Job(cluster, load, LOW_RATE * cluster.instances) for cluster in clusters]
        self.workers.name = f"links, {preset}"
        trials = self.workers(goodput.run_job, jobs)
        second_s = {job.cluster: t.second_p50_s for job, t in zip(jobs, trials, strict=True)}
        goodputs: dict[Cluster, float] = {}
        if preset == LARGE_CACHE:
            [goodputs] = self.goodputs(list(pools.values()), load, [LINK_TARGETS])
        return {
            link: LinkRow(
                at_end_s=second_s[at_end[link]],
                layer_wise_s=second_s[pools[link]],
                alone_s=second_s[replicas],
                goodput=goodputs.get(pools[link]),
            )
            for link in LINKS_SWEPT
        }

    def figure_1(self) -> dict[str, float]:
        """Goodput per GPU of DistServe's Figure 1: one GPU for both phases, or two that prefill
        and one that decodes."""
        one = Cluster(LARGE_CACHE, "a100-80gb", 1, policy="vllm", chunk=2048)
        chunks = replace(one, policy="sarathi-serve", chunk=512)
        pools = replace(one, instances=3, pools=Pools(2, 1))
        load = self.load(FIGURE_1, 2048)
        [goodputs] = self.goodputs([one, chunks, pools], load, [FIGURE_1_TARGETS])
        return {cluster.name: rate for cluster, rate in goodputs.items()}


def row_of(goodputs: Mapping[Cluster, float]) -> Row:
    """The Row of some clusters, by their goodput."""
    return Row(
        chunks=max(rate for cluster, rate in goodputs.items() if not cluster.pools),
        pools={str(cluster.pools): rate for cluster, rate in goodputs.items() if cluster.pools},
    )


def print_rows(head: str, rows: Mapping[str, Row], title: str = "") -> dict[str, Any]:
    """Print the table of a sweep. The splits have columns, if they are the same in all rows.
    Returns what --json has of it."""
    has_columns = len({tuple(row.pools) for row in rows.values()}) == 1
    cells: dict[str, list[Cell]] = {}
    for name, row in rows.items():
        pools: list[Cell] = [("pools", row.best_pools, ",.2f")]
        if has_columns:
            pools = [(split, rate, ",.2f") for split, rate in row.pools.items()]
        cells[name] = [
            ("chunks", row.chunks, ",.2f"),
            *pools,
            ("pools / chunks", row.gain, ".2fx"),
            ("best", row.winner, ""),
        ]
    print(f"{title}{format_table(head, cells)}\n")
    return {name: plain(row) for name, row in rows.items()}


def print_links(preset: str, rows: Mapping[str, LinkRow]) -> None:
    """Print what a link costs a model."""
    cells = {
        link: [
            ("at the end, ms", 1e3 * row.at_end_s, ",.1f"),
            ("layer by layer, ms", 1e3 * row.layer_wise_s, ",.1f"),
            ("no link, ms", 1e3 * row.alone_s, ",.1f"),
            ("goodput per GPU", row.goodput, ",.2f"),
        ]
        for link, row in rows.items()
    }
    print(f"From the first token to the second, {preset}, prompts of 1,500 tokens, 1:1:\n")
    print(format_table("link", cells), end="\n\n")


def main(options: PoolsOptions) -> dict[str, Any]:
    """The command: its report, which --json writes. What is done when it is interrupted is kept."""
    sweep = Sweep(options)
    gpus = options.gpus
    print(
        f"simulated: {gpus} x {options.device}, {options.preset}; {CHAT} is the load, "
        f"for {options.seconds:g} s\ngoodput: requests per second and GPU at which 90 % of "
        "them meet both targets, in TTFT and mean TBT, and P99 of all TBT meets the second;\n"
        f"chunks: sarathi-serve on replicas, the best of {', '.join(map(str, CHUNKS))}; "
        "1:3: one GPU prefills, three decode\n"
    )
    report: dict[str, Any] = {"command": options.command}
    middle = describe(MIDDLE)
    with reporting(options, report):
        names = [describe(targets) for targets in TARGETS]
        targets = dict(zip(names, sweep.rows(gpus, CHAT, TARGETS), strict=True))
        report["targets"] = print_rows("targets", targets)
        ratios = {lengths: sweep.rows(gpus, lengths, [MIDDLE])[0] for lengths in RATIOS}
        title = f"By prompt and output length, {middle}:\n\n"
        report["ratios"] = print_rows("prompt+output", ratios, title)
        sizes = {f"{size} GPUs": sweep.rows(size, CHAT, [MIDDLE])[0] for size in SIZES}
        title = f"By the number of GPUs, {middle}; of 8 GPUs each second split:\n\n"
        report["sizes"] = print_rows("cluster", sizes, title)
        presets = dict.fromkeys((LARGE_CACHE, options.preset))
        report["links"] = links = {preset: sweep.by_link(preset) for preset in presets}
        for preset, rows in links.items():
            print_links(preset, rows)
        draw(options, targets, ratios, links[LARGE_CACHE])
        report["figure_1"] = figure_1 = sweep.figure_1()
        report["findings"] = findings = check_findings(
            TARGETS[0].ttft_s, targets, ratios, sizes, links[LARGE_CACHE], figure_1
        )
        cells: dict[str, list[Cell]] = {}
        for finding in findings:
            cells[finding.text] = [
                ("paper", finding.paper, ""),
                ("here", finding.here, ""),
                ("holds", "yes" if finding.holds else "no", ""),
            ]
        print(f"{format_table('finding', cells)}\n\n{conclude(targets)}")
    if options.chrome_trace:
        write_text(options.chrome_trace, short_trace(options))
    wrote(options.plot, options.chrome_trace)
    return report


def draw(
    options: PoolsOptions,
    targets: Mapping[str, Row],
    ratios: Mapping[str, Row],
    links: Mapping[str, LinkRow],
) -> None:
    """Write the picture of --plot."""
    if not options.plot:
        return
    from lab.pictures.bars import plot_bars

    rows = {**targets, **{f"{name} tokens": row for name, row in ratios.items()}}
    panels = {"chunks, per second and GPU": {name: row.chunks for name, row in rows.items()}}
    for split in next(iter(rows.values())).pools:
        panels[f"pools {split}"] = {name: row.pools[split] for name, row in rows.items()}
    columns = len(panels)
    seconds = {
        "sent at the end": {link: row.at_end_s for link, row in links.items()},
        "layer by layer": {link: row.layer_wise_s for link, row in links.items()},
        "without a link": {link: row.alone_s for link, row in links.items()},
    }
    for name, values in seconds.items():
        panels[f"ms to 2nd token,\n{name}"] = {link: 1e3 * s for link, s in values.items()}
    machine = {
        "model": options.preset,
        "dtype": "16 bits",
        "device": f"simulated: {options.gpus} x {options.device}",
    }
    title = f"Chunks or two pools: goodput, and what a link costs {LARGE_CACHE}"
    plot_bars(panels, title, options.plot, machine, columns)


def conclude(rows: Mapping[str, Row]) -> str:
    """Which targets favour which, in a few lines."""
    by_winner: dict[str, list[str]] = {}
    for name, row in rows.items():
        by_winner.setdefault(row.winner.partition(" ")[0], []).append(name)
    return "\n".join(f"{winner}: {'; '.join(names)}" for winner, names in by_winner.items())


def short_trace(options: PoolsOptions) -> str:
    """A trace for Perfetto of some requests in two pools, with a track for each instance's link."""
    pools = Pools(1, options.gpus - 1)
    cluster = Cluster(options.preset, options.device, options.gpus, pools)
    simulated = cluster.simulate(Load(CHAT, 5.0, MAX_LEN), qps=2.0 * options.gpus, record=True)
    return json.dumps({"traceEvents": list(pool_events(f"pools {pools}", pools, simulated))})


def pool_events(name: str, pools: Pools, simulated: Simulated) -> Iterable[dict[str, Any]]:
    """The events of instances, and of the transfers, each from its start to its end."""
    for run in simulated.stage_runs:
        role = "prefill" if run.replica < pools.prefill else "decode"
        yield trace_event(name, f"{run.replica}: {role}", run)
    for sent in simulated.run.transfers:
        yield {
            "name": f"request {sent.request_id} to {sent.target}",
            "cat": "transfer",
            "id": f"{sent.request_id} at {sent.end}",
            "pid": name,
            "tid": f"{sent.source}: link",
            "ph": "X",
            "ts": 1e6 * sent.start,
            "dur": 1e6 * (sent.end - sent.start),
            "args": {"tokens": sent.tokens, "exposed_ms": 1e3 * sent.exposed_s},
        }
