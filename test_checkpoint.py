"""checkpoint.py: a small random model of each kind, written by transformers, gives transformers' logits here.

And what cannot be loaded exactly is refused, with the name of what is wrong.
"""

import copy
import fnmatch
import json
import weakref

import huggingface_hub
import pytest
import torch
import transformers
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import checkpoint
from attention import make_attention
from kv_cache import KVCache
from model import GPT, PRESETS, FlatBatch, GPTConfig, RopeScaling, Span

VOCAB = 97
SIZE = dict(vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4)
LLAMA3_ROPE = dict(
    rope_type="llama3",
    rope_theta=5e5,
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=16,
)
KINDS = {
    "gpt2": transformers.GPT2Config(vocab_size=VOCAB, n_embd=32, n_layer=2, n_head=4, n_positions=64),
    "gpt2 untied": transformers.GPT2Config(
        vocab_size=VOCAB,
        n_embd=32,
        n_layer=2,
        n_head=4,
        n_positions=64,
        n_inner=40,
        layer_norm_epsilon=0.1,
        tie_word_embeddings=False,
    ),
    "llama 1": transformers.LlamaConfig(**SIZE, max_position_embeddings=64),
    "llama grouped": transformers.LlamaConfig(
        **SIZE, max_position_embeddings=64, num_key_value_heads=2, rms_norm_eps=0.1
    ),
    "llama tied": transformers.LlamaConfig(
        **SIZE, max_position_embeddings=64, num_key_value_heads=1, tie_word_embeddings=True
    ),
    "llama 3": transformers.LlamaConfig(
        **SIZE, max_position_embeddings=128, num_key_value_heads=2, rope_parameters=LLAMA3_ROPE
    ),
    "mistral": transformers.MistralConfig(
        **SIZE, max_position_embeddings=64, num_key_value_heads=2, head_dim=16, sliding_window=24
    ),
    "qwen2": transformers.Qwen2Config(
        **SIZE,
        max_position_embeddings=64,
        num_key_value_heads=2,
        tie_word_embeddings=True,
        rope_parameters=dict(rope_type="default", rope_theta=1e4),
    ),
}
for made in KINDS.values():
    made.bos_token_id = made.eos_token_id = None  # nothing stops early


def make(kind):
    """A transformers model whose every parameter matters: large weights, no norm at 1, no bias at 0."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(KINDS[kind], attn_implementation="sdpa").eval()
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.normal_(0, 0.3)
            if p.ndim == 1 and name.endswith("weight"):
                p += 1
    return model


@pytest.fixture(scope="module", params=KINDS)
def saved(request, tmp_path_factory):
    """(transformers model, directory with model.safetensors, directory with shards) of each kind."""
    model = make(request.param)
    single, sharded = tmp_path_factory.mktemp("single"), tmp_path_factory.mktemp("sharded")
    model.save_pretrained(single)
    model.save_pretrained(sharded, max_shard_size="10KB")
    return model, single, sharded


@pytest.fixture
def save(tmp_path):
    """save(kind) -> the directory of a checkpoint, alone in this test, that may be damaged."""

    def save(kind="llama grouped", **options):
        make(kind).save_pretrained(tmp_path, **options)
        return tmp_path

    return save


def edit(path, change):
    """Apply `change` to the object in a JSON file, or to the dict of tensors in a safetensors file."""
    if path.suffix == ".json":
        content = json.loads(path.read_text())
        change(content)
        path.write_text(json.dumps(content))
    else:
        tensors = load_file(path)
        change(tensors)
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)


def prompt(model):
    """Tokens for as many positions as the model has, at most 48."""
    torch.manual_seed(1)
    return torch.randint(VOCAB, (min(48, model.config.max_positions),)).tolist()


def all_logits(model, tokens):
    """Logits after every token, (len(tokens), vocab_size): one slot per prefix, all in one batch."""
    n, dtype = len(tokens), model.token_embedding.weight.dtype
    cache = KVCache(model.config, n, n, dtype=dtype)
    spans = [Span([i], 0, tokens[: i + 1]) for i in range(n)]
    return model(FlatBatch.build(spans, make_attention(model.config, cache)), cache)


@torch.no_grad()
def reference_logits(model, tokens):
    return model(torch.tensor([tokens])).logits[0]


def in_float64(model):
    """A copy of transformers' model in float64 throughout, with torch's RMSNorm: its own computes in float32."""
    model = copy.deepcopy(model).double()
    for module in list(model.modules()):
        for name, child in module.named_children():
            if type(child).__name__.endswith("RMSNorm"):
                norm = torch.nn.RMSNorm(len(child.weight), eps=child.variance_epsilon, dtype=torch.float64)
                norm.weight = child.weight
                setattr(module, name, norm)
    return model


def rope_of(model, n):
    """transformers' cos and sin of n positions, computed in float32, in our layout, (n, 2, 1, head_dim / 2)."""
    cos, sin = model.model.rotary_emb(torch.zeros(1, dtype=torch.float64), torch.arange(n)[None])
    return torch.stack([cos[0], sin[0]], dim=1).chunk(2, dim=-1)[0].unsqueeze(2)


# -----------------------------------------------------------------------------------------------------
# loading


def test_logits_equal_transformers_float32(saved):
    reference, single, sharded = saved
    assert len(list(sharded.glob("*.safetensors"))) > 3
    for directory in (single, sharded):
        model = GPT.from_pretrained(directory)
        tokens = prompt(model)
        expected = reference_logits(reference, tokens)
        assert expected.std() > 1 and expected.std(0).mean() > 0.5  # well spread, and not the same everywhere
        torch.testing.assert_close(all_logits(model, tokens), expected, rtol=1e-4, atol=1e-4)


def test_logits_equal_transformers_float64(saved):
    reference, single, _ = saved
    model = GPT.from_pretrained(single, dtype=torch.float64)
    reference, tokens = in_float64(reference), prompt(model)
    if model.rope is not None:
        rope = rope_of(reference, len(tokens))
        torch.testing.assert_close(model.rope[: len(tokens)], rope, rtol=0, atol=1e-5)
        model.rope[: len(tokens)] = rope
    expected = reference_logits(reference, tokens)
    torch.testing.assert_close(all_logits(model, tokens), expected, rtol=1e-9, atol=1e-9)


def test_greedy_tokens_equal_transformers_generate(save):
    directory = save("llama 3")
    reference = transformers.AutoModelForCausalLM.from_pretrained(directory)
    model = GPT.from_pretrained(directory)
    tokens = prompt(model)[:20]
    expected = reference.generate(torch.tensor([tokens]), do_sample=False, max_new_tokens=30)[0].tolist()
    cache = KVCache(model.config, 1, 50)
    attention = make_attention(model.config, cache)
    start = 0
    while len(tokens) < 50:
        logits = model(FlatBatch.build([Span([0], start, tokens[start:])], attention), cache)
        start = len(tokens)
        tokens = [*tokens, logits.argmax().item()]
    assert tokens == expected and len(set(tokens[20:])) > 5


def test_gpt2_names_without_prefix_and_with_old_buffers(save):
    def as_published(tensors):
        for name in list(tensors):
            tensors[name.removeprefix("transformer.")] = tensors.pop(name)
        for i in range(2):
            tensors[f"h.{i}.attn.bias"] = torch.ones(1, 1, 64, 64).tril()
            tensors[f"h.{i}.attn.masked_bias"] = torch.tensor(-1e4)

    directory = save("gpt2")
    expected = GPT.from_pretrained(directory).state_dict()
    edit(directory / "model.safetensors", as_published)
    torch.testing.assert_close(GPT.from_pretrained(directory).state_dict(), expected, rtol=0, atol=0)


def test_old_llama_frequencies_are_ignored(save):
    directory = save()
    edit(
        directory / "model.safetensors",
        lambda tensors: tensors.update({"model.layers.1.self_attn.rotary_emb.inv_freq": torch.ones(4)}),
    )
    GPT.from_pretrained(directory)


@pytest.mark.parametrize("stored, wanted", [(torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)])
def test_weights_are_converted_to_the_dtype_of_the_model(save, stored, wanted):
    directory = save()
    edit(
        directory / "model.safetensors",
        lambda tensors: tensors.update({name: tensor.to(stored) for name, tensor in tensors.items()}),
    )
    model = GPT.from_pretrained(directory, dtype=wanted)
    tensors = load_file(directory / "model.safetensors")
    q, k, v = (tensors[f"model.layers.1.self_attn.{x}_proj.weight"] for x in "qkv")
    assert model.blocks[1].preproj.weight.dtype == wanted
    assert torch.equal(model.blocks[1].preproj.weight, torch.cat([q, k, v]).to(wanted))


def test_loading_holds_one_tensor_at_a_time_and_fills_the_parameters_in_place(save, monkeypatch):
    directory = save("llama 1", max_shard_size="10KB")
    alive, most = set(), []

    class Counting:
        def __init__(self, file):
            self.file = file

        def __getattr__(self, name):
            return getattr(self.file, name)

        def __enter__(self):
            self.file.__enter__()
            return self

        def __exit__(self, *exception):
            return self.file.__exit__(*exception)

        def get_tensor(self, name):
            tensor = self.file.get_tensor(name)
            alive.add(name)
            weakref.finalize(tensor, alive.discard, name)
            most.append(len(alive))
            return tensor

    monkeypatch.setattr(checkpoint, "safe_open", lambda *a, **k: Counting(safe_open(*a, **k)))
    model = GPT(checkpoint.read_config(directory), seed=None)
    before = {name: p.data_ptr() for name, p in model.named_parameters()}
    checkpoint.load_weights(model, directory)
    assert max(most) == 1 and len(most) == 21  # embedding, norm, head, and 9 tensors in each layer
    assert before == {name: p.data_ptr() for name, p in model.named_parameters()}


def test_every_number_of_every_parameter_is_filled(saved):
    model = GPT(checkpoint.read_config(saved[1]))
    for p in model.parameters():
        p.fill_(float("nan"))
    checkpoint.load_weights(model, saved[1])
    assert not any(p.isnan().any() for p in model.parameters())


# -----------------------------------------------------------------------------------------------------
# config.json

# What the publishers' config.json say about what is computed, in the form of transformers 4.
LLAMA = dict(model_type="llama", hidden_act="silu", tie_word_embeddings=False)
PUBLISHED = {
    "gpt2": dict(
        model_type="gpt2",
        activation_function="gelu_new",
        layer_norm_epsilon=1e-5,
        n_ctx=1024,
        n_embd=768,
        n_head=12,
        n_layer=12,
        n_positions=1024,
        vocab_size=50257,
    ),
    "gpt2-xl": dict(
        model_type="gpt2",
        activation_function="gelu_new",
        layer_norm_epsilon=1e-5,
        n_ctx=1024,
        n_embd=1600,
        n_head=25,
        n_layer=48,
        n_positions=1024,
        vocab_size=50257,
    ),
    "llama-7b": dict(
        LLAMA,
        hidden_size=4096,
        intermediate_size=11008,
        max_position_embeddings=2048,
        num_attention_heads=32,
        num_hidden_layers=32,
        rms_norm_eps=1e-6,
        vocab_size=32000,
    ),
    "llama2-70b": dict(
        LLAMA,
        hidden_size=8192,
        intermediate_size=28672,
        max_position_embeddings=4096,
        num_attention_heads=64,
        num_hidden_layers=80,
        num_key_value_heads=8,
        pretraining_tp=1,
        rms_norm_eps=1e-5,
        rope_scaling=None,
        vocab_size=32000,
    ),
    "llama3-8b": dict(
        LLAMA,
        attention_bias=False,
        hidden_size=4096,
        intermediate_size=14336,
        max_position_embeddings=8192,
        num_attention_heads=32,
        num_hidden_layers=32,
        num_key_value_heads=8,
        rms_norm_eps=1e-5,
        rope_scaling=None,
        rope_theta=500000.0,
        vocab_size=128256,
    ),
    "mistral-7b": dict(
        model_type="mistral",
        hidden_act="silu",
        hidden_size=4096,
        intermediate_size=14336,
        max_position_embeddings=32768,
        num_attention_heads=32,
        num_hidden_layers=32,
        num_key_value_heads=8,
        rms_norm_eps=1e-5,
        rope_theta=10000.0,
        sliding_window=4096,
        tie_word_embeddings=False,
        vocab_size=32000,
    ),
    "yi-34b": dict(
        LLAMA,
        hidden_size=7168,
        intermediate_size=20480,
        max_position_embeddings=4096,
        num_attention_heads=56,
        num_hidden_layers=60,
        num_key_value_heads=8,
        rms_norm_eps=1e-5,
        rope_theta=5000000.0,
        vocab_size=64000,
    ),
}


def read(path, **config):
    (path / "config.json").write_text(json.dumps(config))
    return checkpoint.read_config(path)


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_config_gives_the_preset(tmp_path, name):
    assert read(tmp_path, **PUBLISHED[name]) == PRESETS[name]


@pytest.mark.parametrize(
    "model_type, config",
    [
        ("gpt2", transformers.GPT2Config),
        ("llama", transformers.LlamaConfig),
        ("mistral", transformers.MistralConfig),
        ("qwen2", transformers.Qwen2Config),
    ],
)
def test_missing_fields_are_what_transformers_assumes(tmp_path, model_type, config):
    silent = read(tmp_path, model_type=model_type)
    config().save_pretrained(tmp_path)
    assert silent == checkpoint.read_config(tmp_path)


@pytest.mark.parametrize("type_key", ["rope_type", "type"])
@pytest.mark.parametrize("kind", ["llama 1", "llama 3", "mistral", "qwen2"])
def test_config_of_transformers_4_and_5_mean_the_same(tmp_path, kind, type_key):
    def as_transformers_4(config):
        rope = config.pop("rope_parameters")
        config["rope_theta"] = rope.pop("rope_theta")
        rope[type_key] = rope.pop("rope_type")
        config["rope_scaling"] = rope if rope[type_key] != "default" else None
        config["torch_dtype"] = config.pop("dtype", None)
        config.pop("layer_types", None)

    KINDS[kind].save_pretrained(tmp_path)
    expected = checkpoint.read_config(tmp_path)
    assert (expected.rope_scaling is not None) == (kind == "llama 3")
    edit(tmp_path / "config.json", as_transformers_4)
    assert checkpoint.read_config(tmp_path) == expected


def test_config_in_full(tmp_path):
    scaling = dict(
        factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192, rope_type="llama3"
    )
    llama31 = read(tmp_path, **PUBLISHED["llama3-8b"] | dict(max_position_embeddings=131072, rope_scaling=scaling))
    assert llama31.rope_scaling == RopeScaling(8.0, 1.0, 4.0, 8192) and llama31.rope_theta == 500000.0
    qwen2 = read(
        tmp_path,
        model_type="qwen2",
        hidden_act="silu",
        hidden_size=896,
        intermediate_size=4864,
        max_position_embeddings=131072,
        max_window_layers=24,
        num_attention_heads=14,
        num_hidden_layers=24,
        num_key_value_heads=2,
        rms_norm_eps=1e-6,
        rope_theta=1000000.0,
        sliding_window=131072,
        tie_word_embeddings=True,
        use_sliding_window=False,
        vocab_size=151936,
    )
    assert qwen2 == GPTConfig(
        "llama",
        151936,
        24,
        14,
        896,
        n_kv_head=2,
        n_inner=4864,
        max_positions=131072,
        norm_eps=1e-6,
        qkv_bias=True,
        tie_embeddings=True,
        rope_theta=1e6,
    )


@pytest.mark.parametrize(
    "options, max_positions",
    [
        (dict(model_type="mistral", sliding_window=100), 100),
        (dict(model_type="mistral", sliding_window=2000), 1000),
        (dict(model_type="mistral", sliding_window=None), 1000),
        (dict(model_type="qwen2", sliding_window=100), 1000),
        (dict(model_type="qwen2", sliding_window=100, use_sliding_window=True), 100),
        (dict(model_type="qwen2", sliding_window=100, layer_types=["full_attention", "sliding_attention"]), 100),
        (dict(model_type="qwen2", sliding_window=100, layer_types=["full_attention"] * 2), 1000),
        (dict(model_type="llama", sliding_window=100), 1000),
    ],
)
def test_positions_end_where_a_sliding_window_would_begin_to_matter(tmp_path, options, max_positions):
    assert read(tmp_path, max_position_embeddings=1000, **options).max_positions == max_positions


@pytest.mark.parametrize(
    "options, message",
    [
        (dict(model_type="mixtral"), "model_type='mixtral'.*'gpt2' or 'llama' or 'mistral' or 'qwen2'"),
        (dict(model_type="gemma2"), "model_type='gemma2'"),
        (dict(), "model_type=None"),
        (dict(model_type="llama", rope_scaling=dict(rope_type="yarn", factor=4.0)), "rope_type='yarn'.*'llama3'"),
        (dict(model_type="llama", rope_scaling=dict(type="linear", factor=4.0)), "rope_type='linear'"),
        (dict(model_type="qwen2", rope_parameters=dict(rope_type="dynamic", factor=4.0)), "rope_type='dynamic'"),
        (dict(model_type="mistral", rope_parameters=dict(rope_type="longrope")), "rope_type='longrope'"),
        (dict(model_type="llama", rope_scaling=dict(rope_type="llama3", factor=8.0)), "low_freq_factor"),
        (dict(model_type="llama", rope_parameters=dict(full_attention=dict(rope_type="default"))), "full_attention"),
        (dict(model_type="llama", rope_parameters=dict(partial_rotary_factor=0.5)), "partial_rotary_factor=0.5"),
        (dict(model_type="llama", partial_rotary_factor=0.25), "partial_rotary_factor=0.25"),
        (dict(model_type="llama", attention_bias=True), "attention_bias=True.*False"),
        (dict(model_type="llama", mlp_bias=True), "mlp_bias=True"),
        (dict(model_type="llama", hidden_act="gelu"), "hidden_act='gelu'.*'silu'"),
        (dict(model_type="mistral", hidden_act="gelu"), "hidden_act='gelu'"),
        (dict(model_type="qwen2", hidden_act="gelu"), "hidden_act='gelu'"),
        (dict(model_type="llama", quantization_config=dict(quant_method="gptq")), "quantization_config=.*gptq"),
        (dict(model_type="gpt2", activation_function="relu"), "activation_function='relu'.*'gelu_new'"),
        (dict(model_type="gpt2", scale_attn_by_inverse_layer_idx=True), "scale_attn_by_inverse_layer_idx=True"),
        (dict(model_type="gpt2", scale_attn_weights=False), "scale_attn_weights=False.*True"),
        (dict(model_type="gpt2", add_cross_attention=True), "add_cross_attention=True"),
        (dict(model_type="gpt2", quantization_config=dict(bits=4)), "quantization_config"),
    ],
)
def test_what_the_model_does_not_compute_is_refused(tmp_path, options, message):
    with pytest.raises(ValueError, match=message):
        read(tmp_path, **options)


def test_options_that_change_nothing_are_accepted(tmp_path):
    read(tmp_path, model_type="gpt2", activation_function="gelu_pytorch_tanh", reorder_and_upcast_attn=True)
    read(tmp_path, model_type="llama", pretraining_tp=2, partial_rotary_factor=1.0, quantization_config=None)


def test_config_that_is_missing_or_broken_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="config.json"):
        checkpoint.read_config(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match="config.json: not JSON"):
        checkpoint.read_config(tmp_path)


# -----------------------------------------------------------------------------------------------------
# tensors that do not fit


@pytest.mark.parametrize(
    "change, message",
    [
        (
            lambda t: t.update({"model.layers.0.self_attn.q_proj.bias": torch.ones(32)}),
            "1 unknown tensors: layers.0.self_attn.q_proj.bias",
        ),
        (lambda t: t.update({"model.layers.2.mlp.up_proj.weight": torch.ones(48, 32)}), "unknown.*layers.2.mlp.up"),
        (
            lambda t: t.pop("model.layers.1.self_attn.k_proj.weight"),
            "1 missing tensors: layers.1.self_attn.k_proj.weight",
        ),
        (lambda t: t.pop("lm_head.weight"), "missing.*lm_head.weight"),
        (lambda t: [t.pop(name) for name in list(t) if "layers.1" in name], "9 missing tensors: (layers.1[^,]+, ){5}…"),
        (lambda t: t.update({"norm.weight": torch.ones(32)}), "twice: norm.weight"),
        (
            lambda t: t.update({"model.layers.0.self_attn.v_proj.weight": torch.ones(32, 32)}),
            r"layers.0.self_attn.v_proj.weight \[32, 32\].*expected \[16, 32\]",
        ),
        (
            lambda t: t.update({"model.layers.0.mlp.down_proj.weight": torch.ones(48, 32)}),
            r"down_proj.weight \[48, 32\].*expected \[32, 48\]",
        ),
        (lambda t: t.update({"lm_head.weight": torch.ones(VOCAB, 32, dtype=torch.int8)}), "lm_head.weight.*I8"),
    ],
)
def test_tensors_that_are_unknown_missing_double_or_misshapen_are_named(save, change, message):
    directory = save()
    model = GPT(checkpoint.read_config(directory))
    before = copy.deepcopy(model.state_dict())
    edit(directory / "model.safetensors", change)
    with pytest.raises(ValueError, match=message):
        checkpoint.load_weights(model, directory)
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)  # nothing was copied


def test_gpt2_matrix_that_is_not_transposed_is_refused(save):
    directory = save("gpt2")
    edit(
        directory / "model.safetensors",
        lambda tensors: tensors.update({"transformer.h.0.mlp.c_fc.weight": torch.ones(128, 32)}),
    )
    with pytest.raises(ValueError, match=r"h.0.mlp.c_fc.weight \[128, 32\].*expected \[32, 128\]"):
        GPT.from_pretrained(directory)


@pytest.mark.parametrize(
    "kind, embedding", [("gpt2", "transformer.wte.weight"), ("llama tied", "model.embed_tokens.weight")]
)
def test_head_stored_next_to_a_tied_embedding_must_equal_it(save, kind, embedding):
    directory = save(kind)
    file = directory / "model.safetensors"
    edit(file, lambda tensors: tensors.update({"lm_head.weight": tensors[embedding].clone()}))
    GPT.from_pretrained(directory)
    edit(file, lambda tensors: tensors["lm_head.weight"][3, 5].add_(0.01))
    with pytest.raises(ValueError, match=f"lm_head.weight is not {embedding}.*tie_word_embeddings=True"):
        GPT.from_pretrained(directory)


# -----------------------------------------------------------------------------------------------------
# files that are not there


@pytest.fixture
def sharded(save):
    return save(max_shard_size="10KB")


def test_missing_shard_is_named(sharded):
    (sharded / "model-00002-of-00012.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match="model-00002-of-00012.safetensors"):
        GPT.from_pretrained(sharded)


def test_tensor_only_in_the_index_is_named(sharded):
    shard = "model-00003-of-00012.safetensors"
    edit(sharded / "model.safetensors.index.json", lambda index: index["weight_map"].update(extra=shard))
    with pytest.raises(ValueError, match=f"{shard}: 1 tensors that only .* index has: extra"):
        GPT.from_pretrained(sharded)


def test_tensor_only_in_the_shard_is_named(sharded):
    shard = "model-00003-of-00012.safetensors"
    edit(sharded / shard, lambda tensors: tensors.update(extra=torch.ones(1)))
    with pytest.raises(ValueError, match=f"{shard}: 1 tensors that only .* index has: extra"):
        GPT.from_pretrained(sharded)


def test_pickles_are_refused(save):
    directory = save()
    (directory / "model.safetensors").rename(directory / "pytorch_model.bin")
    with pytest.raises(ValueError, match="pytorch_model.bin.*safetensors is supported"):
        GPT.from_pretrained(directory)


def test_no_weights_at_all(save):
    directory = save()
    (directory / "model.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match="model.safetensors"):
        GPT.from_pretrained(directory)


def test_file_that_is_not_safetensors_is_named(save):
    directory = save()
    (directory / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1")
    with pytest.raises(ValueError, match="model.safetensors: not a safetensors file"):
        GPT.from_pretrained(directory)


def test_a_directory_is_found_without_the_hub(tmp_path, monkeypatch):
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *a, **k: pytest.fail("asked the Hub"))
    assert checkpoint.find(str(tmp_path)) == tmp_path


def test_only_what_is_read_is_downloaded(tmp_path, monkeypatch):
    wanted = [
        "config.json",
        "generation_config.json",
        "model-00001-of-00002.safetensors",
        "model.safetensors",
        "model.safetensors.index.json",
        "original/tokenizer.model",
        "tokenizer.json",
        "tokenizer.model",
        "vocab.json",
        "merges.txt",
    ]
    others = [
        "pytorch_model.bin",
        "consolidated.safetensors",
        "original/consolidated.00.pth",
        "onnx/model.onnx",
        "README.md",
        "tf_model.h5",
    ]

    def snapshot_download(name, allow_patterns):
        assert name == "owner/model"
        assert [f for f in wanted + others if any(fnmatch.fnmatch(f, p) for p in allow_patterns)] == wanted
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    assert checkpoint.find("owner/model") == tmp_path


@pytest.mark.parametrize("name", ["owner/model", "/no/such/directory"])
def test_offline_says_which_files_to_put_where(tmp_path, monkeypatch, name):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    message = f"{name}.*config.json, model.safetensors.*tokenizer.json"
    with pytest.raises(FileNotFoundError, match=message) as error:
        checkpoint.find(name)
    assert error.value.__cause__ is not None
