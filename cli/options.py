"""Options that the command lines share: a parser, types of values, and the files they write.

An option is a field of a dataclass:

    @dataclass(frozen=True, kw_only=True)
    class Options:
        max_len: int = option("the longest request", type=whole(minimum=1), default=256)

    parser = OptionParser(prog="bench.py", description="...")
    parser.add_fields(Options)
    from_args(Options, parser.parse_args()).max_len     # of --max-len

Read next: loading.py, the options of a model."""

import argparse
import json
import math
import os
import re
import sys
from argparse import ArgumentTypeError, Namespace
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from cli.console import one_line
from policies import ALL_POLICIES, find_policy
from runtime.files import new_file

MAX_WHOLE = 10**15  # torch can count so far
SMALL_PAGES = "64, or half of --max-len; 256 on CUDA"  # runtime.memory.small_page_size in short
PICTURE_SUFFIXES = (".png", ".pdf", ".svg")
Options = TypeVar("Options")
Number = TypeVar("Number", int, float)


class OptionParser(argparse.ArgumentParser):
    """An ArgumentParser whose help ends with the default and whose errors begin with the option."""

    def add_fields(
        self, options: type, leave_out: Collection[str] = (), **default_texts: object
    ) -> None:
        """Add an option for each field of a dataclass that `option` made, but for those to
        `leave_out`. Its help ends with "(default: ...)"; `default_texts` has what stands there, by
        the name of the field, for a default that is another than the field says."""
        for each in fields(options):
            settings = dict(each.metadata)
            if not settings or each.name in leave_out:
                continue
            name = settings.pop("name")
            is_flag = settings.get("action") == "store_true"
            if name and not is_flag:
                settings.setdefault("metavar", name[2:].replace("-", "_").upper())
            name = name or "--" + each.name.replace("_", "-")
            default = settings["default"]
            text = default_texts.get(each.name, settings.pop("default_text") or default)
            if isinstance(default, PerDevice):
                settings["default"] = None
            if is_flag:
                settings["default"] = False
                text = "off"
            settings["help"] += f" (default: {'none' if text is None else text})"
            self.add_argument(name, dest=each.name, **settings)

    def parse_known_args(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[Any, list[str]]:
        """As in argparse, but "--chunk=--" is an error: argparse would make it an empty list."""
        argv = sys.argv[1:] if args is None else args
        for word in argv:
            name, _, value = word.partition("=")
            if name.startswith("--") and value == "--":
                self.error(f"{name} --: is no value")
        return super().parse_known_args(argv, namespace)

    def error(self, message: str) -> NoReturn:
        """Exit with one line: "--chunk 0: must be ...", not argparse's usage and "argument"."""
        message = re.sub(r"^argument (\S+): ", r"\1 ", one_line(message))
        self.exit(2, f"{self.prog}: error: {message} (see --help)\n")


@dataclass(frozen=True)
class PerDevice:
    """A default that depends on the device: the help shows both, `from_args` picks one.

    batch: int = option("...", type=whole(minimum=1), default=PerDevice(cpu=32, gpu=128))"""

    cpu: int
    gpu: int

    def __str__(self) -> str:
        return f"{self.cpu} on a CPU, {self.gpu} on a GPU"

    def pick(self, device: str) -> int:
        """The default on this device: "cpu", "cuda" or "cuda:1"."""
        return self.gpu if device.startswith("cuda") else self.cpu


def option(
    help: str,
    *,
    name: str = "",
    default: object = None,
    default_text: object = None,
    **settings: Any,
) -> Any:
    """A field of a dataclass that is an option of a command line, see OptionParser.add_fields.

    It is called as the field is, or `name`. `default_text` stands in its help instead of `default`:
    for one that is computed later, say. `settings` are as of `add_argument`."""
    named = {"help": help, "name": name, "default": default, "default_text": default_text}
    return field(metadata=named | settings)


def from_args(options: type[Options], args: Namespace, **fixed: object) -> Options:
    """The dataclass, with what was parsed in the fields of its options, but for those `fixed`."""
    values: dict[str, object] = {}
    for each in fields(options):  # pyright: ignore[reportArgumentType]
        default = each.metadata.get("default")
        if each.name in fixed:
            values[each.name] = fixed[each.name]
        elif hasattr(args, each.name):
            value = getattr(args, each.name)
            if value is None and isinstance(default, PerDevice):
                value = default.pick(args.device)
            values[each.name] = value
    return options(**values)


def number(
    *,
    above: float = -math.inf,
    minimum: float = -math.inf,
    maximum: float = math.inf,
    kind: type[Number] = float,
) -> Callable[[str], Number]:
    """The type of a finite number above `above`, at least `minimum` and at most `maximum`."""

    def parse_number(text: str) -> Number:
        with suppress(ValueError):
            value = kind(text)
            if above < value < math.inf and minimum <= value <= maximum:
                return value
        limits = ["a whole number" if kind is int else "a finite number"]
        if math.isfinite(above):
            limits.append(f"above {above:g}")
        if math.isfinite(minimum):
            limits.append(f"of at least {minimum:g}")
        if math.isfinite(maximum):
            limits.append(f"and at most {maximum:g}")
        raise ArgumentTypeError(f"{text:.60}: must be {' '.join(limits)}")

    return parse_number


def whole(*, minimum: int, maximum: int = MAX_WHOLE) -> Callable[[str], int]:
    """The type of a whole number of at least `minimum` and at most `maximum`."""
    return number(minimum=minimum, maximum=maximum, kind=int)


def nonempty_text(text: str) -> str:
    """The type of a text that says something: not "", and not only blanks."""
    if not text.strip():
        raise ArgumentTypeError(f"{text!r:.60}: must not be empty")
    return text


def policy_name(text: str, name: str = "") -> str:
    """The type of a policy: a name that `find_policy` takes. `name` is the text without a size."""
    try:
        find_policy(name or text)
    except (OSError, ValueError) as error:
        raise ArgumentTypeError(str(error)) from error
    return text


def policy_names(text: str) -> list[str]:
    """The type of several policies, with commas: each once, in order."""
    return [policy_name(name) for name in _split_names(text)]


def policies_with_chunks(text: str) -> list[str]:
    """The type of several policies, of which some have a chunk size: "vllm,sarathi:128"."""
    return [policy_name(name, re.sub(r":\d+$", "", name)) for name in _split_names(text)]


def _split_names(text: str) -> list[str]:
    """The names in a text with commas, each once, in order."""
    names = [name.strip() for name in text.split(",")]
    names = list(dict.fromkeys(name for name in names if name))
    if not names:
        raise ArgumentTypeError(f"{text!r}: give at least one")
    return names


def output_file(text: str, suffixes: Sequence[str] = ()) -> str:
    """The type of a file that can be written, which ends in one of `suffixes`, if any are given.

    Whether it can be written is found out before the run, not after: it is opened, and nothing
    in it is changed."""
    nonempty_text(text)
    file = Path(os.path.realpath(text))
    if suffixes and file.suffix not in suffixes:
        raise ArgumentTypeError(f"{text}: must end in {', '.join(suffixes)}")
    try:
        is_new = not file.exists()
        if not file.is_fifo():  # whose reader would see its end
            file.open("ab").close()  # the only way to learn of quotas, long names, read-only disks
        if is_new:
            file.unlink(missing_ok=True)
    except OSError as error:
        raise ArgumentTypeError(f"{text}: cannot be written: {error.strerror}") from error
    return text


def picture_file(text: str) -> str:
    """The type of a picture that can be written."""
    return output_file(text, PICTURE_SUFFIXES)


def policies_option(default: str) -> Any:
    """The option --policies, several that are compared."""
    return option(
        f"comma-separated, from {', '.join(ALL_POLICIES)}, or my_policy.py:ClassName; "
        "sarathi-serve:64 has a chunk of its own, orca-best lets one prompt into a batch, vllm is "
        "its scheduler of 2023",
        type=policies_with_chunks,
        default=default,
    )


def chunk_option(default: object = 256) -> Any:
    """The option --chunk."""
    text = "C, the chunk size and token budget, in tokens"
    return option(text, type=whole(minimum=1), default=default)


def plot_option(help: str) -> Any:
    """The option --plot, a picture."""
    return option(help, type=picture_file, metavar="FILE")


def file_option(help: str, **settings: Any) -> Any:
    """An option that names a file to be written."""
    return option(help, type=output_file, metavar="FILE", **settings)


def json_option() -> Any:
    """The option --json, the file that `write_json` writes."""
    return file_option("write all that is printed, with these options")


def options_json(options: Any) -> dict[str, object]:
    """The options of a command as one flat dict: a dataclass within the dataclass is spread out."""
    record: dict[str, object] = {}
    for name, value in vars(options).items():
        record.update(options_json(value) if is_dataclass(value) else {name: value})
    return record


def plain(record: Any) -> dict[str, Any]:
    """The fields and the properties of a dataclass, as JSON has them."""
    kind = type(record)
    properties = [name for name in dir(kind) if isinstance(getattr(kind, name), property)]
    names = [*(each.name for each in fields(record)), *properties]
    return {name: getattr(record, name) for name in names}


def write_json(options: Any, report: Mapping[str, object]) -> None:
    """Write the options of a command and its report to the file `options.json`, if there is one."""
    if options.json:
        record = {"options": options_json(options), **report}
        write_text(options.json, json.dumps(record, indent=2, default=plain))


def write_text(file: str | os.PathLike[str], text: str) -> None:
    """Write the text to a new_file."""
    with new_file(file) as path:
        path.write_text(text, "utf-8")


def wrote(*files: str | Path | None) -> None:
    """Say which files were written: a line for each that is not None."""
    for file in files:
        if file:
            print(f"wrote {file}")


def wrote_page(file: str | None) -> None:
    """Say where a page was written, if it was, and at which address a browser opens it."""
    if file:
        is_file = Path(file).is_file()  # not a pipe, nor nowhere
        print(f"wrote {file}, open {Path(file).resolve().as_uri()}" if is_file else f"wrote {file}")
