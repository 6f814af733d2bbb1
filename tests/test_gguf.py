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
from tests.test_checkpoints import all_logits, make, prompt, reference_logits

KINDS = {"llama": "llama", "llama tied": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}
LETTERS = bytes_to_unicode()  # of byte-level BPE
TOKENS = [
    "<s>",
    "<|end|>",
    "<tool>",
    *(LETTERS[byte] for byte in range(32, 124)),
    "he",
    "ll",
]  # 97, of the bytes ASCII
TYPES = [3, 3, 4, *[1] * 94]
TEMPLATE = "{{ bos_token }}{% for m in messages %}[{{ m.content }}]{% endfor %}"


def permuted(weight, heads):
    """As llama.cpp's converter writes the rows of queries and keys of a LLaMA."""
    parts = weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:])
    return parts.swapaxes(1, 2).reshape(weight.shape)


def metadata_of(config, architecture):
    """The metadata that llama.cpp's converter writes, {key: value}."""
    head_dim = config.hidden_size // config.num_attention_heads
    if architecture == "qwen3":
        head_dim = config.head_dim
    sizes = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": head_dim,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "rope.freq_base": float(config.rope_parameters["rope_theta"]),
    }
    return {
        "general.architecture": architecture,
        **{f"{architecture}.{key}": value for key, value in sizes.items()},
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": TOKENS,
        "tokenizer.ggml.token_type": TYPES,
        "tokenizer.ggml.merges": ["h e", "l l"],
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.chat_template": TEMPLATE,
    }


def tensors_of(model, architecture):
    """The tensors of transformers' model as llama.cpp's converter writes them, {name: array}."""
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[architecture.upper()], 2)
    heads = {"q_proj": model.config.num_attention_heads}
    heads["k_proj"] = model.config.num_key_value_heads
    tensors = {}
    for name, tensor in model.state_dict().items():
        module, kind = name.rsplit(".", 1)
        array = tensor.numpy()
        part = module.split(".")[-1]
        if architecture == "llama" and part in heads:
            array = permuted(array, heads[part])
        if part != "lm_head" or not model.config.tie_word_embeddings:
            tensors[f"{names[module]}.{kind}"] = array
    return tensors


def write(path, metadata, tensors, quantisation):
    """A GGUF file, by the package's writer. Matrices are quantised."""
    writer = gguf.GGUFWriter(path, metadata["general.architecture"])
    adders = {bool: "bool", int: "uint32", float: "float32", str: "string", list: "array"}
    for key, value in metadata.items():
        if key != "general.architecture":
            getattr(writer, f"add_{adders[type(value)]}")(key, value)
    for name, array in tensors.items():
        if quantisation is not None and array.ndim == 2 and array.shape[1] % 32 == 0:
            blocks = gguf.quants.quantize(array, quantisation)
            writer.add_tensor(name, blocks, raw_dtype=quantisation)
        else:
            writer.add_tensor(name, np.ascontiguousarray(array))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture
def save(tmp_path):
    """save(kind, quantisation, **metadata) -> a file; a key whose value is None is left out."""

    def save(kind="llama", quantisation=None, changed=None, tensors=None):
        model = make(kind)
        architecture = KINDS[kind]
        metadata = metadata_of(model.config, architecture) | (changed or {})
        metadata = {key: value for key, value in metadata.items() if value is not None}
        stored = tensors_of(model, architecture) | (tensors or {})
        stored = {name: array for name, array in stored.items() if array is not None}
        read_gguf.cache_clear()
        return write(tmp_path / "model.gguf", metadata, stored, quantisation)

    return save


@pytest.mark.parametrize("kind", KINDS)
def test_logits_equal_transformers(save, kind):
    model = GPT.from_pretrained(save(kind))
    tokens = prompt(model)
    expected = reference_logits(make(kind), tokens)
    torch.testing.assert_close(all_logits(model, tokens), expected, rtol=0, atol=2e-5)


@pytest.mark.parametrize("name", ["BF16", "Q4_1"])
def test_a_quantised_matrix_is_what_the_package_makes_of_it(save, name):
    quantisation = gguf.GGMLQuantizationType[name]
    file = save("qwen3", quantisation)
    embedding = make("qwen3").state_dict()["model.embed_tokens.weight"].numpy()
    expected = gguf.quants.dequantize(gguf.quants.quantize(embedding, quantisation), quantisation)
    weight = GPT.from_pretrained(file, dtype=torch.float64).token_embedding.weight
    assert torch.equal(weight, torch.from_numpy(expected.astype(float)))
    assert not np.array_equal(expected, embedding)  # something was quantised


HE, LL, SPACE, ONE, TWO = [TOKENS.index(token) for token in ("he", "ll", "Ġ", "1", "2")]
H, E = TOKENS.index("h"), TOKENS.index("e")
WHOLE = {"tokenizer.ggml.tokens": [*TOKENS, "eh"], "tokenizer.ggml.token_type": [*TYPES, 1]}
PRE = "tokenizer.ggml.pre"
BOS = "tokenizer.ggml.add_bos_token"
TWELVE = {"tokenizer.ggml.merges": ["1 2"], "tokenizer.ggml.tokens": [*TOKENS[:-2], "12"]}
ENCODED = [  # metadata, a text, its tokens
    ({}, "hell 12", [HE, LL, SPACE, ONE, TWO]),
    ({}, "<s>he<|end|><tool>", [0, HE, 1, 2]),
    ({BOS: True}, "he", [0, HE]),
    ({PRE: "llama-bpe"}, "he", [0, HE]),  # llama.cpp's default there
    ({PRE: "llama-bpe"} | WHOLE, "eh", [0, 97]),  # a word that is a token is not merged
    (WHOLE, "eh", [E, H]),
    *((TWELVE | {PRE: pre, BOS: False}, "12", [95]) for pre in ("gpt-2", "llama-bpe")),
    *((TWELVE | {PRE: pre}, "12", [ONE, TWO]) for pre in ("smollm", "qwen2")),
]


@pytest.mark.parametrize("metadata, text, tokens", ENCODED)
def test_texts_are_encoded_as_the_metadata_says(save, metadata, text, tokens):
    assert load_tokenizer(save(changed=metadata)).encode(text) == tokens


def test_the_tokens_and_the_template_are_those_of_the_metadata(save):
    file = save(changed={"tokenizer.ggml.eot_token_id": 2, "llama.attention.sliding_window": 24})
    tokenizer = load_tokenizer(file)
    assert tokenizer.decode([0, HE, 1]) == "he"  # a control token has no text
    assert tokenizer.encode_chat([{"role": "user", "content": "he"}]) == [
        *(0, TOKENS.index("[")),
        *(HE, TOKENS.index("]")),
    ]
    assert tokenizer.stop_token_ids == {1, 2} == {*tokenizer.special_tokens.values()} - {0}
    assert checkpoints.read_config(file).max_positions == 24


@pytest.mark.parametrize("end", ["<|im_end|>", "<|eot_id|>", "<end_of_turn>", "<|end|>"])
def test_a_turn_ends_where_its_metadata_calls_the_end_an_ordinary_token(save, end):
    tokens = ["<|endoftext|>", end, *TOKENS[2:]]
    changed = {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.eos_token_id": 0}
    tokenizer = load_tokenizer(
        save(changed=changed | {"tokenizer.ggml.token_type": [3] + [1] * 96})
    )
    assert tokenizer.stop_token_ids == {0, 1}
    assert tokenizer.encode(f"he{end}") == [HE, 1]
    assert tokenizer.decode([HE, 1]) == "he"


REFUSED = [  # metadata, tensors, what is named
    ({"general.architecture": "mamba"}, {}, "general.architecture=mamba"),
    ({"llama.rope.scaling.type": "yarn"}, {}, "rope.scaling.type=yarn"),
    ({"llama.attention.value_length": 4}, {}, "attention.value_length=4"),
    ({"llama.rope.dimension_count": 4}, {}, "rope.dimension_count=4"),
    ({}, {"blk.1.ffn_up.weight": None}, "blk.1.ffn_up.weight"),
    ({}, {"rope_freqs.weight": np.ones(4, "f")}, "rope_freqs.weight"),
    ({}, {"output_norm.weight": np.ones(31, "f")}, "final_norm.weight"),
]


@pytest.mark.parametrize("metadata, tensors, name", REFUSED)
def test_a_model_that_is_not_known_is_refused_by_name(save, metadata, tensors, name):
    with pytest.raises((ValueError, KeyError, RuntimeError), match=name):
        GPT.from_pretrained(save(changed=metadata, tensors=tensors))


@pytest.mark.parametrize("key, value", [("model", "llama"), ("pre", "tekken"), ("pre", None)])
def test_a_tokenizer_that_is_not_known_is_refused_by_name(save, key, value):
    with pytest.raises(ValueError, match=f"tokenizer.ggml.{key}={value}"):
        load_tokenizer(save(changed={f"tokenizer.ggml.{key}": value}))


def test_a_file_is_read_once(save):
    file = str(save())
    GPT.from_pretrained(file)
    load_tokenizer(file)
    assert read_gguf.cache_info().misses == 1
