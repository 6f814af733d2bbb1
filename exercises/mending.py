"""Exercises 11 to 16: a policy that runs, and a load on which its users complain.

A solution holds if the complaint is gone, no rule of policies/referee.py is broken, and on ten
other loads no figure is much worse than the reference's. Many solutions are right.

Read first: problems.py, targets.py. Read next: catalog.py."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from random import Random
from statistics import mean

from cli.tables import format_table
from exercises.given import batch_seconds
from exercises.guards import PolicyError
from exercises.loads import Load, LoadRequest, ample, random_load
from exercises.lockstep import Difference, Trial, compare, serve
from exercises.problems import Problem
from exercises.rules import amount
from policies.remedies import ThresholdUnderContention
from policies.today import VLLMV1
from scheduler import SarathiServe, Scheduler

OTHER_LOADS = 10
WORSE = 1.5  # a figure may be so many times the reference's
ROUNDING = 1e-9
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
        gaps = [0.0]
        for request in trial.requests:
            gaps += [after - before for before, after in pairwise(request.token_times)]
        ttfts = [request.token_times[0] - request.arrival for request in trial.requests]
        return cls(
            longest_gap=max(gaps),
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

    def loads(self) -> Iterator[Load]:
        """The load of the complaint, and the others."""
        yield self.load
        for seed in range(OTHER_LOADS):
            load = random_load(Random(f"mend {seed}"), 0.5 + 0.5 * seed / OTHER_LOADS)
            requests = tuple(replace(r, arrival=0.04 * r.arrival) for r in load.requests)
            yield replace(
                load,
                requests=requests,
                chunk=max(load.chunk, 8),
                prefix_caching=self.load.prefix_caching,
            )

    def find(self, policy: type[Scheduler], load: Load) -> Problem | None:
        """What is wrong on a load: the complaint, a broken rule, or a figure that is worse."""
        trial = Trial(policy, load, batch_seconds)
        try:
            trial.run()
        except PolicyError as error:
            if load is not self.load or error.place:
                raise
            sentence = f'A user: "{self.quote}" The server: "{error}".'
            return Problem("complaint", sentence, details=timeline(trial))
        yours = Figures.of(trial)
        reference = Figures.of(serve(self.reference, load, batch_seconds))
        columns = {"yours": yours, "reference": reference}
        if load is self.load and getattr(yours, self.figure) > self.allowed + ROUNDING:
            table = figures_table(columns, {self.figure: self.allowed})
            sentence = f'A user: "{self.quote}"'
            return Problem("complaint", sentence, details=f"{table}\n\n{timeline(trial)}")
        allowed = {name: WORSE * getattr(reference, name) for name in NAMES}
        allowed["longest_gap"] = max(allowed["longest_gap"], self.least_gap(load))
        allowed["computed_again"] += load.max_len
        for name, limit in allowed.items():
            if getattr(yours, name) > limit + ROUNDING:
                place = "this load" if load is self.load else "another load"
                sentence = (
                    f"The cure is worse elsewhere: on {place} "
                    f'"{NAMES[name]}" is more than {WORSE} times the reference\'s.'
                )
                table = figures_table(columns, {name: limit})
                return Problem("worse", sentence, details=f"{table}\n\n{timeline(trial)}")
        return None

    def least_gap(self, load: Load) -> float:
        """A gap that nobody complains about: two iterations with a full chunk."""
        return 2 * (0.010 + 0.001 * load.chunk + 0.010)

    def what_is_left(self, trial: Trial) -> str:
        """What is left of the complaint in a trial of a solution, in words."""
        figure = getattr(Figures.of(trial), self.figure)
        return f"{NAMES[self.figure]}: {figure:.3g}, and at most {self.allowed:g} is allowed."

    def first_wrong(self, policy: type[Scheduler]) -> Difference | None:
        """Where a policy first decides otherwise than the reference on the complaint's load."""
        return compare(self.load, policy, self.reference, batch_seconds)


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
    columns_shown = (
        f"the first {len(iterations)} of " if len(trial.iterations) > MAX_COLUMNS else ""
    )
    head = f"A sign for each of {columns_shown}{amount(len(trial.iterations), 'iteration')}: "
    return "\n".join([head + "P prefill, d decode, x preempted, . waits", *lines])


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

STARVED_DECODES = Complaint(
    reference=SarathiServe,
    load=STREAM,
    figure="longest_gap",
    allowed=0.15,
    quote="My answer stops in the middle of a word whenever others send prompts.",
)
STARVED_PREFILLS = Complaint(
    reference=SarathiServe,
    load=LONG_ANSWERS,
    figure="longest_ttft",
    allowed=0.5,
    quote="I wait for the first word until somebody else's long answer is complete.",
)
NOTHING_LEFT = Complaint(
    reference=SarathiServe,
    load=ASKED_AGAIN,
    figure="longest_ttft",
    allowed=0.1,
    quote="The first time I got an answer. The second time it hangs.",
)
FIRST_CHUNK = Complaint(
    reference=VLLMV1,
    load=CROWD,
    figure="computed_again",
    allowed=100,
    quote="With six of us the GPU is busy, and nothing comes out.",
)
LONGEST_PAYS = Complaint(
    reference=SarathiServe,
    load=TIGHT,
    figure="longest_gap",
    allowed=0.6,
    quote="My answer was at its last sentence, and then it stopped for a second.",
)
LONG_PROMPT_EATS = Complaint(
    reference=ThresholdUnderContention,
    load=ONE_LONG,
    figure="longest_gap",
    allowed=0.8,
    quote="It answers me at once, but then it stops for seconds.",
)
