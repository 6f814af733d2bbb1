"""The schedule as a page to step through, recorded or live: one HTML file that needs no network.

    text = page(title, machine, {"vllm": recorder}, slo_s=slo_s)

The scripts of web/ draw what a Recorder has kept, and save it as a trace for
https://ui.perfetto.dev. Read first: records.py. Read next: web/page.html, web/run.js."""

import base64
import gzip
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypedDict

from page.records import Recorder

WEB = Path(__file__).with_name("web")
SCRIPTS = (  # they become one script, in this order
    "run.js",
    "sentences.js",
    "colors.js",
    "lanes.js",
    "strips.js",
    "instances.js",
    "pointing.js",
    "highlight.js",
    "view.js",
    "details.js",
    "choices.js",
    "opening.js",
    "tour.js",
    "live.js",
    "cost.js",
    "trace.js",
    "editor.js",
    "main.js",
)
STYLES = ("page.css", "editor.css")


class RowCosts(TypedDict):
    """The matrix products of a machine's model, by the rows of a batch. Times are in seconds."""

    name: str
    read_s: float  # all weights, once
    row_s: float  # to compute a row
    tile: int  # rows are computed in whole tiles


class Costs(TypedDict):
    """What a batch takes, in seconds: decodes alone, a chunk alone, and both together."""

    decodes: int
    chunk: int  # tokens
    decodes_s: float
    chunk_s: float
    both_s: float
    machines: list[RowCosts]


class Packed(TypedDict, total=False):
    """Compressed JSON: in the page, or in a file beside it. See `pack`."""

    data: str  # in base64
    file: str


class ExerciseInfo(TypedDict):
    """An exercise of the page's editor."""

    number: int
    title: str
    file: str  # in the bundle
    hints: list[str]


class Editor(TypedDict):
    """What the page's editor of policies is told. See lab/explore/bundle.py."""

    bundle: Packed  # {"files": {path: text}, "loads": {name: load}}, see lab/explore/bundle.py
    pyodide: str  # the address of Python for browsers, which ends in /
    pyodide_files: list[str]  # what is loaded from there
    template: str  # the text to begin with
    exercises: list[ExerciseInfo]


def pack(content: object) -> bytes:
    """The content as JSON, compressed."""
    text = json.dumps(content, separators=(",", ":"))
    return gzip.compress(text.encode(), 6, mtime=0)


def packed_inline(content: object) -> Packed:
    """The content as it stands in a page."""
    return {"data": base64.b64encode(pack(content)).decode()}


def page(
    title: str,
    machine: str = "",
    recorders: Mapping[str, Recorder] | None = None,
    *,
    live: str | None = None,
    slo_s: float | None = None,
    slo_source: str = "",
    choices: Mapping[str, Sequence[str]] | None = None,
    costs: Costs | None = None,
    iteration: int | None = None,
    files: Mapping[str, str] | None = None,
    editor: Editor | None = None,
) -> str:
    """The page as text.

    It shows the runs of `recorders`, by their names. A live page has none; it asks the address
    `live` for records, which EngineThread.records_since of server/ answers. A gap between tokens
    above `slo_s` seconds is a stall; `slo_source` says where that number is from. Where there are
    many runs, `choices` maps the name of a row of buttons to their labels, and a run's name is one
    label of each, joined by " | ": first its policy, and "*" where there is no choice. A policy may
    lack runs for some of the labels. The tour and a box explain `costs`, if they are given. Without
    choices the page opens with the first run's `iteration`, which counts from 1.

    The records of a run that is in `files` are not in the page, but in the file of that name beside
    it, which is `pack` of {run: records}. With an `editor` one can write a policy in the page."""
    runs = []
    for name, recorder in (recorders or {}).items():
        file = (files or {}).get(name)
        packed = {"file": file} if file else packed_inline(recorder.records)
        runs.append({"name": name, "settings": recorder.settings, **packed})
    content = {
        "title": title,
        "machine": machine,
        "slo_s": slo_s,
        "slo_source": slo_source,
        "live": live,
        "choices": choices,
        "costs": costs,
        "iteration": iteration,
        "editor": {**editor, "worker": _read("worker.js")} if editor else None,
        "runs": runs,
    }
    text = _read("page.html")
    text = text.replace("{{css}}", "".join(_read(style) for style in STYLES))
    text = text.replace("{{js}}", "\n".join(_read(script) for script in SCRIPTS))
    # a "<" could end the element that holds the data. The data comes last, as it may hold anything
    return text.replace("{{data}}", json.dumps(content).replace("<", "\\u003c"))


def _read(name: str) -> str:
    return (WEB / name).read_text("utf-8")
