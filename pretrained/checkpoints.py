"""Checkpoints in the Hugging Face format: config.json and model.safetensors -> our GPT.

What the model cannot compute exactly is refused. Read first: model.py. Read next: tokenizers.py."""

import re
import tomllib
from hashlib import sha256
from itertools import cycle
from pathlib import Path
from typing import Literal

import torch
from pydantic import AliasChoices, BaseModel, Field, PositiveFloat, PositiveInt, ValidationError
from safetensors import SafetensorError, safe_open

from errors import shorten
from model import GPTConfig, RopeScaling
from pretrained.sharding import cut, views

FORMAT = tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8"))
FILES, TENSORS = FORMAT["files"], FORMAT["tensors"]
GPT2_LAYER = "h."  # how the names of what is stored as (in, out) begin


def find(name):
    """The directory `name`, or that of the Hub's files of that name. Raises FileNotFoundError."""
    try:
        directory = Path(name).expanduser()
        if directory.is_dir():
            return directory
        from huggingface_hub import snapshot_download  # a directory needs no Hub

        return Path(snapshot_download(str(name), allow_patterns=sum(FILES.values(), [])))
    except (OSError, ValueError, RuntimeError) as error:  # RuntimeError: ~nobody
        missing = f"no directory here, and not to be had from the Hub ({type(error).__name__})"
        wanted = "config.json, model.safetensors (or its shards) and tokenizer.json must be there"
        raise FileNotFoundError(f"{str(name)!r}: {missing}; {wanted}") from error


class Schema(BaseModel, strict=True, validate_by_name=True, allow_inf_nan=False):
    """What is read of a JSON object, in exact types; what else it holds is passed over."""

    @classmethod
    def read(cls, path):
        """Raises OSError; or ValueError, naming the file, the first wrong key, what it must be."""
        try:
            return cls.model_validate_json(path.read_bytes())
        except ValidationError as error:
            wrong = error.errors()[0]
        problem = re.sub(r"^\w+ should", "must", wrong["msg"])
        names = [key for key in wrong["loc"] if str(key).isidentifier()]  # others are places, types
        if names:
            value = "" if wrong["type"] == "missing" else f"={shorten(wrong['input'])}"
            problem = f"{names[-1]}{value}: {problem}"
        raise ValueError(f"{path}: {problem}")


either = lambda llama, gpt2: Field(alias=llama, validation_alias=AliasChoices(llama, gpt2))


class Rope(Schema, extra="forbid"):
    """The rotation: one rule for all layers, and no option that is not known."""

    rope_type: Literal["default", "llama3"] | None = None
    type: Literal["default", "llama3"] | None = None  # its name in old files
    rope_theta: PositiveFloat | None = None
    partial_rotary_factor: Literal[1] | None = None
    factor: PositiveFloat | None = None
    low_freq_factor: PositiveFloat | None = None
    high_freq_factor: PositiveFloat | None = None
    original_max_position_embeddings: PositiveInt | None = None


class ModelFile(Schema):
    """config.json: GPTConfig's fields by LLaMA's names or GPT-2's, then what has one way only."""

    model_type: Literal["gpt2", "llama", "mistral", "qwen2", "qwen3"]
    vocab_size: PositiveInt
    n_layer: PositiveInt = Field(alias="num_hidden_layers")
    n_head: PositiveInt = Field(alias="num_attention_heads")
    n_kv_head: PositiveInt | None = Field(None, alias="num_key_value_heads")
    head_dim: PositiveInt | None = None
    n_embd: PositiveInt = Field(alias="hidden_size")
    n_inner: PositiveInt | None = Field(None, alias="intermediate_size")
    max_positions: PositiveInt = either("max_position_embeddings", "n_positions")
    norm_eps: PositiveFloat = either("rms_norm_eps", "layer_norm_epsilon")
    tie_embeddings: bool | None = Field(None, alias="tie_word_embeddings")
    rope_theta: PositiveFloat = 10000.0
    rope_parameters: Rope | None = None
    rope: Rope | None = Field(None, alias="rope_scaling")  # what they were in transformers 4
    sliding_window: PositiveInt | None = 4096
    use_sliding_window: bool | None = None
    layer_types: list[Literal["full_attention", "sliding_attention"]] | None = None
    partial_rotary_factor: Literal[1] | None = None
    hidden_act: Literal["silu"] = "silu"
    activation_function: Literal["gelu_new", "gelu_pytorch_tanh"] = "gelu_new"
    scale_attn_weights: Literal[True] = True
    scale_attn_by_inverse_layer_idx: Literal[False] = False
    quantization_config: None = None


def read_config(directory):
    """The GPTConfig of a checkpoint, from config.json as transformers 4 or 5 writes it. A sliding
    window changes nothing up to its length: `max_positions` ends there. Raises FileNotFoundError,
    or ValueError, naming the option, its value and what is supported."""
    path = Path(directory) / "config.json"
    file = ModelFile.read(path)
    known = file.model_dump(include=set(GPTConfig.__dataclass_fields__), exclude_none=True)
    config = FORMAT["architectures"][file.model_type] | known
    slides = file.use_sliding_window or "sliding_attention" in (file.layer_types or ())
    if file.sliding_window and (slides or file.model_type == "mistral"):
        config["max_positions"] = min(file.max_positions, file.sliding_window)
    rope = file.rope or file.rope_parameters or Rope()
    config["rope_theta"] = rope.rope_theta or file.rope_theta
    if "llama3" in (rope.rope_type, rope.type):
        trained = rope.original_max_position_embeddings or file.max_positions
        factors = rope.factor, rope.low_freq_factor, rope.high_freq_factor
        if None in factors or factors[1] >= factors[2]:
            raise ValueError(f"{path}: llama3 needs factor and low_freq_factor < high_freq_factor")
        config["rope_scaling"] = RopeScaling(*factors, trained)
    try:
        return GPTConfig(**config)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


@torch.no_grad()
def load_weights(model, directory, device=None):
    """Fill the model's parameters, one by one, after all are known to fit; only then is a model on
    "meta" given memory, on `device`. Of a parallel.shard.Shard's checkpoint only its own slices are
    read. Raises FileNotFoundError where there are no weights, or ValueError, naming what is
    unknown, missing, there twice, misshapen or not finite."""
    directory = Path(directory)
    whole = model.whole_model() if hasattr(model, "whole_model") else model
    config, sources, tensors = whole.config, _sources(whole), _stored_tensors(directory)
    head = tensors.pop("lm_head.weight", None) if config.tie_embeddings else None
    shapes = {name: shape for its in sources.values() for name, _, shape in its}
    _refuse(directory, "unknown tensors", tensors.keys() - shapes.keys())
    _refuse(directory, "missing tensors", shapes.keys() - tensors.keys())
    misfits, floats = [], TENSORS["floats"]
    for name, expected in shapes.items():
        shape, dtype = tensors[name].get_shape(), tensors[name].get_dtype()
        if shape != expected or dtype not in floats:
            misfits.append(f"{name} {shape} {dtype} (expected {expected}, one of {floats})")
    _refuse(directory, "tensors that do not fit", misfits)
    embedding = next(iter(shapes))  # the first of all parameters
    if head is not None and not torch.equal(head[:], tensors[embedding][:]):
        raise ValueError(f"{directory}: tie_word_embeddings, but lm_head.weight is not {embedding}")
    if model.device.type == "meta":
        model.to_empty(device=device)
    for own, p in model.named_parameters():
        name, dim, ranges = cut(config, 1, 1, 0, own, p.shape) if whole is model else model.cut(own)
        parts = zip(views(p, dim, ranges), ranges, cycle(sources[name]))  # one each, or one for all
        for view, (start, end), (stored, first, _) in parts:
            slices = [slice(None)] * p.ndim
            slices[dim] = slice(start - first, end - first)
            if stored.startswith(GPT2_LAYER):
                view, slices = view.t(), slices[::-1]
            view.copy_(tensors[stored][tuple(slices)])
            # a sum takes one fast pass over what was just written; it may overflow in 16 bits
            if not view.sum().isfinite() and not view.isfinite().all():
                raise ValueError(f"{directory}: {stored} holds NaN or infinity as {view.dtype}")


def _sources(model):
    """{parameter of a whole model: [(name in the checkpoint, first of the parameter's rows that it
    fills, shape there)]}: one for all rows, or one for each range that slices.cut tells apart."""
    sources, modules = {}, FORMAT["modules"][model.config.family]
    for own, p in model.named_parameters():
        *block, module, kind = own.replace("blocks", modules["blocks"]).split(".")
        names = [".".join([*block, its, kind]) for its in modules[module]]  # "layers.3.….weight"
        _, _, ranges = cut(model.config, 1, 1, 0, own, p.shape)
        sources[own] = []
        for name, (start, end) in zip(names, ranges if len(names) > 1 else [(0, len(p))]):
            shape = [end - start, *p.shape[1:]]
            shape = shape[::-1] if name.startswith(GPT2_LAYER) else shape
            sources[own].append((name, start, shape))
    return sources


def _stored_tensors(directory):
    """{name without prefix: a slice of a file, which can be read} of all weights."""
    (single, shards), tensors = FILES["weights"], {}
    if not (paths := sorted(directory.glob(single)) or sorted(directory.glob(shards))):
        why = "not there, nor shards of it (pickles are not read)"
        raise FileNotFoundError(f"{directory / single}: {why}")
    for path in paths:
        try:
            file = safe_open(path, framework="pt")
        except SafetensorError as error:
            raise ValueError(f"{path}: not a safetensors file: {str(error)!r}") from error
        for name in file.keys():
            short = re.sub(TENSORS["prefixes"], "", name)
            if short in tensors:
                raise ValueError(f"{path}: {short} is there twice")
            if not re.fullmatch(TENSORS["no_weights"], short):
                tensors[short] = file.get_slice(name)
    return tensors


def fingerprint(directory):
    """A digest of config.json and the first row of each tensor, to tell checkpoints apart."""
    digest = sha256((directory / "config.json").read_bytes())
    for name, tensor in sorted(_stored_tensors(directory).items()):
        digest.update(f"{name}: {tensor[:1].double().tolist()}".encode())
    return digest.hexdigest()


def _refuse(directory, problem, names):
    """Raise ValueError if there are any `names`, with how many and the first few."""
    if names:
        few = ", ".join(sorted(names)[:5]) + (", …" if len(names) > 5 else "")
        raise ValueError(f"{directory}: {len(names)} {problem}: {few}")
