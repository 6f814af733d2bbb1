"""Policies by name, those in files of one's own, and what an engine is told about them."""

import re
from dataclasses import replace

import pytest

from config import EngineConfig
from engine import Engine
from kv_cache import Pages
from policies import POLICIES, TODAY, find_policy, make_scheduler, policy_options, scheduler_of
from policies.observers import chunk_records
from policies.pages import make_pages
from scheduler import Request, SarathiServe
from tests.helpers import IN_ORDER, RESERVING, advance, tiny_model

OWN = """from scheduler import Request, SarathiServe
class Shortest(SarathiServe):
    def __init__(self, *args, limit=4, **options):
        super().__init__(*args, **options)
        self.limit = limit
    def token_budget(self, decodes, prefills):
        return 8 // self.limit
    def rank(self, request):
        return self.pages.free([request])  # an error deeper down, in kv_cache.py
three = 3
from dataclasses import dataclass
@dataclass
class Hint:
    limit: "int" = 4  # looked up in the module while it is loaded
"""
NAME = "my_policy.py:Shortest"
SIZES = dict(chunk=8, max_batch=2, max_len=8)


@pytest.fixture
def own(tmp_path, monkeypatch):
    """my_policy.py in the working directory, its path."""
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "my_policy.py"
    path.write_text(OWN, "utf-8")
    return path


def test_a_custom_policy_is_loaded_once_from_any_path(own):
    found = find_policy(NAME)
    assert found is find_policy(f"{own}:Shortest") is find_policy(f"./{NAME}")
    assert issubclass(found, SarathiServe) and policy_options(found) == {"limit"}
    scheduler = make_scheduler(f"{own}:Shortest", Pages(2, 8), **SIZES)
    scheduler.add(Request(0, [0] * 6, 6, 1))
    assert [chunk.length for chunk in scheduler.next_batch()] == [2]


@pytest.mark.parametrize(
    "name", ["sarathi_serve", "my_policy.py", "my_policy.py:Longest", "my_policy.py:three"]
)
def test_an_unknown_policy_is_refused(own, name):
    with pytest.raises(ValueError, match="policy=|no subclass of Scheduler"):
        find_policy(name)
    with pytest.raises(FileNotFoundError):
        find_policy("other_policy.py:Shortest")


def test_a_file_that_fails_has_its_traceback_and_can_be_mended(own):
    own.write_text("import scheduler\n\n1 / 0\n", "utf-8")
    with pytest.raises(ZeroDivisionError) as caught:
        find_policy(NAME)
    assert (caught.traceback[-1].path, caught.traceback[-1].lineno) == (own, 2)
    own.write_text(OWN, "utf-8")
    assert find_policy(NAME).__name__ == "Shortest"


def test_reserving_and_in_order_policies_are_derived_from_their_classes():
    homes = ("scheduler", "policies.ablations")
    papers = [name for name, cls in POLICIES.items() if cls.__module__ in homes]
    whole = {"request-level", "orca", "orca-best", "sarathi"}
    assert set(RESERVING) & set(papers) == whole and len(papers) == 8
    assert {*papers, "dynamic"} <= set(IN_ORDER) and "priority" not in IN_ORDER


def test_a_config_is_made_of_fields_and_options_of_the_policy():
    config = EngineConfig("dynamic", 64, policy_options={"tile": 8, "tbt_slo": 0.2})
    assert EngineConfig().policy == "sarathi-serve" and EngineConfig().policy_options == {}
    sized = replace(config, max_batch=2, max_len=16, page_size=16, pages=2)
    scheduler = scheduler_of(sized, clock=lambda: 7.0)
    assert (scheduler.chunk, scheduler.max_batch, scheduler.max_len) == (64, 2, 16)
    assert (scheduler.tbt_slo, scheduler.tile, scheduler.clock()) == (0.2, 8, 7.0)
    with pytest.raises(TypeError):  # an option of another policy
        scheduler_of(replace(sized, policy="orca"), clock=float)


def test_an_engine_takes_the_fields_of_a_config_as_keywords():
    changes = dict(policy="dynamic", chunk=8, max_batch=2, max_len=16, page_size=4, pages=8)
    changes |= dict(prefix_caching=True, max_waiting=5, attention="sdpa")
    config = EngineConfig(**changes, policy_options={"tbt_slo": 0.2})
    assert Engine(tiny_model(), config).config == config
    with pytest.raises(TypeError, match="tbt_slo"):
        Engine(tiny_model(), policy="dynamic", tbt_slo=0.2)


EXAMPLE = r"`((?:\w+=\d+ ?)+), ([\w+ ]+)`[^`]*?`((?:\.\.\. \| )?0:[^`]*)`,? theirs `([^`]+)`"
EXAMPLES = [
    (name, *example)
    for name, policy in TODAY.items()
    for example in re.findall(EXAMPLE, " ".join(policy.__doc__.split()))
]


@pytest.mark.parametrize("name, sizes, load, batches, theirs", EXAMPLES)
def test_an_example_of_what_differs_from_an_engine_is_true_here(name, sizes, load, batches, theirs):
    options = dict(chunk=8, max_batch=8, max_len=64, page_size=4, pages=64)
    options |= {key: int(value) for key, value in re.findall(r"(\w+)=(\d+)", sizes)}
    cache = make_pages(options.pop("pages"), options.pop("page_size"), not load[0].isdigit())
    scheduler = make_scheduler(name, cache, **options)
    for i, lengths in enumerate(load.split()):
        prompt, output = lengths.split("+")
        tokens = [1000 + i] * int(prompt) if prompt.isdigit() else [*map(ord, prompt)]
        scheduler.add(Request(i, tokens, len(tokens), int(output), float(i)))
    rows = []
    while scheduler.requests:
        batch = scheduler.next_batch()
        rows.append(" ".join(f"{i}:{'d' if d else n}" for i, _, n, d in chunk_records(batch)))
        advance(scheduler, batch)
    assert len(load.split()) <= 4 and theirs != batches
    expected = batches.removeprefix("... | ")
    text = " | ".join(rows) + " | "
    assert f"{expected} | " in text if expected != batches else text.startswith(f"{expected} | ")


def test_each_difference_from_an_engine_has_its_example():
    differing = {name for name, cls in TODAY.items() if "Differs from theirs" in cls.__doc__}
    assert differing == {name for name, *_ in EXAMPLES} and len(EXAMPLES) == 15
