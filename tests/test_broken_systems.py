"""The papers' claims against systems that are broken on purpose, see claim_labs.py.

Each claim has the verdict that it deserves on the GPU of its paper, as the cost model has it, and a
worse one on each system that is broken in a way which the claim is about."""

from dataclasses import dataclass, replace
from functools import cache

import pytest

from lab.claims import serving
from lab.claims.claim import Finding
from lab.claims.claims import CLAIMS
from tests.claim_labs import BREAKS, Break, ShortLab, broken_schedulers

FROM_BEST_TO_WORST = ["as in the paper", "trend only", "not seen here"]
REQUEST_LEVEL, WHOLE_PROMPTS, APART, SLOW_ATTENTION, RESERVED, REREAD, OWN_KEYS, FREE = BREAKS
FUNCTIONS = {claim.id: claim.function for claim in CLAIMS}


@dataclass(frozen=True)
class Expected:
    """What a claim says of a system that is not broken, and which breaks it notices."""

    verdict: str
    notices: tuple[Break, ...]


EXPECTED = {
    "S-F3": Expected("as in the paper", (REREAD, FREE)),
    "S-F4a": Expected("trend only", (REREAD,)),
    "S-F4b": Expected("as in the paper", (REREAD,)),
    "S-F7": Expected("as in the paper", (WHOLE_PROMPTS, REREAD, FREE)),
    "S-F8": Expected("as in the paper", (WHOLE_PROMPTS, APART, SLOW_ATTENTION, REREAD)),
    "S-T4": Expected("as in the paper", (WHOLE_PROMPTS, APART, SLOW_ATTENTION, REREAD, FREE)),
    "S-F9": Expected("as in the paper", (WHOLE_PROMPTS, APART, SLOW_ATTENTION, REREAD, FREE)),
    "S-F11": Expected("as in the paper", (WHOLE_PROMPTS, APART, SLOW_ATTENTION, REREAD, FREE)),
    "S-F10": Expected("trend only", (WHOLE_PROMPTS, APART, SLOW_ATTENTION, REREAD)),
    "S-F13": Expected("as in the paper", (WHOLE_PROMPTS, REREAD, OWN_KEYS, FREE)),
    "SS-F7": Expected("as in the paper", (REQUEST_LEVEL, WHOLE_PROMPTS, RESERVED, FREE)),
    "SS-F9": Expected("as in the paper", (WHOLE_PROMPTS, SLOW_ATTENTION, REREAD, FREE)),
    "SS-F14": Expected("trend only", (WHOLE_PROMPTS,)),
    "SS-F10": Expected("trend only", (WHOLE_PROMPTS, RESERVED, FREE)),
    "SS-F12": Expected("trend only", (WHOLE_PROMPTS, FREE)),
    "SS-T4": Expected("trend only", (WHOLE_PROMPTS, APART, SLOW_ATTENTION, FREE)),
    "B-1": Expected("as in the paper", (REQUEST_LEVEL,)),
    "B-2": Expected("trend only", (WHOLE_PROMPTS, SLOW_ATTENTION, REREAD, FREE)),
    "S-3.1": Expected("as in the paper", (REREAD,)),
    "S-4.4": Expected("as in the paper", (WHOLE_PROMPTS,)),
    "S-F9b": Expected("as in the paper", (WHOLE_PROMPTS, APART, SLOW_ATTENTION, REREAD, FREE)),
    "S-F10b": Expected("as in the paper", (WHOLE_PROMPTS, APART, SLOW_ATTENTION, REREAD, FREE)),
    "S-F11b": Expected("as in the paper", (WHOLE_PROMPTS, APART, SLOW_ATTENTION, REREAD, FREE)),
    "S-F13c": Expected("trend only", (WHOLE_PROMPTS, APART, SLOW_ATTENTION, REREAD, FREE)),
    "SS-F1": Expected("as in the paper", (REQUEST_LEVEL, WHOLE_PROMPTS, REREAD)),
    "SS-4.3": Expected("as in the paper", (FREE,)),
    "SS-5.2": Expected("as in the paper", ()),
    "SS-F9b": Expected("as in the paper", (SLOW_ATTENTION, FREE)),
    "B-1b": Expected("as in the paper", (REQUEST_LEVEL,)),
    "B-3": Expected("trend only", (REREAD,)),
    "C-1": Expected("as in the paper", (APART, SLOW_ATTENTION, REREAD)),
    "B-7": Expected("trend only", (REQUEST_LEVEL, WHOLE_PROMPTS)),
}
TAKE_SECONDS = {"SS-F12", "SS-5.2", "SS-F10", "S-4.4"}
NOTICED = [(claim, broken) for claim, row in EXPECTED.items() for broken in row.notices]


lab_of = cache(ShortLab)  # claims share runs, as those of `bench.py paper`


@cache
def measure(claim_id: str, broken: Break | None) -> Finding:
    """What a claim finds on a system: SARATHI's claims on its A6000, others on an A100."""
    preset = "mistral-7b"
    device = "a100-80gb"
    if claim_id.startswith(("S-", "C-")):
        preset = "llama-13b"
        device = "a6000"
    with broken_schedulers(broken), pytest.MonkeyPatch.context() as patch:
        patch.setattr(serving, "plot_serving", lambda *_: None)
        return FUNCTIONS[claim_id](lab_of(preset, device, broken))


@pytest.mark.parametrize(
    "claim_id",
    [
        pytest.param(claim_id, marks=[pytest.mark.slow] * (claim_id in TAKE_SECONDS))
        for claim_id in FUNCTIONS
    ],
)
def test_a_claim_has_its_verdict_on_the_papers_gpu(claim_id):
    assert measure(claim_id, None).verdict(busy=False) == EXPECTED[claim_id].verdict


CHECKS_THAT_FAIL = [  # (claim, break, check)
    ("S-F13", OWN_KEYS, "attention falls"),
    ("S-F13", WHOLE_PROMPTS, "prefill < 1.25, at the end"),
    ("SS-F14", WHOLE_PROMPTS, "chunks of 512 < 2"),
    ("SS-F9", WHOLE_PROMPTS, "with a chunk < 3"),
    ("B-2", WHOLE_PROMPTS, "with a chunk / decodes alone < 3"),
    ("S-F10", SLOW_ATTENTION, "0.4 < attention"),
    ("S-F3", REREAD, "decode falls"),
    ("S-F7", FREE, "1.5 < linear layers, at the end"),
    ("SS-T4", WHOLE_PROMPTS, "1.5 < hybrid-only / sarathi-serve:128"),
]


@pytest.mark.parametrize("claim_id, broken, check", CHECKS_THAT_FAIL)
def test_a_check_holds_but_on_the_broken_system(claim_id, broken, check):
    descriptions = [each.description for each in measure(claim_id, None).checks]
    assert check in descriptions and measure(claim_id, None).failures() == []
    assert check in [each.description for each in measure(claim_id, broken).failures()]


@pytest.mark.slow
@pytest.mark.parametrize("claim_id, broken", NOTICED)
def test_a_claim_notices_that_the_system_is_broken(claim_id, broken):
    whole = FROM_BEST_TO_WORST.index(EXPECTED[claim_id].verdict)
    verdict = measure(claim_id, broken).verdict(busy=False)
    assert FROM_BEST_TO_WORST.index(verdict) > whole


def test_every_claim_notices_some_break_and_every_break_is_noticed():
    assert EXPECTED.keys() == FUNCTIONS.keys()
    notice_none = {claim for claim, expected in EXPECTED.items() if not expected.notices}
    assert notice_none == {"SS-5.2"}  # see test_claims_can_fail.py
    assert {broken for _, broken in NOTICED} == set(BREAKS)


def test_s_f7_notices_products_that_compute_no_row_too_many():
    lab = ShortLab("llama-13b", "a6000")
    lab.cost.tile = 1
    lab.cost.device = replace(lab.cost.device, tile=1)
    failures = FUNCTIONS["S-F7"](lab).failures()
    assert "1.1 < iteration, at the end" in [check.description for check in failures]
