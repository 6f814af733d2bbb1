"""Random models give the logits that transformers gives; what is not loaded exactly is refused."""

import copy
import json

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from config import GPTConfig, RopeScaling
from kv_cache import KVCache
from model import GPT
from pretrained import checkpoints
from request import lone_chunk
from tests.helpers import run

VOCAB = 97


def gpt2(**more):
    size = dict(vocab_size=VOCAB, n_embd=32, n_layer=2, n_head=4, n_positions=64)
    return transformers.GPT2Config(**size, **more)


def llama_like(config=transformers.LlamaConfig, max_position_embeddings=64, **more):
    size = dict(vocab_size=VOCAB, hidden_size=32, intermediate_size=48)
    size |= dict(num_hidden_layers=2, num_attention_heads=4)
    return config(**size, max_position_embeddings=max_position_embeddings, **more)


FREQUENCIES = dict(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0)
ROPE = FREQUENCIES | dict(rope_theta=5e5, original_max_position_embeddings=16)
LLAMA_3 = dict(max_position_embeddings=128, num_key_value_heads=2, rope_parameters=ROPE)
QWEN2 = dict(num_key_value_heads=2, tie_word_embeddings=True)
QWEN2 |= dict(rope_parameters=dict(rope_type="default", rope_theta=1e4))
QWEN3 = QWEN2 | dict(head_dim=16)  # wider than hidden_size / heads, as the small ones have it
MISTRAL = dict(num_key_value_heads=2, head_dim=16, sliding_window=24)
KINDS = {
    "gpt2": gpt2(),
    "gpt2 untied": gpt2(n_inner=40, layer_norm_epsilon=0.1, tie_word_embeddings=False),
    "llama": llama_like(num_key_value_heads=2, rms_norm_eps=0.1),
    "llama tied": llama_like(num_key_value_heads=1, tie_word_embeddings=True),
    "llama 3": llama_like(**LLAMA_3),
    "mistral": llama_like(transformers.MistralConfig, **MISTRAL),
    "qwen2": llama_like(transformers.Qwen2Config, **QWEN2),
    "qwen3": llama_like(transformers.Qwen3Config, **QWEN3),
}
for made in KINDS.values():
    made.bos_token_id = made.eos_token_id = None  # nothing stops early


def make(kind, n_layer=2, dtype=torch.float32):
    """A transformers model whose every parameter matters: large weights, no norm 1, no bias 0."""
    config = copy.deepcopy(KINDS[kind])
    config.num_hidden_layers = n_layer
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:1] * n_layer
    torch.manual_seed(0)
    options = dict(attn_implementation="sdpa", dtype=dtype)
    model = transformers.AutoModelForCausalLM.from_config(config, **options).eval()
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.normal_(0, 0.3)
            if p.ndim == 1 and name.endswith("weight"):
                p += 1
    return model


def prompt(model):
    """Tokens for as many positions as the model has, at most 48."""
    torch.manual_seed(1)
    return torch.randint(VOCAB, (min(48, model.config.max_positions),)).tolist()


def all_logits(model, tokens, chunk=64):
    """Logits after every token, (len(tokens), vocab_size), computed in chunks of so many tokens."""
    cache = KVCache(model.config, 1, len(tokens), dtype=model.dtype)
    starts = range(0, len(tokens), chunk)
    spans = [lone_chunk([0], start, tokens[start : start + chunk]) for start in starts]
    return torch.cat([run(model, cache, [span], all_rows=True) for span in spans])


@torch.no_grad()
def reference_logits(model, tokens):
    return model(torch.tensor([tokens])).logits[0]


@pytest.mark.parametrize("shard_size, chunk", [("1GB", 5), ("10KB", 64)])
@pytest.mark.parametrize("kind", KINDS)
def test_logits_equal_transformers(tmp_path, kind, shard_size, chunk):
    reference = make(kind)
    reference.save_pretrained(tmp_path, max_shard_size=shard_size)
    assert (len(list(tmp_path.glob("*.safetensors"))) > 3) == (shard_size == "10KB")
    model = GPT.from_pretrained(tmp_path)
    tokens = prompt(model)
    expected = reference_logits(reference, tokens)
    assert expected.std() > 1 and expected.std(0).mean() > 0.5  # well spread, and they differ
    torch.testing.assert_close(all_logits(model, tokens, chunk), expected, rtol=0, atol=2e-5)
    assert model.config.tie_embeddings == (model.head.weight is model.token_embedding.weight)


def test_weights_are_converted_to_the_dtype_of_the_model(tmp_path):
    make("llama").save_pretrained(tmp_path)
    weight = GPT.from_pretrained(tmp_path, dtype=torch.bfloat16).blocks[1].postproj.weight
    tensor = load_file(tmp_path / "model.safetensors")["model.layers.1.self_attn.o_proj.weight"]
    assert torch.equal(weight, tensor.bfloat16())


# What the publishers' config.json say about what is computed, in the form of transformers 4.
GPT2 = dict(model_type="gpt2", activation_function="gelu_new", layer_norm_epsilon=1e-5)
GPT2 |= dict(n_ctx=1024, n_positions=1024, vocab_size=50257)
LLAMA = dict(model_type="llama", hidden_act="silu", tie_word_embeddings=False, vocab_size=32000)
SIZES = ["hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"]
SIZES += ["intermediate_size", "max_position_embeddings", "rms_norm_eps"]


def published(*sizes, **more):
    """A LLaMA's config.json; None: an option that it does not have."""
    return LLAMA | {name: size for name, size in zip(SIZES, sizes, strict=True) if size} | more


LLAMA3 = dict(vocab_size=128256, rope_theta=500000.0, rope_scaling=None, attention_bias=False)
MISTRAL_V01 = dict(model_type="mistral", rope_theta=10000.0, sliding_window=4096)
PUBLISHED = {
    "gpt2": GPT2 | dict(n_embd=768, n_head=12, n_layer=12),
    "llama-7b": published(4096, 32, 32, None, 11008, 2048, 1e-6),
    "llama3-8b": published(4096, 32, 32, 8, 14336, 8192, 1e-5, **LLAMA3),
    "mistral-7b": published(4096, 32, 32, 8, 14336, 32768, 1e-5, **MISTRAL_V01),
}


def read(path, **config):
    (path / "config.json").write_text(json.dumps(config), "utf-8")
    return checkpoints.read_config(path)


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_config_gives_the_preset(tmp_path, name):
    assert read(tmp_path, **PUBLISHED[name]) == GPTConfig.preset(name)


def sized(model_type, **options):
    """A config.json that says the sizes, and `options`."""
    sizes = dict(zip(SIZES, (128, 2, 32, 8, 48, 5000, 1e-5), strict=True))
    if model_type == "gpt2":
        sizes = PUBLISHED["gpt2"]
    return sizes | dict(vocab_size=97, head_dim=16, model_type=model_type) | options


@pytest.mark.parametrize("length", [64, None])
def test_the_trained_context_may_stand_beside_the_rope_or_nowhere(tmp_path, length):
    beside = dict(original_max_position_embeddings=length) if length else {}
    config = read(tmp_path, **sized("llama"), rope_scaling=FREQUENCIES, rope_theta=5e5, **beside)
    trained = length or config.max_positions
    assert (config.rope_theta, config.rope_scaling) == (5e5, RopeScaling(8, 1, 4, trained))


WINDOWS = [  # model_type, window, options, positions
    ("mistral", 100, {}, 100),
    ("mistral", None, {}, 5000),
    ("qwen2", 100, dict(use_sliding_window=True, max_window_layers=1), 100),
    ("qwen2", 100, dict(use_sliding_window=True, max_window_layers=2), 5000),
    ("llama", 100, {}, 5000),
]


@pytest.mark.parametrize("model_type, window, options, positions", WINDOWS)
def test_positions_end_where_a_window_would_slide(tmp_path, model_type, window, options, positions):
    options = sized(model_type, sliding_window=window, **options)
    assert read(tmp_path, **options).max_positions == positions


NOT_COMPUTED = [  # an option, and a value that our model does not compute exactly
    ("llama", "hidden_act", "gelu"),
    ("gpt2", "activation_function", "relu"),
    ("gpt2", "scale_attn_weights", False),
    ("gpt2", "scale_attn_by_inverse_layer_idx", True),
    ("llama", "rope_scaling", dict(rope_type="linear", factor=2.0)),
    ("llama", "rope_parameters", dict(rope_theta=1e4, partial_rotary_factor=0.5)),
    ("llama", "quantization_config", {"quant_method": "gptq"}),
    ("phi3", "pad_token_id", 0),
]


@pytest.mark.parametrize("kind, option, value", NOT_COMPUTED)
def test_what_is_not_computed_exactly_is_refused_by_name(tmp_path, kind, option, value):
    name = {"rope_scaling": "rope_type", "pad_token_id": "model_type"}.get(option, option)
    name = name.replace("rope_parameters", "partial_rotary_factor")
    with pytest.raises(ValueError, match=f"{name}=.*: must be one of "):
        read(tmp_path, **sized(kind, **{option: value}))


NORM = "model.norm.weight"
MISFITS = [  # a tensor of a checkpoint that is another one, or not there
    ("llama", "model.layers.0.self_attn.q_norm.weight", torch.ones(8)),
    ("llama", "model.layers.1.self_attn.k_proj.weight", None),
    ("llama", "lm_head.weight", None),
    ("llama", NORM, torch.ones(31)),
    ("llama tied", "lm_head.weight", torch.ones(97, 32)),
]


@pytest.mark.parametrize("kind, name, tensor", MISFITS)
def test_weights_that_are_no_whole_model_are_refused(tmp_path, kind, name, tensor):
    make(kind).save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = {**load_file(file), name: tensor}
    save_file({name: value for name, value in tensors.items() if value is not None}, file)
    with pytest.raises(RuntimeError if name == NORM else ValueError):
        GPT.from_pretrained(tmp_path)


def test_biases_of_a_llama_are_refused(tmp_path):
    config = copy.deepcopy(KINDS["llama"])
    config.attention_bias = True
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="unknown weights: .*bias"):
        GPT.from_pretrained(tmp_path)


def test_a_short_name_is_that_of_an_installed_file_or_of_the_hub(monkeypatch):
    monkeypatch.setattr(checkpoints, "find_spec", lambda package: None)
    assert checkpoints.find("smollm2") == checkpoints.SMOLLM2_ON_HUB
