"""The papers' claims that one device can show: their titles, and the functions that measure them.

S is SARATHI, SS Sarathi-Serve, B a post on schedulers, C a Chinese post on SARATHI; F is a figure,
T a table, a number alone a section. `bench.py paper` measures the claims in this order. A new claim
is a function that takes a Bench and returns a Finding, and an entry here. Read first:
measured_phases.py, measured_batches.py, measured_offline.py and measured_serving.py; then
measured_counts.py, measured_costs.py, measured_gains.py and measured_stalls.py. Read next:
report.py."""

import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass

from lab.papers.bench import Bench
from lab.papers.finding import Finding
from lab.papers.measured_batches import b_2, s_f8, s_f10, s_f13, ss_f9, ss_f14
from lab.papers.measured_costs import b_3, c_1, s_f10b, ss_f9b
from lab.papers.measured_counts import b_1b, s_3_1, s_4_4
from lab.papers.measured_gains import s_f9b, s_f11b, s_f13c
from lab.papers.measured_offline import b_1, s_f9, s_f11, s_t4
from lab.papers.measured_phases import s_f3, s_f4a, s_f4b, s_f7
from lab.papers.measured_serving import b_7, ss_f7, ss_f10, ss_f12, ss_t4
from lab.papers.measured_stalls import ss_4_3, ss_5_2, ss_f1


@dataclass(frozen=True, kw_only=True)
class Claim:
    """A figure or table of a paper, and the function that measures it here."""

    id: str
    covers: tuple[str, ...] = ()  # other claims that are measured with it
    title: str
    seconds: tuple[int, int]  # how long it takes, about, with --quick and without, on two CPU cores
    function: Callable[[Bench], Finding]

    @property
    def ids(self) -> tuple[str, ...]:
        """All claims that are measured with it, itself first."""
        return (self.id, *self.covers)

    @property
    def name(self) -> str:
        """The heading of what is found: its ids and its title."""
        return f"{', '.join(self.ids)}: {self.title}"

    @property
    def sentence(self) -> str:
        """The claim in a sentence."""
        return self.text.partition("\n")[0]

    @property
    def clause(self) -> str:
        """The claim in a dozen words: the sentence up to its first colon, semicolon or stop."""
        return re.split(r"[:;.](?= |$)", self.sentence)[0]

    @property
    def text(self) -> str:
        """The claim, and what else is to be said of it: the docstring of the function."""
        text = (inspect.getdoc(self.function) or "").removeprefix(f"{self.id}: ")
        return text[:1].upper() + text[1:]

    def seconds_of(self, quick: bool) -> int:
        """How long it takes, about."""
        quick_s, full_s = self.seconds
        return quick_s if quick else full_s


CLAIMS = [
    Claim(
        id="S-F3",
        covers=("SS-F4",),
        title="Time per token of prefill and decode, by operation",
        seconds=(10, 95),
        function=s_f3,
    ),
    Claim(
        id="S-F4a",
        covers=("SS-F3",),
        title="Throughput of prefill and decode over their tokens, in one layer and in all",
        seconds=(5, 80),
        function=s_f4a,
    ),
    Claim(
        id="S-F4b",
        covers=("SS-F5",),
        title="Arithmetic intensity by operation, computed, beside the ridge of this device",
        seconds=(5, 10),
        function=s_f4b,
    ),
    Claim(
        id="S-3.1",
        title="Arithmetic intensity of 1 to 512 decodes, computed for LLaMA-13B on an A6000",
        seconds=(1, 1),
        function=s_3_1,
    ),
    Claim(
        id="S-F7",
        covers=("SS-F6",),
        title="Time of an iteration, over its tokens: are there steps?",
        seconds=(15, 75),
        function=s_f7,
    ),
    Claim(
        id="S-F8",
        covers=("S-T2",),
        title="How much cheaper a decode is beside a chunk of 256, over batch and context",
        seconds=(50, 155),
        function=s_f8,
    ),
    Claim(
        id="S-T4",
        title="Throughput gains of SARATHI over request-level, three contexts",
        seconds=(85, 130),
        function=s_t4,
    ),
    Claim(
        id="S-F9",
        title="Throughput gain over P:D, for chunks of 128, 256 and 512, or a quarter of that",
        seconds=(65, 210),
        function=s_f9,
    ),
    Claim(
        id="S-F9b",
        covers=("S-F9c",),
        title="Throughput gain below, at and above P:D = C / (B - 1), longer requests",
        seconds=(65, 235),
        function=s_f9b,
    ),
    Claim(
        id="S-F11b",
        title="SARATHI and Orca at its best over P:D: where each peaks",
        seconds=(1, 1),
        function=s_f11b,
    ),
    Claim(
        id="S-F11",
        title="SARATHI and Orca's best and worst case over request-level",
        seconds=(1, 1),
        function=s_f11,
    ),
    Claim(
        id="S-F10",
        title="Time by operation for the same requests, request-level against SARATHI",
        seconds=(5, 55),
        function=s_f10,
    ),
    Claim(
        id="S-F10b",
        title="Time by operation with chunks twice as long",
        seconds=(5, 55),
        function=s_f10b,
    ),
    Claim(
        id="S-F13",
        title="What small chunks cost: attention, and the whole prefill",
        seconds=(15, 105),
        function=s_f13,
    ),
    Claim(
        id="S-F13c",
        title="Throughput over request-level with chunks of 64 to 512, or a quarter",
        seconds=(30, 55),
        function=s_f13c,
    ),
    Claim(
        id="S-4.4",
        title="P:D from which all decodes ride, counted",
        seconds=(3, 3),
        function=s_4_4,
    ),
    Claim(
        id="C-1",
        title="What riding saves a decode: weights, or keys and values",
        seconds=(1, 1),
        function=c_1,
    ),
    Claim(
        id="SS-F7",
        title="Requests A to D over time, under four policies",
        seconds=(30, 35),
        function=ss_f7,
    ),
    Claim(
        id="SS-F9",
        title="Decodes beside a whole prompt and beside a chunk, against decodes alone",
        seconds=(10, 60),
        function=ss_f9,
    ),
    Claim(
        id="SS-F9b",
        title="Decodes beside a chunk against decodes alone, over batch and context",
        seconds=(5, 25),
        function=ss_f9b,
    ),
    Claim(
        id="SS-F14",
        title="What chunks of 512, 1,024 and 2,048, or less, add to a prefill, over prompt lengths",
        seconds=(15, 235),
        function=ss_f14,
    ),
    Claim(
        id="SS-F10",
        covers=("SS-F11",),
        title="Capacity under the strict and the relaxed SLO, both datasets",
        seconds=(60, 550),
        function=ss_f10,
    ),
    Claim(
        id="SS-F12",
        title="Capacity over the SLO: vllm with three batch sizes, two token budgets",
        seconds=(3, 1150),
        function=ss_f12,
    ),
    Claim(
        id="SS-5.2",
        title="Capacity of vllm with three batch sizes",
        seconds=(1, 1),
        function=ss_5_2,
    ),
    Claim(
        id="SS-T4",
        title="Hybrid batches alone, chunks alone, and both: P50 TTFT and P99 TBT",
        seconds=(65, 100),
        function=ss_t4,
    ),
    Claim(
        id="SS-F1",
        covers=("SS-F2",),
        title="Stalls over time and under load, and what they are traded for",
        seconds=(45, 100),
        function=ss_f1,
    ),
    Claim(
        id="SS-4.3",
        title="The token budget of the strict and the relaxed SLO, by timing batches",
        seconds=(25, 60),
        function=ss_4_3,
    ),
    Claim(
        id="B-1",
        title="Slots used under static batching, as the post counts and in iterations",
        seconds=(85, 85),
        function=b_1,
    ),
    Claim(
        id="B-1b",
        title="Slots over steps under static and continuous batching, counted",
        seconds=(1, 1),
        function=b_1b,
    ),
    Claim(
        id="B-2",
        title="A prompt beside six decodes, whole and in eight chunks, as it goes on",
        seconds=(15, 40),
        function=b_2,
    ),
    Claim(
        id="B-3",
        title="An iteration over its prompt tokens: the post's table, its timeline, and here",
        seconds=(20, 20),
        function=b_3,
    ),
    Claim(
        id="B-7",
        title=(
            "Static batching, Orca, and Orca with chunks of 512, 256 and 128, or a quarter, at a "
            "load that saturates"
        ),
        seconds=(120, 240),
        function=b_7,
    ),
]
