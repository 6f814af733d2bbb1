"""The examples run as their docstrings say, and print what a reader expects."""

import re
import shlex
from pathlib import Path

import pytest

import bench
from examples import my_policy
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
def test_nano_stalls_under_orca_and_vllm_and_all_texts_are_the_same():
    *lines, same = run_example("nano")
    assert [int(line.split()[-2]) for line in lines[::5]] == [1, 8, 12, 1]
    assert len(lines) == 20 and same.endswith(" True")


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


def test_my_policy_serves_as_its_docstring_says(capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    (line,) = re.findall(r"(?m)^ *python bench\.py (serve .*)$", my_policy.__doc__)
    bench.main([*shlex.split(line.replace("$OWN", POLICY)), "--requests", "20"])
    text = capsys.readouterr().out
    assert f"\n{POLICY}: " in text and "\nsarathi-serve: " in text
