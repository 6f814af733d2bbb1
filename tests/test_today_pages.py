"""The pages of `bench.py today`: what was tried is what the sources say, and the README has it."""

from pathlib import Path

import pytest

from lab.claims import today
from lab.claims.today_rules import TinyLoad, conduct_of, smallest_difference, steps_of
from policies import TODAY
from tests.helpers import parse

README = (Path(__file__).parents[1] / "policies/README.md").read_text("utf-8")

# policy: a batch, a long prompt in front, memory for 10 + 20 and 10 + 12, who pays
CONDUCT = """
vllm-v1: mixed, blocks, 30, the newest
sglang: prefill first, alone, blocks, 47, the fewest outputs
sglang-mixed: mixed, blocks, 47, the fewest outputs
no-evict: mixed, blocks, 52, never
fastgen: mixed, blocks, 30, waits
tgi: prefill first, alone, blocks, 52, never
hf: mixed, blocks, 30, who finds none
nano-vllm: prefill first, alone, blocks, 30, the newest
interval: in turn, blocks, 30, the newest
shortest-uncached: mixed, is passed, 30, the newest
peak: mixed, blocks, 45, the newest
sarathi: mixed, blocks, 60, never
request-level: one batch after the other, blocks, 60, never
"""


@pytest.mark.parametrize("row", CONDUCT.strip().splitlines())
def test_what_a_policy_does_is_found_out_by_trying(row):
    policy, _, expected = row.partition(": ")
    conduct = conduct_of(policy)
    assert ", ".join(str(value) for value in vars(conduct).values()) == expected


def test_the_smallest_load_on_which_vllm_differs_is_the_smallest():
    difference = smallest_difference("vllm-v1", "sarathi-serve")
    load = difference.load
    assert difference.steps == (steps_of("vllm-v1", load), steps_of("sarathi-serve", load))
    assert difference.steps[0] != difference.steps[1]
    assert smallest_difference("vllm-v1", "sarathi-serve", sum(map(sum, load.requests)) - 1) is None
    assert smallest_difference("vllm-v1", "vllm-v1", 8) is None
    ample = TinyLoad(load.requests, load.chunk, pages=100)
    assert steps_of("vllm-v1", ample) == steps_of("sarathi-serve", ample)


def test_the_readme_has_what_the_command_prints():
    printed = "".join(f"{today.PAGES[name]().to_markdown()}\n\n" for name in ("engines", "vllm-v1"))
    assert all(f"| {policy} " in printed for policy in TODAY)
    for page in printed.strip().split("\n\n## ")[1:]:
        assert page in README
    assert "random loads, with enough memory for all: 0 differ" in printed


def test_every_page_is_in_the_readme():
    assert README.count("\n## ") == len(today.PAGES)


@pytest.mark.parametrize("options", dict.fromkeys(today.CHECKLIST.values()))
def test_a_command_of_the_checklist_is_one_of_the_bench(options):
    parse([*today.SERVE.split(), *options.split()])
    assert f"`bench.py {today.SERVE}`" in README and f": `{options}`" in README
