"""What the command lines share: options that show their defaults, the model they name, tables, errors of one line."""

import argparse
import errno
import os
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import torch

import measure
from attention import BACKENDS, check_backend
from model import DTYPES, GPT, PRESETS, GPTConfig


class OptionParser(argparse.ArgumentParser):
    """An ArgumentParser whose help ends with the default, in words where the value itself says nothing."""

    def add(self, option, help, default=None, shown=None, **more):
        """Add an option; `shown` stands for `default` in the help."""
        self.add_argument(option, default=default, help=f"{help} (default: {shown or default})", **more)

    def add_model_options(self, default_model):
        """The options that `load_model` reads, and --threads. `default_model` says what --model is when not given."""
        add = self.add
        add("--model", f"a geometry with random weights: {', '.join(PRESETS)}", shown=default_model)
        add("--init-from", "a checkpoint instead: a local directory or a Hugging Face Hub name", shown="none")
        add("--device", "where to run: cpu, cuda, cuda:1, ...", "cuda" if torch.cuda.is_available() else "cpu")
        add("--dtype", "of weights and cache", choices=DTYPES,
            shown="bfloat16, or float32 on a CPU that is faster with it")
        add("--attention", "the backend; auto is xformers for 16 bits on CUDA, else sdpa", "auto", choices=BACKENDS)
        add("--seed", "of weights and prompts", 0, shown="0", type=int)
        add("--compile", "torch.compile the layers around attention", False, "off", action="store_true")
        add("--threads", "CPU threads", shown="torch's choice", type=int)

    def check_model_options(self, args):
        """Exit with a message if one of these makes no sense."""
        if args.model and args.model not in PRESETS:
            self.error(f"--model {args.model!r}: must be one of {', '.join(PRESETS)}; --init-from takes a checkpoint")
        if args.model and args.init_from:
            self.error("--model and --init-from: give one of them")
        if args.threads is not None and args.threads < 1:
            self.error(f"--threads {args.threads}: must be at least 1")

    def check_files(self, args, *options):
        """Exit with a message, not after minutes of measuring, if a file that is to be written cannot be."""
        for option in options:
            file = getattr(args, option.replace("-", "_"))
            if file and (Path(file).is_dir() or not Path(file).absolute().parent.is_dir()):
                self.error(f"--{option} {file}: must be a file in a directory that exists")
            if file and not os.access(file if Path(file).exists() else Path(file).absolute().parent, os.W_OK):
                self.error(f"--{option} {file}: cannot be written there")
            if file and option == "plot" and Path(file).suffix not in (".png", ".pdf", ".svg"):
                self.error(f"--plot {file}: must end in .png, .pdf or .svg")


def find_device(name):
    """The torch.device of that name, a CPU or a CUDA device. Raises ValueError if it makes no sense or is not there."""
    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cpu", "cuda"):
        raise ValueError(f"--device {name}: must be cpu, cuda, cuda:1, ...")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ValueError(f"--device {name}: torch {torch.__version__} sees {torch.cuda.device_count()} CUDA devices")
    return device


def load_model(args, length, gpu_model="llama-13b", gpu_bytes=40e9):
    """The model to measure, on its device. Sets args.model, args.dtype where they were left open.

    `length` is the option that says how many positions the model must have, such as "seq_len"; `gpu_model` is the
    default on a GPU with more than `gpu_bytes` of memory. Raises ValueError for an option that this machine or the
    model does not allow.
    """
    device = find_device(args.device)
    check_backend(args.attention, device)
    positions = getattr(args, length)
    if args.dtype is None:
        fast = torch.bfloat16 if device.type == "cuda" else measure.fastest_cpu_dtype()
        args.dtype = str(fast).removeprefix("torch.")
    if args.init_from:
        model = GPT.from_pretrained(args.init_from, device, DTYPES[args.dtype])
    else:
        if args.model is None:
            roomy = device.type == "cuda" and torch.cuda.get_device_properties(device).total_memory > gpu_bytes
            args.model = gpu_model if roomy else "llama-160m"
        config = GPTConfig.preset(args.model)
        if config.family == "llama":  # random weights know no positions, so they may be as many as asked for
            config = replace(config, max_positions=max(config.max_positions, positions))
        model = GPT(config, device, DTYPES[args.dtype], seed=args.seed)
    if positions > model.config.max_positions:
        raise ValueError(f"--{length.replace('_', '-')} {positions}: "
                         f"this model is limited to {model.config.max_positions}")
    if args.compile:
        if device.type == "cpu" and not shutil.which(os.environ.get("CXX", "g++")):
            raise ValueError("--compile: needs a C++ compiler on a CPU, g++ or what CXX names")
        model.compile()
    return model


def machine_lines(machine):
    """What every heading begins with: the machine and the model, from experiments.describe_machine or simulated."""
    if "threads" not in machine:
        return f"{machine['device']}\n{machine['model']}, {machine['dtype']}\n"
    compiled = ", compiled" if machine["compiled"] else ""
    threads = "1 thread" if machine["threads"] == 1 else f"{machine['threads']} threads"
    return (f"{machine['device']}, {threads}, torch {machine['torch']}\n"
            f"{machine['model']} ({machine['parameters'] / 1e6:,.1f} M parameters), {machine['dtype']}{compiled}\n")


def print_table(rows):
    """Print rows of strings as a Markdown table, the first row as its head, numbers aligned to the right."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    for number, row in enumerate(rows):
        print("| " + " | ".join(cell.ljust(w) if i == 0 else cell.rjust(w)
                                for i, (cell, w) in enumerate(zip(row, widths))) + " |")
        if number == 0:
            print("|" + "|".join("-" * (w + 1) + ("-" if i == 0 else ":") for i, w in enumerate(widths)) + "|")


def run(main):
    """Call main(). What a user can cause ends with a line and an exit status, not with a traceback."""
    sys.stdout.reconfigure(line_buffering=True)  # a pipe sees each line when it is printed
    try:
        try:
            main()
        finally:
            sys.stdout.flush()
    except (ValueError, ImportError, torch.OutOfMemoryError) as error:
        raise SystemExit(f"error: {error}") from error
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    except OSError as error:
        if isinstance(error, BrokenPipeError) or error.errno == errno.ENOSPC:  # do not fail again when Python exits
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(141 if isinstance(error, BrokenPipeError) else f"error: {error}") from error
