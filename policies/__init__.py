"""All policies by name: the papers' (scheduler.py), what goes beyond them (here), and one's own.

    make_scheduler("sarathi-serve", Pages(64, 16), chunk=256, max_batch=16, max_len=512)
    make_scheduler("my_policy.py:ShortestFirst", ...)       a Scheduler subclass in that file

Plain Python, like scheduler.py. Read next: dynamic.py, priority.py."""

import runpy
import traceback
from functools import cache
from inspect import getfullargspec, signature
from pathlib import Path

import scheduler
from policies.dynamic import Dynamic
from policies.priority import Priority

POLICIES = {
    "request-level": scheduler.RequestLevel,
    "orca": scheduler.Orca,
    "orca-best": scheduler.OrcaBest,
    "vllm": scheduler.VLLM,
    "sarathi": scheduler.Sarathi,
    "sarathi-serve": scheduler.SarathiServe,
    "chunked-only": scheduler.ChunkedOnly,
    "hybrid-only": scheduler.HybridOnly,
    "dynamic": Dynamic,
    "priority": Priority,
}
OWN = "nanosarathi_policy_"  # and its path: what a file of one's own has as its __name__
_run_once = cache(lambda path: runpy.run_path(path, run_name=OWN + path))  # but for what raises


def find_policy(name):
    """The class of a policy: a name in POLICIES, or "path/to/file.py:ClassName". Raises ValueError
    if there is no such subclass of Scheduler; what the file itself raises passes through."""
    if str(name) in POLICIES:
        return POLICIES[name]
    file, _, class_name = str(name).rpartition(":")
    if not file.endswith(".py"):
        raise ValueError(f"policy={name!r}: must be one of {', '.join(POLICIES)}, or FILE.py:Class")
    path = Path(file).resolve()
    if not path.is_file():
        raise ValueError(f"policy={name!r}: there is no file {file}")
    found = _run_once(str(path)).get(class_name)
    if not (isinstance(found, type) and issubclass(found, scheduler.Scheduler)):
        raise ValueError(f"policy={name!r}: {file} has no subclass of Scheduler of that name")
    return found


def policy_options(policy):
    """The own options of a policy class, a set: what its __init__s take by keyword only."""
    return {name for cls in policy.__mro__ for name in getfullargspec(cls.__init__).kwonlyargs}


def make_scheduler(policy, pages, **options):
    """The scheduler of that name. Raises ValueError for an unknown one, or an option it has not."""
    cls = find_policy(policy)
    known = {"chunk", "max_batch", "max_len", "clock", *policy_options(cls)}
    for option in options.keys() - known:
        has = f"policy {policy!r} has no such option, only {sorted(known)}"
        raise ValueError(f"{option}={options[option]!r}: {has}")
    try:
        signature(cls).bind(pages, **options)
    except TypeError as error:
        why = f"its __init__ must take pages and {list(options)}: {error}"
        raise ValueError(f"policy={policy!r}: cannot be made: {why}") from error
    return cls(pages, **options)


def where_it_failed(error):
    """Like "my_policy.py line 12", where an error came out of a policy of one's own, without the
    line if it came of what such a policy returned; else None."""
    if isinstance(error, SyntaxError):  # of a null byte it does not know the place
        return "{} line {}".format(error.filename or "the policy's file", error.lineno)
    where = file = None
    for frame, line in traceback.walk_tb(error.__traceback__):
        if frame.f_globals.get("__name__", "").startswith(OWN):
            where = f"{frame.f_code.co_filename} line {line}"
        its = type(frame.f_locals.get("self")).__module__
        file = its.removeprefix(OWN) if its.startswith(OWN) else file
    return where or file
