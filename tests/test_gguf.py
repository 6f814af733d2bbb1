"""GGUF files give the model, the tokens and the prompts that they say; others are refused by name.

The files are written by the package gguf from random models of transformers, permuted as llama.cpp
permutes them. A real file is read in test_real_model.py."""

import struct

import gguf
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from model import GPT
from pretrained import checkpoints
from pretrained.gguf_files import MAX_ITEMS, read_gguf
from pretrained.tokenizers import BYTE_OF_LETTER, load_chat, load_tokenizer
from tests.test_checkpoints import all_logits, make, prompt, reference_logits

KINDS = {"llama": "llama", "llama tied": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}
OURS = {  # names of llama.cpp -> transformers'
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
THEIRS = {theirs: ours for ours, theirs in OURS.items()}
LETTERS = sorted(BYTE_OF_LETTER, key=BYTE_OF_LETTER.get)
TOKENS = ["<s>", "<|end|>", "<tool>", *LETTERS[32:124], "he", "ll"]  # 97, of the bytes ASCII
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
    tensors = {}
    for name, tensor in model.state_dict().items():
        module, kind = name.rsplit(".", 1)
        layer = []
        if name.startswith("model.layers."):
            _, _, number, module = module.split(".", 3)
            layer = ["blk", number]
        if module == "lm_head" and model.config.tie_word_embeddings:
            continue
        ours = THEIRS[module]
        array = tensor.numpy()
        heads = {"attn_q": model.config.num_attention_heads}
        heads["attn_k"] = model.config.num_key_value_heads
        if architecture == "llama" and ours in heads:
            array = permuted(array, heads[ours])
        tensors[".".join([*layer, ours, kind])] = array
    return tensors


def write(path, metadata, tensors, quantisation=None):
    """A GGUF file, by the package's writer. Matrices are quantised."""
    writer = gguf.GGUFWriter(path, metadata.get("general.architecture", "llama"))
    adders = {bool: "bool", int: "uint32", float: "float32", str: "string", list: "array"}
    for key, value in metadata.items():
        if key == "general.alignment" and value:
            writer.add_custom_alignment(value)
        elif key != "general.architecture":
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
        return write(tmp_path / "model.gguf", metadata, stored, quantisation)

    return save


@pytest.mark.parametrize("kind, alignment", [*((kind, None) for kind in KINDS), ("llama", 256)])
def test_logits_equal_transformers(save, kind, alignment):
    reference = make(kind)
    model = GPT.from_pretrained(save(kind, changed={"general.alignment": alignment}))
    tokens = prompt(model)
    expected = reference_logits(reference, tokens)
    torch.testing.assert_close(all_logits(model, tokens), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"])
def test_a_quantised_matrix_is_what_the_package_makes_of_it(save, name):
    quantisation = gguf.GGMLQuantizationType[name]
    file = save("qwen3", quantisation)
    embedding = make("qwen3").state_dict()["model.embed_tokens.weight"].numpy()
    expected = gguf.quants.dequantize(gguf.quants.quantize(embedding, quantisation), quantisation)
    weight = GPT.from_pretrained(file).token_embedding.weight
    assert torch.equal(weight, torch.from_numpy(expected.copy()))
    assert not np.array_equal(expected, embedding)  # something was quantised


HE, LL, SPACE, ONE, TWO = [TOKENS.index(token) for token in ("he", "ll", "Ġ", "1", "2")]
H, E = TOKENS.index("h"), TOKENS.index("e")
WHOLE = {"tokenizer.ggml.tokens": [*TOKENS, "eh"], "tokenizer.ggml.token_type": [*TYPES, 1]}
LLAMA_3 = {"tokenizer.ggml.pre": "llama-bpe"}
BOS = "tokenizer.ggml.add_bos_token"
ENCODED = [  # metadata, a text, its tokens
    ({}, "hell 12", [HE, LL, SPACE, ONE, TWO]),
    ({}, "<s>he<|end|><tool>", [0, HE, 1, 2]),
    ({BOS: True}, "he", [0, HE]),
    (LLAMA_3, "he", [0, HE]),  # llama.cpp's default there
    (LLAMA_3 | {BOS: False}, "he", [HE]),
    (LLAMA_3 | WHOLE, "eh", [0, 97]),  # a word that is a token is not merged
    (WHOLE, "eh", [E, H]),
]


@pytest.mark.parametrize("metadata, text, tokens", ENCODED)
def test_texts_are_encoded_as_the_metadata_says(save, metadata, text, tokens):
    tokenizer = load_tokenizer(save(changed=metadata))
    assert tokenizer.encode(text) == tokens
    assert tokenizer.encode_chat("he") == [HE]


def test_the_tokens_and_the_template_are_those_of_the_metadata(save):
    tokenizer = load_tokenizer(save())
    assert tokenizer.decode([0, HE, 2, 1]) == "he<tool>"  # a control token has no text
    assert tokenizer.stop_token_ids == {1}
    assert dict(tokenizer.special_tokens) == {"<s>": 0, "<|end|>": 1}
    assert load_chat(save())([{"role": "user", "content": "he"}]) == "<s>[he]"
    file = save(changed={"tokenizer.ggml.eot_token_id": 2, "llama.attention.sliding_window": 24})
    assert load_tokenizer(file).stop_token_ids == {1, 2}
    assert checkpoints.read_config(file).max_positions == 24


def of_llama(key, value, message):
    """A row of REFUSED: another value of a key of the architecture."""
    return {f"llama.{key}": value}, {}, f"llama.{key}{message}"


REFUSED = [  # metadata, tensors, what the line says
    ({"general.architecture": "mamba"}, {}, "general.architecture='mamba': must be one of llama,"),
    ({"general.alignment": 0}, {}, "general.alignment=0: must be a positive number"),
    of_llama("block_count", None, ": Field required"),
    of_llama("block_count", True, "=True: .* valid integer"),
    of_llama("attention.head_count", [4, 4], "=.* integer"),
    of_llama("rope.freq_base", float("nan"), "=nan"),
    of_llama("rope.scaling.type", "yarn", "='yarn'"),
    of_llama("rope.scale_linear", 2.0, "=2.0"),
    of_llama("attention.value_length", 4, "=4: must be .* 8"),
    of_llama("rope.dimension_count", 4, "=4: must be .* 8"),
    of_llama("expert_count", 8, "=8"),
    ({"llama.block_count": 3}, {}, "9 missing tensors: blk.2.attn_k.weight"),
    ({"llama.attention.head_count": 3}, {}, "n_kv_head=2: must divide n_head=3"),
    ({"llama.vocab_size": 98}, {}, "tensors that do not fit: .*token_embd.weight"),
    ({}, {"blk.1.ffn_up.weight": None}, "1 missing tensors: blk.1.ffn_up.weight"),
    ({}, {"blk.1.attn_q.weight": np.ones((9, 32), "f")}, "do not fit: blk.1.attn_q.weight"),
    ({}, {"rope_freqs.weight": np.ones(4, "f")}, "1 unknown tensors: rope_freqs.weight"),
    ({}, {"output_norm.weight": np.ones(32, "i")}, "output_norm.weight is of type I32, must be"),
    ({}, {"output_norm.weight": np.full(32, np.nan, "f")}, "output_norm.weight holds NaN"),
]


@pytest.mark.parametrize("metadata, tensors, message", REFUSED)
def test_a_model_that_is_not_known_is_refused_by_name(save, metadata, tensors, message):
    file = save(changed=metadata, tensors=tensors)
    with pytest.raises(ValueError, match=f"^{file}: .*{message}") as caught:
        GPT.from_pretrained(file)
    assert "\n" not in str(caught.value)


REFUSED_TEXT = [  # a key of tokenizer.ggml, its value, what the line says
    ("model", "llama", "model='llama': must be one of gpt2"),
    ("pre", "tekken", "pre='tekken': must be one of gpt-2, smollm"),
    ("pre", None, "pre=None: must be one of"),
    ("tokens", None, "tokens: Field required"),
    ("tokens", [1, 2], "tokens=1: .* valid string"),
    ("tokens", ["a", "a"], "tokens: must not hold a token twice"),
    ("token_type", [1], "token_type: has 1 items, must have 97"),
    ("merges", ["he"], "merges: 'he' must be two tokens and a space"),
    ("merges", ["q zz"], "no tokenizer can be made of it"),
    ("eos_token_id", 97, "eos_token_id=97: must be below 97"),
    ("add_eos_token", True, "add_eos_token=True"),
]
REFUSED_TEXT = [({f"tokenizer.ggml.{key}": value}, text) for key, value, text in REFUSED_TEXT]
REFUSED_TEXT += [
    ({BOS: True, "tokenizer.ggml.bos_token_id": None}, "add_bos_token=True: needs a bos_token_id"),
    ({"tokenizer.chat_template": 3}, "chat_template: must be a text"),
]


@pytest.mark.parametrize("metadata, message", REFUSED_TEXT)
def test_a_tokenizer_that_is_not_known_is_refused_by_name(save, metadata, message):
    file = save(changed=metadata)
    with pytest.raises(ValueError, match=f"^{file}: .*{message}") as caught:
        load_tokenizer(file)
    assert "\n" not in str(caught.value)


HUGE = 10**12
ARRAY = b"tokenizer.ggml.tokens" + struct.pack("<II", 9, 8)
EMBEDDING = b"token_embd.weight" + struct.pack("<I", 2)
LIES = [  # what stands in a header, after which bytes, and what is said of it
    (b"PK\3\4", b"", "does not begin with GGUF"),
    (struct.pack("<I", 1), b"GGUF", "version 1, must be"),
    (struct.pack("<Q", HUGE), b"GGUF\3\0\0\0", "1,000,000,000,000 tensors, must be at most"),
    (struct.pack("<QQ", 1, HUGE), b"GGUF\3\0\0\0", "1,000,000,000,000 keys, must be at most"),
    (struct.pack("<Q", HUGE), ARRAY, "texts in an array"),
    (struct.pack("<Q", MAX_ITEMS), ARRAY, "bytes|codec|value of type"),
    (struct.pack("<Q", HUGE), ARRAY + struct.pack("<Q", 97), "1,000,000,000,000 bytes in a text"),
    (struct.pack("<QQ", 32, 2**40), EMBEDDING, " bytes, with token_embd.weight at least"),
    (struct.pack("<QQ", 32, 2**63), EMBEDDING, " bytes, with token_embd.weight at least"),
    (struct.pack("<QQI", 31, 97, 8), EMBEDDING, r"weight \[97, 31\]: rows must be whole blocks"),
]


@pytest.mark.parametrize("lie, place, message", LIES)
def test_a_header_that_lies_is_refused_before_memory_is_taken(save, lie, place, message):
    file = save()
    content = bytearray(file.read_bytes())
    start = content.index(place) + len(place)
    content[start : start + len(lie)] = lie
    file.write_bytes(content)
    with pytest.raises(ValueError, match=f"^{file}: .*({message})"):
        read_gguf(file)


@pytest.mark.parametrize(
    "name, other", [(b"ggml.bos_", b"ggml.eos_"), (b"blk.0.ffn_up", b"blk.1.ffn_up")]
)
def test_names_that_stand_twice_are_refused(save, name, other):
    file = save()
    file.write_bytes(file.read_bytes().replace(name, other))
    with pytest.raises(ValueError, match=f"^{file}: .*{other.decode()}.* is there twice"):
        read_gguf(file)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_a_file_that_is_cut_off_or_damaged_is_refused_in_one_line(tmp_path_factory, data):
    folder = tmp_path_factory.getbasetemp()
    file = folder / "whole.gguf"
    if not file.exists():
        config = make("llama")
        write(file, metadata_of(config.config, "llama"), tensors_of(config, "llama"))
    content = bytearray(file.read_bytes())
    damaged = folder / "damaged.gguf"
    cut = data.draw(st.integers(0, len(content) - 1))
    damaged.write_bytes(content[:cut])
    problem = f"not a whole GGUF file: has {cut:,} bytes, " if cut >= 4 else "not a GGUF file: "
    with pytest.raises(ValueError, match=f"^{damaged}: {problem}"):
        read_gguf(damaged)
    header = content.index(b"blk.0.")
    content[data.draw(st.integers(0, header))] = data.draw(st.integers(0, 255))
    damaged.write_bytes(content)
    try:
        checkpoints.read_config(damaged)
        load_tokenizer(damaged)
    except ValueError as error:
        assert str(error).startswith(f"{damaged}: ") and "\n" not in str(error)


def test_a_file_on_the_hub_is_named_with_its_repository(monkeypatch, tmp_path):
    fetched = []

    def hf_hub_download(repository, filename):
        fetched.append((repository, filename))
        return str(tmp_path / filename)

    monkeypatch.setattr("huggingface_hub.hf_hub_download", hf_hub_download)
    for name in ("org/repo/x.gguf", "org/repo/folder/x.gguf"):
        path = checkpoints.find(name)
        assert path == tmp_path / name.removeprefix("org/repo/")
    assert fetched == [("org/repo", "x.gguf"), ("org/repo", "folder/x.gguf")]
