"""Exercises 11 to 16: a policy that runs, and a load on which its users complain.

A solution holds if the complaint is gone, no rule of policies/referee.py is broken, and on other
loads no figure is much worse than the reference's. Many solutions are right, but for 13: there one
decision is, and it is compared.

Read first: problems.py, targets.py. Read next: catalog.py."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from random import Random
from statistics import mean

from cli.tables import format_table
from exercises.given import batch_seconds
from exercises.loads import Load, LoadRequest, ample, mixed_loads, random_load, small_loads
from exercises.lockstep import Trial, serve
from exercises.problems import Problem, differs_from
from exercises.rules import SHARING, Rule, amount
from policies.remedies import ThresholdUnderContention
from policies.today import VLLMV1
from scheduler import SarathiServe, Scheduler

OTHER_LOADS = 40
WORSE = 1.5  # a figure may be so many times the reference's
MAX_COLUMNS = 100  # iterations of a timeline that are printed


@dataclass(frozen=True)
class Figures:
    """What users feel of a run. Times are in seconds."""

    longest_gap: float  # between two tokens of a request
    longest_ttft: float
    mean_ttft: float
    computed_again: int  # tokens, after preemptions
    seconds: float  # until the last request has ended

    @classmethod
    def of(cls, trial: Trial) -> "Figures":
        """The figures of a trial that has served its load."""
        gaps = [gap for request in trial.requests for gap in request.tbt]
        ttfts = [request.token_times[0] - request.arrival for request in trial.requests]
        return cls(
            longest_gap=max(gaps, default=0.0),
            longest_ttft=max(ttfts),
            mean_ttft=mean(ttfts),
            computed_again=sum(request.recomputed_tokens for request in trial.requests),
            seconds=trial.now,
        )


NAMES = {  # of the figures, in tables
    "longest_gap": "longest gap, s",
    "longest_ttft": "longest TTFT, s",
    "mean_ttft": "mean TTFT, s",
    "computed_again": "computed again",
    "seconds": "all done after, s",
}


@dataclass(frozen=True)
class Complaint:
    """What users complain about: a figure that is too large on a load."""

    reference: type[Scheduler]
    load: Load
    figure: str  # a field of Figures
    allowed: float
    quote: str  # of a user
    before: Figures  # of the policy as it is given
    rules: Sequence[Rule] = ()  # of the decisions on other loads, where only one is right

    def loads(self) -> Iterator[Load]:
        """The load of the complaint, and the others."""
        yield self.load
        if self.rules:
            yield from small_loads(13, prefix_caching=True)
            return
        yield from (load for load in WITHOUT_SHARING if load is not self.load)
        for seed in range(OTHER_LOADS):
            load = random_load(Random(f"mend {seed}"), 0.5 + 0.5 * seed / OTHER_LOADS)
            requests = tuple(replace(r, arrival=0.04 * r.arrival) for r in load.requests)
            chunk = max(load.chunk, 8)
            max_batch = max(2, load.max_batch // 2)
            yield replace(load, requests=requests, chunk=chunk, max_batch=max_batch)

    def find(self, policy: type[Scheduler], load: Load) -> Problem | None:
        """What is wrong on a load: the complaint, a broken rule, or a figure that is worse."""
        if self.rules and load is not self.load:
            return differs_from(self.reference, self.rules)(policy, load)
        trial = Trial(policy, load, batch_seconds)
        sentence = trial.run() or over_budget(trial)
        if sentence:
            if load is self.load:
                sentence = f'A user: "{self.quote}" {sentence}'
            return Problem("rule_of_every_policy", sentence, details=timeline(trial))
        yours = Figures.of(trial)
        reference = Figures.of(serve(self.reference, load, batch_seconds))
        rule = "complaint"
        sentence = f'A user: "{self.quote}"'
        limits = {self.figure: self.allowed} if load is self.load else {}
        if not exceeded(yours, limits):
            rule = "worse"
            sentence = "The cure is worse than the complaint"
            if load is not self.load:
                sentence = "The cure is worse elsewhere, on a load without complaints"
            two_iterations = 2 * (0.020 + 0.001 * load.chunk)
            limits = {name: WORSE * getattr(reference, name) + two_iterations for name in NAMES}
            limits["computed_again"] += load.max_len
            sentence += f": a figure is much more than {WORSE} times the reference's."
        if not exceeded(yours, limits):
            return None
        table = figures_table({"yours": yours, "reference": reference}, limits)
        return Problem(rule, sentence, details=f"{table}\n\n{timeline(trial)}")


def over_budget(trial: Trial) -> str | None:
    """A sentence, if a batch has more prompt tokens than the budget leaves, and more than one."""
    for iteration in trial.iterations:
        left = max(1, trial.load.chunk - iteration.decode_tokens)
        if iteration.prefill_tokens > left:
            return (
                f"The budget is of {trial.load.chunk} tokens: beside {iteration.decode_tokens} "
                f"decodes a batch has {iteration.prefill_tokens} tokens of prompts."
            )
    return None


def exceeded(figures: Figures, limits: dict[str, float]) -> bool:
    """Whether one of the figures is above its limit."""
    return any(getattr(figures, name) > limit for name, limit in limits.items())


def figures_table(columns: dict[str, Figures], limits: dict[str, float] | None = None) -> str:
    """The figures of some policies, by the heads of their columns, and what is allowed."""
    rows: dict[str, list[tuple[str, float | None, str]]] = {}
    for name, title in NAMES.items():
        spec = ".3f" if name != "computed_again" else ",.0f"
        rows[title] = [(head, getattr(figures, name), spec) for head, figures in columns.items()]
        if limits is not None:
            rows[title].append(("allowed", limits.get(name), spec))
    return format_table("figure", rows)


def timeline(trial: Trial) -> str:
    """A line for each request, with a sign for each iteration."""
    iterations = trial.iterations[:MAX_COLUMNS]
    lines = []
    for request in trial.requests:
        signs = ""
        for iteration in iterations:
            chunks = {chunk.request_id: chunk for chunk in iteration.chunks}
            chunk = chunks.get(request.id)
            has_come = request.arrival <= iteration.start
            has_ended = request.finish_reason and request.token_times[-1] <= iteration.start
            if chunk:
                signs += "d" if chunk.is_decode else "P"
            elif request.id in iteration.preempted:
                signs += "x"
            else:
                signs += "." if has_come and not has_ended else " "
        lines.append(f"  request {request.id:>2}  {signs.rstrip()}")
    number = amount(len(iterations), "iteration")
    head = f"A sign for each of the first {number}: P prefill, d decode, x preempted, . waits"
    return "\n".join([head, *lines])


# The loads of the complaints.

STREAM = ample(  # prompts come while two requests decode
    LoadRequest(0.0, 8, 30),
    LoadRequest(0.0, 8, 30),
    *(LoadRequest(0.1 + 0.05 * i, 40, 2) for i in range(16)),
    chunk=32,
)
LONG_ANSWERS = ample(
    LoadRequest(0.0, 8, 100),
    LoadRequest(0.0, 8, 100),
    *(LoadRequest(0.1 + 0.1 * i, 40, 4) for i in range(6)),
    chunk=32,
)
ASKED_AGAIN = Load(
    (
        LoadRequest(0.0, 16, 4, shared=16),
        LoadRequest(0.1, 9, 4),
        LoadRequest(0.5, 16, 4, shared=16),
        LoadRequest(0.6, 22, 4, shared=16),
    ),
    chunk=32,
    max_batch=4,
    pages=40,
    page_size=4,
    prefix_caching=True,
)
CROWD = Load(
    tuple(LoadRequest(0.02 * i, 100, 12) for i in range(6)),
    chunk=32,
    max_batch=6,
    pages=32,
    page_size=8,
)
TIGHT = Load(
    tuple(LoadRequest(0.1 * i, 20, 40) for i in range(8)),
    chunk=32,
    max_batch=8,
    pages=40,
    page_size=4,
)
ONE_LONG = ample(
    LoadRequest(0.0, 800, 4),
    *(LoadRequest(0.1 + 0.04 * i, 10, 20) for i in range(6)),
    chunk=64,
)

STEADY = ample(  # short prompts never end, and three requests decode
    LoadRequest(0.0, 8, 200),
    LoadRequest(0.0, 8, 200),
    LoadRequest(0.0, 8, 200),
    LoadRequest(0.05, 400, 4),
    *(LoadRequest(0.06 + 0.04 * i, 20, 2) for i in range(100)),
    chunk=64,
)
WITHOUT_SHARING = (STREAM, LONG_ANSWERS, CROWD, TIGHT, ONE_LONG, STEADY, next(mixed_loads()))

STARVED_DECODES = Complaint(
    reference=SarathiServe,
    load=STREAM,
    figure="longest_gap",
    allowed=0.15,
    quote="My answer stops in the middle of a word whenever others send prompts.",
    before=Figures(1.0246, 0.23572, 0.15408, 0, 1.42442),
)
STARVED_PREFILLS = Complaint(
    reference=SarathiServe,
    load=LONG_ANSWERS,
    figure="longest_ttft",
    allowed=0.5,
    quote="I wait for the first word until somebody else's long answer is complete.",
    before=Figures(0.0217, 1.68512, 1.255235, 0, 2.28592),
)
NOTHING_LEFT = Complaint(
    reference=SarathiServe,
    load=ASKED_AGAIN,
    figure="longest_ttft",
    allowed=0.1,
    quote="The first time I got an answer. The second time it hangs.",
    before=Figures(0.01145, math.inf, math.inf, 0, math.inf),
    rules=SHARING,
)
FIRST_CHUNK = Complaint(
    reference=VLLMV1,
    load=CROWD,
    figure="computed_again",
    allowed=50,
    quote="With six of us the GPU is busy, and nothing comes out.",
    before=Figures(0.07123, 1.72302, 0.970633, 247, 2.04382),
)
LONGEST_PAYS = Complaint(
    reference=SarathiServe,
    load=TIGHT,
    figure="longest_gap",
    allowed=0.6,
    quote="My answer was at its last sentence, and then it stopped for a second.",
    before=Figures(0.88443, 1.08983, 0.375116, 316, 2.55865),
)
LONG_PROMPT_EATS = Complaint(
    reference=ThresholdUnderContention,
    load=ONE_LONG,
    figure="longest_gap",
    allowed=0.8,
    quote="It answers me at once, but then it stops for seconds.",
    before=Figures(3.87225, 4.2115, 0.726643, 0, 4.6901),
)
