"""Checkpoints in the Hugging Face format: config.json and model.safetensors -> our GPT.

What the model cannot compute exactly is refused. Read first: model.py, whose `from_pretrained`
calls find, read_config and load_weights. Read next: tokenizers.py.
"""

import re
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Literal

import torch
from pydantic import AliasChoices, BaseModel, ConfigDict, Field, ValidationError
from safetensors import SafetensorError, safe_open

from checks import shown
from model import GPTConfig, RopeScaling

# What is downloaded: no pickles, and no second copy of the weights (consolidated.safetensors).
HUB_FILES = """config.json generation_config.json model*.safetensors model.safetensors.index.json
    tokenizer.json tokenizer.model original/tokenizer.model""".split()


def find(name):
    """The directory of a checkpoint: `name` itself if it is one, else the Hub's files of that name.
    Raises FileNotFoundError, which says what to put where, if it is neither here nor there."""
    try:
        directory = Path(name).expanduser()
        if directory.is_dir():
            return directory
        from huggingface_hub import snapshot_download  # a directory needs no Hub

        return Path(snapshot_download(str(name), allow_patterns=HUB_FILES))
    except (OSError, ValueError, RuntimeError) as error:  # RuntimeError: ~nobody
        raise FileNotFoundError(
            f"{str(name)!r}: no directory here, and not to be had from the Hub "
            f"({type(error).__name__}). Give a directory with config.json, model.safetensors (or "
            "its shards and their index) and tokenizer.json, or try again with a network"
        ) from error


class Schema(BaseModel):
    """What is read of a JSON object, in exact types; what else it holds is passed over."""

    model_config = ConfigDict(strict=True, validate_by_name=True)

    @classmethod
    def read(cls, path):
        """Raises OSError or ValueError, naming the file and the first key that is wrong, its value
        and what is allowed."""
        try:
            return cls.model_validate_json(path.read_bytes())
        except ValidationError as error:
            wrong = error.errors()[0]
        problem = re.sub(r"^\w+ should", "must", wrong["msg"])
        names = [key for key in wrong["loc"] if str(key).isidentifier()]  # others are places, types
        if names:
            value = "" if wrong["type"] == "missing" else f"={shown(wrong['input'])}"
            problem = f"{names[-1]}{value}: {problem}"
        raise ValueError(f"{path}: {problem}")


# config.json -> GPTConfig

Size = Annotated[int, Field(ge=1, le=2**22)]  # what is larger was never published
Count = Annotated[int, Field(ge=1, le=2**12)]
TokenId = Annotated[int, Field(ge=0, le=2**22)]
Positive = Annotated[float, Field(ge=1e-20, le=1e20)]
either = lambda llama, gpt2: Field(alias=llama, validation_alias=AliasChoices(llama, gpt2))


class Rope(Schema, extra="forbid"):
    """The rotation: one rule for all layers, and no option that is not known."""

    rope_type: Literal["default", "llama3"] | None = None
    type: Literal["default", "llama3"] | None = None  # its name in old files
    rope_theta: Positive | None = None
    partial_rotary_factor: Literal[1] | None = None
    factor: Positive | None = None
    low_freq_factor: Positive | None = None
    high_freq_factor: Positive | None = None
    original_max_position_embeddings: Size | None = None


class ModelFile(Schema):
    """config.json: GPTConfig's fields by LLaMA's names or GPT-2's, then what has one way only."""

    model_type: Literal["gpt2", "llama", "mistral", "qwen2", "qwen3"]
    vocab_size: Size
    n_layer: Count = Field(alias="num_hidden_layers")
    n_head: Count = Field(alias="num_attention_heads")
    n_kv_head: Count | None = Field(None, alias="num_key_value_heads")
    head_dim: Count | None = None
    n_embd: Size = Field(alias="hidden_size")
    n_inner: Size | None = Field(None, alias="intermediate_size")
    max_positions: Size = either("max_position_embeddings", "n_positions")
    norm_eps: Positive = either("rms_norm_eps", "layer_norm_epsilon")
    tie_embeddings: bool | None = Field(None, alias="tie_word_embeddings")
    rope_theta: Positive = 10000.0
    rope_parameters: Rope | None = None
    rope: Rope | None = Field(None, alias="rope_scaling")  # what they were in transformers 4
    sliding_window: Size | None = 4096
    use_sliding_window: bool | None = None
    layer_types: list[Literal["full_attention", "sliding_attention"]] | None = None
    partial_rotary_factor: Literal[1] | None = None
    hidden_act: Literal["silu"] = "silu"
    activation_function: Literal["gelu_new", "gelu_pytorch_tanh"] = "gelu_new"
    attention_bias: Literal[False] = False
    mlp_bias: Literal[False] = False
    scale_attn_weights: Literal[True] = True
    scale_attn_by_inverse_layer_idx: Literal[False] = False
    add_cross_attention: Literal[False] = False
    quantization_config: None = None


def read_config(directory):
    """The GPTConfig of a checkpoint, from config.json as transformers 4 or 5 writes it. A sliding
    window is not computed but respected: up to its length it changes nothing, so `max_positions`
    ends there. Raises FileNotFoundError, or ValueError, naming the option, its value and what is
    supported, for a model that is not computed here."""
    path = Path(directory) / "config.json"
    file = ModelFile.read(path)
    kind, config = file.model_type, file.model_dump(include=set(GPTConfig.__dataclass_fields__))
    family = "gpt2" if kind == "gpt2" else "llama"
    config |= dict(family=family, qkv_bias=kind == "qwen2", qk_norm=kind == "qwen3")
    if file.tie_embeddings is None:
        config["tie_embeddings"] = kind == "gpt2"
    slides = file.use_sliding_window or "sliding_attention" in (file.layer_types or ())
    if file.sliding_window and (slides or kind == "mistral"):
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


# model.safetensors -> the model's parameters

# What we, GPT-2 and LLaMA call the modules; several names fill the rows of one matrix.
MODULES = [
    ("blocks", "h", "layers"),
    ("token_embedding", "wte", "embed_tokens"),
    ("position_embedding", "wpe", ""),
    ("attn_norm", "ln_1", "input_layernorm"),
    ("preproj", "attn.c_attn", "self_attn.q_proj self_attn.k_proj self_attn.v_proj"),
    ("q_norm", "", "self_attn.q_norm"),
    ("k_norm", "", "self_attn.k_norm"),
    ("postproj", "attn.c_proj", "self_attn.o_proj"),
    ("ffn_norm", "ln_2", "post_attention_layernorm"),
    ("ffn_ln1", "mlp.c_fc", "mlp.gate_proj mlp.up_proj"),
    ("ffn_ln2", "mlp.c_proj", "mlp.down_proj"),
    ("final_norm", "ln_f", "norm"),
    ("head", "lm_head", "lm_head"),
]
FLOATS = ("F64", "F32", "F16", "BF16")
NO_WEIGHTS = r"h\.\d+\.attn\.(masked_)?bias|(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq"


@torch.no_grad()
def load_weights(model, directory, device=None):
    """Fill the model's parameters from model.safetensors, or from the shards of its index. Tensors
    are read and converted one by one, straight into the parameters, after all are checked (only
    then is a model on "meta" given memory, on `device`). Raises FileNotFoundError, naming the file,
    or ValueError, naming what is unknown, missing, there twice, misshapen or not finite."""
    directory, targets = Path(directory), _targets(model)
    with ExitStack() as files:
        tensors = _stored_tensors(directory, files)
        head = tensors.pop("lm_head.weight", None) if model.config.tie_embeddings else None
        _refuse(directory, "unknown tensors", tensors.keys() - targets.keys())
        _refuse(directory, "missing tensors", targets.keys() - tensors.keys())
        misfits = []
        for name, target in targets.items():
            file, stored = tensors[name]
            header, expected = file.get_slice(stored), list(target.shape)
            shape, dtype = header.get_shape(), header.get_dtype()
            if shape != expected or dtype not in FLOATS:
                misfits.append(
                    f"{stored} {shape} {dtype} (expected {expected}, {' or '.join(FLOATS)})"
                )
        _refuse(directory, "tensors that do not fit", misfits)
        embedding = tensors[next(iter(targets))]  # the first of all parameters
        if head and not torch.equal(*(file.get_tensor(name) for file, name in (head, embedding))):
            problem = f"{head[1]} is not {embedding[1]}, though tie_word_embeddings=True"
            raise ValueError(f"{directory}: {problem}")
        if model.device.type == "meta":
            targets = _targets(model.to_empty(device=device))
        for name, target in targets.items():
            file, stored = tensors[name]
            target.copy_(file.get_tensor(stored))
            # a sum takes one fast pass over what was just written; it may overflow in 16 bits
            if not target.sum().isfinite() and not target.isfinite().all():
                raise ValueError(f"{directory}: {name} holds NaN or infinity as {target.dtype}")


def _targets(model):
    """{name in the checkpoint: the part of a parameter that it fills}, views of stored shapes."""
    config, targets = model.config, {}
    modules = {ours: gpt2 if config.family == "gpt2" else llama for ours, gpt2, llama in MODULES}
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


class Index(Schema):
    weight_map: dict[str, Annotated[str, Field(pattern=r"^[\w.-]+\.safetensors$")]]


def _stored_tensors(directory, files):
    """{name without prefix: (open file, name)} of all weights; closed with `files`."""
    single, index = directory / "model.safetensors", directory / "model.safetensors.index.json"
    tensors, shards = {}, {single: ()}  # the file: all names that the index promises in it
    if index.is_file() and not single.is_file():
        file_of, shards = Index.read(index).weight_map, {}
        for name, file in file_of.items():
            shards.setdefault(directory / file, set()).add(name)
    for path, names in shards.items():
        if not path.is_file():
            found = () if names else directory.iterdir()
            pickles = [its.name for its in found if its.suffix in (".bin", ".pt", ".pth")]
            _refuse(directory, "pickles, of which none is read, and no safetensors", pickles)
            raise FileNotFoundError(f"{path}: not there, or not a file")
        try:
            file = files.enter_context(safe_open(path, framework="pt"))
        except SafetensorError as error:
            raise ValueError(f"{path}: not a safetensors file: {str(error)!r}") from error
        differ = names ^ set(file.keys()) if names else ()
        _refuse(path, "tensors that only the file or only the index has", differ)
        for name in file.keys():
            short = re.sub(r"^(transformer|model)\.", "", name)  # as some files have it
            if short in tensors:
                raise ValueError(f"{path}: {short} is there twice")
            if not re.fullmatch(NO_WEIGHTS, short):
                tensors[short] = (file, name)
    return tensors


def _refuse(where, problem, names):
    """Raise ValueError if there are any `names`, with how many and the first few."""
    names = sorted(names)
    if names:
        few = repr(", ".join(names[:5]))[1:-1] + (", …" if len(names) > 5 else "")
        raise ValueError(f"{where}: {len(names)} {problem}: {few}")
