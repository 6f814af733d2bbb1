"""The files that commands write: whole, or as they were before. Read next: tables.py."""

import json
import os
import subprocess
import time
from collections.abc import Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from runtime.files import new_file


def options_json(*options: Any) -> dict[str, object]:
    """All options of a command, of one or several dataclasses, as one flat dict."""
    return {name: value for each in options for name, value in asdict(each).items()}


def plain(record: Any) -> Any:
    """The fields and the properties of a dataclass, as JSON has them; a path as text."""
    if isinstance(record, Path):
        return str(record)
    kind = type(record)
    properties = [name for name in dir(kind) if isinstance(getattr(kind, name), property)]
    names = [*(each.name for each in fields(record)), *properties]
    return {name: getattr(record, name) for name in names}


def provenance() -> dict[str, str]:
    """The commit of this repository, "" without git, and the date."""
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
    git = subprocess.run(command, capture_output=True, text=True)
    return {"commit": git.stdout.strip(), "date": time.strftime("%Y-%m-%d")}


def write_json(file: str | Path | None, report: Mapping[str, object]) -> None:
    """Write the report of a command and its provenance to a file, if there is one."""
    if file:
        write_text(file, json.dumps({**provenance(), **report}, indent=2, default=plain))


def write_text(file: str | os.PathLike[str], text: str) -> None:
    """Write the text to a new_file."""
    with new_file(file) as path:
        path.write_text(text, "utf-8")


def wrote(*files: str | Path | None) -> None:
    """Say which files were written: a line for each that is not None."""
    for file in files:
        if file:
            print(f"wrote {file}")


def wrote_page(file: str | Path) -> None:
    """Say where a page was written, and at which address a browser opens it."""
    print(f"wrote {file}, open {Path(file).resolve().as_uri()}")
