"""Checkpoints in the Hugging Face format: a directory with config.json and model.safetensors -> our GPT.

Three steps, which GPT.from_pretrained takes one after the other:

    directory = find("path/or/hub-name")
    model = GPT(read_config(directory), seed=None)
    load_weights(model, directory)

What the model cannot compute exactly is refused: another architecture, an option that changes what is
computed, a tensor that would not be used, a part of a parameter that would not be filled.

Read first: model.py, whose parameters are filled here. Read next: tokenizer.py.
"""

import json
import re
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open

from model import GPTConfig, RopeScaling

# What is downloaded: no pickles, and no second copy of the weights in another layout (consolidated.safetensors).
HUB_FILES = ["config.json", "generation_config.json", "model*.safetensors", "model.safetensors.index.json",
             "tokenizer.json", "tokenizer.model", "original/tokenizer.model", "vocab.json", "merges.txt"]


def find(name):
    """The directory of a checkpoint: `name` itself if it is one, otherwise the Hub's files of that name.

    Raises FileNotFoundError, which says what to put where, if it is neither here nor can be downloaded.
    """
    directory = Path(name).expanduser()
    if directory.is_dir():
        return directory
    from huggingface_hub import snapshot_download  # imported only where it is used: a directory needs no Hub

    try:
        return Path(snapshot_download(str(name), allow_patterns=HUB_FILES))
    except (OSError, ValueError) as error:
        raise FileNotFoundError(
            f"{str(name)!r}: not a directory here, and not to be had from the Hub ({type(error).__name__}). "
            "Put config.json, model.safetensors (or model.safetensors.index.json and its shards) and "
            "tokenizer.json into a directory and give its path, or try again with a network") from error


def read_json(path):
    """The object in a JSON file. Raises FileNotFoundError or ValueError, naming the file."""
    if not path.is_file():
        raise FileNotFoundError(f"{path}: not there; a checkpoint is config.json and model.safetensors")
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: not JSON: {error}") from error
    if not isinstance(stored, dict):
        raise ValueError(f"{path}: must hold a JSON object, not {type(stored).__name__}")
    return stored


# -----------------------------------------------------------------------------------------------------
# config.json -> GPTConfig

# What transformers assumes where config.json is silent.
_LLAMA = dict(vocab_size=32000, hidden_size=4096, num_hidden_layers=32, num_attention_heads=32,
              num_key_value_heads=None, head_dim=None, intermediate_size=11008, max_position_embeddings=2048,
              rms_norm_eps=1e-6, rope_theta=10000.0, tie_word_embeddings=False)
DEFAULTS = {
    "gpt2": dict(vocab_size=50257, n_embd=768, n_layer=12, n_head=12, n_inner=None, n_positions=1024,
                 layer_norm_epsilon=1e-5, tie_word_embeddings=True),
    "llama": _LLAMA,
    "mistral": _LLAMA | dict(num_key_value_heads=8, intermediate_size=14336, max_position_embeddings=131072,
                             sliding_window=4096),
    "qwen2": _LLAMA | dict(vocab_size=151936, num_key_value_heads=32, intermediate_size=22016,
                           max_position_embeddings=32768, sliding_window=4096),
}

# Options that change what is computed, and the values that the model computes.
SUPPORTED = {
    "gpt2": dict(activation_function=("gelu_new", "gelu_pytorch_tanh"), scale_attn_weights=(True,),
                 scale_attn_by_inverse_layer_idx=(False,), add_cross_attention=(False,)),
    "llama": dict(hidden_act=("silu",), attention_bias=(False,), mlp_bias=(False,)),
    "mistral": dict(hidden_act=("silu",)),
    "qwen2": dict(hidden_act=("silu",)),
}


def read_config(directory):
    """The GPTConfig of a checkpoint, from config.json as transformers 4 or 5 writes it.

    A sliding window is not computed but respected: up to its length it changes nothing, so `max_positions`
    ends there. Raises FileNotFoundError without a config.json, and ValueError, naming the option, its value and
    what is supported, for a model that is not computed here.
    """
    path = Path(directory) / "config.json"
    stored = read_json(path)
    model_type = stored.get("model_type")
    _require(path, {"model_type": model_type}, model_type=tuple(DEFAULTS))
    _require(path, stored, quantization_config=(None,), **SUPPORTED[model_type])
    c = DEFAULTS[model_type] | stored
    if model_type == "gpt2":
        return GPTConfig("gpt2", c["vocab_size"], c["n_layer"], c["n_head"], c["n_embd"], n_inner=c["n_inner"],
                         max_positions=c["n_positions"], norm_eps=c["layer_norm_epsilon"],
                         tie_embeddings=c["tie_word_embeddings"])
    max_positions, theta, scaling = c["max_position_embeddings"], *_read_rope(path, c)
    layer_types = c.get("layer_types") or ()
    if model_type == "mistral" or c.get("use_sliding_window") or "sliding_attention" in layer_types:
        max_positions = min(max_positions, c.get("sliding_window") or max_positions)
    return GPTConfig(
        "llama", c["vocab_size"], c["num_hidden_layers"], c["num_attention_heads"], c["hidden_size"],
        n_kv_head=c["num_key_value_heads"], head_dim=c["head_dim"], n_inner=c["intermediate_size"],
        max_positions=max_positions, norm_eps=c["rms_norm_eps"], qkv_bias=model_type == "qwen2",
        tie_embeddings=c["tie_word_embeddings"], rope_theta=theta, rope_scaling=scaling)


def _require(path, options, **allowed):
    """Raise ValueError unless every option, where it is given, has one of its allowed values."""
    for option, values in allowed.items():
        if option in options and options[option] not in values:
            raise ValueError(f"{path}: {option}={options[option]!r} is not supported, "
                             f"it must be {' or '.join(map(repr, values))}")


def _read_rope(path, c):
    """(rope_theta, RopeScaling or None), from `rope_parameters`, or `rope_scaling` next to `rope_theta`."""
    rope = c.get("rope_scaling") or c.get("rope_parameters") or {}
    rope = {"rope_type": rope.get("type", "default"), "rope_theta": c["rope_theta"],
            "original_max_position_embeddings": c["max_position_embeddings"],
            "partial_rotary_factor": c.get("partial_rotary_factor") or 1.0} | rope
    _require(path, rope, rope_type=("default", "llama3"), partial_rotary_factor=(1.0,))
    per_layer = [key for key, value in rope.items() if isinstance(value, dict)]
    if per_layer:
        raise ValueError(f"{path}: rope_parameters of {', '.join(per_layer)}: only one rule is supported")
    if rope["rope_type"] == "default":
        return rope["rope_theta"], None
    fields = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    missing = [field for field in fields if field not in rope]
    if missing:
        raise ValueError(f"{path}: rope_type='llama3' needs {', '.join(missing)}")
    return rope["rope_theta"], RopeScaling(*(rope[field] for field in fields))


# -----------------------------------------------------------------------------------------------------
# model.safetensors -> the model's parameters

# Our modules and what the checkpoint calls them; several names fill the rows of one matrix, in this order.
GPT2_MODULES = {
    "token_embedding": ["wte"], "position_embedding": ["wpe"], "final_norm": ["ln_f"], "head": ["lm_head"],
    "attn_norm": ["h.{}.ln_1"], "preproj": ["h.{}.attn.c_attn"], "postproj": ["h.{}.attn.c_proj"],
    "ffn_norm": ["h.{}.ln_2"], "ffn_ln1": ["h.{}.mlp.c_fc"], "ffn_ln2": ["h.{}.mlp.c_proj"],
}
LLAMA_MODULES = {
    "token_embedding": ["embed_tokens"], "final_norm": ["norm"], "head": ["lm_head"],
    "attn_norm": ["layers.{}.input_layernorm"],
    "preproj": [f"layers.{{}}.self_attn.{x}_proj" for x in "qkv"],
    "postproj": ["layers.{}.self_attn.o_proj"],
    "ffn_norm": ["layers.{}.post_attention_layernorm"],
    "ffn_ln1": ["layers.{}.mlp.gate_proj", "layers.{}.mlp.up_proj"],
    "ffn_ln2": ["layers.{}.mlp.down_proj"],
}
# family: (modules, a prefix that names may or may not have, tensors that hold no weights: masks and frequencies)
FORMATS = {
    "gpt2": (GPT2_MODULES, "transformer.", re.compile(r"h\.\d+\.attn\.(masked_)?bias")),
    "llama": (LLAMA_MODULES, "model.", re.compile(r"(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq")),
}


class Stored(NamedTuple):
    """A tensor in an open safetensors file. Its shape and dtype are in the header, the rest is read on demand."""

    file: object
    name: str

    def read(self):
        """The tensor, on the CPU, as it is stored."""
        return self.file.get_tensor(self.name)

    def misfit(self, target):
        """A message if the tensor cannot be copied into `target`, else None."""
        header = self.file.get_slice(self.name)
        shape, dtype, expected = header.get_shape(), header.get_dtype(), list(target.shape)
        if shape != expected or dtype not in ("F64", "F32", "F16", "BF16"):
            return f"{self.name} {shape} {dtype} (expected {expected}, F64, F32, F16 or BF16)"


@torch.no_grad()
def load_weights(model, directory):
    """Fill the model's parameters from model.safetensors, or from the shards of model.safetensors.index.json.

    Tensors are read and converted one by one, straight into the parameters. Before the first is copied, all
    are checked: every tensor is used once and every parameter filled, or ValueError names what is unknown,
    missing, there twice or of another shape. Raises FileNotFoundError, naming the file, where one is missing.
    """
    directory, targets = Path(directory), _targets(model)
    with ExitStack() as files:
        tensors = _stored_tensors(directory, model.config.family, files)
        embedding = tensors.get(FORMATS[model.config.family][0]["token_embedding"][0] + ".weight")
        head = tensors.pop("lm_head.weight", None) if model.config.tie_embeddings else None
        _refuse(directory, "unknown tensors", tensors.keys() - targets.keys())
        _refuse(directory, "missing tensors", targets.keys() - tensors.keys())
        misfits = [tensors[name].misfit(target) for name, target in targets.items()]
        _refuse(directory, "tensors that do not fit", filter(None, misfits))
        if head and not torch.equal(head.read(), embedding.read()):
            raise ValueError(f"{directory}: {head.name} is not {embedding.name}, though tie_word_embeddings=True")
        for name, target in targets.items():
            target.copy_(tensors[name].read())


def _targets(model):
    """{name in the checkpoint: the part of a parameter that it fills}, views of the shape that is stored."""
    config = model.config
    modules = FORMATS[config.family][0]
    rows = {"preproj": [heads * config.head_dim for heads in (config.n_head, config.n_kv_head, config.n_kv_head)],
            "ffn_ln1": [config.n_inner, config.n_inner]}
    targets = {}
    for name, parameter in model.named_parameters():
        *block, module, kind = name.split(".")  # "blocks", "3", "preproj", "weight"
        sources = modules[module]
        parts = parameter.split(rows[module]) if len(sources) > 1 else [parameter]
        for source, part in zip(sources, parts, strict=True):
            if config.family == "gpt2" and block and part.ndim == 2:
                part = part.T  # GPT-2's layers are stored as (in, out)
            targets[f"{source.format(*block[1:])}.{kind}"] = part
    return targets


def _stored_tensors(directory, family, files):
    """{name without prefix: Stored} of all tensors that hold weights; the files are closed with `files`."""
    _, prefix, no_weights = FORMATS[family]
    tensors, twice = {}, []
    for path, promised in _shards(directory).items():
        try:
            file = files.enter_context(safe_open(path, framework="pt"))
        except SafetensorError as error:
            raise ValueError(f"{path}: not a safetensors file: {error}") from error
        if promised is not None:
            _refuse(path, "tensors that only the file or only the index has", promised ^ set(file.keys()))
        for name in file.keys():
            short = name.removeprefix(prefix)
            if short in tensors:
                twice.append(short)
            if not no_weights.fullmatch(short):
                tensors[short] = Stored(file, name)
    _refuse(directory, "tensors that are there twice", twice)
    return tensors


def _shards(directory):
    """{file: the names that the index promises in it, None without an index}. Raises if there is none."""
    single, index = directory / "model.safetensors", directory / "model.safetensors.index.json"
    if single.is_file():
        return {single: None}
    if index.is_file():
        shards = {}
        for name, shard in read_json(index).get("weight_map", {}).items():
            shards.setdefault(directory / shard, set()).add(name)
        return shards
    pickles = sorted(path.name for pattern in ("*.bin", "*.pt", "*.pth") for path in directory.glob(pattern))
    if pickles:
        raise ValueError(f"{directory}: {', '.join(pickles)}: pickles are not read, safetensors is supported")
    raise FileNotFoundError(f"{directory}: neither model.safetensors nor model.safetensors.index.json is there")


def _refuse(where, problem, names):
    """Raise ValueError if there are any `names`, with how many and the first few."""
    names = sorted(names)
    if names:
        shown = ", ".join(names[:5]) + (", …" if len(names) > 5 else "")
        raise ValueError(f"{where}: {len(names)} {problem}: {shown}")
