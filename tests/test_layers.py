"""Imports point down: no file knows what is built on it, and what only plans needs no torch."""

import ast
import graphlib
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PLAN = "errors kv_cache scheduler policies memory config"
CORE = f"{PLAN} pretrained attention model sampling packed_linear outputs engine torch"
LAB = f"{CORE} pretrained parallel cli views lab"
MAY_IMPORT = {  # a folder stands for all of its modules; `a.b` is that module alone
    "errors": "",
    "memory": "",
    "outputs": "scheduler",
    "kv_cache": "errors",
    "attention": "errors kv_cache attention torch",
    "packed_linear": "model torch",
    "model": "errors kv_cache pretrained attention torch",
    "sampling": "errors torch",
    "scheduler": "errors kv_cache",
    "policies": PLAN,
    "config": PLAN,
    "engine": CORE,
    "pretrained": "errors pretrained torch",
    "parallel": f"{CORE} pretrained parallel",
    "cli": f"{CORE} pretrained parallel lab.measure.timing cli",
    "views": "scheduler policies outputs lab.measure.metrics views",
    "lab": LAB,
    "lab.commands": f"{LAB} server",
    "bench": LAB,
    "sample": f"{CORE} pretrained parallel cli",
    "server": f"{CORE} pretrained parallel cli views server",
    "examples": CORE,
}
LAZILY = {  # in functions, or for annotations alone
    "kv_cache": "torch",
    "config": "torch",
    "memory": "torch",
    "lab.commands.paper": "bench",  # it runs the other commands
}
PATHS = [
    path.relative_to(ROOT) for glob in ("*.py", "*/*.py", "*/*/*.py") for path in ROOT.glob(glob)
]
MODULES = {  # dotted name -> source, of all but the tests
    ".".join(path.with_suffix("").parts).removesuffix(".__init__"): (ROOT / path).read_text("utf-8")
    for path in PATHS
    if not str(path).startswith((".", "tests", "test_", "conftest"))
}
OURS = {"torch", "tests", *(name.split(".")[0] for name in MODULES)}


def imports_of(source):
    """(dotted name, whether the program runs without it) of each module of OURS in a source."""
    imports = []
    optional = set()  # nodes within functions, or for annotations alone
    for node in ast.walk(ast.parse(source)):
        for_types = isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        if for_types or isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            optional.update(ast.walk(node))
        names = [alias.name for alias in getattr(node, "names", []) if hasattr(alias, "name")]
        if isinstance(node, ast.ImportFrom):
            base = "." * node.level + (node.module or "")
            dotted = [f"{base}.{name}" for name in names]  # modules of that folder, or its content
            names = [name if name in MODULES else base for name in dotted]
        imports += [(name, node in optional) for name in dict.fromkeys(names)]
    return [(name, is_optional) for name, is_optional in imports if is_ours(name)]


def is_ours(name):
    """Whether an imported name is relative, or of this repository, or torch."""
    return name[0] == "." or name.split(".")[0] in OURS


def allowed_imports(module):
    """The names that a module may import: those of the innermost folder that the table has."""
    parts = module.split(".")
    folders = [".".join(parts[:count]) for count in range(len(parts), 0, -1)]
    return next(MAY_IMPORT[folder] for folder in folders if folder in MAY_IMPORT)


def is_within(name, modules):
    """Whether a dotted name is one of these modules, or in one of these folders."""
    return any(f"{name}.".startswith(f"{module}.") for module in modules.split())


def wrong_imports(modules):
    """["module imports other"] that point up; a cycle among modules raises graphlib.CycleError."""
    wrong = []
    graph = {}
    for module, source in modules.items():
        for name, is_optional in imports_of(source):
            if is_within(name, allowed_imports(module)):
                graph.setdefault(module, []).append(name)
            elif not (is_optional and is_within(name, LAZILY.get(module, ""))):
                wrong.append(f"{module} imports {name}")
    graphlib.TopologicalSorter(graph).prepare()
    return wrong


def test_imports_point_down():
    tops = {name.split(".")[0] for name in MODULES}
    assert tops == {name.split(".")[0] for name in MAY_IMPORT} and len(MODULES) > 40
    assert wrong_imports(MODULES) == []


@pytest.mark.parametrize(
    "module, source, wrong",
    [
        ("scheduler", "from policies.token_budget import SLOS", "policies.token_budget"),
        ("scheduler", "import modelling, model", "model"),
        ("scheduler", "def f():\n    import engine", "engine"),  # a lazy one counts too
        ("policies.own", "class A:\n    def f(self):\n        import torch", "torch"),
        ("policies.own", "from .slo import SLOS", ".slo"),  # imports are absolute
        ("config", "import torch.nn", "torch.nn"),  # only inside of a function
        ("model", "def f():\n    from lab.measure import timing", "lab.measure.timing"),
        ("pretrained.own", "from model import GPT", "model"),
        ("views.own", "from cli import options", "cli.options"),
        ("cli.own", "if True:\n    import lab.simulator.machine", "lab.simulator.machine"),
        ("sample", "from lab.simulator import devices", "lab.simulator.devices"),
        ("engine", "from parallel.shard import Shard", "parallel.shard"),
        ("parallel.own", "from cli import options", "cli.options"),
        ("engine", "from tests.helpers import alone", "tests.helpers"),
    ],
)
def test_a_wrong_import_is_seen(module, source, wrong):
    assert wrong_imports(MODULES | {module: source}) == [f"{module} imports {wrong}"]


def test_a_cycle_is_seen():
    made_up = {"policies.a": "import policies.b", "policies.b": "def f():\n    import policies.a"}
    with pytest.raises(graphlib.CycleError):
        wrong_imports(MODULES | made_up)


def test_planning_needs_no_torch():
    modules = "scheduler, policies, config, policies.token_budget"
    code = f"import sys, {modules}; print('torch' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert (run.stdout, run.stderr) == ("False\n", "")
