"""sample.py, held against Engine.generate: the same texts, from one prompt or several."""

import transformers

import sample
from cli.console import visible
from engine import Engine
from model import GPT, GPTConfig
from pretrained.tokenizers import ByteTokenizer, load_tokenizer
from sampling import SamplingParams
from tests.helpers import FakeTokenizer
from tests.test_checkpoints import small
from tests.test_tokenizers import byte_level_directory

COMMON = ["--preset", "llama-tiny", "--device", "cpu"]


def printed_by(capsys, *words):
    """(stdout, stderr) of sample.py with the smallest model, 9 tokens each."""
    sample.app([*COMMON, "--max-new-tokens", "9", *words])
    return capsys.readouterr()


def test_one_prompt_streams_and_several_share_batches(capsys):
    alone = {}
    for prompt in ("one", "two three", "ü!"):
        out, _ = printed_by(capsys, "--chunk", "4", "--prompt", prompt)
        alone[prompt] = out
        assert out.startswith(prompt) and len(out) > len(prompt) + 1
    words = [word for prompt in alone for word in ("--prompt", prompt)]
    out, _ = printed_by(capsys, "--chunk", "4", *words)
    titles = [f"--- {prompt}\n{text}" for prompt, text in alone.items()]
    assert out == "".join(titles)


def test_a_checkpoint_comes_with_its_tokenizer(tmp_path, capsys):
    config = small()
    config.vocab_size = 300
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    byte_level_directory(tmp_path)
    engine = Engine(GPT.from_pretrained(tmp_path), tokenizer=load_tokenizer(tmp_path))
    (expected,) = engine.generate(["abc"], SamplingParams(9), progress=False)
    capsys.readouterr()
    words = ["--device", "cpu", "--prompt", "abc", "--max-new-tokens", "9"]
    sample.app(["--model", str(tmp_path), *words])
    out, err = capsys.readouterr()
    assert "float32 on cpu" in err
    assert out == f"abc{visible(expected.text)}\n"


def test_what_is_not_told_is_as_in_the_python_api_and_said_first(capsys):
    options = sample.SampleOptions()
    defaults = SamplingParams()
    for name in ("temperature", "top_k", "top_p"):
        assert getattr(options, name) == getattr(defaults, name)
    out, err = printed_by(capsys, "--prompt", "x")
    assert "float32 on cpu" in err.splitlines()[0]
    engine = Engine(GPT(GPTConfig.preset("llama-tiny")), tokenizer=ByteTokenizer())
    completion = engine.generate(["x"], SamplingParams(9), progress=False)[0]
    assert out == f"x{completion.text}\n"


def calls_of_stream(monkeypatch):
    """[(config, prompts, params)] of all calls of Engine.stream from here on."""
    calls = []
    stream = Engine.stream

    def spy(engine, prompts, params):
        calls.append((engine.config, prompts, params))
        return stream(engine, prompts, params)

    monkeypatch.setattr(Engine, "stream", spy)
    return calls


def test_a_chat_is_encoded_without_what_begins_a_text(monkeypatch, capsys):
    ours = ByteTokenizer()
    tokenizer = FakeTokenizer(lambda text: [1, *text.encode()], ours.decode)
    monkeypatch.setattr(FakeTokenizer, "encode_chat", lambda self, m: ours.encode_chat(m))
    monkeypatch.setattr("pretrained.tokenizers.ByteTokenizer", lambda: tokenizer)
    calls = calls_of_stream(monkeypatch)
    printed_by(capsys, "--chat", "hi", "--prompt", "a")
    assert calls[0][1] == [[1, ord("a")], list(b"user: hi\nassistant:")]


def test_options_are_passed_on(monkeypatch, capsys):
    calls = calls_of_stream(monkeypatch)
    words = ["--prompt", "a", "--prompt", "b", "--temperature", "0.5", "--top-k", "4"]
    words += ["--top-p", "0.6", "--seed", "7"]
    printed_by(capsys, *words, "--policy", "vllm", "--chunk", "5")
    printed_by(capsys, *words, "--prefix-caching")
    (config, _, params), (caching, *_) = calls
    expected = dict(
        max_new_tokens=9,
        temperature=0.5,
        top_k=4,
        top_p=0.6,
    )
    assert params == [SamplingParams(**expected, seed=seed) for seed in (7, 8)]
    assert (config.policy, config.chunk, config.max_batch) == ("vllm", 5, 2)
    assert not config.prefix_caching and caching.prefix_caching
    assert (caching.policy, caching.page_size) == ("sarathi-serve", 5)  # half of the longest, 10
