"""What `bench.py paper` computes, measures, prints and writes. Read first: paper.py."""

import gc
from dataclasses import replace
from multiprocessing import Pool
from pathlib import Path
from typing import Any

from tqdm import tqdm

from cli.files import options_json, write_json, wrote
from cli.loading import load_model, resolve_model
from cli.model import ModelOptions, split_names
from lab.claims import CLAIMS
from lab.claims.claim import Claim, Found, agreement
from lab.claims.labs import PaperLab, RealLab
from lab.measure.machine_info import measure_machine

PICTURES = ("S-F3", "S-F9", "S-F12", "S-F13", "SS-F1", "SS-F7", "SS-F8", "SS-F10")
Machines = dict[str, Found]  # by the name of the machine


def run(
    ids: str, on: str | None, plot: Path | None, json: Path | None, model: ModelOptions
) -> None:
    """Compute and measure the claims, print each, and how many numbers come out.

    The arguments are as of the command. Raises ValueError for an unknown claim."""
    names = split_names(ids) or [*CLAIMS]
    unknown = set(names) - CLAIMS.keys()
    if unknown:
        raise ValueError(f"{min(unknown)}: no such claim, there are {', '.join(CLAIMS)}")
    claims = [CLAIMS[name] for name in names]
    computed = compute(claims) if on != "here" else {}
    lab = None
    if on != "papers":
        model = resolve_model(model)
        lab = real_lab(model)
    report: dict[str, dict[str, Any]] = {}
    for claim in claims:
        columns: dict[str, Machines] = {}
        notes: list[str] = []
        if claim.id in computed:
            columns["cost model"] = computed[claim.id]
        if lab:
            note = reason_not_here(claim, lab, on)
            notes = [f"here: {note}"] if note else []
            columns["here"] = {} if note else {lab.name: measure(claim, lab)}
        print(claim.markdown(columns, notes), end="\n\n", flush=True)
        draw(claim, columns, plot)
        report[claim.id] = {"sentence": claim.sentence, "notes": notes}
        for column, machines in columns.items():
            found = {name: each.to_json() for name, each in machines.items()}
            report[claim.id][column] = found
    if computed:
        print(agreement(found for machines in computed.values() for found in machines.values()))
    machine = lab.info.to_json() if lab else None
    record = {"options": {"on": on, **options_json(model)}, "machine": machine}
    write_json(json, record | {"claims": report})
    wrote(json)


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
    longest = 4096 if options.device == "cpu" else 8192
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


def draw(claim: Claim, columns: dict[str, Machines], plot: Path | None) -> None:
    """Draw what was found on the last machine, to plot-ID.png, if the claim has a picture."""
    found = [each for machines in columns.values() for each in machines.values()]
    if not plot or claim.id not in PICTURES or not found:
        return
    file = str(plot.with_stem(f"{plot.stem}-{claim.id}"))
    if found[-1].picture:
        found[-1].picture(file)
    else:
        from lab.pictures.capacities import plot_table  # matplotlib takes a second

        heads = dict.fromkeys(head for row in found[-1].rows.values() for head in row)
        panels = {head: found[-1].column(head) for head in heads}
        plot_table(panels, f"{claim.id}: {claim.sentence}", file)
    wrote(file)
