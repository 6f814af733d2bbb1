"""How the model of a command line is loaded.

    options = resolve_model(ModelOptions(preset="llama-tiny"))
    model = load_model(options, positions=2048, positions_from="--max-len")

Read first: model.py, the options. Read next: console.py."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from cli.model import SMALL_PRESET, EngineOptions, ModelOptions
from config import GPTConfig
from kv_cache import kv_bytes_per_token
from model import GPT
from pretrained import checkpoints
from runtime.memory import check_memory
from runtime.runner import find_fast

if TYPE_CHECKING:
    from engine import Engine
    from pretrained.tokenizers import Tokenizer


def make_engine(
    options: EngineOptions, model: GPT, attention: str = "auto", **settings: Any
) -> Engine:
    """The engine of these options, as `settings` of Engine change it."""
    from parallel.stages import engine_for

    return engine_for(model)(model, attention=attention, **asdict(options) | settings)


def resolve_model(
    options: ModelOptions, *, gpu_preset: str = "llama-13b", gpu_bytes: float = 40e9
) -> ModelOptions:
    """The same options with a device, a preset or a model, and a dtype.

    The default preset is `gpu_preset` on a GPU with more than `gpu_bytes` of memory, else
    SMALL_PRESET. The default dtype is fast.fastest_dtype. Raises ValueError if torchrun has not
    started as many processes as --tp and --pp need."""
    processes = options.tp * options.pp
    if int(os.environ.get("WORLD_SIZE", 1)) != processes:
        command = f"torchrun --nproc-per-node {processes} {shlex.join(sys.argv)}"
        raise ValueError(
            f"--tp {options.tp} --pp {options.pp}: needs {processes} processes: {command}"
        )
    if processes > 1 and options.compile:
        raise ValueError("--compile: not with several processes")
    device = torch.device(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    fast = find_fast()
    dtype = fast.fastest_dtype(device) if fast else torch.float32
    preset = options.preset
    if preset is None and options.model is None:
        preset = SMALL_PRESET
        if device.type == "cuda":
            memory_bytes = torch.cuda.get_device_properties(device).total_memory
            preset = gpu_preset if memory_bytes > gpu_bytes else SMALL_PRESET
    return replace(
        options,
        device=str(device),
        preset=preset,
        dtype=options.dtype or str(dtype).removeprefix("torch."),
    )


def load_model(options: ModelOptions, positions: int, *, positions_from: str) -> GPT:
    """The model on its device; with --tp or --pp a Shard, on rank 0: on others this never returns.

    It must have `positions` positions, which error messages call `positions_from`, as "--max-len".
    What is open in `options` is filled in by `resolve_model`, which a command calls itself if it
    has another default model, or writes the options. Raises ValueError for what this machine cannot
    do."""
    options = resolve_model(options)
    load = partial(_load_here, options, positions, f"{positions_from} {positions}")
    device = torch.device(str(options.device))
    if options.tp * options.pp == 1:
        return load(GPT, device)
    from parallel.ranks import Ranks
    from parallel.shard import Shard
    from parallel.stages import Stage

    ranks = Ranks(options.tp, options.pp, device.type)
    model = ranks.start(lambda: Stage(load(partial(Shard, ranks=ranks), ranks.device))).model
    if ranks.device.type == "cuda":
        print("# no CUDA graphs with --tp or --pp: decodes wait for launches", file=sys.stderr)
    return model


def _load_here(
    options: ModelOptions,
    positions: int,
    length: str,
    kind: Callable[..., Any],
    device: torch.device,
) -> Any:
    """load_model in this process: a GPT, or the Shard of one of several ranks, as `kind` makes it.
    `length` is for error messages: the option and its value, as "--max-len 2048"."""
    dtype: torch.dtype = getattr(torch, str(options.dtype))
    if options.model:
        config = checkpoints.read_config(options.model)
    else:
        config = GPTConfig.preset(str(options.preset))
    checkpoint = None if options.layers else options.model  # else its weights are of another model
    if options.layers:
        config = replace(config, n_layer=options.layers)
    if not checkpoint and config.family == "llama":  # its weights have learned no positions
        config = replace(config, max_positions=max(config.max_positions, positions))
    if positions > config.max_positions:
        raise ValueError(f"{length}: this model is limited to {config.max_positions}")

    model = kind(config, device="meta", dtype=dtype, seed=None)
    weight_bytes = sum(p.numel() for p in model.parameters()) * dtype.itemsize
    cache_bytes = positions * kv_bytes_per_token(model.config, dtype)
    check_memory(f"{options.title} and a request of {length}", weight_bytes + cache_bytes, device)
    if not checkpoint:
        model = kind(config, device=device, dtype=dtype, seed=options.seed)
    elif kind is GPT:
        checkpoints.load_weights(model, checkpoint, device)
    else:
        model.load(checkpoint, device)
    fast = find_fast()
    if fast:
        if options.compile:
            fast.compile_layers(model)
        fast.pack(model)
    return model


def find_tokenizer(options: ModelOptions) -> tuple[Tokenizer, ModelOptions]:
    """The tokenizer of the model of these options, and the options with its geometry.

    A checkpoint has its own tokenizer. A geometry has random weights, and its tokens are bytes.
    That is said on stderr. Raises as load_tokenizer."""
    from pretrained.tokenizers import ByteTokenizer, load_tokenizer

    if options.model:
        return load_tokenizer(options.model), options
    print(f"# {options.name} with random weights, the text will be noise", file=sys.stderr)
    return ByteTokenizer(), replace(options, preset=options.name)
