"""What the command lines share: options, the model they name, errors of one line.

What a command can be told is in options.toml, with the words of its help. Where torch is needed it
is imported late, so that --help answers at once. Read next: offline.py."""

import argparse
import json
import math
import os
import re
import shlex
import sys
import tomllib
from collections import namedtuple
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

from policies import POLICIES, find_policy, where_it_failed

DTYPES = ("float32", "bfloat16", "float16")
OPTIONS = tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8"))
PICTURES = (".png", ".pdf", ".svg")
ByDevice = namedtuple("ByDevice", "cpu gpu")  # the default of an option


def number(text, above=-math.inf, least=-math.inf, most=math.inf, kind=float):
    """The number in the text of an option, which must be above `above`, from `least` to `most`."""
    with suppress(ValueError):
        value = kind(text)
        if above < value < math.inf and least <= value <= most:
            return value
    limits = {"above": above, "of at least": least, "and at most": most}
    limits = " ".join(f"{words} {x:g}" for words, x in limits.items() if math.isfinite(x))
    allowed = f"{'a whole' if kind is int else 'a finite'} number {limits}".strip()
    raise argparse.ArgumentTypeError(f"{text:.60}: must be {allowed}")


def whole(text, least, most=10**15):
    """A whole number of at least `least` and at most `most`, which torch can count."""
    return number(text, least=least, most=most, kind=int)


def policy_name(text, chunks=False):
    """A name that `find_policy` takes; with `chunks` maybe with a chunk size, "sarathi:128"."""
    try:
        find_policy(re.sub(r":\d+$", "", text) if chunks else text)
    except (TypeError, ValueError) as error:
        where = where_it_failed(error)  # if the file was found, but not good
        raise argparse.ArgumentTypeError(f"{where}: {error}" if where else error) from error
    return text


def policy_names(text, chunks=False):
    """Such names with commas, as a list."""
    names = list(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    if not names:
        raise argparse.ArgumentTypeError(f"{text!r}: give at least one")
    return [policy_name(name, chunks) for name in names]


def output_file(text, suffixes=()):
    """A file that can be written, not found out after minutes, and has one of `suffixes` if any."""
    file = Path(os.path.realpath(text))
    if suffixes and file.suffix not in suffixes:
        raise argparse.ArgumentTypeError(f"{text}: must end in {', '.join(suffixes)}")
    try:
        is_new = not file.exists()
        if not file.is_fifo():  # whose reader would see its end
            file.open("ab").close()  # only who tries knows of quotas, long names, read-only disks
        if is_new:
            file.unlink(missing_ok=True)
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{text}: cannot be written: {error.strerror}") from error
    return text


# what options.toml may name
GIVEN = {"all_policies": ", ".join(POLICIES), "policy": policy_name}
GIVEN |= {"policies with chunks": partial(policy_names, chunks=True), "dtypes": DTYPES}
GIVEN |= {"file": output_file, "picture": partial(output_file, suffixes=PICTURES)}


class OptionParser(argparse.ArgumentParser):
    """An ArgumentParser whose help ends with the default and whose errors begin with the option."""

    def add_table(self, *tables, **given):
        """Add the options of tables in options.toml. `given` are the words that are filled in, and
        by their names what a type or choices may be, beside those of GIVEN."""
        given = GIVEN | given
        for name, its in (option for table in tables for option in OPTIONS[table].items()):
            its = {key: x.format_map(given) if isinstance(x, str) else x for key, x in its.items()}
            its |= {key: given[its[key]] for key in ("type", "choices") if key in its}
            if "whole" in its:
                its["type"] = partial(whole, **its.pop("whole"))
            if "number" in its:
                its["type"] = partial(number, **its.pop("number"))
            default, shown = its.get("default"), its.pop("shown", None)
            if both := its.pop("by_device", None):  # of which bench.parse_args takes one
                default, shown = ByDevice(*both), "{} on a CPU, {} on a GPU".format(*both)
            if shown is None:
                shown = "none" if default is None else "off" if default is False else default
            its |= {"default": default, "help": f"{its['help']} (default: {shown})"}
            self.add_argument(f"--{name}", **its)

    def add_model_options(self, default_model, names="names"):
        """The options that `load_model` reads, two of them under the names of a table.
        `default_model` says which geometry there is by default."""
        import torch

        from attention import BACKENDS
        from pretrained.presets import PRESETS

        words = dict(presets=", ".join(PRESETS), default_model=default_model)
        words["device"] = "cuda" if torch.cuda.is_available() else "cpu"
        self.add_table(names, "model", backends=BACKENDS, **words)

    def error(self, message):
        """Exit with one line: "--chunk 0: must be ...", not argparse's usage and "argument"."""
        message = re.sub(r"^argument (\S+): ", r"\1 ", message.replace("\n", " "))
        self.exit(2, f"{self.prog}: error: {message} (see --help)\n")


def find_device(name):
    """The torch.device of that name, a CPU or a CUDA device. Raises ValueError if there is none."""
    import torch

    if not re.fullmatch(r"cpu|cuda(:(\d|[1-9]\d))?", name):
        raise ValueError(f"--device {name}: must be cpu, cuda, cuda:1, ...")
    device, count = torch.device(name), torch.cuda.device_count()
    if device.type == "cuda" and (device.index or 0) >= count:
        raise ValueError(f"--device {name}: torch {torch.__version__} sees {count} CUDA devices")
    return device


def load_model(args, length, *default):
    """The model to measure, on its device; with --tp or --pp a Shard, on rank 0: on others this
    never returns. Sets the number of threads, args.model and args.dtype. `length` names the option
    that says how many positions the model must have, if it does. `default` is the model, and beyond
    how many bytes of a GPU's memory. Raises ValueError for what this machine cannot do."""
    device, count = find_device(args.device), args.tp * args.pp
    if (world := int(os.environ.get("WORLD_SIZE", 1))) != count:
        text = f"--tp {args.tp} --pp {args.pp}: needs {count} processes, not {world}: "
        raise ValueError(f"{text}torchrun --nproc-per-node {count} {shlex.join(sys.argv)}")
    if count == 1:
        return _load(args, length, device, None, *default)
    from parallel.ranks import Ranks
    from parallel.stages import Stage

    if args.compile:
        raise ValueError("--compile: not with --tp or --pp")
    ranks = Ranks(args.tp, args.pp, device.type)
    load = lambda: Stage(_load(args, length, ranks.device, ranks, *default))
    return ranks.start(load).model


def _load(args, length, device, ranks, gpu_model="llama-13b", gpu_bytes=40e9):
    """load_model on a device, maybe as one of Ranks."""
    import torch

    from attention import check_backend
    from config import check_memory
    from kv_cache import kv_bytes_per_token
    from lab.measure.timing import fastest_cpu_dtype
    from model import GPT, GPTConfig
    from packed_linear import pack
    from parallel.shard import Shard
    from pretrained import checkpoints

    if args.model and args.init_from:
        both = f"{args.model} and {args.init_from}"
        raise ValueError(f"{both}: a geometry and a checkpoint, give one of them")
    positions = getattr(args, length) or 1
    check_backend(args.attention, device)
    if args.threads:
        torch.set_num_threads(args.threads)
    if args.dtype is None:
        fast = torch.bfloat16 if device.type == "cuda" else fastest_cpu_dtype()
        args.dtype = str(fast).removeprefix("torch.")
    args.dtype = ranks.gather(args.dtype)[0] if ranks else args.dtype
    dtype = getattr(torch, args.dtype)
    if args.init_from:
        directory = checkpoints.find(args.init_from)
        config = checkpoints.read_config(directory)
    else:
        memory = torch.cuda.mem_get_info(device)[1] if device.type == "cuda" else 0  # in all
        args.model = args.model or (gpu_model if memory > gpu_bytes else "llama-160m")
        config = GPTConfig.preset(args.model)
    dashes = "--" * (length in ("max_len", "seq_len"))  # others are no options
    option = f"{dashes}{length.replace('_', '-')} {positions}"
    if ranks:
        weights_are = checkpoints.fingerprint(directory) if args.init_from else args.seed
        models = ranks.gather((config, weights_are))
        if others := [rank for rank, its in enumerate(models) if its != models[0]]:
            raise ValueError(f"rank {others[0]} has another model, or other weights, than rank 0")
    make = partial(Shard, ranks=ranks) if ranks else GPT
    empty = make(config, device="meta", dtype=dtype, seed=None)
    weights = sum(p.numel() for p in empty.parameters()) * dtype.itemsize
    needed = weights + positions * kv_bytes_per_token(empty.config, dtype)
    check_memory(f"{args.init_from or args.model} and a request of {option}", needed, device)
    if not args.init_from and config.family == "llama":  # random weights know no positions
        config = replace(config, max_positions=max(config.max_positions, positions))
    if positions > config.max_positions:
        raise ValueError(f"{option}: this model is limited to {config.max_positions}")
    if args.init_from:
        checkpoints.load_weights(model := empty, directory, device)
    else:
        model = make(config, device=device, dtype=dtype, seed=args.seed)
    if args.compile:
        model.compile()
    return pack(model)


def engine_for(model):
    """The class of engines that serve this model: Engine, or where it is a Shard, of all ranks."""
    if hasattr(model, "ranks"):
        from parallel.stages import ParallelEngine as its
    else:
        from engine import Engine as its
    return its


def runner_for(model):
    """The class of their runners."""
    return engine_for(model).make_runner


def find_texts(args):
    """(name, Tokenizer) of the model that `load_model` will load: a checkpoint and its own, or one
    of random weights, which is said, and bytes. Raises as checkpoints.find and load_tokenizer."""
    from pretrained import checkpoints
    from pretrained.tokenizers import byte_tokenizer, load_tokenizer

    if name := args.init_from:
        args.init_from = checkpoints.find(name)
        return name, load_tokenizer(args.init_from)
    args.model = args.model or "llama-160m"
    print(f"# {args.model} with random weights, the text will be noise", file=sys.stderr)
    return args.model, byte_tokenizer()


def machine_lines(machine):
    """What every heading begins with: the machine and the model, measured or simulated."""
    if "threads" not in machine:
        return "{device}\n{model}, {dtype}\n".format_map(machine)
    text = "{device}, threads: {threads}, torch {torch}\n{model}, {parameters:,} parameters, "
    text += "{dtype}" + ", TP {tp} x PP {pp}" * ("tp" in machine)
    return text.format_map(machine) + ", compiled" * machine["compiled"] + "\n"


def write_json(args, report):
    """Write the options and the report, a dict, to the file of --json, if there is one."""
    if args.json:
        write_text(args.json, json.dumps({"options": vars(args)} | report, indent=2))


def write_text(file, text):
    """Write the text to a file: all of it, or the file stays as it was; or to a pipe."""
    path = Path(file)
    if path.exists() and not path.is_file() or str(file).startswith("/dev/"):
        path.write_text(text, "utf-8")
    else:
        path = path.resolve()  # a link stays one
        part = path.with_name(f"{path.name[:200]}.part")
        part.write_text(text, "utf-8")
        part.replace(path)


def wrote(*files):
    """Say which files were written: a line for each that is not None."""
    for file in filter(None, files):
        print(f"wrote {file}")
