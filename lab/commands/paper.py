"""The papers' figures and tables that one device can show, on this one.

    python bench.py paper                      all of them; --list names them, and their times
    python bench.py paper --only S-F9,'SS-*'   some claims, by their ids

What is done is kept in results/<machine>, see `folder_of`: paper.json, from which paper.md is made,
and pictures. A run that was interrupted goes on where it was. Read first: lab/claims/claims.py
and report.py."""

import fnmatch
import re
from argparse import ArgumentTypeError, Namespace
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from cli.loading import load_model, resolve_model
from cli.model import ModelOptions
from cli.options import (
    OptionParser,
    PerDevice,
    add_model_options,
    from_args,
    model_options,
    nonempty_text,
    option,
    whole,
    wrote,
)
from lab.claims import report
from lab.claims.claim import Claim
from lab.claims.claims import CLAIMS
from lab.claims.labs import RealLab, Size
from lab.claims.provenance import age
from lab.measure import timing
from lab.measure.machine_info import RealMachineInfo, measure_machine

VENDORS = r"\((r|tm)\)|\b(amd|intel|nvidia|cpu|processor|\d+-core)\b|@.*"
BAR_FORMAT = "{desc} |{bar}| {elapsed}, {remaining} left"


def some_claims(text: str) -> list[Claim]:
    """The type of --only: claims by ids, their own or of those they cover, or by patterns: SS-*."""
    claims: dict[str, Claim] = {}
    for name in text.split(","):
        name = name.strip()
        matching = [claim for claim in CLAIMS if fnmatch.filter(claim.ids, name)]
        if not matching:
            raise ArgumentTypeError(f"{name}: no such claim; --list names them")
        claims |= {claim.id: claim for claim in matching}
    return list(claims.values())


@dataclass(frozen=True, kw_only=True)
class PaperOptions:
    """The options of `bench.py paper`."""

    claims: list[Claim] = option(
        "such as S-F9,SS-F12",
        name="--only",
        type=some_claims,
        default=CLAIMS,
        default_text="all",
    )
    quick: bool = option("on a CPU: fewer sizes, shorter runs, no capacities", action="store_true")
    list_only: bool = option(
        "say what there is and what is done already, and measure nothing",
        name="--list",
        action="store_true",
    )
    fresh: bool = option("measure again what is done already", action="store_true")
    out: str | None = option(
        "where results are kept",
        type=nonempty_text,
        default_text="results/<machine>, with its dtype if that is not bfloat16",
        metavar="DIRECTORY",
    )
    max_len: int = option(
        "the longest request on the device",
        type=whole(minimum=64),
        default=PerDevice(cpu=4096, gpu=8192),
    )
    model: ModelOptions


def add_options(parser: OptionParser) -> None:
    """Add the options of the command."""
    parser.add_fields(PaperOptions)
    add_model_options(parser, "llama-13b on a GPU with 40 GB or more, else llama-160m")


def resolve(parser: OptionParser, args: Namespace) -> PaperOptions:
    """The options, with those filled in that were left open.

    Raises ValueError for several ranks: a claim is about one device."""
    if args.tp * args.pp > 1:
        raise ValueError("--tp, --pp: claims are of one device")
    return from_args(PaperOptions, args, model=resolve_model(model_options(args)))


def main(options: PaperOptions) -> None:
    """The command. Each claim that is done is printed and kept."""
    device = torch.device(str(options.model.device))
    threads = torch.get_num_threads() if device.type == "cpu" else 0
    folder = folder_of(timing.device_name(device), threads, options.model.dtype)
    directory = Path(options.out) if options.out else report.RESULTS / folder
    results = report.read_results(directory)
    if options.list_only:
        print_list(options, results)
        return

    model = load_model(options.model, options.max_len, positions_from="--max-len")
    machine = measure_machine(model, options.model.name, 256, options.model.attention)
    machine = replace(machine, model=Path(machine.model).name)  # say nothing of where files lie
    lab = RealLab(model, machine, options.model, size_of(device, options.quick))
    conditions = conditions_of(machine, options.model, lab.size)
    todo = claims_to_measure(options, results, conditions)
    directory.mkdir(parents=True, exist_ok=True)
    report.save_results(results, machine, directory)  # errors of writing come before a long run
    print(f"{machine.heading()}\n{len(todo)} of {len(options.claims)} claims left to do\n")

    total_s = sum(claim.seconds_of(options.quick) for claim in todo)
    with tqdm(total=total_s, leave=False, disable=None, bar_format=BAR_FORMAT, smoothing=0) as bar:
        for claim in todo:
            seconds = claim.seconds_of(options.quick)
            bar.set_description(f"{claim.id}, about {seconds} s")
            picture = str(directory / report.picture_of(claim))
            record = report.measure_claim(claim, lab.for_claim(picture), conditions)
            results[claim.id] = record
            report.save_results(results, machine, directory)
            bar.write(f"{record.markdown(claim)}\n")
            bar.update(seconds)
    wrote(str(directory / "paper.json"), str(directory / "paper.md"))


def conditions_of(machine: RealMachineInfo, model: ModelOptions, size: Size) -> dict[str, Any]:
    """The conditions that numbers depend on. If one differs, a claim is measured again."""
    return {
        "device": machine.device,
        "threads": machine.threads,
        "torch": machine.torch,
        "model": machine.model,
        "dtype": machine.dtype,
        "attention": machine.attention,
        "seed": model.seed,
        "compile": model.compile,
        "quick": size == "quick",  # on a GPU nothing is
    }


def size_of(device: torch.device, quick: bool) -> Size:
    """Which sizes the claims are measured at."""
    if device.type == "cuda":
        return "gpu"
    return "quick" if quick else "cpu"


def folder_of(device: str, threads: int, dtype: str | None = None) -> str:
    """The folder of a machine: "epyc-2-threads"; of a GPU, without threads, "h100-80gb-hbm3".

    Those of a CPU that are not of bfloat16 lie apart, in "epyc-2-threads-float32": of CPUs with one
    name some multiply bfloat16, and some do not."""
    device_words = re.findall(r"[a-z0-9]+", re.sub(VENDORS, " ", device.lower()))
    parts = ["-".join(device_words) or "cpu"]
    if threads:
        parts.append(f"{threads}-thread" if threads == 1 else f"{threads}-threads")
        if dtype not in (None, "bfloat16"):
            parts.append(dtype)
    return "-".join(parts)


def print_list(options: PaperOptions, results: report.Results) -> None:
    """Say what the claims are, how long each takes, and which are done."""
    for claim in options.claims:
        notes = [f"{claim.seconds_of(options.quick)} s"]
        record = results.get(claim.id)
        if record and record.is_done:
            notes += ["done", age(record.provenance)]
        print(f"{claim.name} ({', '.join(filter(None, notes))})\n    {claim.sentence}")


def claims_to_measure(
    options: PaperOptions, results: report.Results, conditions: dict[str, Any]
) -> Sequence[Claim]:
    """The claims that are not done under these conditions. A full run is good for a quick one."""
    good_conditions = (conditions, conditions | {"quick": False})
    measured = {
        claim_id
        for claim_id, record in results.items()
        if record.is_done and record.options in good_conditions
    }
    return [claim for claim in options.claims if options.fresh or claim.id not in measured]
