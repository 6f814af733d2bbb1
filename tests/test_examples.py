"""The examples run as their docstrings say, and their numbers are those of the load."""

import re
from functools import partial

import pytest
from transformers import AutoModelForCausalLM

from engine import Engine
from examples import stall
from runtime.runner import Runner
from tests import forked
from tests.test_checkpoints import small
from tests.test_tokenizers import byte_level_directory


def run_example(name):
    """What an example prints, run as a newcomer would."""
    done = forked.run("-m", f"examples.{name}")
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_offline_prints_eight_tokens_of_each_request():
    rows = re.findall(r"request (\d), a prompt of (\d+) tokens: (.*)", run_example("offline"))
    assert [(number, prompt_len) for number, prompt_len, _ in rows] == [
        ("0", "3"),
        ("1", "100"),
        ("2", "300"),
    ]
    assert [len(tokens.split(", ")) for _, _, tokens in rows] == [8, 8, 8]


@pytest.mark.slow
def test_online_decodes_beside_the_long_prompt():
    requests = re.findall(r"request (\d): token", run_example("online"))
    assert requests.count("0") == 9
    assert requests.count("1") == 4
    # request 1's prompt of 300 takes five iterations; request 0 gets a token in each
    assert requests.index("1") == 5


def test_a_prompt_of_1000_tokens_freezes_answers_under_vllm_only(tmp_path, capsys, monkeypatch):
    """On a clock that counts a hundredth of a second for each token that is computed."""
    computed = []
    forward = Runner.forward

    def counted(runner, flat):
        computed.extend(flat.tokens)
        return forward(runner, flat)

    monkeypatch.setattr(Runner, "forward", counted)
    monkeypatch.setattr(stall, "Engine", partial(Engine, clock=lambda: len(computed) / 100))
    config = small(vocab_size=300, max_position_embeddings=2048)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    byte_level_directory(tmp_path)
    stall.main(["--model", str(tmp_path), "--svg", str(tmp_path / "stall.svg")])
    pattern = r"longest freeze (\S+) s, the long prompt waits (\S+) s"
    assert re.findall(pattern, capsys.readouterr().out) == [
        ("10.04", "10.00"),  # the prompt, then four decodes
        ("0.32", "11.05"),  # 35 chunks, each with three decodes
    ]
    assert "sarathi-serve" in (tmp_path / "stall.svg").read_text("utf-8")
