"""The papers' claims: paper | cost model | here.

    python bench.py paper                       all claims, computed, and measured where it is quick
    python bench.py paper S-F3,SS-F9            some of them
    python bench.py paper --on papers           computed only, on the papers' machines
    python bench.py paper SS-F10 --on here      measured only

Read first: lab/claims/claim.py and labs.py."""

import gc
import subprocess
import time
from argparse import Namespace
from dataclasses import dataclass, replace
from multiprocessing import Pool
from pathlib import Path
from typing import Any

from tqdm import tqdm

from cli.loading import (
    ModelOptions,
    add_model_options,
    find_device,
    load_model,
    model_options,
    resolve_model,
)
from cli.options import OptionParser, from_args, json_option, option, plot_option, write_json, wrote
from lab.claims import batches, latency, pipelines, throughput  # noqa: F401  they enter CLAIMS
from lab.claims.claim import CLAIMS, Claim, Found, agreement
from lab.claims.labs import PaperLab, RealLab
from lab.measure.machine_info import measure_machine

PICTURES = ("S-F3", "S-F9", "S-F12", "S-F13", "SS-F1", "SS-F7", "SS-F8", "SS-F10")
Machines = dict[str, Found]  # by the name of the machine


@dataclass(frozen=True, kw_only=True)
class PaperOptions:
    """The options of `bench.py paper`."""

    ids: str
    on: str | None = option(
        "papers: computed, on the papers' machines; here: measured, on this one",
        choices=("papers", "here"),
        default_text="both, but for what takes long here",
    )
    json: str | None = json_option()
    plot: str | None = plot_option(f"draw {', '.join(PICTURES)}: p.png makes p-S-F3.png and others")
    model: ModelOptions


def add_options(parser: OptionParser) -> None:
    """Add the options of the command."""
    parser.add_argument("ids", nargs="?", default=",".join(CLAIMS), help="claims (default: all)")
    parser.add_fields(PaperOptions, leave_out=["ids"])
    add_model_options(parser, "llama-13b on a GPU with 40 GB or more, else llama-160m")


def resolve(parser: OptionParser, args: Namespace) -> PaperOptions:
    """The options. Exits with a message for an unknown claim."""
    unknown = [name for name in args.ids.split(",") if name not in CLAIMS]
    if unknown:
        parser.error(f"{unknown[0]}: no such claim, there are {', '.join(CLAIMS)}")
    return from_args(PaperOptions, args, ids=args.ids, model=resolve_model(model_options(args)))


def main(options: PaperOptions) -> None:
    """Compute and measure the claims, print each, and how many numbers come out."""
    claims = [CLAIMS[name] for name in options.ids.split(",")]
    computed = compute(claims) if options.on != "here" else {}
    lab = None if options.on == "papers" else real_lab(options.model)
    report: dict[str, dict[str, Any]] = {}
    for claim in claims:
        columns: dict[str, Machines] = {}
        notes: list[str] = []
        if claim.id in computed:
            columns["cost model"] = computed[claim.id]
        if lab:
            note = reason_not_here(claim, lab, options.on)
            notes = [f"here: {note}"] if note else []
            columns["here"] = {} if note else {lab.name: measure(claim, lab)}
        print(claim.markdown(columns, notes), end="\n\n", flush=True)
        draw(claim, columns, options.plot)
        report[claim.id] = {"sentence": claim.sentence, "notes": notes}
        for column, machines in columns.items():
            found = {name: each.to_json() for name, each in machines.items()}
            report[claim.id][column] = found
    if computed:
        print(agreement(found for machines in computed.values() for found in machines.values()))
    machine = lab.info.to_json() if lab else None
    write_json(options, provenance() | {"machine": machine, "claims": report})
    wrote(options.json)


def compute(claims: list[Claim]) -> dict[str, Machines]:
    """What the cost model has of each claim, on the machines of its paper."""
    tasks = [(claim.id, place) for claim in claims for place in range(len(claim.systems))]
    computed: dict[str, Machines] = {claim.id: {} for claim in claims}
    with Pool(initializer=gc.disable) as pool:  # simulations make no cycles
        results = pool.imap(compute_one, tasks, chunksize=1)
        bar = tqdm(results, "computed", len(tasks), leave=False, disable=None)
        for (claim_id, place), found in zip(tasks, bar, strict=True):
            computed[claim_id][CLAIMS[claim_id].systems[place].name] = found
    return computed


def compute_one(task: tuple[str, int]) -> Found:
    """What a claim finds on one of its systems."""
    claim_id, place = task
    claim = CLAIMS[claim_id]
    return claim.function(PaperLab(claim.systems[place]))


def real_lab(options: ModelOptions) -> RealLab:
    """The lab of this machine and model."""
    device = find_device(options.device)
    longest = 8192 if device.type == "cuda" else 4096
    model = load_model(options, longest, positions_from="")
    info = measure_machine(model, options.name, 256, options.attention)
    info = replace(info, model=Path(info.model).name)  # say nothing of where files lie
    return RealLab(model, info, options.attention, options.seed)


def reason_not_here(claim: Claim, lab: RealLab, on: str | None) -> str:
    """Why a claim is not measured here, in words; "" if it is."""
    if claim.here == "no":
        return "one device cannot show it"
    if claim.here == "slow" and on != "here":
        return "takes long, see --on here"
    return claim.missing_ridge(lab.ridge)


def measure(claim: Claim, lab: RealLab) -> Found:
    """What a claim finds on this machine."""
    lab.busy = False
    found = claim.function(lab)
    found.busy = lab.busy
    return found


def draw(claim: Claim, columns: dict[str, Machines], plot: str | None) -> None:
    """Draw what was found on the last machine, to plot-ID.png, if the claim has a picture."""
    found = [each for machines in columns.values() for each in machines.values()]
    if not plot or claim.id not in PICTURES or not found:
        return
    file = str(Path(plot).with_stem(f"{Path(plot).stem}-{claim.id}"))
    if found[-1].picture:
        found[-1].picture(file)
    else:
        from lab.pictures.bars import plot_bars  # matplotlib takes a second

        heads = dict.fromkeys(head for row in found[-1].rows.values() for head in row)
        panels = {head: found[-1].column(head) for head in heads}
        plot_bars(panels, f"{claim.id}: {claim.sentence}", file)
    wrote(file)


def provenance() -> dict[str, Any]:
    """The commit of this repository, and the date."""
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
    git = subprocess.run(command, capture_output=True, text=True)
    return {"commit": git.stdout.strip(), "date": time.strftime("%Y-%m-%d")}
