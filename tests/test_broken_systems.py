"""The papers' claims against systems that are broken on purpose, see broken_systems.py.

Each claim has the verdict that it deserves on the GPU of its paper, as the cost model has it, and
says that something more is wrong on each system that is broken in a way which it is about."""

from dataclasses import replace
from functools import cache

import pytest

from lab.claims import serving
from lab.claims.claim import Finding
from lab.claims.claims import CLAIMS
from tests.broken_systems import SYSTEMS, broken
from tests.claim_labs import ShortLab

FUNCTIONS = {claim.id: claim.function for claim in CLAIMS}
TREND_ONLY = set("S-F4a S-F10 SS-F14 SS-F10 SS-F12 SS-T4 SS-F1 B-2 S-F13c B-3 B-7".split())
TAKE_SECONDS = {"SS-F12", "SS-5.2", "SS-F10", "S-4.4"}
NOTICED_BY = {  # system: the claims that speak of what is broken
    "weights are read again for each row": (
        "S-F3 S-F4a S-F4b S-F7 S-F8 S-T4 S-F9 S-F11 S-F10 S-F13 SS-F9 B-2 S-3.1 S-F9b S-F10b "
        "S-F11b S-F13c SS-F1 B-3 C-1"
    ),
    "all rows but the first cost nothing": (
        "S-F3 S-F7 S-T4 S-F9 S-F11 S-F13 SS-F7 SS-F9 SS-F10 SS-F12 SS-T4 B-2 S-F9b S-F10b "
        "S-F11b S-F13c SS-4.3 SS-F9b"
    ),
    "a chunk meets no keys but its own": "S-F13",
    "attention goes by the chunk alone": "S-F13 SS-F9",
    "attention of a chunk takes three times": "SS-F9 B-2",
    "no key is kept: decodes compute all again": "S-F3 S-F8 SS-F7",
    "a decode reads one key": "S-F3 S-F8 SS-F9b",
    "a decode reads four times its keys": "S-F8 S-T4",
    "other operations take half as long as products": "S-F3 SS-F9b",
    "the CPU takes 20 ms": "S-F3 S-F9b SS-F9 SS-F9b",
    "decodes ride in batches of their own": (
        "S-F8 S-T4 S-F9 S-F11 S-F10 SS-T4 S-F9b S-F10b S-F11b S-F13c C-1"
    ),
    "attention is ten times slower in hybrid batches": (
        "S-F8 S-T4 S-F9 S-F11 S-F10 SS-F9 SS-T4 B-2 S-F9b S-F10b S-F11b S-F13c SS-F9b C-1"
    ),
    "products are a quarter slower in hybrid batches": "S-F8 S-T4 B-2",
    "riding decodes read no keys": "C-1 S-F8 S-T4",
    "chunks of a batch are computed one by one": "S-F3",
    "nothing is chunked": (
        "S-F7 S-F8 S-T4 S-F9 S-F11 S-F10 S-F13 SS-F7 SS-F9 SS-F14 SS-F10 SS-F12 SS-T4 B-2 "
        "S-4.4 S-F9b S-F10b S-F11b S-F13c SS-F1 B-7"
    ),
    "request-level admits while others run": "SS-F7 B-1 SS-F1 B-1b B-7",
    "request-level runs one at a time": "B-1b B-1 S-T4",
    "orca never makes hybrid batches": "S-F11 S-F11b",
    "orca-best is orca": "S-F11 S-F11b",
    "vllm lets decodes go first": "SS-F7 SS-F10 SS-F1",
    "vllm computes one prompt at a time": "SS-F7",
    "decodes are skipped every second time": "SS-F7 S-4.4 SS-T4",
    "only two decodes ride": "S-T4 S-4.4",
    "the budget is ignored beyond three decodes": "S-T4 SS-T4 SS-F1 B-7",
    "decodes are not in the budget": "S-4.4 SS-F1",
    "a batch has C + 1 tokens": "S-T4 S-F9",
    "the budget is not rounded to tiles": "S-F13c",
    "sarathi-serve computes one prompt at a time": "SS-F7",
    "sarathi-serve begins new prompts first": "SS-F7",
    "chunked-only is sarathi-serve": "SS-T4",
    "hybrid-only cuts prompts": "SS-T4",
    "who comes last is admitted first": "B-1",
    "half of the slots are used": "S-F11 B-1b",
    "a request is preempted now and then": "SS-F7",
    "pages are never shared out": "SS-F7 SS-F10",
    "memory has no end": "SS-F10",
    "TBT is the mean of a request": "SS-F7 SS-T4 B-7",
    "the longest gap of a request is left out": "SS-F7",
    "TTFT is a gap, too": "SS-F7 SS-T4",
    "P99 is P90": "SS-T4 SS-F1 B-7",
    "TTFT begins when a request is scheduled": "SS-F7",
    "a queue may grow": "SS-F10",
    "all requests have the median lengths": "B-7",
}
NOTICED = [(claim, system) for system, claims in NOTICED_BY.items() for claim in claims.split()]


lab_of = cache(lambda preset, device, system: ShortLab(preset, device))  # claims share its runs


@cache
def measure(claim_id: str, system: str | None) -> Finding:
    """What a claim finds on a system: SARATHI's claims on its A6000, others on an A100."""
    preset = "mistral-7b"
    device = "a100-80gb"
    if claim_id.startswith(("S-", "C-")):
        preset = "llama-13b"
        device = "a6000"
    with broken(system), pytest.MonkeyPatch.context() as patch:
        patch.setattr(serving, "plot_serving", lambda *_: None)
        return FUNCTIONS[claim_id](lab_of(preset, device, system))


def wrong(claim_id: str, system: str | None) -> set[str]:
    """The checks that fail, and the numbers that are not of the paper's size."""
    finding = measure(claim_id, system)
    numbers = {each.text for each in finding.published if not each.is_same_size}
    return numbers | {f"{check.title}: {check.description}" for check in finding.failures()}


def case(claim_id: str, *values: str, is_slow: bool = False):
    """The parameters of a test. It is slow, too, if the claim takes seconds."""
    marks = [pytest.mark.slow] if is_slow or claim_id in TAKE_SECONDS else []
    return pytest.param(claim_id, *values, marks=marks)


@pytest.mark.parametrize("claim_id", list(map(case, FUNCTIONS)))
def test_a_claim_has_its_verdict_on_the_papers_gpu(claim_id):
    verdict = "trend only" if claim_id in TREND_ONLY else "as in the paper"
    assert measure(claim_id, None).verdict(busy=False) == verdict


CHECKS_THAT_FAIL = [  # (claim, system, check)
    ("S-F13", "a chunk meets no keys but its own", "attention falls"),
    ("S-F13", "nothing is chunked", "prefill < 1.25, at the end"),
    ("SS-F14", "nothing is chunked", "chunks of 512 < 2"),
    ("SS-F9", "nothing is chunked", "with a chunk < 3"),
    ("B-2", "nothing is chunked", "with a chunk / decodes alone < 3"),
    ("S-F10", "attention is ten times slower in hybrid batches", "0.4 < attention"),
    ("S-F3", "weights are read again for each row", "decode falls"),
    ("S-F7", "all rows but the first cost nothing", "1.5 < linear layers, at the end"),
    ("SS-T4", "nothing is chunked", "1.5 < hybrid-only / sarathi-serve:128"),
    ("S-F9b", "all rows but the first cost nothing", "0.98 < sarathi:256"),
    ("S-F9b", "all rows but the first cost nothing", "1 < sarathi:256"),
    ("S-F11b", "the CPU takes 20 ms", "orca-best < 1.02 * sarathi"),
    ("S-F11b", "weights are read again for each row", "sarathi:128 < orca-best"),
    ("S-F13c", "nothing is chunked", "1 < 256 over 64"),
    ("S-F13c", "weights are read again for each row", "1.02 < 256 over the baseline"),
    (
        "S-F10b",
        "decodes ride in batches of their own",
        "chunks of 512 < chunks of 256, at the start",
    ),
    ("S-F10b", "decodes ride in batches of their own", "1.02 < chunks of 512"),
    ("SS-F9b", "a decode reads one key", "context 2,048 falls"),
    (
        "SS-F9b",
        "attention is ten times slower in hybrid batches",
        "context 2,048 < 1.05 * context 512, at the end",
    ),
    ("B-3", "no key is kept: decodes compute all again", "here rises"),
    ("B-3", "weights are read again for each row", "here < 4.9"),
    ("C-1", "riding decodes read no keys", "0.5 < attention < 2, at the end"),
    ("C-1", "decodes ride in batches of their own", "linear < 0.8"),
    ("SS-4.3", "riding decodes read no keys", "iteration rises"),
    ("SS-4.3", "no key is kept: decodes compute all again", "2 * strict chunk < relaxed chunk"),
]


@pytest.mark.parametrize("claim_id, system, check", CHECKS_THAT_FAIL)
def test_a_check_holds_but_on_the_broken_system(claim_id, system, check):
    descriptions = [each.description for each in measure(claim_id, None).checks]
    assert check in descriptions and measure(claim_id, None).failures() == []
    assert check in [each.description for each in measure(claim_id, system).failures()]


@pytest.mark.parametrize(
    "claim_id, system",
    [case(*pair, is_slow=NOTICED_BY[pair[1]].split()[0] != pair[0]) for pair in NOTICED],
)
def test_a_claim_notices_that_the_system_is_broken(claim_id, system):
    assert wrong(claim_id, system) - wrong(claim_id, None)


def test_every_claim_notices_some_break_and_every_break_is_noticed():
    assert NOTICED_BY.keys() == SYSTEMS.keys()
    notice_some = {claim_id for claim_id, _ in NOTICED}
    assert FUNCTIONS.keys() - notice_some == {"SS-5.2"}  # see test_claims_can_fail.py


def test_s_f7_notices_products_that_compute_no_row_too_many():
    lab = ShortLab("llama-13b", "a6000")
    lab.cost.tile = 1
    lab.cost.device = replace(lab.cost.device, tile=1)
    failures = FUNCTIONS["S-F7"](lab).failures()
    assert "1.1 < iteration, at the end" in [check.description for check in failures]
