"""What the command lines share: types of options, the model they name, errors of one line.

Where torch is needed it is imported late, so that --help answers at once. Read next: offline.py.
"""

import argparse
import errno
import json
import math
import os
import re
import shutil
import sys
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

from policies import find_policy, where_it_failed

DTYPES = ("float32", "bfloat16", "float16")
PICTURES = (".png", ".pdf", ".svg")


def number(above=None, least=None, most=None, kind=float):
    """A finite number above `above`, at least `least` and at most `most`, where these are given.

    What makes a type of options returns a function for argparse, from the text to the value.
    """
    limits = {"above": above, "of at least": least, "and at most": most}
    limits = " ".join(f"{words} {x:g}" for words, x in limits.items() if x is not None)

    def parse(text):
        with suppress(ValueError):
            value = kind(text)
            inside = (above is None or value > above) and (least is None or value >= least)
            if math.isfinite(value) and inside and (most is None or value <= most):
                return value
        allowed = f"{'a whole' if kind is int else 'a finite'} number {limits}".strip()
        raise argparse.ArgumentTypeError(f"{text}: must be {allowed}")

    return parse


def whole(least):
    """A whole number of at least `least`."""
    return number(least=least, kind=int)


def wholes(least):
    """Whole numbers of at least `least` with commas, as a sorted list."""
    return lambda text: sorted({whole(least)(part) for part in text.split(",")})


def policy_names(chunks=False):
    """Policies with commas, as a list of names that `find_policy` takes.

    With `chunks`, a name may end in a chunk size of its own, as in "sarathi:128".
    """

    def parse(text):
        names = list(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
        if not names:
            raise argparse.ArgumentTypeError(f"{text!r}: give at least one")
        for name in names:
            try:
                find_policy(re.sub(r":\d+$", "", name) if chunks else name)
            except (TypeError, ValueError) as error:
                where = where_it_failed(error)  # if the file was found, but not good
                message = f"{where}: {error}" if where else str(error)
                raise argparse.ArgumentTypeError(message) from error
        return names

    return parse


def output_file(text, suffixes=()):
    """A file that can be written, not found out after minutes, and has one of `suffixes` if any."""
    file, folder, allowed = Path(text), Path(text).absolute().parent, ", ".join(suffixes[:-1])
    if file.is_dir() or not folder.is_dir():
        problem = "must be a file in a directory that exists"
    elif not os.access(file if file.exists() else folder, os.W_OK):
        problem = "cannot be written there"
    elif suffixes and file.suffix not in suffixes:
        problem = f"must end in {allowed} or {suffixes[-1]}"
    else:
        return text
    raise argparse.ArgumentTypeError(f"{text}: {problem}")


class OptionParser(argparse.ArgumentParser):
    """An ArgumentParser whose help ends with the default and whose errors begin with the option."""

    def add(self, option, help, default=None, shown=None, **more):
        """Add an option; `shown` stands for `default` in the help."""
        if shown is None:
            shown = "none" if default is None else "off" if default is False else default
        self.add_argument(option, default=default, help=f"{help} (default: {shown})", **more)

    def add_model_options(self, default_model):
        """The options that `load_model` reads. `default_model` says what --model is by default."""
        import torch

        from attention import BACKENDS
        from pretrained.presets import PRESETS

        add, device = self.add, "cuda" if torch.cuda.is_available() else "cpu"
        fast = "bfloat16, or float32 on a CPU that is faster with it"
        backends = "the backend; auto is xformers for 16 bits on CUDA, else sdpa"
        names = f"a geometry with random weights: {', '.join(PRESETS)}"
        add("--model", names, shown=default_model)
        add("--init-from", "a checkpoint instead: a local directory or a name on the Hub")
        add("--device", "where to run: cpu, cuda, cuda:1, ...", device)
        add("--dtype", "of weights and cache", choices=DTYPES, shown=fast)
        add("--attention", backends, "auto", choices=BACKENDS)
        add("--seed", "of weights and prompts", 0, type=whole(0))
        add("--compile", "torch.compile the layers around attention", False, action="store_true")
        add("--threads", "CPU threads", shown="torch's choice", type=whole(1))

    def add_files(self, json="write all that is printed, with these options", **contents):
        """An option for each file that can be written, such as json, and what is written to it."""
        for name, what in ({"json": json} | contents).items():
            file = partial(output_file, suffixes=PICTURES) if name == "plot" else output_file
            self.add(f"--{name.replace('_', '-')}", what, metavar="FILE", type=file)

    def error(self, message):
        """Exit with the message: "--chunk 0: must be ...", without argparse's "argument"."""
        super().error(re.sub(r"^argument (--\S+): ", r"\1 ", message))


def find_device(name):
    """The torch.device of that name, a CPU or a CUDA device. Raises ValueError if there is none."""
    import torch

    if not re.fullmatch(r"cpu|cuda(:(\d|[1-9]\d))?", name):
        raise ValueError(f"--device {name}: must be cpu, cuda, cuda:1, ...")
    device, count = torch.device(name), torch.cuda.device_count()
    if device.type == "cuda" and (device.index or 0) >= count:
        raise ValueError(f"--device {name}: torch {torch.__version__} sees {count} CUDA devices")
    return device


def load_model(args, length, gpu_model="llama-13b", gpu_bytes=40e9):
    """The model to measure, on its device. Sets the number of threads, args.model and args.dtype.

    `length` is the option that says how many positions the model must have, such as "seq_len";
    `gpu_model` is the default on a GPU with more than `gpu_bytes` of memory. Raises ValueError for
    an option that this machine or the model does not allow.
    """
    import torch

    from attention import check_backend
    from experiments.measure import fastest_cpu_dtype
    from model import GPT, GPTConfig
    from pretrained.presets import PRESETS

    if args.model and args.init_from:
        raise ValueError("--model and --init-from: give one of them")
    if args.model and args.model not in PRESETS:
        names = f"must be one of {', '.join(PRESETS)}; --init-from takes a checkpoint"
        raise ValueError(f"--model {args.model!r}: {names}")
    device, positions = find_device(args.device), getattr(args, length)
    check_backend(args.attention, device)
    if args.compile and device.type == "cpu" and not shutil.which(os.environ.get("CXX", "g++")):
        raise ValueError("--compile: needs a C++ compiler on a CPU, g++ or what CXX names")
    if args.threads:
        torch.set_num_threads(args.threads)
    if args.dtype is None:
        fast = torch.bfloat16 if device.type == "cuda" else fastest_cpu_dtype()
        args.dtype = str(fast).removeprefix("torch.")
    dtype = getattr(torch, args.dtype)
    if args.init_from:
        model = GPT.from_pretrained(args.init_from, device, dtype)
    else:
        memory = torch.cuda.mem_get_info(device)[1] if device.type == "cuda" else 0  # in all
        args.model = args.model or (gpu_model if memory > gpu_bytes else "llama-160m")
        config = GPTConfig.preset(args.model)
        if config.family == "llama":  # random weights know no positions: as many as asked for
            config = replace(config, max_positions=max(config.max_positions, positions))
        model = GPT(config, device, dtype, seed=args.seed)
    if positions > (most := model.config.max_positions):
        option = f"--{length.replace('_', '-')} {positions}"
        raise ValueError(f"{option}: this model is limited to {most}")
    if args.compile:
        model.compile()
    return model


def machine_lines(machine):
    """What every heading begins with: the machine and the model, measured or simulated."""
    if "threads" not in machine:
        return "{device}\n{model}, {dtype}\n".format_map(machine)
    more = {"s": "" if machine["threads"] == 1 else "s", "millions": machine["parameters"] / 1e6}
    more["compiled"] = ", compiled" if machine["compiled"] else ""
    text = "{device}, {threads} thread{s}, torch {torch}\n{model} ({millions:,.1f} M parameters), "
    return (text + "{dtype}{compiled}\n").format_map(machine | more)


def write_json(args, report):
    """Write the options and the report, a dict, to the file of --json, if there is one."""
    if args.json:
        Path(args.json).write_text(json.dumps({"options": vars(args)} | report, indent=2))


def run(main):
    """Call main(). What a user can cause ends with a line and an exit status, not a traceback."""
    sys.stdout.reconfigure(line_buffering=True)  # a pipe sees each line when it is printed
    try:
        try:
            main()
        finally:
            sys.stdout.flush()
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    except Exception as error:
        place, pipe = where_it_failed(error), isinstance(error, BrokenPipeError)
        if pipe or getattr(error, "errno", None) == errno.ENOSPC:  # do not fail again at exit
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        known = isinstance(error, (ValueError, ImportError, OSError))
        if not (place or known or type(error).__name__ == "OutOfMemoryError"):  # torch's
            raise
        where = f"{place}: {type(error).__name__}: " if place else ""
        raise SystemExit(141 if pipe else f"error: {where}{error}") from error
