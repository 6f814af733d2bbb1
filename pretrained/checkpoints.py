"""Checkpoints in the Hugging Face format: config.json and model.safetensors -> our GPT.

Three steps, which GPT.from_pretrained takes one after the other:

    directory = find("path/or/hub-name")
    model = GPT(read_config(directory), seed=None)
    load_weights(model, directory)

What the model cannot compute exactly is refused: another architecture, an option that changes
what is computed, a tensor that would not be used, a part of a parameter that would not be filled.

Read first: model.py, whose parameters are filled here. Read next: tokenizers.py.
"""

import json
import re
from contextlib import ExitStack
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from model import GPTConfig, RopeScaling

# What is downloaded: no pickles, and no second copy of the weights (consolidated.safetensors).
HUB_FILES = """config.json generation_config.json model*.safetensors model.safetensors.index.json
    tokenizer.json tokenizer.model original/tokenizer.model vocab.json merges.txt""".split()


def find(name):
    """The directory of a checkpoint: `name` itself if it is one, else the Hub's files of that name.

    Raises FileNotFoundError, which says what to put where, if it is neither here nor on the Hub.
    """
    directory = Path(name).expanduser()
    if directory.is_dir():
        return directory
    from huggingface_hub import snapshot_download  # a directory needs no Hub

    try:
        return Path(snapshot_download(str(name), allow_patterns=HUB_FILES))
    except (OSError, ValueError) as error:
        raise FileNotFoundError(
            f"{str(name)!r}: not a directory here, and not to be had from the Hub "
            f"({type(error).__name__}). Put config.json, model.safetensors (or "
            "model.safetensors.index.json and its shards) and tokenizer.json into a directory and "
            "give its path, or try again with a network"
        ) from error


def read_json(path):
    """The object in a JSON file. Raises FileNotFoundError or ValueError, naming the file."""
    if not path.is_file():
        needed = "a checkpoint is config.json and model.safetensors"
        raise FileNotFoundError(f"{path}: not there; {needed}")
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: not JSON: {error}") from error
    if not isinstance(stored, dict):
        raise ValueError(f"{path}: must hold a JSON object, not {type(stored).__name__}")
    return stored


# --------------------------------------------------------------------------------------------------
# config.json -> GPTConfig

# option of config.json: (field of GPTConfig, what transformers assumes where it is not given)
GPT2_FIELDS = {
    "vocab_size": ("vocab_size", 50257),
    "n_layer": ("n_layer", 12),
    "n_head": ("n_head", 12),
    "n_embd": ("n_embd", 768),
    "n_inner": ("n_inner", None),
    "n_positions": ("max_positions", 1024),
    "layer_norm_epsilon": ("norm_eps", 1e-5),
    "tie_word_embeddings": ("tie_embeddings", True),
}
# the same for llama, mistral, qwen2
LLAMA_FIELDS = {
    "vocab_size": ("vocab_size", 32000, 32000, 151936),
    "num_hidden_layers": ("n_layer", 32, 32, 32),
    "num_attention_heads": ("n_head", 32, 32, 32),
    "num_key_value_heads": ("n_kv_head", None, 8, 32),
    "head_dim": ("head_dim", None, None, None),
    "hidden_size": ("n_embd", 4096, 4096, 4096),
    "intermediate_size": ("n_inner", 11008, 14336, 22016),
    "max_position_embeddings": ("max_positions", 2048, 131072, 32768),
    "sliding_window": ("sliding_window", None, 4096, 4096),
    "rms_norm_eps": ("norm_eps", 1e-6, 1e-6, 1e-6),
    "rope_theta": ("rope_theta", 10000.0, 10000.0, 10000.0),
    "tie_word_embeddings": ("tie_embeddings", False, False, False),
}
# model_type: (its fields, their column, options that change what is computed and what we compute)
_GPT2 = dict(scale_attn_weights=(True,), scale_attn_by_inverse_layer_idx=(False,))
_GPT2 |= dict(activation_function=("gelu_new", "gelu_pytorch_tanh"), add_cross_attention=(False,))
_LLAMA = dict(hidden_act=("silu",), attention_bias=(False,), mlp_bias=(False,))
MODEL_TYPES = {
    "gpt2": (GPT2_FIELDS, 1, _GPT2),
    "llama": (LLAMA_FIELDS, 1, _LLAMA),
    "mistral": (LLAMA_FIELDS, 2, dict(hidden_act=("silu",))),
    "qwen2": (LLAMA_FIELDS, 3, dict(hidden_act=("silu",))),
}


def read_config(directory):
    """The GPTConfig of a checkpoint, from config.json as transformers 4 or 5 writes it.

    A sliding window is not computed but respected: up to its length it changes nothing, so
    `max_positions` ends there. Raises FileNotFoundError without a config.json, and ValueError,
    naming the option, its value and what is supported, for a model that is not computed here.
    """
    path = Path(directory) / "config.json"
    stored = read_json(path)
    model_type = stored.get("model_type")
    _require(path, {"model_type": model_type}, model_type=tuple(MODEL_TYPES))
    fields, column, supported = MODEL_TYPES[model_type]
    _require(path, stored, quantization_config=(None,), **supported)
    c = {option: row[column] for option, row in fields.items()} | stored
    geometry = {row[0]: c[option] for option, row in fields.items()}
    if model_type == "gpt2":
        return GPTConfig("gpt2", **geometry)
    window, layer_types = geometry.pop("sliding_window"), c.get("layer_types") or ()
    slides = c.get("use_sliding_window") or "sliding_attention" in layer_types
    if window and (slides or model_type == "mistral"):
        geometry["max_positions"] = min(geometry["max_positions"], window)
    geometry["rope_theta"], geometry["rope_scaling"] = _read_rope(path, c)
    return GPTConfig("llama", qkv_bias=model_type == "qwen2", **geometry)


def _require(path, options, **allowed):
    """Raise ValueError unless every option, where it is given, has one of its allowed values."""
    for option, values in allowed.items():
        if option in options and options[option] not in values:
            problem = f"{option}={options[option]!r} is not supported"
            raise ValueError(f"{path}: {problem}, it must be {' or '.join(map(repr, values))}")


def _read_rope(path, c):
    """(rope_theta, RopeScaling or None), from `rope_parameters` or from `rope_scaling`."""
    rope = c.get("rope_scaling") or c.get("rope_parameters") or {}
    rope = {
        "rope_type": rope.get("type", "default"),
        "rope_theta": c["rope_theta"],
        "original_max_position_embeddings": c["max_position_embeddings"],
        "partial_rotary_factor": c.get("partial_rotary_factor") or 1.0,
    } | rope
    _require(path, rope, rope_type=("default", "llama3"), partial_rotary_factor=(1.0,))
    if rules := ", ".join(key for key, value in rope.items() if isinstance(value, dict)):
        raise ValueError(f"{path}: rope_parameters of {rules}: only one rule is supported")
    if rope["rope_type"] == "default":
        return rope["rope_theta"], None
    scaling = "factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"
    if missing := ", ".join(option for option in scaling if option not in rope):
        raise ValueError(f"{path}: rope_type='llama3' needs {missing}")
    return rope["rope_theta"], RopeScaling(*(rope[option] for option in scaling))


# --------------------------------------------------------------------------------------------------
# model.safetensors -> the model's parameters

# What we, GPT-2 and LLaMA call the modules; several names fill the rows of one matrix.
MODULES = [
    ("blocks", "h", "layers"),
    ("token_embedding", "wte", "embed_tokens"),
    ("position_embedding", "wpe", ""),
    ("attn_norm", "ln_1", "input_layernorm"),
    ("preproj", "attn.c_attn", "self_attn.q_proj self_attn.k_proj self_attn.v_proj"),
    ("postproj", "attn.c_proj", "self_attn.o_proj"),
    ("ffn_norm", "ln_2", "post_attention_layernorm"),
    ("ffn_ln1", "mlp.c_fc", "mlp.gate_proj mlp.up_proj"),
    ("ffn_ln2", "mlp.c_proj", "mlp.down_proj"),
    ("final_norm", "ln_f", "norm"),
    ("head", "lm_head", "lm_head"),
]
_NO_GPT2_WEIGHTS = r"h\.\d+\.attn\.(masked_)?bias"
_NO_LLAMA_WEIGHTS = r"(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq"
# family: (modules, a prefix that names may have, a pattern for masks and frequencies: no weights)
FORMATS = {
    "gpt2": ({row[0]: row[1] for row in MODULES}, "transformer.", _NO_GPT2_WEIGHTS),
    "llama": ({row[0]: row[2] for row in MODULES}, "model.", _NO_LLAMA_WEIGHTS),
}


@torch.no_grad()
def load_weights(model, directory):
    """Fill the model's parameters from model.safetensors, or from the shards of its index.

    Tensors are read and converted one by one, straight into the parameters, after all are checked:
    every tensor is used once and every parameter filled, or ValueError names what is unknown,
    missing, there twice or misshapen. Raises FileNotFoundError, naming a file that is missing.
    """
    directory, family, targets = Path(directory), model.config.family, _targets(model)
    with ExitStack() as files:
        tensors = _stored_tensors(directory, family, files)
        head = tensors.pop("lm_head.weight", None) if model.config.tie_embeddings else None
        _refuse(directory, "unknown tensors", tensors.keys() - targets.keys())
        _refuse(directory, "missing tensors", targets.keys() - tensors.keys())
        misfits = [_misfit(*tensors[name], target) for name, target in targets.items()]
        _refuse(directory, "tensors that do not fit", filter(None, misfits))
        embedding = tensors[FORMATS[family][0]["token_embedding"] + ".weight"]
        if head and not torch.equal(*(file.get_tensor(name) for file, name in (head, embedding))):
            problem = f"{head[1]} is not {embedding[1]}, though tie_word_embeddings=True"
            raise ValueError(f"{directory}: {problem}")
        for name, target in targets.items():
            file, stored = tensors[name]
            target.copy_(file.get_tensor(stored))


def _misfit(file, name, target):
    """A message if a tensor, by its header, cannot be copied into `target`, else None."""
    header = file.get_slice(name)
    shape, dtype, expected = header.get_shape(), header.get_dtype(), list(target.shape)
    if shape != expected or dtype not in ("F64", "F32", "F16", "BF16"):
        return f"{name} {shape} {dtype} (expected {expected}, F64, F32, F16 or BF16)"


def _targets(model):
    """{name in the checkpoint: the part of a parameter that it fills}, views of stored shapes."""
    config, modules, targets = model.config, FORMATS[model.config.family][0], {}
    q, kv = config.n_head * config.head_dim, config.n_kv_head * config.head_dim
    rows = {"preproj": [q, kv, kv], "ffn_ln1": [config.n_inner, config.n_inner]}
    for name, parameter in model.named_parameters():
        *block, module, kind = name.split(".")  # "blocks", "3", "preproj", "weight"
        sources = modules[module].split()
        parts = parameter.split(rows[module] if len(sources) > 1 else len(parameter))
        for source, part in zip(sources, parts, strict=True):
            if config.family == "gpt2" and block and part.ndim == 2:
                part = part.T  # GPT-2's layers are stored as (in, out)
            targets[".".join([*block, source, kind]).replace("blocks", modules["blocks"])] = part
    return targets


def _stored_tensors(directory, family, files):
    """{name without prefix: (open file, name)} of all weights; closed with `files`."""
    _, prefix, no_weights = FORMATS[family]
    tensors, twice = {}, []
    for path, promised in _shards(directory).items():
        try:
            file = files.enter_context(safe_open(path, framework="pt"))
        except SafetensorError as error:
            raise ValueError(f"{path}: not a safetensors file: {error}") from error
        differ = set() if promised is None else promised ^ set(file.keys())
        _refuse(path, "tensors that only the file or only the index has", differ)
        for name in file.keys():
            short = name.removeprefix(prefix)
            if short in tensors:
                twice.append(short)
            if not re.fullmatch(no_weights, short):
                tensors[short] = (file, name)
    _refuse(directory, "tensors that are there twice", twice)
    return tensors


def _shards(directory):
    """{file: the names that the index promises in it, None without an index}."""
    single, index = directory / "model.safetensors", directory / "model.safetensors.index.json"
    if single.is_file():
        return {single: None}
    if index.is_file():
        shards = {}
        for name, shard in read_json(index).get("weight_map", {}).items():
            shards.setdefault(directory / shard, set()).add(name)
        return shards
    names = sorted(path.name for path in directory.iterdir())
    if pickles := ", ".join(n for n in names if n.endswith((".bin", ".pt", ".pth"))):
        raise ValueError(f"{directory}: {pickles}: pickles are not read, safetensors is supported")
    raise FileNotFoundError(f"{directory}: neither {single.name} nor {index.name} is there")


def _refuse(where, problem, names):
    """Raise ValueError if there are any `names`, with how many and the first few."""
    names = sorted(names)
    if names:
        shown = ", ".join(names[:5]) + (", …" if len(names) > 5 else "")
        raise ValueError(f"{where}: {len(names)} {problem}: {shown}")
