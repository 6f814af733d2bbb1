"""Policies by name and in files, held against one written here and what a class says of itself."""

from dataclasses import replace

import pytest

from config import EngineConfig
from engine import Engine
from kv_cache import Pages
from policies import POLICIES, find_policy, make_scheduler, policy_options, scheduler_of
from scheduler import Request, SarathiServe
from tests.helpers import IN_ORDER, RESERVING, tiny_model

OWN = """from scheduler import Request, SarathiServe
class Shortest(SarathiServe):
    def __init__(self, *args, limit=4, **options):
        super().__init__(*args, **options)
        self.limit = limit
    def token_budget(self, decodes, prefills):
        return 8 // self.limit
three = 3
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
    policy = find_policy(NAME)
    assert policy is find_policy(f"{own}:Shortest") is find_policy(f"./{NAME}")
    assert issubclass(policy, SarathiServe)
    assert policy_options(policy) == {"limit"}
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
    assert caught.traceback[-1].path == own
    own.write_text(OWN, "utf-8")
    assert find_policy(NAME).__name__ == "Shortest"


def test_reserving_and_in_order_policies_are_derived_from_their_classes():
    homes = ("scheduler", "policies.ablations")
    papers = [name for name, cls in POLICIES.items() if cls.__module__ in homes]
    assert set(RESERVING) & set(papers) == {"request-level", "orca", "orca-best", "sarathi"}
    assert {*papers, "dynamic"} <= set(IN_ORDER)
    assert "priority" not in IN_ORDER


def test_a_config_is_made_of_fields_and_options_of_the_policy():
    config = EngineConfig("dynamic", 64, policy_options={"tile": 8, "tbt_slo": 0.2})
    sized = replace(
        config,
        max_batch=2,
        max_len=16,
        page_size=16,
        pages=2,
    )
    scheduler = scheduler_of(sized, clock=lambda: 7.0)
    assert (scheduler.chunk, scheduler.max_batch, scheduler.max_len) == (64, 2, 16)
    assert (scheduler.tbt_slo, scheduler.tile, scheduler.clock()) == (0.2, 8, 7.0)
    with pytest.raises(TypeError):  # an option of another policy
        scheduler_of(replace(sized, policy="orca"), clock=float)


def test_an_option_of_a_policy_is_no_keyword_of_an_engine():
    with pytest.raises(TypeError, match="tbt_slo"):
        Engine(tiny_model(), policy="dynamic", tbt_slo=0.2)
