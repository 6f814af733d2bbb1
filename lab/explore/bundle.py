"""The files that Python needs in a browser, and what the editor of the schedule page is told.

They are those that answer.py imports, the exercises, and the web files of page/, as they stand.
Read first: answer.py. Read next: page/web/editor.js, which asks for them."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from exercises.catalog import EXERCISES
from lab.explore.runs import Load
from page.html import Editor, Packed

PYODIDE = "https://cdn.jsdelivr.net/pyodide/v314.0.7/full/"  # where a page finds Python
PYODIDE_FILES = (  # of the npm package `pyodide`, which a site may have beside it
    "pyodide.mjs",
    "pyodide.asm.mjs",
    "pyodide.asm.wasm",
    "pyodide-lock.json",
    "python_stdlib.zip",
)
ROOT = Path(__file__).resolve().parents[2]
TEMPLATE = "policies/template.py"
FILES = (  # relative to ROOT
    "bookkeeping.py",
    "config.py",
    "kv_cache.py",
    "request.py",
    "scheduler.py",
    "cli/__init__.py",
    "cli/tables.py",
    "exercises/*.py",
    "runtime/__init__.py",
    "runtime/files.py",
    "runtime/memory.py",
    "lab/__init__.py",
    "lab/explore/*.py",
    "lab/measure/__init__.py",
    "lab/measure/arrival.py",
    "lab/measure/run_loop.py",
    "lab/measure/run_plan.py",
    "lab/simulator/__init__.py",
    "lab/simulator/cost_model.py",
    "lab/simulator/devices.py",
    "lab/simulator/simulation.py",
    "parallel/__init__.py",
    "parallel/micro_batches.py",
    "policies/*.py",
    "pretrained/__init__.py",
    "pretrained/presets.py",
    "pretrained/sharding.py",
    "page/*.py",
    "page/web/*",
)


def bundle(loads: Mapping[str, Load]) -> dict[str, Any]:
    """The content of the files by their paths, and the loads by their names in the page."""
    paths = sorted({path for pattern in FILES for path in ROOT.glob(pattern) if path.is_file()})
    return {
        "files": {path.relative_to(ROOT).as_posix(): path.read_text("utf-8") for path in paths},
        "loads": {name: load.to_json() for name, load in loads.items()},
    }


def editor(packed: Packed, pyodide: str = PYODIDE) -> Editor:
    """What the page's editor is told: where the bundle is, and the address of Pyodide."""
    return {
        "bundle": packed,
        "pyodide": pyodide,
        "pyodide_files": list(PYODIDE_FILES),
        "template": (ROOT / TEMPLATE).read_text("utf-8"),
        "exercises": [
            {
                "number": exercise.number,
                "title": exercise.title,
                "file": exercise.file.relative_to(ROOT).as_posix(),
                "hints": list(exercise.hints),
            }
            for exercise in EXERCISES
        ],
    }
