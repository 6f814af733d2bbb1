"""The examples run as their docstrings say, and their numbers are those of the load."""

import re

import pytest

from tests import forked


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
