"""Random models give the logits that transformers gives; what is not loaded exactly is refused."""

import copy
import json
import math
import weakref
from unittest.mock import Mock

import huggingface_hub
import pytest
import torch
import transformers
from huggingface_hub.utils import filter_repo_objects
from safetensors.torch import load_file, save_file
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from config import GPTConfig
from engine import Engine
from kv_cache import KVCache
from model import GPT, rope_table
from pretrained import checkpoints
from request import lone_chunk
from sampling import SamplingParams
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


@pytest.fixture
def save(tmp_path):
    """save(kind) -> the directory of a checkpoint, alone in this test, that may be damaged."""

    def save(kind="llama", **options):
        make(kind).save_pretrained(tmp_path, **options)
        return tmp_path

    return save


def edit(path, change):
    """Apply `change` to the object in a JSON file, or to the tensors in a safetensors file."""
    if path.suffix == ".json":
        content = json.loads(path.read_text())
        change(content)
        path.write_text(json.dumps(content))
    else:
        tensors = load_file(path)
        change(tensors)
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)


def add(name, *shape):
    """A change to a dict of tensors: there is another one, or one of another shape."""
    return lambda tensors: tensors.update({name: torch.ones(shape)})


def as_integers(name):
    """A change to a dict of tensors: one of them has whole numbers."""
    return lambda tensors: tensors.update({name: tensors[name].int()})


def drop(part):
    """A change to a dict of tensors: all with `part` in their names are gone."""
    return lambda tensors: [tensors.pop(name) for name in list(tensors) if part in name]


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
def test_logits_equal_transformers_and_every_number_is_filled(save, kind, shard_size, chunk):
    directory = save(kind, max_shard_size=shard_size)
    assert (len(list(directory.glob("*.safetensors"))) > 3) == (shard_size == "10KB")
    model = GPT(checkpoints.read_config(directory))
    for p in model.parameters():
        p.fill_(math.nan)
    checkpoints.load_weights(model, directory)
    assert not any(p.isnan().any() for p in model.parameters())
    tokens = prompt(model)
    expected = reference_logits(make(kind), tokens)
    assert expected.std() > 1 and expected.std(0).mean() > 0.5  # well spread, and they differ
    torch.testing.assert_close(all_logits(model, tokens, chunk), expected, rtol=1e-4, atol=1e-4)


def as_published(tensors):
    """GPT-2's names have no prefix, and there are buffers next to the weights."""
    for name in list(tensors):
        tensors[name.removeprefix("transformer.")] = tensors.pop(name)
    tensors["h.1.attn.bias"] = torch.ones(1, 1, 64, 64).tril()
    tensors["h.1.attn.masked_bias"] = torch.tensor(-1e4)


OLD_FREQUENCIES = add("model.layers.1.self_attn.rotary_emb.inv_freq", 4)


@pytest.mark.parametrize("kind, change", [("gpt2", as_published), ("llama", OLD_FREQUENCIES)])
def test_old_names_and_buffers_change_nothing(save, kind, change):
    file = save(kind) / "model.safetensors"
    expected = GPT.from_pretrained(file.parent).state_dict()
    edit(file, change)
    loaded = GPT.from_pretrained(file.parent).state_dict()
    torch.testing.assert_close(loaded, expected, rtol=0, atol=0)


@pytest.mark.parametrize(
    "stored, dtype", [(torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)]
)
def test_weights_are_converted_to_the_dtype_of_the_model(save, stored, dtype):
    file = save() / "model.safetensors"
    edit(file, lambda tensors: tensors.update({n: t.to(stored) for n, t in tensors.items()}))
    weight = GPT.from_pretrained(file.parent, dtype=dtype).blocks[1].postproj.weight
    tensor = load_file(file)["model.layers.1.self_attn.o_proj.weight"]
    assert (tensor.dtype, weight.dtype) == (stored, dtype)
    assert torch.equal(weight, tensor.to(dtype))


def test_loading_holds_one_tensor_and_fills_parameters_in_place(save, monkeypatch):
    directory = save("llama", max_shard_size="10KB")
    alive = set()
    counts = []
    fill = checkpoints._fill

    def counting(view, tensor, source, *more):
        def read(self, slices):
            part = tensor[slices]
            alive.add(source.name)
            weakref.finalize(part, alive.discard, source.name)
            counts.append(len(alive))
            return part

        fill(view, type("Counted", (), {"__getitem__": read})(), source, *more)

    monkeypatch.setattr(checkpoints, "_fill", counting)
    model = GPT(checkpoints.read_config(directory), seed=None)
    places = {name: p.data_ptr() for name, p in model.named_parameters()}
    checkpoints.load_weights(model, directory)
    assert max(counts) == 1
    assert len(counts) == 21  # embedding, norm, head, and 9 tensors in each layer
    assert places == {name: p.data_ptr() for name, p in model.named_parameters()}


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
LLAMA2 = dict(pretraining_tp=1, rope_scaling=None)
MISTRAL_V01 = dict(model_type="mistral", rope_theta=10000.0, sliding_window=4096)
PUBLISHED = {
    "gpt2": GPT2 | dict(n_embd=768, n_head=12, n_layer=12),
    "llama-7b": published(4096, 32, 32, None, 11008, 2048, 1e-6),
    "llama2-70b": published(8192, 80, 64, 8, 28672, 4096, 1e-5, **LLAMA2),
    "llama3-8b": published(4096, 32, 32, 8, 14336, 8192, 1e-5, **LLAMA3),
    "mistral-7b": published(4096, 32, 32, 8, 14336, 32768, 1e-5, **MISTRAL_V01),
    "yi-34b": published(7168, 60, 56, 8, 20480, 4096, 1e-5, rope_theta=5e6, vocab_size=64000),
}


def read(path, **config):
    (path / "config.json").write_text(json.dumps(config))
    return checkpoints.read_config(path)


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_config_gives_the_preset(tmp_path, name):
    assert read(tmp_path, **PUBLISHED[name]) == GPTConfig.preset(name)


LLAMA_SIZES = dict(
    zip(SIZES, (128, 2, 32, 8, 48, 5000, 1e-5), strict=True), vocab_size=97, head_dim=16
)


def sized(model_type, **options):
    """A config.json that says the sizes, and `options`."""
    sizes = PUBLISHED["gpt2"] if model_type == "gpt2" else LLAMA_SIZES
    return sizes | dict(model_type=model_type) | options


@pytest.mark.parametrize("model_type", ["gpt2", "llama", "mistral", "qwen2", "qwen3"])
def test_missing_options_default_as_in_transformers_but_not_sizes(tmp_path, model_type):
    config = sized(model_type)
    silent = read(tmp_path, **config)
    transformers.CONFIG_MAPPING[model_type](**config).save_pretrained(tmp_path)
    assert silent == checkpoints.read_config(tmp_path)
    same = dict(reorder_and_upcast=1, partial_rotary_factor=1.0, pretraining_tp=2)
    same |= dict(quantization_config=None, activation_function="gelu_pytorch_tanh")
    assert read(tmp_path, **config | same) == silent
    del config["vocab_size"]
    with pytest.raises(ValueError, match="config.json: vocab_size: Field required"):
        read(tmp_path, **config)


def without(key, options=FREQUENCIES, **more):
    return {name: value for name, value in options.items() if name != key} | more


def plain(theta):
    return dict(rope_type="default", rope_theta=theta)


# Where a fact of RoPE may stand, beside what else: config.json has it in several places.
LENGTH = "original_max_position_embeddings"
ROPE_PLACES = {
    "theta twice": dict(rope_theta=1e3, rope_parameters=plain(5e5)),
    "theta beside rope_scaling": dict(rope_theta=5e5, rope_scaling=FREQUENCIES),
    "an empty rope_scaling": dict(rope_scaling={}, rope_parameters=plain(5e5)),
    "rope_scaling and rope_parameters": dict(rope_scaling=FREQUENCIES, rope_parameters=plain(5e5)),
    "type": dict(rope_scaling=without("rope_type", type="llama3")),
    "another type": dict(rope_scaling=FREQUENCIES | dict(type="default")),
    "another rope_type": dict(rope_scaling=FREQUENCIES | dict(type="llama3", rope_type="default")),
    "length inside": dict(rope_scaling=FREQUENCIES | {LENGTH: 64}),
    "length beside": dict(rope_scaling=FREQUENCIES) | {LENGTH: 64},
    "length twice": dict(rope_scaling=FREQUENCIES | {LENGTH: 512}) | {LENGTH: 64},
    "length nowhere": dict(rope_scaling=FREQUENCIES),
}


@pytest.mark.parametrize("place", ROPE_PLACES)
def test_rope_is_that_of_transformers_wherever_it_stands(tmp_path, place):
    ours = read(tmp_path, **sized("llama"), **ROPE_PLACES[place])
    theirs = transformers.AutoConfig.from_pretrained(tmp_path)
    frequencies = LlamaRotaryEmbedding(theirs).inv_freq
    minus_sines = rope_table(ours, 2, "cpu", torch.float64)[1, 1, 0, : len(frequencies)]
    torch.testing.assert_close(-minus_sines.asin().float(), frequencies, rtol=1e-6, atol=0)


SIZES_OF_GPT2 = ["n_embd", "n_layer", "n_head", "n_positions"]
OTHER_NAMES = ["hidden_size", "num_hidden_layers", "num_attention_heads", "max_position_embeddings"]
NAMES = {  # options of GPT-2 beside, or instead of, those that it is published with
    "its own": {},
    "LLaMA's": dict(zip(OTHER_NAMES, (96, 2, 4, 64), strict=True)),
    "eps of both": dict(rms_norm_eps=1e-3),
    "nulls": dict(n_inner=None, head_dim=None, num_key_value_heads=None),
}


@pytest.mark.parametrize("names", NAMES)
def test_sizes_of_gpt2_are_those_of_transformers_under_each_name(tmp_path, names):
    published = PUBLISHED["gpt2"]
    if names == "LLaMA's":
        published = {key: value for key, value in published.items() if key not in SIZES_OF_GPT2}
    ours = read(tmp_path, **published | NAMES[names])
    theirs = transformers.AutoConfig.from_pretrained(tmp_path)
    sizes = [ours.n_embd, ours.n_layer, ours.n_head, ours.max_positions]
    assert sizes == [getattr(theirs, name) for name in SIZES_OF_GPT2]
    assert ours.norm_eps == theirs.layer_norm_epsilon


WINDOWS = [  # model_type, window, options, positions
    ("mistral", 100, {}, 100),
    ("mistral", 9000, {}, 5000),
    ("mistral", None, {}, 5000),
    ("qwen2", 100, {}, 5000),
    ("qwen2", 100, dict(use_sliding_window=True), 100),
    ("qwen2", 100, dict(layer_types=["full_attention", "sliding_attention"]), 100),
    ("qwen2", 100, dict(layer_types=["full_attention"] * 2), 5000),
    ("llama", 100, {}, 5000),
]


@pytest.mark.parametrize("model_type, window, options, positions", WINDOWS)
def test_positions_end_where_a_window_would_slide(tmp_path, model_type, window, options, positions):
    options = sized(model_type, sliding_window=window, **options)
    assert read(tmp_path, **options).max_positions == positions


WRONG = [  # an option, a value of a wrong type, that no model has, or that is not computed
    *(("vocab_size", value) for value in ("97", 97.0, True, None, 0)),
    *(("model_type", value) for value in (None, "mixtral", "llama\nllama")),
    *(("rms_norm_eps", value) for value in (0, math.nan)),
    ("head_dim", [16]),
    ("num_hidden_layers", 2.0),
    ("num_key_value_heads", "8"),
    ("sliding_window", 2.5),
    ("rope_theta", 0),
    ("tie_word_embeddings", "true"),
    ("layer_types", ["linear_attention"]),
    ("rope_scaling", "yarn"),
    ("rope_parameters", [ROPE]),
    ("hidden_act", "gelu"),
    ("activation_function", "relu"),
    ("partial_rotary_factor", 0.25),
    ("scale_attn_weights", False),
    ("scale_attn_by_inverse_layer_idx", True),
    ("quantization_config", {"quant_method": "gptq"}),
    ("text_config", {}),  # a model within another one, that sees or hears
]
WRONG_ROPE = [
    ("rope_type", "yarn"),
    ("type", "linear"),
    ("factor", 0),
    ("partial_rotary_factor", 0.5),
    ("full_attention", {}),
    ("beta_fast", 32),
]
REFUSED = [
    *(({name: value}, f"{name}=.*: must be ") for name, value in WRONG),
    *(
        ({place: ROPE | {name: value}}, f"{name}={value!r}: (must be|Extra)")
        for place in ("rope_scaling", "rope_parameters")
        for name, value in WRONG_ROPE
    ),
    ({"model_type": "phi3"}, "must be 'gpt2', 'llama', 'mistral', 'qwen2' or 'qwen3'"),
    ({"num_key_value_heads": 3}, "n_kv_head=3: must divide n_head=32"),
]


@pytest.mark.parametrize("options, message", REFUSED)
def test_unsupported_or_invalid_options_are_refused_in_one_line(tmp_path, options, message):
    with pytest.raises(ValueError, match=f"{tmp_path}/config.json: .*{message}") as error:
        read(tmp_path, **sized("llama") | options)
    assert str(error.value).isprintable()


Q_BIAS = "layers.0.self_attn.q_proj.bias"
K = "layers.1.self_attn.k_proj.weight"
V = "layers.0.self_attn.v_proj.weight"
C_FC = "h.0.mlp.c_fc.weight"
MISFITS = [
    ("llama", add(f"model.{Q_BIAS}", 32), f"1 unknown tensors: {Q_BIAS}"),
    ("llama", drop(K), f"1 missing tensors: {K}"),
    ("llama", drop("lm_head.weight"), "missing.*lm_head.weight"),
    ("llama", drop("layers.1"), "9 missing tensors: (layers.1[^,]+, ){5}…"),
    ("llama", add("norm.weight", 32), ": norm.weight is there twice"),
    ("llama", add(f"model.{V}", 32, 32), rf"{V} \[32, 32\].*expected \[16, 32\]"),
    ("llama", as_integers("model.norm.weight"), r"norm.weight \[32\] I32 \(expected \[32\], one"),
    ("gpt2", add(f"transformer.{C_FC}", 128, 32), rf"{C_FC} \[128, 32\].*expected \[32, 128\]"),
]


@pytest.mark.parametrize("kind, change, message", MISFITS)
def test_tensors_that_do_not_fit_are_named_and_nothing_is_copied(save, kind, change, message):
    directory = save(kind)
    model = GPT(checkpoints.read_config(directory))
    before = copy.deepcopy(model.state_dict())
    edit(directory / "model.safetensors", change)
    with pytest.raises(ValueError, match=message):
        checkpoints.load_weights(model, directory)
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)


EMBEDDINGS = {"gpt2": "transformer.wte.weight", "llama tied": "model.embed_tokens.weight"}


@pytest.mark.parametrize("kind, embedding", EMBEDDINGS.items())
def test_head_stored_next_to_a_tied_embedding_must_equal_it(save, kind, embedding):
    file = save(kind) / "model.safetensors"
    edit(file, lambda tensors: tensors.update({"lm_head.weight": tensors[embedding].clone()}))
    GPT.from_pretrained(file.parent)
    edit(file, lambda tensors: tensors["lm_head.weight"][3, 5].add_(0.01))
    own = embedding.partition(".")[2]
    with pytest.raises(ValueError, match=f"tie_word_embeddings, but lm_head.weight is not {own}"):
        GPT.from_pretrained(file.parent)


SHARD = "model-00003-of-00012.safetensors"


def test_shards_hold_each_tensor_once(save):
    shard = save(max_shard_size="10KB") / SHARD
    assert shard.is_file() and not (shard.parent / "model.safetensors").exists()
    other = shard.with_name(SHARD.replace("3", "4"))
    first = next(iter(load_file(other)))
    edit(shard, lambda tensors: tensors.update(load_file(other)))
    with pytest.raises(ValueError, match=f"{other}: {first[6:]} is there twice"):
        GPT.from_pretrained(shard.parent)
    shard.unlink()
    with pytest.raises(ValueError, match="missing tensors: "):
        GPT.from_pretrained(shard.parent)


@pytest.mark.parametrize("value", [math.nan, -math.inf, 1e5])
def test_weights_that_are_not_finite_in_their_dtype_are_refused(save, value):
    file = save("gpt2") / "model.safetensors"
    edit(file, lambda tensors: tensors[f"transformer.{C_FC}"].fill_(6e4))  # their sum overflows
    GPT.from_pretrained(file.parent, dtype=torch.float16)
    edit(file, lambda tensors: tensors[f"transformer.{C_FC}"][3, 5].fill_(value))
    with pytest.raises(ValueError, match=f"{C_FC} holds NaN or infinity as torch.float16"):
        GPT.from_pretrained(file.parent, dtype=torch.float16)


def test_a_long_context_costs_nothing_until_a_request_may_be_long(save, monkeypatch):
    directory = save("llama 3")
    edit(directory / "config.json", lambda c: c.update(max_position_embeddings=2**24))
    table = Mock(wraps=rope_table)
    monkeypatch.setattr("model.rope_table", table)
    model = GPT.from_pretrained(directory, dtype=torch.float64)
    logits = all_logits(model, [3] * 70)
    assert table.call_args.args[1] == 70
    long_request = Engine(model, max_len=5000, max_batch=1)
    long_request.generate([[3] * 4998], SamplingParams(2), progress=False)
    assert table.call_args.args[1] == 5000
    torch.testing.assert_close(all_logits(model, [3] * 70), logits, rtol=0, atol=0)


def test_weights_in_no_file_or_one_that_is_not_safetensors(save):
    file = save() / "model.safetensors"
    file.rename(file.parent / "pytorch_model.bin")
    with pytest.raises(FileNotFoundError, match="model.safetensors.*pickles are not read"):
        GPT.from_pretrained(file.parent)
    file.write_text("version https://git-lfs.github.com/spec/v1")
    with pytest.raises(ValueError, match="model.safetensors: not a safetensors file"):
        GPT.from_pretrained(file.parent)


READ = [
    *("config.json", "generation_config.json", "model.safetensors", SHARD, "tokenizer.json"),
    *("tokenizer.model", "original/tokenizer.model", "tokenizer_config.json"),
    *("special_tokens_map.json", "added_tokens.json"),
    *("chat_template.json", "chat_template.jinja"),
    "additional_chat_templates/rag.jinja",
]
NEVER_READ = [
    *("pytorch_model.bin", "consolidated.safetensors", "original/consolidated.00.pth"),
    *("onnx/model.onnx", "README.md", "tf_model.h5", "model.fp16.safetensors"),
    "model.safetensors.index.json",
]


def test_only_files_that_are_read_are_downloaded(tmp_path, monkeypatch):
    """And nothing if a directory is there."""

    download = Mock(return_value=str(tmp_path))
    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert checkpoints.find("owner/model") == checkpoints.find(str(tmp_path)) == tmp_path
    ((name,), options) = download.call_args
    files = filter_repo_objects(READ + NEVER_READ, allow_patterns=options["allow_patterns"])
    assert (name, list(files)) == ("owner/model", READ)


@pytest.mark.parametrize("name", ["owner/model", "/no/such/directory"])
def test_offline_says_which_files_to_put_where(tmp_path, monkeypatch, name):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    message = f"{name}.*config.json, model.safetensors.*tokenizer.json"
    with pytest.raises(FileNotFoundError, match=message) as error:
        checkpoints.find(name)
    assert error.value.__cause__ is not None
