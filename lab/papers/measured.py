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


@dataclass(frozen=True)
class Claim:
    """A figure or table of a paper: the function that measures it here, whose docstring begins with
    its id."""

    function: Callable[[Bench], Finding]
    title: str
    seconds: tuple[int, int]  # how long it takes, about, with --quick and without, on two CPU cores
    covers: tuple[str, ...] = ()  # other claims that are measured with it

    @property
    def id(self) -> str:
        """Its paper, and the figure, table or section."""
        return (inspect.getdoc(self.function) or "").partition(":")[0]

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
        s_f3,
        "Time per token of prefill and decode, by operation",
        seconds=(10, 95),
        covers=("SS-F4",),
    ),
    Claim(
        s_f4a,
        "Throughput of prefill and decode over their tokens, in one layer and in all",
        seconds=(5, 80),
        covers=("SS-F3",),
    ),
    Claim(
        s_f4b,
        "Arithmetic intensity by operation, computed, beside the ridge of this device",
        seconds=(5, 10),
        covers=("SS-F5",),
    ),
    Claim(
        s_3_1,
        "Arithmetic intensity of 1 to 512 decodes, computed for LLaMA-13B on an A6000",
        seconds=(1, 1),
    ),
    Claim(
        s_f7,
        "Time of an iteration, over its tokens: are there steps?",
        seconds=(15, 75),
        covers=("SS-F6",),
    ),
    Claim(
        s_f8,
        "How much cheaper a decode is beside a chunk of 256, over batch and context",
        seconds=(50, 155),
        covers=("S-T2",),
    ),
    Claim(
        s_t4,
        "Throughput gains of SARATHI over request-level, three contexts",
        seconds=(85, 130),
    ),
    Claim(
        s_f9,
        "Throughput gain over P:D, for chunks of 128, 256 and 512, or a quarter of that",
        seconds=(65, 210),
    ),
    Claim(
        s_f9b,
        "Throughput gain below, at and above P:D = C / (B - 1), longer requests",
        seconds=(65, 235),
        covers=("S-F9c",),
    ),
    Claim(
        s_f11b,
        "SARATHI and Orca at its best over P:D: where each peaks",
        seconds=(1, 1),
    ),
    Claim(
        s_f11,
        "SARATHI and Orca's best and worst case over request-level",
        seconds=(1, 1),
    ),
    Claim(
        s_f10,
        "Time by operation for the same requests, request-level against SARATHI",
        seconds=(5, 55),
    ),
    Claim(
        s_f10b,
        "Time by operation with chunks twice as long",
        seconds=(5, 55),
    ),
    Claim(
        s_f13,
        "What small chunks cost: attention, and the whole prefill",
        seconds=(15, 105),
    ),
    Claim(
        s_f13c,
        "Throughput over request-level with chunks of 64 to 512, or a quarter",
        seconds=(30, 55),
    ),
    Claim(
        s_4_4,
        "P:D from which all decodes ride, counted",
        seconds=(3, 3),
    ),
    Claim(
        c_1,
        "What riding saves a decode: weights, or keys and values",
        seconds=(1, 1),
    ),
    Claim(
        ss_f7,
        "Requests A to D over time, under four policies",
        seconds=(30, 35),
    ),
    Claim(
        ss_f9,
        "Decodes beside a whole prompt and beside a chunk, against decodes alone",
        seconds=(10, 60),
    ),
    Claim(
        ss_f9b,
        "Decodes beside a chunk against decodes alone, over batch and context",
        seconds=(5, 25),
    ),
    Claim(
        ss_f14,
        "What chunks of 512, 1,024 and 2,048, or less, add to a prefill, over prompt lengths",
        seconds=(15, 235),
    ),
    Claim(
        ss_f10,
        "Capacity under the strict and the relaxed SLO, both datasets",
        seconds=(60, 550),
        covers=("SS-F11",),
    ),
    Claim(
        ss_f12,
        "Capacity over the SLO: vllm with three batch sizes, two token budgets",
        seconds=(3, 1150),
    ),
    Claim(
        ss_5_2,
        "Capacity of vllm with three batch sizes",
        seconds=(1, 1),
    ),
    Claim(
        ss_t4,
        "Hybrid batches alone, chunks alone, and both: P50 TTFT and P99 TBT",
        seconds=(65, 100),
    ),
    Claim(
        ss_f1,
        "Stalls over time and under load, and what they are traded for",
        seconds=(45, 100),
        covers=("SS-F2",),
    ),
    Claim(
        ss_4_3,
        "The token budget of the strict and the relaxed SLO, by timing batches",
        seconds=(25, 60),
    ),
    Claim(
        b_1,
        "Slots used under static batching, as the post counts and in iterations",
        seconds=(85, 85),
    ),
    Claim(
        b_1b,
        "Slots over steps under static and continuous batching, counted",
        seconds=(1, 1),
    ),
    Claim(
        b_2,
        "A prompt beside six decodes, whole and in eight chunks, as it goes on",
        seconds=(15, 40),
    ),
    Claim(
        b_3,
        "An iteration over its prompt tokens: the post's table, its timeline, and here",
        seconds=(20, 20),
    ),
    Claim(
        b_7,
        "Static batching, Orca, and Orca with chunks of 512, 256 and 128, or a quarter, at a "
        "load that saturates",
        seconds=(120, 240),
    ),
]
