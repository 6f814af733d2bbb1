"""The papers' experiments on machines that are not here, from a cost model.

    python bench.py simulate                      the claims that need the papers' GPUs
    python bench.py simulate --only pipeline      one of them

Read first: lab/simulator/simulation.py and lab/claims/claims.py."""

import gc
import math
import os
import pickle
import signal
from argparse import ArgumentTypeError, Namespace
from collections.abc import Callable, Collection, Generator, Iterable, Mapping, Sequence
from concurrent.futures import BrokenExecutor, ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import active_children, parent_process
from pathlib import Path
from threading import Thread
from typing import Any, TypeVar

from tqdm import tqdm

from cli.console import SIGNALS
from cli.options import (
    OptionParser,
    from_args,
    json_option,
    number,
    option,
    plot_option,
    whole,
    write_json,
    wrote,
)
from cli.tables import Cell, format_table, show
from lab.claims.claim import Claim, Finding, Published
from lab.claims.claims import EXPERIMENTS
from lab.claims.jobs import Setup
from lab.claims.picture import draw
from lab.claims.provenance import provenance
from lab.claims.table import plain

Job = TypeVar("Job")
Result = TypeVar("Result")

INTRODUCTION = """\
Simulated, with the constants in devices.py. Claims as in the papers:
S is SARATHI, SS is Sarathi-Serve, D DistServe, B a post on schedulers; F a figure, T a table.
"""


def names_from(allowed: Collection[str]) -> Callable[[str], list[str]]:
    """The type of a text of these names, with commas."""

    def parse_names(text: str) -> list[str]:
        names = [name.strip() for name in text.split(",")]
        for name in names:
            if name not in allowed:
                raise ArgumentTypeError(f"{name}: must be from {', '.join(allowed)}")
        return names

    return parse_names


@dataclass(frozen=True, kw_only=True)
class SimulateOptions:
    """The options of `bench.py simulate`."""

    command: str
    only: list[str] = option(
        "from " + ", ".join(f"{name} ({each.ids})" for name, each in EXPERIMENTS.items()),
        type=names_from(EXPERIMENTS),
        default=list(EXPERIMENTS),
        default_text="all",
    )
    requests: int = option(
        "in each run of the serving experiments",
        type=whole(minimum=8, maximum=1_000_000),
        default=512,
    )
    cpu_ms: float = option(
        "CPU time of an iteration on each stage, in the experiments of Sarathi-Serve, in ms",
        type=number(minimum=0, maximum=1e6),
        default=0.0,
    )
    processes: int = option(
        "simulate so many at once",
        type=whole(minimum=1, maximum=256),
        default=os.cpu_count() or 1,
        default_text="the number of cores",
    )
    plot: str | None = plot_option(
        "draw each claim: p.png makes p-SS-F8.png, p-S-T4.png and others"
    )
    json: str | None = json_option()


def add_options(parser: OptionParser) -> None:
    """Add the options of the command."""
    parser.add_fields(SimulateOptions)


def resolve(parser: OptionParser, args: Namespace) -> SimulateOptions:
    """The options."""
    return from_args(SimulateOptions, args)


def main(options: SimulateOptions) -> None:
    """Simulate the claims, print them and how many numbers came out, draw and write."""
    findings: dict[Claim, Finding] = {}
    workers = Workers(options.processes)
    setup = Setup(run=workers, requests=options.requests, cpu_s=options.cpu_ms / 1e3)
    print(f"{INTRODUCTION}Sarathi-Serve's and the post's: {setup}.\n")
    try:
        for name in options.only:
            workers.name = name
            lab = EXPERIMENTS[name].lab(setup)
            for claim in EXPERIMENTS[name].claims:
                lab.picture = picture_of(claim, options.plot)
                finding = claim.function(lab)
                if lab.picture and not finding.has_picture:
                    draw(finding, f"{claim.name}, simulated", lab.picture, None)
                print(f"{markdown_of(claim, finding)}\n")
                findings[claim] = finding
    finally:
        if findings:  # also if this was interrupted
            print_conclusion(findings)
            claims = [json_of(claim, finding) for claim, finding in findings.items()]
            write_json(options, {"provenance": provenance(), "claims": claims})
            wrote(options.json, *(picture_of(claim, options.plot) for claim in findings))


def markdown_of(claim: Claim, finding: Finding) -> str:
    """What is printed: the claim, the paper's numbers with ours, and the tables."""
    rows: dict[str, list[Cell]] = {}
    for each in finding.published:
        rows[each.text] = [
            ("paper", each.paper_text, ""),
            ("simulated", each.here_text, ""),
            ("error", error_text(each), ""),
        ]
    tables = [table.markdown(finding.numbers_in(table)) for table in finding.tables]
    parts = [claim.name, claim.text, format_table("number", rows), *tables]
    return "\n\n".join(part for part in parts if part)


def error_text(number: Published) -> str:
    """How far ours is off: "+3%", "+3% (fitted)", or whether a bound is "met"; "-" if that is not
    known."""
    if number.is_met is not None:
        return "met" if number.is_met else "not met"
    text = show(number.error, "+.0%")
    return f"{text} (fitted)" if number.is_fitted else text


def json_of(claim: Claim, finding: Finding) -> dict[str, Any]:
    """All numbers, those of the paper with ours and its error."""
    numbers = [
        {
            "text": each.text,
            "paper": plain(each.paper),
            "simulated": plain(each.here),
            "error": None if each.error == math.inf else each.error,
            "met": each.is_met,
            "fitted": each.is_fitted,
        }
        for each in finding.published
    ]
    return {
        "claim": claim.id,
        "title": claim.title,
        "text": claim.text,
        "numbers": numbers,
        "tables": [table.to_json() for table in finding.tables],
    }


def picture_of(claim: Claim, plot: str | None) -> str:
    """The file in which a claim is drawn: p-S-T4.png for p.png; "" without one."""
    return str(Path(plot).with_stem(f"{Path(plot).stem}-{claim.id}")) if plot else ""


def print_conclusion(findings: Mapping[Claim, Finding]) -> None:
    """Print how many of the published numbers came out, if any were compared."""
    published = [(claim.id, number) for claim in findings for number in findings[claim].published]
    compared = [(claim_id, number) for claim_id, number in published if number.error is not None]
    if not compared:
        return
    fitted = [number for _, number in compared if number.is_fitted]
    predicted = [(claim_id, number) for claim_id, number in compared if not number.is_fitted]
    serving = [(claim_id, number) for claim_id, number in predicted if claim_id.startswith("SS-")]
    without_f14 = [number for claim_id, number in serving if claim_id != "SS-F14"]
    bounds = [number.is_met for _, number in published if number.is_met is not None]
    print(
        "Of the published numbers came out\n"
        f"- that nothing was fitted to: {came_out(number for _, number in predicted)}\n"
        f"- Sarathi-Serve's among these: {came_out(number for _, number in serving)}\n"
        f"- without SS-F14, whose first prompt is fitted: {came_out(without_f14)}\n"
        "- that constants were fitted to (S-T2, S-F7, the batches of 27 and 11, what\n"
        f"  S-F12 assumes, SS-F14's prompt of 2,047): {came_out(fitted)}\n"
        f'- bounds, such as "below 5%": {sum(bounds)} of {len(bounds)}\n'
        'Why others do not come out is in simulator/README.md, "Where it is off".'
    )


def came_out(numbers: Iterable[Published]) -> str:
    """How many are off by 10 % and by 25 % at most: "56 of 90 within 10%, 75 within 25%"."""
    errors = [abs(number.error) for number in numbers if number.error is not None]
    within_10 = sum(error <= 0.1 for error in errors)
    within_25 = sum(error <= 0.25 for error in errors)
    return f"{within_10} of {len(errors)} within 10%, {within_25} within 25%"


def prepare_worker() -> None:
    """Let this process end when the one that started it has ended, and collect garbage seldom."""
    # simulations make millions of small objects, and no cycles among them
    gc.set_threshold(200_000, 50, 50)

    def wait_for_parent() -> None:
        parent = parent_process()
        assert parent is not None  # this is a worker
        parent.join()
        os._exit(1)

    Thread(target=wait_for_parent, daemon=True).start()


class Workers:
    """Processes that simulate the jobs of all experiments. A job that was simulated before, maybe
    for another table, is not simulated again."""

    def __init__(self, processes: int) -> None:
        self.processes = processes
        self.name = ""  # of the experiment, for its progress bar
        self.results: dict[bytes, Any] = {}  # pickled function and job -> its result

    def __call__(self, function: Callable[[Job], Result], jobs: Sequence[Job]) -> list[Result]:
        """[function(job) for job in jobs]. All processes have ended when this returns."""
        keys = [pickle.dumps((function, job)) for job in jobs]
        new_jobs = {
            key: job for key, job in zip(keys, jobs, strict=True) if key not in self.results
        }
        results = results_of(self.processes, self.name, function, list(new_jobs.values()))
        self.results.update(zip(new_jobs, results, strict=True))
        return [self.results[key] for key in keys]


def results_of(
    processes: int, name: str, function: Callable[[Job], Result], jobs: Sequence[Job]
) -> Generator[Result, None, None]:
    """function(job) for each job, in order, by some processes, which have ended when this has. A
    progress bar has the `name`."""
    pool = ProcessPoolExecutor(processes, initializer=prepare_worker)
    # workers start with these signals blocked, and keep them so: this process ends the workers
    unblocked = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        futures = [pool.submit(function, job) for job in jobs]
        signal.pthread_sigmask(signal.SIG_SETMASK, unblocked)
        for future in tqdm(futures, name, leave=False, disable=None):
            yield future.result()
    except BrokenExecutor:
        advice = "a process was killed, maybe for lack of memory: try fewer --processes"
        raise ChildProcessError(advice) from None
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
        for process in active_children():
            process.kill()
        signal.pthread_sigmask(signal.SIG_SETMASK, unblocked)
