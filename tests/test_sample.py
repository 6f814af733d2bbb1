"""sample.py: text in, text out."""

import inspect

import pytest

import sample
from engine import Engine
from model import GPT, GPTConfig
from pretrained.tokenizers import byte_tokenizer
from sampling import SamplingParams
from tests import forked

COMMON = ["--preset", "llama-tiny", "--device", "cpu"]


def test_one_prompt_streams_and_several_share_batches(capsys):
    common = [*COMMON, "--max-new-tokens", "12", "--temperature", "0", "--chunk", "4"]
    alone = {}
    for prompt in ("one", "two three", "ü!"):
        sample.main([*common, "--prompt", prompt])
        alone[prompt] = capsys.readouterr().out.removesuffix("\n")
        assert alone[prompt].startswith(prompt) and len(alone[prompt]) > len(prompt)
    sample.main([*common, *(word for prompt in alone for word in ("--prompt", prompt))])
    printed = capsys.readouterr().out.split("--- ")[1:]
    assert printed == [text + "\n" for text in alone.values()]


def test_a_checkpoint_comes_with_its_tokenizer(tmp_path, capsys):
    import transformers
    from tokenizers import Tokenizer, decoders, models

    tokenizer = Tokenizer(models.BPE({c: i for i, c in enumerate("abcdefgh")}, []))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    sizes = dict(vocab_size=8, hidden_size=16, intermediate_size=24, num_hidden_layers=1)
    more = dict(num_attention_heads=2, bos_token_id=None, eos_token_id=None)
    config = transformers.LlamaConfig(**sizes, **more)
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path)
    capsys.readouterr()
    words = ["--device", "cpu", "--prompt", "abc", "--max-new-tokens", "9"]
    sample.main(["--model", str(tmp_path), *words])
    printed = capsys.readouterr()
    assert printed.err.startswith(f"# {tmp_path}: float32 on cpu, temperature 0, ")
    text = printed.out.strip()
    assert text.startswith("abc") and len(text) == 12 and set(text) <= set("abcdefgh")


def test_what_is_not_told_is_as_in_the_python_api_and_said_first(tmp_path, capsys):
    options = sample.parse_args(["--prompt", "x"])
    told = (options.temperature, options.top_k, options.top_p)
    defaults = SamplingParams()
    assert told == (defaults.temperature, defaults.top_k, defaults.top_p)
    for load in (GPT.__init__, GPT.from_pretrained):
        default = inspect.signature(load).parameters["dtype"].default
        assert f"torch.{options.model.dtype}" == str(default)
    sample.main([*COMMON, "--prompt", "x", "--max-new-tokens", "9"])
    printed = capsys.readouterr()
    first_line = printed.err.splitlines()[0]
    assert "float32 on cpu" in first_line and "temperature 0, top-k 0, top-p 1" in first_line
    model = GPT(GPTConfig.preset("llama-tiny"))
    engine = Engine(model, tokenizer=byte_tokenizer())
    completion = engine.generate(["x"], SamplingParams(9), progress=False)[0]
    assert printed.out == f"x{completion.text}\n"


def test_options_are_passed_on(monkeypatch):
    seen = []
    stream = Engine.stream

    def spy(engine, prompts, params):
        scheduler = engine.scheduler
        made = type(scheduler).__name__, scheduler.chunk, scheduler.max_batch
        shares = scheduler.pages.prefix_caching
        seen.extend([params, made + (scheduler.pages.page_size,) * shares])
        return stream(engine, prompts, params)

    monkeypatch.setattr(Engine, "stream", spy)
    argv = [
        *(*COMMON, "--prompt", "a", "--prompt", "b", "--max-new-tokens", "3"),
        *("--temperature", "0.5", "--top-k", "4", "--top-p", "0.6"),
    ]
    sample.main([*argv, "--seed", "7", "--policy", "vllm", "--chunk", "9"])
    params, made = seen
    params = [(p.max_new_tokens, p.temperature, p.top_k, p.top_p, p.seed) for p in params]
    assert params == [(3, 0.5, 4, 0.6, 7), (3, 0.5, 4, 0.6, 8)]
    assert made == ("VLLM", 9, 2)
    sample.main([*argv, "--prefix-caching"])
    assert seen[-1] == ("SarathiServe", 256, 2, 2)  # a page has half of the longest, 4


@pytest.mark.slow
@pytest.mark.parametrize(
    "words, message",
    [
        ([], "required: --prompt, --chat"),
        ([*COMMON, "--prompt", "x", "--temperature", "-1"], "--temperature -1: must"),
        ([*COMMON, "--prompt", ""], "prompt"),
        (["--model", "/no/such/directory", "--prompt", "x"], "config.json"),
        (
            [*COMMON, "--prompt", "x", "--policy", "fifo"],
            "error: --policy policy='fifo': must be one of",
        ),
    ],
)
def test_what_is_wrong_is_said_without_a_traceback(words, message):
    done = forked.run("sample.py", *words)
    assert done.returncode != 0 and message in done.stderr and "Traceback" not in done.stderr
