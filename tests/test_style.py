"""The packages that files import, held against the files of requirements."""

import ast
import re
import sys

from tests.helpers import ROOT, repository

PATHS = [str(path) for path in repository("*.py")]
TESTS = {path for path in PATHS if re.search(r"(^|/)(tests/|test_|conftest)", path)}
OURS = {path.partition("/")[0].removesuffix(".py") for path in PATHS}
BROUGHT = {"pydantic_core", "triton", "httpx2", "nbformat"}  # by pydantic, torch, openai, nbclient
ENGINES = {"openvino", "openvino_genai", "optimum", "vllm", "nanovllm"}
PAGE = {"pyodide", "js"}


def required(*files):
    """The packages of files of requirements, as they are imported."""
    packages = set()
    for file in files:
        text = (ROOT / file).read_text("utf-8")
        packages.update(re.findall(r"(?m)^([\w-]+)==", text.replace("-", "_")))
    return packages


def imported(paths, *, late):
    """The packages that files import, neither ours nor Python's; `late`: in functions, too."""
    packages = set()
    for path in paths:
        tree = ast.parse((ROOT / path).read_text("utf-8"))
        for node in ast.walk(tree) if late else tree.body:
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            else:
                continue
            packages.update(name.partition(".")[0] for name in names)
    return packages - OURS - sys.stdlib_module_names - {""}


def test_each_package_that_is_imported_is_required():
    """Also one that another package brings: that may change."""
    running = required("requirements.txt")
    serving = running | required("server/requirements.txt")
    testing = serving | required("requirements-dev.txt")
    others = BROUGHT | ENGINES | PAGE
    code = set(PATHS) - TESTS
    without_server = {path for path in code if not path.startswith("server/")}
    assert imported(without_server, late=False) <= running
    assert imported(code, late=True) <= serving | others
    assert imported(TESTS, late=True) <= testing | others
