"""The papers' claims, held against results/simulated, counts by hand, and broken systems.

The numbers are those of results/simulated, which `bench.py paper --on papers` wrote."""

import json

import numpy as np
import pytest

import bench
from lab.claims import CLAIMS
from lab.claims.claim import Claim, Result, agreement
from lab.claims.labs import PaperLab
from lab.claims.systems import MISTRAL_7B, YI_34B
from lab.measure.capacity import STEP, Bounded, values_above_quantile
from lab.simulator.cost_model import CostModel, LayerSeconds
from request import Batch
from tests.helpers import ROOT

FILE = ROOT / "results/simulated/simulated.json"
KEPT = json.loads(FILE.read_text("utf-8"))["claims"]
FAST = "S-F3 S-F4 S-F7 S-F8 S-F10 S-4.3.1 S-4.4 SS-F7 SS-F8 SS-F9 SS-F10 SS-F14 SS-T3 D-F1"


def nine_digits(value):
    """The same with all numbers rounded: sums may be added up in another order."""
    if isinstance(value, dict):
        return {key: nine_digits(each) for key, each in value.items()}
    return float(f"{value:.9g}") if isinstance(value, float) else value


NUMBERS = [
    pytest.param(claim_id, system, marks=[] if claim_id in FAST.split() else pytest.mark.slow)
    for claim_id, claim in CLAIMS.items()
    for system in claim.systems
    if (claim_id, system) != ("SS-F12", YI_34B)  # half a minute, of capacities as Mistral's
]


class KeptLab(PaperLab):
    """Searches no capacity of SS-F10 and SS-F11: that of `rows` is met, and not a step above it."""

    def __init__(self, system, rows):
        super().__init__(system)
        self.rows = rows

    def capacity(self, server, lengths, slo):
        qps = self.rows[f"{lengths}, {slo}"][server]
        load = (*self.system.server(server, slo), lengths, self.system.slos_s[slo])
        assert self.try_rate(*load, qps).met
        assert not self.try_rate(*load, STEP ** (1 / 16) * qps).met
        return Bounded(qps)


@pytest.mark.parametrize("claim_id, system", NUMBERS)
def test_numbers_are_those_of_the_results(claim_id, system, little_garbage):
    """Fast ones are single batches, short runs, what is counted, and Figure 10."""
    kept = KEPT[claim_id]["cost model"][system.name]
    result = CLAIMS[claim_id].function(KeptLab(system, kept["rows"])).to_json()
    assert nine_digits(result) == nine_digits(kept)


def test_the_results_have_every_claim_and_every_relation_holds():
    assert KEPT.keys() == CLAIMS.keys()
    rows = [row for claim in KEPT.values() for row in claim["cost model"].values()]
    assert all(row["holds"] for row in rows)


def test_a_load_is_served_once_for_all_slos_and_no_capacity_changes(monkeypatch):
    monkeypatch.setattr(PaperLab, "requests", 48)
    lab = PaperLab(MISTRAL_7B)
    run_at = lab.run_at
    loads = []

    def counted(*args):
        loads.append(args[:4])
        return run_at(*args)

    monkeypatch.setattr(lab, "run_at", counted)
    for slo_s, is_longer in ((0.1, False), (0.07, False), (0.5, True)):
        server = ("vllm", 16, "sharegpt4", slo_s)
        assert lab.capacity_at(*server) == PaperLab(MISTRAL_7B).capacity_at(*server)
        assert (len(loads) > len(set(loads))) == is_longer


# ---- systems that are broken on purpose


def weights_again_for_each_row(old, self, tokens):
    """Products of a system that batches nothing."""
    return tuple(tokens * each for each in old(self, 1))


def no_keys_but_its_own(old, self, batch):
    """Attention of a system that forgets the chunks before."""
    return old(self, [(0, start if length == 1 else 0, length) for _, start, length in batch])


def decodes_apart(old, self, batch):
    """A system that computes decodes in batches of their own."""
    parts = [old(self, chunks) for chunks in split(batch) if chunks]
    return LayerSeconds(*map(sum, zip(*parts, strict=True)))


def split(batch):
    """The chunks and the decodes of a batch."""
    return [c for c in batch if c[2] > 1], [c for c in batch if c[2] == 1]


def whole_prompts(old, self, request):
    """A batch that cuts no prompt."""
    whole = Batch()
    length = old(whole, request)
    self.extend(whole)
    self.left -= length
    return length


def decodes_without_budget(old, self, requests):
    """A budget that decodes take nothing of."""
    old(self, requests)
    self.left += len(requests)


BROKEN = [  # (a claim, what is replaced, by what)
    ("S-F3", CostModel, "token_seconds", weights_again_for_each_row),
    ("S-F13", CostModel, "layer_seconds", no_keys_but_its_own),
    ("S-F8", CostModel, "layer_seconds", decodes_apart),
    ("SS-F7", Batch, "add", whole_prompts),
    ("S-4.4", Batch, "add_decodes", decodes_without_budget),
]


@pytest.mark.parametrize("claim_id, owner, name, new", BROKEN)
def test_a_claim_does_not_hold_on_a_broken_system(claim_id, owner, name, new, monkeypatch):
    claim = CLAIMS[claim_id]
    old = getattr(owner, name)
    monkeypatch.setattr(owner, name, lambda *args: new(old, *args))
    assert not claim.function(PaperLab(claim.systems[0])).holds


# ---- the frame


def made_up() -> Result:
    """Numbers of the text: 5 % and 20 % off and unknown; one of each other source; two bounds."""
    result = Result("x")
    result.publish("a", 100, 105.0)
    result.publish("b", 100, 80.0)
    result.publish("c", 100, None)
    result.publish("data", 100, 109.0, "data")
    result.publish("fitted", 100, 200.0, "fitted")
    result.publish("met", Bounded(2, "at least"), 2.5)
    result.publish("not met", Bounded(2, "below"), 2.5)
    return result


def test_each_number_is_counted_once_by_its_source():
    lines = agreement([made_up(), made_up()]).splitlines()
    counts = [[int(word) for word in line.split() if word.isdecimal()] for line in lines]
    assert counts == [[4, 2, 10, 4, 25], [2, 2, 10, 2, 25], [2, 0, 10, 0, 25], [4, 2]]


def test_a_claim_is_measured_only_where_the_ridge_is_high_enough():
    claim = Claim("S-F3", "", made_up, (), "quick", least_ridge=72)
    assert claim.missing_ridge(13) and not claim.missing_ridge(72)


@pytest.mark.parametrize("count, quantile", [(1, 0.99), (7, 0.5), (350, 0.99)])
def test_so_many_long_values_lift_a_quantile(count, quantile):
    needed = values_above_quantile(count, quantile)
    for long in (needed, needed - 1):
        values = [1.0] * (count - long) + [2.0] * long
        assert (np.quantile(values, quantile) > 2 - 1e-9) == (long == needed)


# ---- the command


def test_the_command_computes_measures_and_writes(tmp_path):
    out = tmp_path / "paper.json"
    model = ["--preset", "llama-tiny", "--device", "cpu", "--dtype", "float32"]
    files = ["--json", str(out), "--plot", str(tmp_path / "p.png")]
    bench.main(["paper", "S-F13,SS-F7,S-F12,S-F4", "--on", "here", *model, *files])
    report = json.loads(out.read_text("utf-8"))
    assert report["commit"] and report["date"] and report["machine"]["attention"]
    assert not any("cost model" in row for row in report["claims"].values())
    (result,) = report["claims"]["S-F13"]["here"].values()
    assert result["rows"]["64"]["attention"] > 0 and len(result["published"]) == 5
    assert report["claims"]["S-F12"]["here"] == {} and report["claims"]["S-F12"]["notes"]
    assert {file.name for file in tmp_path.glob("*.png")} == {"p-S-F13.png", "p-SS-F7.png"}
