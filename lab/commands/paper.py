"""The papers' claims: paper | cost model | here.

    python bench.py paper                       all claims, computed, and measured where it is quick
    python bench.py paper S-F3,SS-F9            some of them
    python bench.py paper --on papers           computed only, on the papers' machines
    python bench.py paper SS-F10 --on here      measured only

Read first: lab/claims/claim.py and labs.py. Read next: paper_run.py."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from cyclopts import Parameter

from cli.model import ModelOptions


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class PaperOptions:
    """The options of `bench.py paper`."""

    on: Literal["papers", "here"] | None = None
    """papers: computed, on the papers' machines; here: measured, on this one. [default: both, but
    for what takes long here]"""
    plot: Path | None = None
    """Draw eight of the claims: p.png makes p-S-F3.png and others."""
    json: Path | None = None
    """Write all that is printed, with these options."""


def main(
    ids: str = "",
    /,
    *,
    options: PaperOptions = PaperOptions(),
    model: ModelOptions = ModelOptions(),
) -> None:
    """The papers' claims, computed on the papers' machines and measured on this one.

    Parameters
    ----------
    ids
        Such as S-F3,SS-F9. [default: all]
    """
    from lab.commands.paper_run import run

    run(ids, options.on, options.plot, options.json, model)
