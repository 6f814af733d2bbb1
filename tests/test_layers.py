"""Imports, held against an order of rooms: they point down, and what only plans needs no torch."""

import ast
import graphlib
import re
from functools import cache

import pytest

from tests.helpers import ROOT, repository

ORDER = """
    pretrained.presets config request kv_cache bookkeeping scheduler policies
    parallel.micro_batches runtime.files runtime.memory
    torch pretrained attention model fast sampling runtime engine parallel
    lab.measure lab.simulator page cli lab.pictures lab.claims server
    exercises lab.explore lab.commands bench sample examples lab
""".split()  # from the bottom up: a room imports only rooms before it
LATE = {("kv_cache", "torch"), ("runtime.memory", "torch")}  # in functions, for annotations
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
    return two if two in ORDER else parts[0]


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
        floor = ORDER.index(room_of(module))
        for name, is_late in imports_of(source, names):
            other = room_of(name)
            if other not in TOPS and "." not in other:
                continue  # another package
            is_below = other in ORDER[: floor + 1]
            if not is_below and not (is_late and (ORDER[floor], other) in LATE):
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


@pytest.mark.parametrize(
    "module, source, wrong",
    [
        ("scheduler", "from policies.pages import make_pages", "policies.pages"),
        ("scheduler", "def f():\n    import engine", "engine"),  # a late one counts too
        ("config", "import torch.nn", "torch.nn"),
        ("engine", "import_module('lab.measure.timing')", "lab.measure.timing"),
    ],
)
def test_a_wrong_import_is_seen(module, source, wrong):
    assert wrong_imports(MODULES | {module: source}) == [f"{module} imports {wrong}"]
