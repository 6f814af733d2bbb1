"""How the files of this repository are written: types, names, and what lies where."""

import ast
import re
import sys
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
HIDDEN_OR_FOREIGN = re.compile(r"(^|/)(\.|__pycache__|results/)")
PROGRAMS_OF_TESTS = {"beside.py", "cpu_time.py", "rank_program.py", "test_lockstep.py"}
MAX_NAME = 70
LINE_COUNT = re.compile(r"\b\d[\d,]* lines\b", re.IGNORECASE)
COUNTED = re.compile(r"has [\d,]+ tokens\s+of\s+code\s+in\s+[\d,]+\s+lines")  # by test_readme.py


def files(suffix):
    """All files of the repository that end in `suffix`, {path from the top folder: text}."""
    paths = [path.relative_to(ROOT) for path in ROOT.rglob(f"*{suffix}")]
    paths = [path for path in paths if not HIDDEN_OR_FOREIGN.search(str(path))]
    return {str(path): (ROOT / path).read_text("utf-8") for path in sorted(paths)}


@cache
def python():
    """All Python files, {path: syntax tree}."""
    return {path: ast.parse(text) for path, text in files(".py").items()}


def paths_of_tests():
    """The paths of tests."""
    return {path for path in python() if re.search(r"(^|/)(tests/|test_|conftest)", path)}


def functions(tree):
    """All functions of a file, also methods and nested ones."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield node


def is_annotated(function):
    """Whether all arguments but self and cls have a type, and so has the result."""
    arguments = function.args
    named = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    variable = [argument for argument in (arguments.vararg, arguments.kwarg) if argument]
    typed = [argument for argument in named if argument.arg not in ("self", "cls")]
    has_types = all(argument.annotation for argument in typed + variable)
    return has_types and function.returns is not None


def docstrings(tree):
    """All docstrings of a file."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            yield ast.get_docstring(node) or ""


def imported_modules(tree):
    """The dotted names that a file imports, as far as they can be modules."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or ""
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def is_main_check(node):
    """Whether a statement is `if __name__ == ...`."""
    return isinstance(node, ast.If) and "__name__" in ast.unparse(node.test)


def test_the_files_are_found():
    assert {"engine.py", "lab/measure/timing.py", "tests/test_style.py"} <= python().keys()
    assert "lab/measure/timing.py" not in paths_of_tests()
    assert {"conftest.py", "test_equivalence.py", "tests/helpers.py"} <= paths_of_tests()


@pytest.mark.parametrize(
    "source, annotated",
    [
        ("def f(x: int, *rest: int, key: str = '', **more: int) -> None: ...", True),
        (
            "class A:\n def f(self) -> None: ...\n @classmethod\n def g(cls, x: int) -> int: ...",
            True,
        ),
        ("def f(x) -> None: ...", False),
        ("def f(x: int): ...", False),
        ("def f(*, key=1) -> None: ...", False),
        ("def f(*rest) -> None: ...", False),
        ("def f() -> None:\n def g(x): ...", False),
    ],
)
def test_a_missing_annotation_is_seen(source, annotated):
    assert all(map(is_annotated, functions(ast.parse(source)))) == annotated


def test_every_function_outside_of_tests_is_annotated():
    missing = [
        f"{path}:{function.lineno} {function.name}"
        for path, tree in python().items()
        if path not in paths_of_tests()
        for function in functions(tree)
        if not is_annotated(function)
    ]
    assert missing == []


def test_the_name_of_a_test_is_a_short_sentence():
    too_long = [
        f"{path}:{function.lineno} {function.name}"
        for path in paths_of_tests()
        for function in functions(python()[path])
        if function.name.startswith("test_") and len(function.name) > MAX_NAME
    ]
    assert too_long == []


def packages_in(*names):
    """The packages of files of requirements, as they are imported."""
    texts = [(ROOT / name).read_text("utf-8") for name in names]
    return set(re.findall(r"(?m)^([\w-]+)==", "\n".join(texts).replace("-", "_")))


def foreign_imports(paths, *, late):
    """{(path, package)} of all that is neither ours nor Python's; `late`: in functions, too."""
    ours = {path.partition("/")[0].removesuffix(".py") for path in python()}
    found = set()
    for path in paths:
        tree = python()[path]
        nodes = ast.walk(tree) if late else tree.body
        for node in nodes:
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            found |= {(path, name.partition(".")[0]) for name in names}
    return {(path, name) for path, name in found if name not in ours | sys.stdlib_module_names}


def test_each_package_that_is_imported_is_required():
    """Also one that another package brings: that may change."""
    running = packages_in("requirements.txt")
    serving = running | packages_in("server/requirements.txt")
    testing = serving | packages_in("requirements-dev.txt")
    # by pydantic, torch, openai, nbclient
    brought = {"pydantic_core", "triton", "httpx2", "nbformat"}
    engines = {"openvino", "openvino_genai", "optimum", "vllm", "nanovllm"}
    of_others = engines | {"pyodide", "js"}  # the page's
    code = python().keys() - paths_of_tests()
    server = {path for path in code if path.startswith("server/")}
    wrong = foreign_imports(code - server, late=False)
    assert {(path, name) for path, name in wrong if name not in running} == set()
    for paths, packages in ((code, serving), (python().keys(), testing)):
        imports = foreign_imports(paths, late=True)
        assert {name for _, name in imports} - packages <= brought | of_others


def test_there_is_no_toml_but_the_projects():
    assert list(files(".toml")) == ["pyproject.toml"]


def test_the_folder_of_tests_holds_tests_and_their_helpers():
    here = {path: tree for path, tree in python().items() if path.startswith("tests/")}
    tests = {path for path in here if Path(path).name.startswith("test_")}
    imported = {name for path in paths_of_tests() for name in imported_modules(python()[path])}
    others = {path for path in here if Path(path).name not in ("__init__.py", "conftest.py")}
    for path in others - tests:
        module = path.removesuffix(".py").replace("/", ".")
        assert module in imported or Path(path).name in PROGRAMS_OF_TESTS, f"{path}: unused"
    programs = {path for path, tree in here.items() if any(map(is_main_check, tree.body))}
    assert {Path(path).name for path in programs} <= PROGRAMS_OF_TESTS


def test_no_text_counts_the_lines_of_files():
    counts = []
    for path, tree in python().items():
        if path not in paths_of_tests():
            counts += [(path, text) for text in docstrings(tree) if LINE_COUNT.search(text)]
    readmes = files("README.md")
    readmes["README.md"] = COUNTED.sub("", readmes["README.md"])
    counts += [(path, text) for path, text in readmes.items() if LINE_COUNT.search(text)]
    assert [(path, LINE_COUNT.search(text)[0]) for path, text in counts] == []
