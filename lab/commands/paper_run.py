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
from lab.claims.claim import Claim, Result, agreement
from lab.claims.labs import PaperLab, RealLab
from lab.measure.machine_info import measure_machine

PICTURES = ("S-F3", "S-F9", "S-F12", "S-F13", "SS-F1", "SS-F7", "SS-F8", "SS-F10")
Machines = dict[str, Result]  # by the name of the machine


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
            report[claim.id][column] = {name: each.to_json() for name, each in machines.items()}
    if computed:
        print(agreement(result for machines in computed.values() for result in machines.values()))
    machine = lab.info.to_json() if lab else None
    record = {"options": {"on": on, **options_json(model)}, "machine": machine}
    write_json(json, record | {"claims": report})
    wrote(json)


def compute(claims: list[Claim]) -> dict[str, Machines]:
    """What the cost model has of each claim, on the machines of its paper. Claims about one machine
    share its lab, which brings no load twice to a server. Those go first whose capacities are
    searched, and of the others those of most GPUs: they take long."""
    claims_of: dict[str, list[str]] = {}  # ids by the name of a machine
    effort: dict[str, tuple[int, int]] = {}  # by the same name, only to compare
    for claim in claims:
        for system in claim.systems:
            claims_of.setdefault(system.name, []).append(claim.id)
            effort[system.name] = len(system.slos_s), system.cost.tp * system.cost.pp
    tasks = sorted(claims_of.items(), key=lambda task: effort[task[0]], reverse=True)
    with Pool(initializer=gc.disable) as pool:  # simulations make no cycles
        results = pool.imap(compute_on, tasks, chunksize=1)
        bar = tqdm(results, "computed", len(tasks), leave=False, disable=None)
        results_on = {name: results for (name, _), results in zip(tasks, bar, strict=True)}
    return {
        claim.id: {system.name: results_on[system.name][claim.id] for system in claim.systems}
        for claim in claims
    }


def compute_on(task: tuple[str, list[str]]) -> dict[str, Result]:
    """What claims find on one machine, by their ids."""
    name, ids = task
    (system,) = {s for id in ids for s in CLAIMS[id].systems if s.name == name}
    lab = PaperLab(system)
    return {id: CLAIMS[id].function(lab) for id in ids}


def real_lab(options: ModelOptions) -> RealLab:
    """The lab of this machine and model."""
    longest = 4096 if options.device == "cpu" else 8192
    model = load_model(options, longest, positions_from="")
    info = measure_machine(model, options.name, 256, options.attention)
    info = replace(info, model=Path(info.model).name)  # say nothing of where files lie
    return RealLab(model, info, options.attention, options.seed)


def reason_not_here(claim: Claim, lab: RealLab, on: str | None) -> str:
    """Why a claim is not measured here, in words; "" if it is."""
    if claim.measured == "no":
        return "one device cannot show it"
    if claim.measured == "slow" and on != "here":
        return "takes long, see --on here"
    return claim.missing_ridge(lab.ridge)


def measure(claim: Claim, lab: RealLab) -> Result:
    """What a claim finds on this machine."""
    lab.busy = False
    result = claim.function(lab)
    result.busy = lab.busy
    return result


def draw(claim: Claim, columns: dict[str, Machines], plot: Path | None) -> None:
    """Draw what was found on the last machine, to plot-ID.png, if the claim has a picture."""
    results = [each for machines in columns.values() for each in machines.values()]
    if not plot or claim.id not in PICTURES or not results:
        return
    file = str(plot.with_stem(f"{plot.stem}-{claim.id}"))
    if results[-1].picture:
        results[-1].picture(file)
    else:
        from lab.pictures.capacities import plot_table  # matplotlib takes a second

        heads = dict.fromkeys(head for row in results[-1].rows.values() for head in row)
        panels = {head: results[-1].column(head) for head in heads}
        plot_table(panels, f"{claim.id}: {claim.sentence}", file)
    wrote(file)
