"""The loop that brings the arrivals of a load to a server, and what was seen of the run.

    run = LoadRun(server, arrivals, prompts).run()

A Server is an engine in real time, or a simulation on a clock of its own. Plain Python, as a
simulation needs no torch. Read first: workload.py. Read next: load_run.py, which serves in real
time."""

import math
import statistics
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from lab.measure.arrival import Arrival
from policies.observers import Iteration, Sent
from request import Event, Request
from scheduler import Scheduler


class Server(Protocol):
    """What a load is brought to. All times are in seconds of the run."""

    @property
    def schedulers(self) -> Sequence[Scheduler]:
        """The schedulers that make its batches, which a Recorder watches."""
        ...

    @property
    def last_iteration(self) -> Iteration | None:
        """What the last step computed; None if nothing."""
        ...

    @property
    def probe_readings(self) -> Sequence[float]:
        """The readings of a timing.Probe during the run; empty for a simulation."""
        ...

    def clock(self) -> float:
        """The time."""
        ...

    def ready_at(self) -> float:
        """When its next batch can begin; infinity if there is no work."""
        ...

    def wait_until(self, time: float) -> None:
        """Let the time pass."""
        ...

    def add(self, i: int, arrival: Arrival, prompt: list[int] | None, /) -> object:
        """Queue request i."""
        ...

    def step(self) -> list[Event]:
        """Compute one batch, and return the Events of its tokens."""
        ...

    def abort(self, i: int, /) -> Request:
        """End request i."""
        ...


class Recorder(Protocol):
    """What sees every decision of a run: page.records.Recorder, or a checker of policies."""

    def watch(self, schedulers: Sequence[Scheduler]) -> Any:
        """Look at each batch that these schedulers make from here on."""
        ...

    def add(self, iteration: Iteration) -> Any:
        """See what an iteration computed."""
        ...


@dataclass(frozen=True)
class Run:
    """What was seen of one run. Times are in seconds from its start."""

    completions: list[Request]  # of request i in arrivals; "abort": the run was cut short
    iterations: list[Iteration]
    seconds: float  # until the last token
    cut_short: str = ""  # "given up" if the run was
    drift: float = 0.0  # share of the machine that others used, see timing.steadily
    transfers: Sequence[Sent] = ()  # between two pools, in the order in which they ended


def no_progress() -> None:
    """Called in the place of a progress bar."""


class LoadRun:
    """Brings `arrivals` to a server, with the token ids of workload.prompts, or None where lengths
    are enough. `progress` is called after each request that ended; a `recorder` sees every batch.
    The run is cut short if `gives_up` says so of a request that ended."""

    def __init__(
        self,
        server: Server,
        arrivals: Sequence[Arrival],
        prompts: Sequence[list[int]] | None = None,
        progress: Callable[[], object] = no_progress,
        recorder: Recorder | None = None,
        gives_up: Callable[[Request], bool] | None = None,
    ) -> None:
        self.server = server
        self.arrivals = arrivals
        self.prompts = prompts
        self.progress = progress
        self.recorder = recorder
        self.gives_up = gives_up
        self.completions: dict[int, Request] = {}  # by request
        self.iterations: list[Iteration] = []
        self.arrived: set[int] = set()
        self.cut_short = ""
        in_order = sorted(range(len(arrivals)), key=lambda i: arrivals[i].time)
        self.due = deque(in_order)  # requests that have not arrived, the next one first
        if recorder:
            recorder.watch(server.schedulers)

    def step(self) -> bool:
        """Add the request that is due, or else run one iteration. False if all is done."""
        ready_at = self.server.ready_at()
        if self.due and self.arrivals[self.due[0]].time <= ready_at:
            self._add_first_due()
            return True
        if ready_at == math.inf:
            return False
        for event in self.server.step():
            if event.finish_reason:
                self._complete(event.request)
        iteration = self.server.last_iteration
        if iteration:
            self.iterations.append(iteration)
            if self.recorder:
                self.recorder.add(iteration)
        return True

    def run(self) -> Run:
        """Step until all is done."""
        while not self.cut_short and self.step():
            pass
        return self.result()

    def result(self) -> Run:
        """The Run up to here. Aborts what still runs."""
        for i in self.arrived - self.completions.keys():
            self.completions[i] = self.server.abort(i)
        completions = [self.completions[i] for i in sorted(self.completions)]
        ends = [c.token_times[-1] for c in completions if c.token_times]
        ends += [iteration.end for iteration in self.iterations]
        return Run(
            completions=completions,
            iterations=self.iterations,
            seconds=max(ends, default=0.0),
            cut_short=self.cut_short,
            drift=statistics.fmean(self.server.probe_readings or [0.0]),
        )

    def _complete(self, completion: Request) -> None:
        """Keep a request that ended."""
        self.completions[completion.id] = completion
        if self.gives_up and self.gives_up(completion):
            self.cut_short = "given up"
        self.progress()

    def _add_first_due(self) -> None:
        """Bring the request that is due first to the server."""
        i = self.due.popleft()
        arrival = self.arrivals[i]
        self.server.wait_until(arrival.time)
        self.arrived.add(i)
        self.server.add(i, arrival, self.prompts[i] if self.prompts else None)
