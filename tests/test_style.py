"""The packages that files import, held against the files of requirements."""

import ast
import re
import sys
from functools import cache

from tests.helpers import ROOT, repository


@cache
def python():
    """All Python files, {path from the top folder: syntax tree}."""
    return {str(path): ast.parse((ROOT / path).read_text("utf-8")) for path in repository("*.py")}


def paths_of_tests():
    """The paths of tests."""
    return {path for path in python() if re.search(r"(^|/)(tests/|test_|conftest)", path)}


def imported_packages(nodes):
    """The packages that some statements import from."""
    for node in nodes:
        modules = []
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            modules = [node.module or ""]
        yield from (module.partition(".")[0] for module in modules)


def packages_in(*names):
    """The packages of files of requirements, as they are imported."""
    texts = [(ROOT / name).read_text("utf-8") for name in names]
    return set(re.findall(r"(?m)^([\w-]+)==", "\n".join(texts).replace("-", "_")))


def foreign_imports(paths, *, late):
    """{(path, package)} of all that is neither ours nor Python's; `late`: in functions, too."""
    ours = {path.partition("/")[0].removesuffix(".py") for path in python()}
    ours |= sys.stdlib_module_names
    pairs = set()
    for path in paths:
        tree = python()[path]
        packages = set(imported_packages(ast.walk(tree) if late else tree.body))
        pairs |= {(path, package) for package in packages - ours}
    return pairs


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
