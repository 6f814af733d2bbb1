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
TOLERANCE = dict(rtol=0, atol=2e-5)


def small(config=transformers.LlamaConfig, **options):
    """A geometry of a class of transformers."""
    sizes = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 64,
        "eos_token_id": None,  # nothing stops early
    }
    return config(**sizes | options)


FREQUENCIES = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}
ROPE = FREQUENCIES | {"rope_theta": 5e5, "original_max_position_embeddings": 16}
GROUPED = {"num_key_value_heads": 2}
TIED = {"num_key_value_heads": 1, "tie_word_embeddings": True}
WIDE = {"head_dim": 16}  # wider than hidden_size / heads, as small models of Qwen3 have it
UNTIED = {"n_inner": 40, "layer_norm_epsilon": 0.1, "tie_word_embeddings": False}
KINDS = {
    "gpt2": small(transformers.GPT2Config),
    "gpt2 untied": small(transformers.GPT2Config, **UNTIED),
    "llama": small(rms_norm_eps=0.1, **GROUPED),
    "llama tied": small(**TIED),
    "llama 3": small(max_position_embeddings=128, rope_parameters=ROPE, **GROUPED),
    "mistral": small(transformers.MistralConfig, sliding_window=24, **GROUPED, **WIDE),
    "qwen2": small(transformers.Qwen2Config, **TIED),
    "qwen3": small(transformers.Qwen3Config, **TIED, **WIDE),
}


def make(kind, n_layer=2, dtype=torch.float32):
    """A transformers model whose every parameter matters: large weights, no norm 1, no bias 0."""
    config = copy.deepcopy(KINDS[kind])
    config.num_hidden_layers = n_layer
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:1] * n_layer
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(False)
        parameter.normal_(0, 0.3)
        if parameter.ndim == 1 and name.endswith("weight"):
            parameter += 1
    return model


def prompt(model):
    """Tokens for as many positions as the model has, at most 48."""
    torch.manual_seed(1)
    return torch.randint(VOCAB, (min(48, model.config.max_positions),)).tolist()


def all_logits(model, tokens, chunk=64):
    """Logits after every token, (len(tokens), vocab_size), computed in chunks of so many tokens."""
    cache = KVCache(model.config, 1, len(tokens), dtype=model.dtype)
    logits = []
    for start in range(0, len(tokens), chunk):
        span = lone_chunk([0], start, tokens[start : start + chunk])
        logits.append(run(model, cache, [span], all_rows=True))
    return torch.cat(logits)


def reference_logits(model, tokens):
    return model(torch.tensor([tokens])).logits[0]


@pytest.mark.parametrize("kind", KINDS)
def test_logits_equal_transformers(tmp_path, kind):
    reference = make(kind)
    reference.save_pretrained(tmp_path, max_shard_size="10KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 3
    model = GPT.from_pretrained(tmp_path, dtype=torch.float64)
    tokens = prompt(model)
    expected = reference_logits(reference.double(), tokens)
    assert expected.std(0).mean() > 0.5  # the rows differ
    torch.testing.assert_close(all_logits(model, tokens, chunk=5), expected, **TOLERANCE)
    assert model.config.tie_embeddings == (model.head.weight is model.token_embedding.weight)


PUBLISHED = {  # most defaults of transformers are a published model's
    "gpt2": transformers.GPT2Config(),
    "llama-7b": transformers.LlamaConfig(),
    "mistral-7b": transformers.MistralConfig(rms_norm_eps=1e-5),
    "llama3-8b": transformers.LlamaConfig(
        vocab_size=128256,
        num_key_value_heads=8,
        intermediate_size=14336,
        max_position_embeddings=8192,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 5e5},
    ),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_config_gives_the_preset(tmp_path, name):
    PUBLISHED[name].save_pretrained(tmp_path)
    assert checkpoints.read_config(tmp_path) == GPTConfig.preset(name)


def read(path, **config):
    """The geometry by a config.json of these options, in the form of transformers 4."""
    (path / "config.json").write_text(json.dumps(config), "utf-8")
    return checkpoints.read_config(path)


@pytest.mark.parametrize("beside", [{}, {"original_max_position_embeddings": 64}])
def test_the_trained_context_may_stand_beside_the_rope_or_nowhere(tmp_path, beside):
    config = read(
        tmp_path,
        model_type="llama",
        max_position_embeddings=5000,
        rope_theta=5e5,
        rope_scaling=FREQUENCIES,
        **beside,
    )
    assert config.rope_theta == 5e5
    assert config.rope_scaling == RopeScaling(8, 1, 4, 64 if beside else 5000)


WINDOWS = [  # model_type, options, positions
    ("mistral", {}, 100),
    ("mistral", {"sliding_window": None}, 5000),
    ("qwen2", {"use_sliding_window": True, "max_window_layers": 1}, 100),
    ("qwen2", {"use_sliding_window": True, "max_window_layers": 2}, 5000),
    ("llama", {}, 5000),
]


@pytest.mark.parametrize("model_type, options, positions", WINDOWS)
def test_positions_end_where_a_window_would_slide(tmp_path, model_type, options, positions):
    sizes = {"max_position_embeddings": 5000, "sliding_window": 100, "num_hidden_layers": 2}
    config = read(tmp_path, model_type=model_type, **sizes | options)
    assert config.max_positions == positions


NOT_COMPUTED = [  # the option that is named, model_type, options
    ("model_type", "phi3", {"pad_token_id": 0}),
    ("hidden_act", "llama", {"hidden_act": "gelu"}),
    ("activation_function", "gpt2", {"activation_function": "relu"}),
    ("scale_attn_weights", "gpt2", {"scale_attn_weights": False}),
    ("scale_attn_by_inverse_layer_idx", "gpt2", {"scale_attn_by_inverse_layer_idx": True}),
    ("rope_type", "llama", {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}),
    ("partial_rotary_factor", "llama", {"rope_parameters": {"partial_rotary_factor": 0.5}}),
    ("quantization_config", "llama", {"quantization_config": {"quant_method": "gptq"}}),
]


@pytest.mark.parametrize("named, model_type, options", NOT_COMPUTED)
def test_what_is_not_computed_exactly_is_refused_by_name(tmp_path, named, model_type, options):
    with pytest.raises(ValueError, match=f"{named}="):
        read(tmp_path, model_type=model_type, **options)


MISFITS = [  # a tensor of a checkpoint that is another one, or not there
    ("llama", "model.layers.0.self_attn.q_norm.weight", torch.ones(8)),
    ("llama", "lm_head.weight", None),
    ("llama", "model.norm.weight", torch.ones(31)),
    ("llama tied", "lm_head.weight", torch.ones(97, 32)),
]


@pytest.mark.parametrize("kind, name, tensor", MISFITS)
def test_weights_that_are_no_whole_model_are_refused(tmp_path, kind, name, tensor):
    make(kind).save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    tensors.pop(name, None)
    if tensor is not None:
        tensors[name] = tensor
    save_file(tensors, file)
    with pytest.raises((ValueError, RuntimeError)):
        GPT.from_pretrained(tmp_path)


def test_a_short_name_without_its_package_is_that_of_the_hub(monkeypatch):
    monkeypatch.setattr(checkpoints, "find_spec", lambda package: None)
    assert checkpoints.find("smollm2") == checkpoints.SMOLLM2_ON_HUB
