"""Options that the command lines share: a parser, types of values, and the files they write.

    parser = OptionParser(prog="bench.py", description="...")
    parser.add_option("--chunk", help="C, in tokens", type=whole(minimum=1), default=256)

Read next: loading.py, the options of a model."""

import argparse
import json
import math
import os
import re
import sys
from argparse import ArgumentTypeError
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any, NoReturn

from errors import one_line
from files import new_file
from policies import ALL_POLICIES, find_policy
from policies.custom import where_it_failed

MAX_WHOLE = 10**15  # torch can count so far
SMALL_PAGES = "64, or half of --max-len; 256 on CUDA"  # hardware.memory.small_page_size in short
PICTURE_SUFFIXES = (".png", ".pdf", ".svg")


class OptionParser(argparse.ArgumentParser):
    """An ArgumentParser whose help ends with the default and whose errors begin with the option."""

    def add_option(
        self,
        name: str,
        *,
        help: str,
        default: object = None,
        default_text: object = None,
        **settings: Any,
    ) -> None:
        """Add an option, as `add_argument` does, whose help ends with "(default: ...)".

        `default_text` stands there instead of `default`: for one that is computed later, say.
        With action="store_true" the default is False."""
        if settings.get("action") == "store_true":
            default = False
        if default_text is None:
            default_text = default
        if default_text is None:
            default_text = "none"
        elif default_text is False:
            default_text = "off"
        self.add_argument(
            name, help=f"{help} (default: {default_text})", default=default, **settings
        )

    def parse_known_args(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[Any, list[str]]:
        """As in argparse, but "--chunk=--" is an error: argparse would make it an empty list."""
        words = sys.argv[1:] if args is None else args
        for word in words:
            name, _, value = word.partition("=")
            if name.startswith("--") and value == "--":
                self.error(f"{name} --: is no value")
        return super().parse_known_args(words, namespace)

    def error(self, message: str) -> NoReturn:
        """Exit with one line: "--chunk 0: must be ...", not argparse's usage and "argument"."""
        message = re.sub(r"^argument (\S+): ", r"\1 ", one_line(message))
        self.exit(2, f"{self.prog}: error: {message} (see --help)\n")


@dataclass(frozen=True)
class PerDevice:
    """A default that depends on the device: the help shows both, `resolve` picks one.

    BATCH = PerDevice(cpu=32, gpu=128)
    parser.add_option("--batch", help="...", type=whole(minimum=1), default_text=BATCH)
    batch = args.batch or BATCH.pick(args.device)"""

    cpu: int
    gpu: int

    def __str__(self) -> str:
        return f"{self.cpu} on a CPU, {self.gpu} on a GPU"

    def pick(self, device: str) -> int:
        """The default on this device: "cpu", "cuda" or "cuda:1"."""
        return self.gpu if device.startswith("cuda") else self.cpu


def number(
    *, above: float = -math.inf, minimum: float = -math.inf, maximum: float = math.inf
) -> Callable[[str], float]:
    """The type of a finite number above `above`, at least `minimum` and at most `maximum`."""

    def parse_number(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if above < value < math.inf and minimum <= value <= maximum:
            return value
        raise _out_of_limits(text, "a finite", above, minimum, maximum)

    return parse_number


def whole(*, minimum: int, maximum: int = MAX_WHOLE) -> Callable[[str], int]:
    """The type of a whole number of at least `minimum` and at most `maximum`."""

    def parse_whole(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = minimum - 1
        if minimum <= value <= maximum:
            return value
        raise _out_of_limits(text, "a whole", -math.inf, minimum, maximum)

    return parse_whole


def _out_of_limits(
    text: str, kind: str, above: float, minimum: float, maximum: float
) -> ArgumentTypeError:
    """The error for a text that is no such number: "0: must be a whole number of at least 1"."""
    limits = [f"{kind} number"]
    if math.isfinite(above):
        limits.append(f"above {above:g}")
    if math.isfinite(minimum):
        limits.append(f"of at least {minimum:g}")
    if math.isfinite(maximum):
        limits.append(f"and at most {maximum:g}")
    return ArgumentTypeError(f"{text:.60}: must be {' '.join(limits)}")


def nonempty_text(text: str) -> str:
    """The type of a text that says something: not "", and not only blanks."""
    if not text.strip():
        raise ArgumentTypeError(f"{text!r:.60}: must not be empty")
    return text


def policy_name(text: str) -> str:
    """The type of a policy: a name that `find_policy` takes."""
    return _check_policy(text, text)


def policy_names(text: str) -> list[str]:
    """The type of several policies, with commas."""
    return [_check_policy(name, name) for name in _split_names(text)]


def policies_with_chunks(text: str) -> list[str]:
    """The type of several policies, of which some have a chunk size: "vllm,sarathi:128"."""
    return [_check_policy(name, re.sub(r":\d+$", "", name)) for name in _split_names(text)]


def _split_names(text: str) -> list[str]:
    """The names in a text with commas, each once, in order."""
    names = [name.strip() for name in text.split(",")]
    names = list(dict.fromkeys(name for name in names if name))
    if not names:
        raise ArgumentTypeError(f"{text!r}: give at least one")
    return names


def _check_policy(text: str, name: str) -> str:
    """Returns the text if there is a policy of this name, else raises ArgumentTypeError."""
    try:
        find_policy(name)
    except (TypeError, ValueError) as error:
        where = where_it_failed(error)  # if the file was found, but not good
        raise ArgumentTypeError(f"{where}: {error}" if where else str(error)) from error
    return text


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


def add_policies_option(parser: OptionParser, default: str) -> None:
    """Add --policies, several that are compared."""
    parser.add_option(
        "--policies",
        help=f"comma-separated, from {', '.join(ALL_POLICIES)}, or my_policy.py:ClassName; "
        "sarathi-serve:64 has a chunk of its own, orca-best lets one prompt into a batch, vllm is "
        "its scheduler of 2023",
        type=policies_with_chunks,
        default=default,
    )


def add_chunk_option(
    parser: OptionParser, default: int | None = 256, default_text: object = None
) -> None:
    """Add --chunk. `default_text` describes a default that is not known yet, None."""
    parser.add_option(
        "--chunk",
        help="C, the chunk size and token budget, in tokens",
        type=whole(minimum=1),
        default=default,
        default_text=default_text,
    )


def add_json_option(parser: OptionParser) -> None:
    """Add --json, the file that `write_json` writes."""
    parser.add_option(
        "--json",
        help="write all that is printed, with these options",
        type=output_file,
        metavar="FILE",
    )


def options_json(options: Any) -> dict[str, object]:
    """The options of a command as one flat dict: a dataclass within the dataclass is spread out."""
    record: dict[str, object] = {}
    for field in fields(options):
        value = getattr(options, field.name)
        if is_dataclass(value):
            record.update(options_json(value))
        else:
            record[field.name] = value
    return record


def write_json(options: Any, report: Mapping[str, object]) -> None:
    """Write the options of a command and its report to the file `options.json`, if there is one."""
    if options.json:
        record = {"options": options_json(options), **report}
        write_text(options.json, json.dumps(record, indent=2))


@contextmanager
def keeping(options: Any, report: Mapping[str, object]) -> Iterator[None]:
    """Write the report at the end of this block, as write_json does; also if an interrupt or an
    error ends it, with all that was added to the report until then, if anything was."""
    before = len(report)
    try:
        yield
    finally:
        if len(report) > before:
            write_json(options, report)
            wrote(options.json)


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
    if file and Path(file).is_file():
        print(f"wrote {file}, open {Path(file).resolve().as_uri()}")
    elif file:  # a pipe, or nowhere
        print(f"wrote {file}")
