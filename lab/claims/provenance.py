"""Where a result comes from: the commit, the time, and a hash of the code that it depends on.

    record.provenance = provenance()          when it is measured
    age(record.provenance)                    "measured 47 commits ago", if the code has changed

Read next: report.py."""

import ast
import hashlib
import subprocess
import time
from collections.abc import Mapping
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]


def provenance() -> dict[str, str]:
    """The commit, the time and the hash of the code; no commit outside of a repository."""
    return {
        "commit": git("rev-parse", "HEAD"),
        "time": time.strftime("%Y-%m-%d %H:%M"),
        "code": code_hash(),
    }


@cache
def code_hash() -> str:
    """A hash of the syntax trees of the claims and of all modules of this repository that they
    import. Comments, docstrings and layout are no part of it."""
    trees: dict[Path, ast.Module] = {}
    todo = [ROOT / "lab/claims/claims.py"]
    while todo:
        path = todo.pop()
        if path not in trees:
            trees[path] = tree_of(path.read_text("utf-8"))
            todo += imported_by(trees[path])
    digest = hashlib.sha256()
    for path in sorted(trees):
        digest.update(ast.dump(trees[path]).encode())
    return digest.hexdigest()[:16]


def tree_of(source: str) -> ast.Module:
    """The syntax tree of a module, without docstrings."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        has_docstring = isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
        if has_docstring and ast.get_docstring(node, clean=False) is not None:
            node.body = node.body[1:]
    return tree


def imported_by(tree: ast.Module) -> list[Path]:
    """The files of this repository's modules that a module imports, also within functions."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        if isinstance(node, ast.ImportFrom):
            names |= {f"{node.module}", *(f"{node.module}.{alias.name}" for alias in node.names)}
    places = [ROOT / name.replace(".", "/") for name in names]
    files = [place.with_suffix(".py") for place in places]
    files += [place / "__init__.py" for place in places]
    return [file for file in files if file.is_file()]


def age(origin: Mapping[str, str]) -> str:
    """How many commits ago a result was measured; "" if the code is the same, or if that is not
    known."""
    if not origin.get("commit") or origin["code"] == code_hash():
        return ""
    commits = git("rev-list", "--count", f"{origin['commit']}..HEAD")
    return f"measured {commits} commits ago" if commits else ""


def git(*arguments: str) -> str:
    """What a command of git prints about this repository; "" if it fails."""
    try:
        command = ["git", "-C", str(ROOT), *arguments]
        completed = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return ""
    return completed.stdout.strip()
