"""The schedule page as a site: index.html, and beside it what is loaded when it is asked for.

    files = write_runs(folder, {"steady": recorders})    {run: file}, for `files` of html.page
    write_text(folder / "index.html", page(..., files=files))

Read first: html.py."""

import re
from collections.abc import Mapping
from pathlib import Path

from page.html import Packed, pack
from page.records import Recorder
from runtime.files import new_file


def write_packed(folder: Path, file: str, content: object) -> Packed:
    """Write the content to a file of the site. Returns where the page finds it."""
    path = folder / file
    path.parent.mkdir(parents=True, exist_ok=True)
    with new_file(path) as part:
        part.write_bytes(pack(content))
    return {"file": file}


def write_runs(folder: Path, groups: Mapping[str, Mapping[str, Recorder]]) -> dict[str, str]:
    """Write the records of all runs, a file for each group. Returns {run: its file}."""
    files = {}
    for group, recorders in groups.items():
        file = f"runs/{re.sub(r'[^a-z0-9]+', '-', group.lower())}.json.gz"
        records = {name: recorder.records for name, recorder in recorders.items()}
        write_packed(folder, file, records)
        files.update(dict.fromkeys(recorders, file))
    return files
