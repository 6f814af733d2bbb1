"""The model that a command line names, and how it is loaded: --preset, --model, --device, ...

A command adds the options, makes `ModelOptions` of what was parsed, fills in what was left open
(`resolve_model`), and loads the model (`load_model`):

    add_model_options(parser, default_preset="llama-160m")
    options = resolve_model(model_options(parser.parse_args()))
    model = load_model(options, positions=2048, positions_from="--max-len")

Read next: console.py."""

from __future__ import annotations

import os
import re
import shlex
import sys
from argparse import ArgumentTypeError, Namespace
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from cli.options import (
    OptionParser,
    chunk_option,
    from_args,
    nonempty_text,
    option,
    policy_name,
    whole,
)
from policies import ALL_POLICIES
from pretrained.presets import PRESETS
from runtime.torchrun import find_place

if TYPE_CHECKING:
    from engine import Engine
    from model import GPT, GPTConfig
    from parallel.ranks import Ranks
    from pretrained.tokenizers import Tokenizer

DTYPES = ("float32", "bfloat16", "float16")
FAST_DTYPES = "bfloat16; float16 on a GPU before Ampere, float32 on a CPU that is faster with it"
SMALL_PRESET = "llama-160m"  # the geometry where none is named, and no large GPU is there
MAX_PROCESSES = 10_000


def default_device() -> str:
    """A GPU, if there is one."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def checkpoint_name(text: str) -> str:
    """The type of --model: a directory, or a name on the Hub.

    A preset of that name is meant by mistake, but for those of GPT-2: the Hub has them, too."""
    nonempty_text(text)
    is_preset = text in PRESETS and not text.startswith("gpt2")
    if is_preset and not os.path.isdir(text):
        raise ArgumentTypeError(f"{text}: is a preset, write --preset {text}")
    return text


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """Which model computes, and how. None is what `resolve_model` fills in.

    Raises ValueError for a preset and a model."""

    preset: str | None = option(
        f"a geometry with random weights: {', '.join(PRESETS)}", type=nonempty_text, metavar="NAME"
    )
    model: str | None = option(
        "a checkpoint instead: a local directory or a name on the Hub",
        type=checkpoint_name,
        metavar="MODEL",
    )
    device: str = option("where to run: cpu, cuda, cuda:1, ...", type=nonempty_text)
    dtype: str | None = option("of weights and cache", choices=DTYPES)
    attention: str = option(
        "the backend, of those in fast/; auto: flash for 16 bits on CUDA, matmul for bfloat16 on a "
        "CPU, else sdpa",
        type=nonempty_text,
        default="auto",
    )
    seed: int = option("of all that is random", type=whole(minimum=0), default=0)
    compile: bool = option(
        "torch.compile the layers around attention: fewer kernels, after a minute or so",
        action="store_true",
    )
    threads: int | None = option(
        "CPU threads", type=whole(minimum=1, maximum=10_000), default_text="torch's choice"
    )
    tp: int = option(
        "processes that share each layer, started by torchrun, see parallel/README.md",
        type=whole(minimum=1, maximum=MAX_PROCESSES),
        default=1,
    )
    pp: int = option(
        "stages of a pipeline of processes, started by torchrun, see parallel/README.md",
        type=whole(minimum=1, maximum=MAX_PROCESSES),
        default=1,
    )
    layers: int | None = None  # compute so many, with random weights; None: all

    def __post_init__(self) -> None:
        if self.preset and self.model:
            models = f"--preset {self.preset}, --model {self.model}"
            raise ValueError(f"{models}: a geometry and a checkpoint, give one of them")

    @property
    def name(self) -> str:
        """What the model is called: its checkpoint or its geometry."""
        return self.model or self.preset or SMALL_PRESET

    @property
    def title(self) -> str:
        """The name as headings of tables have it: a model of fewer or more layers says so."""
        return f"{self.name}, cut to --layers {self.layers}" if self.layers else self.name


def add_model_options(
    parser: OptionParser, default_preset: str, default_dtype: str | None = None
) -> None:
    """Add the options of `ModelOptions`. `default_preset` describes the default geometry; without
    a `default_dtype` it is what is fast here."""
    device = default_device()
    dtype = default_dtype or FAST_DTYPES
    parser.add_fields(ModelOptions, preset=default_preset, device=device, dtype=dtype)
    parser.set_defaults(device=device, dtype=default_dtype)


def add_layers_option(parser: OptionParser, default_text: str = "all of the model") -> None:
    """Add --layers, for commands that time a model: `ModelOptions.layers`."""
    parser.add_argument(
        "--layers",
        help=f"compute so many, with random weights (default: {default_text})",
        type=whole(minimum=1, maximum=10_000),
    )


def model_options(args: Namespace) -> ModelOptions:
    """The ModelOptions among what was parsed."""
    return from_args(ModelOptions, args)


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """An engine that writes text: of sample.py and of the server."""

    policy: str = option(
        f"the scheduling policy: {', '.join(ALL_POLICIES)}, or FILE.py:Class",
        type=policy_name,
        default="sarathi-serve",
    )
    chunk: int = chunk_option()
    max_batch: int = option("the most requests that run at once", type=whole(minimum=1), default=16)
    prefix_caching: bool = option(
        "share the pages of prompts that begin alike", action="store_true"
    )
    model: ModelOptions

    def make_engine(self, model: GPT, **settings: Any) -> Engine:
        """The engine of these options, as `settings` of Engine change it."""
        from parallel import engine_for

        options = {
            "policy": self.policy,
            "chunk": self.chunk,
            "max_batch": self.max_batch,
            "prefix_caching": self.prefix_caching,
            "attention": self.model.attention,
        }
        return engine_for(model)(model, **options | settings)


def find_device(name: str) -> torch.device:
    """The torch.device of that name, a CPU or a CUDA device. Raises ValueError if there is none."""
    if not re.fullmatch(r"cpu|cuda(:(\d|[1-9]\d))?", name):
        raise ValueError(f"--device {name}: must be cpu, cuda, cuda:1, ...")
    device = torch.device(name)
    count = torch.cuda.device_count()
    if device.type == "cuda" and (device.index or 0) >= count:
        raise ValueError(f"--device {name}: torch {torch.__version__} sees {count} CUDA devices")
    return device


def resolve_model(
    options: ModelOptions, *, gpu_preset: str = "llama-13b", gpu_bytes: float = 40e9
) -> ModelOptions:
    """The same options with a preset or a model, and a dtype; also sets the number of threads.

    The default preset is `gpu_preset` on a GPU with more than `gpu_bytes` of memory, else
    SMALL_PRESET. The default dtype is fast.fastest_dtype. Raises ValueError for what this machine
    cannot do."""
    from runtime.runner import find_fast

    device = find_device(options.device)
    _check_processes(options)
    if options.threads:
        torch.set_num_threads(options.threads)
    dtype = options.dtype
    if dtype is None:
        fast = find_fast()
        default = fast.fastest_dtype(device) if fast else torch.float32
        dtype = str(default).removeprefix("torch.")
    preset = options.preset
    if preset is None and options.model is None:
        memory_bytes = 0
        if device.type == "cuda":
            memory_bytes = torch.cuda.get_device_properties(device).total_memory
        preset = gpu_preset if memory_bytes > gpu_bytes else SMALL_PRESET
    return replace(options, preset=preset, dtype=dtype)


def _check_processes(options: ModelOptions) -> None:
    """Raise ValueError if torchrun has not started as many processes as --tp and --pp need."""
    needed = options.tp * options.pp
    started = find_place().world_size
    if started != needed:
        raise ValueError(
            f"--tp {options.tp} --pp {options.pp}: needs {needed} processes, not {started}: "
            f"torchrun --nproc-per-node {needed} {shlex.join(sys.argv)}"
        )
    if needed > 1 and options.compile:
        raise ValueError("--compile: not with several processes")


def load_model(options: ModelOptions, positions: int, *, positions_from: str) -> GPT:
    """The model on its device; with --tp or --pp a Shard, on rank 0: on others this never returns.

    It must have `positions` positions, which error messages call `positions_from`, as "--max-len".
    What is open in `options` is filled in by `resolve_model`, which a command calls itself if it
    has another default model, or writes the options. Raises ValueError for what this machine cannot
    do."""
    options = resolve_model(options)
    length = f"{positions_from} {positions}"
    device = find_device(options.device)
    if options.tp * options.pp == 1:
        return _load_here(options, positions, length, device, None)
    from parallel.ranks import Ranks
    from parallel.shard import Shard
    from parallel.stages import Stage

    ranks = Ranks(options.tp, options.pp, device.type)

    def load_stage() -> Stage:
        shard = _load_here(options, positions, length, ranks.device, ranks)
        assert isinstance(shard, Shard)
        return Stage(shard)

    model = ranks.start(load_stage).model
    if ranks.device.type == "cuda":
        print("# no CUDA graphs with --tp or --pp: decodes wait for launches", file=sys.stderr)
    return model


def _load_here(
    options: ModelOptions, positions: int, length: str, device: torch.device, ranks: Ranks | None
) -> GPT:
    """load_model in this process, maybe as one of several ranks. All of these take rank 0's dtype.
    `length` is for error messages: the option and its value, as "--max-len 2048"."""
    from kv_cache import kv_bytes_per_token
    from model import GPT, GPTConfig
    from parallel.shard import Shard
    from pretrained import checkpoints
    from runtime.memory import check_memory
    from runtime.runner import find_fast

    dtype_name = ranks.gather(options.dtype)[0] if ranks else options.dtype
    dtype: torch.dtype = getattr(torch, str(dtype_name))
    directory = None
    if options.model:
        directory = options.model
        config = checkpoints.read_config(directory)
    else:
        config = GPTConfig.preset(options.preset or SMALL_PRESET)
    if options.layers:
        directory = None  # its weights are of another model
        config = replace(config, n_layer=options.layers)
    make_model: Callable[..., GPT] = GPT
    if ranks:
        _check_same_model(ranks, config, options.seed)
        make_model = partial(Shard, ranks=ranks)

    empty = make_model(config, device="meta", dtype=dtype, seed=None)
    weight_bytes = sum(p.numel() for p in empty.parameters()) * dtype.itemsize
    cache_bytes = positions * kv_bytes_per_token(empty.config, dtype)
    check_memory(f"{options.title} and a request of {length}", weight_bytes + cache_bytes, device)
    if not directory and config.family == "llama":  # random weights have learned no positions
        config = replace(config, max_positions=max(config.max_positions, positions))
    if positions > config.max_positions:
        raise ValueError(f"{length}: this model is limited to {config.max_positions}")

    if directory:
        model = make_model(config, device="meta", dtype=dtype, seed=None)
        load = model.load if isinstance(model, Shard) else partial(checkpoints.load_weights, model)
        load(directory, device)
    else:
        model = make_model(config, device=device, dtype=dtype, seed=options.seed)
    fast = find_fast()
    if fast and options.compile:
        fast.compile_layers(model)
    if fast:
        fast.pack(model)
    return model


def _check_same_model(ranks: Ranks, config: GPTConfig, seed: int) -> None:
    """Raise ValueError on all ranks if one has another config, or other random weights, than
    rank 0."""
    models = ranks.gather((config, seed))
    for rank, model in enumerate(models):
        if model != models[0]:
            raise ValueError(f"rank {rank} has another model, or other weights, than rank 0")


def find_tokenizer(options: ModelOptions, computed: str = "") -> tuple[Tokenizer, ModelOptions]:
    """The tokenizer of the model of these options, and the options with its name or geometry.

    A checkpoint has its own tokenizer. A geometry has random weights, and its tokens are bytes.
    That is said on stderr, and how a text is `computed`. Raises as load_tokenizer."""
    from pretrained.tokenizers import ByteTokenizer, load_tokenizer

    if options.model:
        tokenizer = load_tokenizer(options.model)
        if computed:
            print(f"# {options.name}: {computed}", file=sys.stderr)
        return tokenizer, options
    noise = f"# {options.name} with random weights, the text will be noise"
    print(f"{noise}, {computed}" if computed else noise, file=sys.stderr)
    return ByteTokenizer(), replace(options, preset=options.name)
