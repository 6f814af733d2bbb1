"""The examples run as their docstrings say, and print what a reader expects."""

import re
from pathlib import Path

import pytest

import bench
from tests import forked

ROOT = Path(__file__).parents[1]
POLICY = "examples/my_policy.py:Eager"


def run_example(name):
    """The lines that an example prints, run as a newcomer would."""
    done = forked.run("-m", f"examples.{name}")
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.splitlines()


@pytest.mark.slow
def test_offline_prints_the_tokens_and_times_of_each_request():
    lines = run_example("offline")
    assert len(lines) == 6
    heads = lines[::2]
    times = lines[1::2]
    for i, (head, prompt_len) in enumerate(zip(heads, (3, 100, 300), strict=True)):
        start, _, tokens = head.partition(": ")
        assert start == f"request {i}, a prompt of {prompt_len} tokens"
        assert len(tokens.split(", ")) == 8
    for line in times:
        assert re.fullmatch(r"  first token after \d+\.\d{3} s, longest gap \d+\.\d{3} s", line)


@pytest.mark.slow
def test_online_decodes_beside_the_long_prompt():
    lines = run_example("online")
    requests = [
        int(re.match(r"request (\d): token \d+, (goes on|length)", line)[1]) for line in lines
    ]
    assert requests.count(0) == 9 and requests.count(1) == 4
    # request 1's prompt of 300 takes five iterations; request 0 gets a token in each
    assert requests.index(1) == 5


def test_my_policy_keeps_all_rules(capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    bench.main(["check", POLICY])
    assert capsys.readouterr().out.startswith(f"{POLICY} keeps all rules: nothing lost, ")
