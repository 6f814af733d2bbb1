"""A GGUF file gives the logits of the model that it was made of, and tokens as its metadata says.

A real file is read in test_real_model.py."""

import gguf
import numpy as np
import pytest
import torch
from transformers.convert_slow_tokenizer import bytes_to_unicode

from model import GPT
from pretrained import checkpoints
from pretrained.gguf_file import read_gguf
from pretrained.tokenizers import load_tokenizer
from tests.test_checkpoints import TOLERANCE, all_logits, make, prompt, reference_logits

ARCHITECTURES = {
    "llama": "llama",
    "llama tied": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
}
LETTERS = bytes_to_unicode()  # of byte-level BPE
BYTES = [LETTERS[byte] for byte in range(32, 124)]
TOKENS = ["<s>", "<|end|>", "<tool>", *BYTES, "he", "ll"]
BOS = 0
EOS = 1
TOOL = 2
CONTROL = 3
USER_DEFINED = 4
NORMAL = 1
TEMPLATE = "{{ bos_token }}{% for m in messages %}[{{ m.content }}]{% endfor %}"


def metadata_of(config, architecture):
    """The metadata that llama.cpp's converter writes, {key: value}."""
    head_dim = getattr(config, "head_dim", None)
    sizes = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": head_dim or config.hidden_size // config.num_attention_heads,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "rope.freq_base": config.rope_parameters["rope_theta"],
    }
    return {
        "general.architecture": architecture,
        **{f"{architecture}.{key}": value for key, value in sizes.items()},
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": TOKENS,
        "tokenizer.ggml.token_type": [CONTROL, CONTROL, USER_DEFINED, *[NORMAL] * 94],
        "tokenizer.ggml.merges": ["h e", "l l"],
        "tokenizer.ggml.bos_token_id": BOS,
        "tokenizer.ggml.eos_token_id": EOS,
        "tokenizer.chat_template": TEMPLATE,
    }


def tensors_of(model, architecture):
    """The tensors of transformers' model as llama.cpp's converter writes them, {name: array}."""
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[architecture.upper()], 2)
    tensors = {}
    for name, tensor in model.state_dict().items():
        module, kind = name.rsplit(".", 1)
        if architecture == "llama" and module.endswith(("q_proj", "k_proj")):
            rows = tensor.unflatten(0, (-1, 2, 4))  # (heads, halves, head_dim / 2, inputs)
            tensor = rows.transpose(1, 2).reshape(tensor.shape)
        if module != "lm_head" or not model.config.tie_word_embeddings:
            tensors[f"{names[module]}.{kind}"] = tensor.numpy()
    return tensors


@pytest.fixture
def save(tmp_path):
    """save(kind) -> a file by the package's writer, maybe with some metadata or tensors `changed`;
    what is None is left out."""

    def save(kind="llama", changed=None):
        model = make(kind)
        architecture = ARCHITECTURES[kind]
        content = metadata_of(model.config, architecture) | tensors_of(model, architecture)
        writer = gguf.GGUFWriter(tmp_path / "model.gguf", architecture)
        for name, value in (content | (changed or {})).items():
            if isinstance(value, np.ndarray):
                writer.add_tensor(name, np.ascontiguousarray(value))
            elif value is not None:
                writer.add_key_value(name, value, gguf.GGUFValueType.get_type(value))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        read_gguf.cache_clear()
        return tmp_path / "model.gguf"

    return save


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_logits_equal_transformers(save, kind):
    model = GPT.from_pretrained(save(kind))
    tokens = prompt(model)
    expected = reference_logits(make(kind), tokens)
    torch.testing.assert_close(all_logits(model, tokens), expected, **TOLERANCE)


PRE = "tokenizer.ggml.pre"
ADD_BOS = "tokenizer.ggml.add_bos_token"
WHOLE = {"tokenizer.ggml.tokens": [*TOKENS[:-3], "eh", "he", "ll"]}
TWELVE = {"tokenizer.ggml.tokens": [*TOKENS[:-1], "12"], "tokenizer.ggml.merges": ["1 2"]}
ENCODED = [  # metadata, a text, its tokens
    ({}, "hell 12", "he ll Ġ 1 2"),
    ({}, "<s>he<|end|><tool>", "<s> he <|end|> <tool>"),
    ({ADD_BOS: True}, "he", "<s> he"),
    ({PRE: "llama-bpe"}, "he", "<s> he"),  # llama.cpp's default there
    (WHOLE | {PRE: "llama-bpe"}, "eh", "<s> eh"),  # a word that is a token is not merged
    (WHOLE, "eh", "e h"),
    (TWELVE | {PRE: "gpt-2"}, "12", "12"),
    (TWELVE | {PRE: "llama-bpe", ADD_BOS: False}, "12", "12"),
    (TWELVE | {PRE: "smollm"}, "12", "1 2"),
    (TWELVE | {PRE: "qwen2"}, "12", "1 2"),
]


def spelled(ids, tokens=TOKENS):
    return " ".join(tokens[token_id] for token_id in ids)


@pytest.mark.parametrize("changed, text, expected", ENCODED)
def test_texts_are_encoded_as_the_metadata_says(save, changed, text, expected):
    ids = load_tokenizer(save(changed=changed)).encode(text)
    assert spelled(ids, changed.get("tokenizer.ggml.tokens", TOKENS)) == expected


def test_the_tokens_and_the_template_are_those_of_the_metadata(save):
    file = save(changed={"tokenizer.ggml.eot_token_id": TOOL})
    tokenizer = load_tokenizer(file)
    prompt = tokenizer.encode_chat([{"role": "user", "content": "he"}])
    assert spelled(prompt) == "<s> [ he ]"
    assert tokenizer.decode(prompt) == "[he]"  # a control token has no text
    assert tokenizer.stop_token_ids == {EOS, TOOL}
    assert tokenizer.special_tokens == {"<s>": BOS, "<|end|>": EOS, "<tool>": TOOL}


def test_positions_end_where_a_window_would_slide(save):
    file = save(changed={"llama.attention.sliding_window": 24})
    assert checkpoints.read_config(file).max_positions == 24


@pytest.mark.parametrize("end", ["<|im_end|>", "<|eot_id|>", "<end_of_turn>", "<|end|>"])
def test_a_turn_ends_where_its_metadata_calls_the_end_an_ordinary_token(save, end):
    changed = {
        "tokenizer.ggml.tokens": ["<|endoftext|>", end, *TOKENS[2:]],
        "tokenizer.ggml.token_type": [CONTROL] + [NORMAL] * 96,
        "tokenizer.ggml.eos_token_id": 0,
    }
    tokenizer = load_tokenizer(save(changed=changed))
    assert tokenizer.stop_token_ids == {0, 1}
    ids = tokenizer.encode(f"he{end}")
    assert ids[1:] == [1]
    assert tokenizer.decode(ids) == "he"


REFUSED = [  # metadata or a tensor, what is named
    ({"general.architecture": "mamba"}, "general.architecture"),
    ({"llama.rope.scaling.type": "yarn"}, "rope.scaling.type"),
    ({"llama.attention.value_length": 4}, "attention.value_length"),
    ({"llama.rope.dimension_count": 4}, "rope.dimension_count"),
    ({"blk.1.ffn_up.weight": None}, "blk.1.ffn_up.weight"),
    ({"rope_freqs.weight": np.ones(4, "f")}, "rope_freqs.weight"),
    ({"output_norm.weight": np.ones(31, "f")}, "final_norm.weight"),
]


@pytest.mark.parametrize("changed, named", REFUSED)
def test_a_model_that_is_not_known_is_refused_by_name(save, changed, named):
    with pytest.raises((ValueError, KeyError, RuntimeError), match=named):
        GPT.from_pretrained(save(changed=changed))


@pytest.mark.parametrize("key, value", [("model", "llama"), ("pre", "tekken"), ("pre", None)])
def test_a_tokenizer_that_is_not_known_is_refused_by_name(save, key, value):
    with pytest.raises(ValueError, match=f"tokenizer.ggml.{key}"):
        load_tokenizer(save(changed={f"tokenizer.ggml.{key}": value}))


def test_a_file_is_read_once(save):
    file = str(save())
    GPT.from_pretrained(file)
    load_tokenizer(file)
    assert read_gguf.cache_info().misses == 1
