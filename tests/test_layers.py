"""Imports, held against a table: they point down, and what only plans needs no torch."""

import ast
import graphlib
import re
import subprocess
import sys
from functools import cache

import pytest

from tests.helpers import ROOT, repository

LOW = "runtime.files runtime.memory"
SHARED = "request scheduler policies"
PLANNING = f"pretrained.presets config {SHARED} kv_cache bookkeeping parallel.micro_batches {LOW}"
CACHE = "config request kv_cache"
MODEL = "pretrained attention model sampling"
ENGINE = f"{PLANNING} {MODEL} runtime engine torch"
LIBRARIES = f"{ENGINE} parallel lab.measure lab.simulator page"
MAY_IMPORT = {  # from the bottom up: a room names only rooms above its own line
    "pretrained.presets": "",
    "config": "pretrained.presets",
    "request": "",
    "kv_cache": "config request",
    "bookkeeping": "request kv_cache",
    "scheduler": "request bookkeeping",
    "policies": "config request kv_cache scheduler",
    "parallel.micro_batches": SHARED,
    "runtime.files": "",
    "runtime.memory": "config kv_cache",
    "pretrained": "pretrained.presets config request torch",
    "attention": f"{CACHE} torch",
    "model": f"{CACHE} pretrained attention torch",
    "fast": f"{CACHE} runtime.memory attention model torch",
    "sampling": "attention torch",
    "runtime": f"{CACHE} runtime.memory {MODEL} torch",
    "engine": f"{PLANNING} {MODEL} runtime",
    "parallel": ENGINE,
    "lab.measure": f"{ENGINE} parallel",
    "lab.simulator": f"{ENGINE} lab.measure",
    "page": f"{SHARED} parallel.micro_batches runtime.files",
    "cli": f"{ENGINE} parallel",
    "lab.pictures": "request policies parallel.micro_batches lab.measure runtime.files cli",
    "lab.claims": f"{LIBRARIES} cli lab.pictures",
    "server": f"{ENGINE} parallel page cli",
    "exercises": f"{PLANNING} page cli",
    "lab.explore": f"{PLANNING} lab.measure lab.simulator page exercises",
    "lab.commands": f"{LIBRARIES} cli lab.pictures lab.claims server lab.explore",
    "bench": f"{LIBRARIES} cli lab.commands",
    "sample": f"{ENGINE} parallel cli",
    "examples": f"{LIBRARIES} cli lab.pictures lab.commands server",
}
MAY_IMPORT_LATE = {  # other packages, within functions or for annotations alone
    "kv_cache": "torch",
    "runtime.memory": "torch",
}
MODULES = {  # dotted name -> source, of all but the tests
    ".".join(path.with_suffix("").parts).removesuffix(".__init__"): (ROOT / path).read_text("utf-8")
    for path in repository("*.py")
    if not str(path).startswith(("tests", "test_", "conftest"))
}
TOPS = {"torch", "tests", *(name.split(".")[0] for name in MODULES)}


def room_of(module):
    """The room of a dotted name: its first part, or two parts in lab/. In runtime/, of which the
    core stands on some and others on the core, modules are rooms that have a line of their own."""
    parts = module.split(".")
    two = ".".join(parts[:2])
    return two if parts[0] == "lab" or two in MAY_IMPORT else parts[0]


@cache
def imports_of(source, modules):
    """[(dotted name, whether it is imported late)] of what a source imports."""
    imports = []
    late_nodes = set()
    for node in ast.walk(ast.parse(source)):
        for_types = isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        if for_types or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            late_nodes.update(ast.walk(node))
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            dotted = [f"{node.module}.{alias.name}" for alias in node.names]
            names = [name if name in modules else node.module for name in dotted]
        if isinstance(node, ast.Constant) and "." in str(node.value) and node.value in modules:
            names = [node.value]  # for importlib
        imports += [(name, node in late_nodes) for name in dict.fromkeys(names)]
    return imports


def wrong_imports(modules):
    """["module imports other"] where the table does not allow it."""
    wrong = []
    names = frozenset(modules)
    for module, source in modules.items():
        room = room_of(module)
        allowed = {room, *MAY_IMPORT.get(room, "").split()}
        for name, is_late in imports_of(source, names):
            other = room_of(name)
            if is_late and other in MAY_IMPORT_LATE.get(room, ""):
                continue
            if other not in allowed and name.split(".")[0] in TOPS:
                wrong.append(f"{module} imports {name}")
    return wrong


def test_imports_point_down():
    assert wrong_imports(MODULES) == []


def test_only_one_file_asks_for_fast():
    """Nothing else names it, so it can be taken away: see test_without_fast.py."""
    naming = re.compile(r"""[\"']fast[\"']|^ *(import|from) fast\b""", re.MULTILINE)
    rooms = {room_of(module) for module, source in MODULES.items() if naming.search(source)}
    assert rooms - {"fast"} == {"runtime"}
    assert naming.findall(MODULES["runtime.runner"])


def test_no_modules_import_each_other_in_a_circle():
    """Also within a room: between rooms there is none, as each is allowed those above it alone."""
    names = frozenset(MODULES)
    graph = {}
    for module, source in MODULES.items():
        graph[module] = {name for name, _ in imports_of(source, names)} - {module}
    graphlib.TopologicalSorter(graph).prepare()


def test_the_table_has_all_rooms_and_points_up_its_own_lines():
    assert {room_of(module) for module in MODULES} - {"lab"} == MAY_IMPORT.keys()
    assert len(MODULES) > 40
    rooms = ["torch"]
    for room, allowed in MAY_IMPORT.items():
        assert set(allowed.split()) <= set(rooms), room
        rooms.append(room)


@pytest.mark.parametrize(
    "module, source, wrong",
    [
        ("scheduler", "from policies.pages import make_pages", "policies.pages"),
        ("scheduler", "def f():\n    import engine", "engine"),  # a late one counts too
        ("scheduler", "if TYPE_CHECKING:\n    import engine", "engine"),
        ("config", "import torch.nn", "torch.nn"),
        ("engine", "from tests.helpers import alone", "tests.helpers"),
        ("engine", "import_module('lab.measure.timing')", "lab.measure.timing"),
    ],
)
def test_a_wrong_import_is_seen(module, source, wrong):
    assert wrong_imports(MODULES | {module: source}) == [f"{module} imports {wrong}"]


def test_planning_needs_no_torch():
    modules = "scheduler, policies, config, policies.pages, policies.referee"
    code = f"import sys, {modules}; print('torch' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert (run.stdout, run.stderr) == ("False\n", "")
