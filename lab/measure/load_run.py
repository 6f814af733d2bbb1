"""A load, served by an engine in real time.

    run = serve(model, config, arrivals, prompts)

Read first: run_loop.py, engine.py. Read next: capacity.py, which makes runs at several rates."""

import gc
import math
import time
from collections.abc import Callable, Sequence

from config import EngineConfig
from engine import Engine
from lab.measure import timing as measure
from lab.measure.arrival import Arrival
from lab.measure.run_loop import LoadRun, Recorder, Run, no_progress
from model import GPT
from parallel.stages import ParallelEngine, engine_for
from policies.observers import Iteration
from sampling import SamplingParams

GLANCE_EVERY_S = 1.0  # how often an engine's run probes the machine


class Clock:
    """Seconds since it was made, or set to 0 again."""

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self.now = now
        self.start = now()

    def __call__(self) -> float:
        """The time in seconds."""
        return self.now() - self.start

    def set(self, seconds: float = 0.0) -> None:
        """Let it be `seconds`, and go on from there."""
        self.start = self.now() - seconds


class EngineServer:
    """An engine as a Server. Outputs have the lengths of the load, as there are no stop tokens.
    Latencies count from the arrival, also if that is during an iteration."""

    def __init__(
        self,
        engine: Engine,
        clock: Clock,
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        self.engine = engine
        self.clock = clock
        self.sleep = sleep
        self.step = engine.step
        self.abort = engine.abort
        self.schedulers = engine.schedulers
        self.probe = measure.probe_of(engine.runner.model.device)
        self.probe_readings: list[float] = []
        self.next_glance = 0.0

    @property
    def last_iteration(self) -> Iteration | None:
        """What the last step computed; None if nothing."""
        return self.engine.last_iteration

    def ready_at(self) -> float:
        """The time if there is work, else infinity. Probes the machine every second."""
        self._glance()
        return self.clock() if self.engine.has_work else math.inf

    def _glance(self) -> None:
        """Probe the machine if that is due. The clock, which is the engine's, stands still
        meanwhile, so that the glance lies in no measured time. Several ranks are probed when no
        batch is in flight: the others would go on."""
        now = self.clock()
        engine = self.engine
        in_flight = isinstance(engine, ParallelEngine) and engine.in_flight
        if now >= self.next_glance and not in_flight:
            self.probe_readings.append(self.probe.take(measure.GLANCE_S))
            self.next_glance = now + GLANCE_EVERY_S
            self.clock.set(now)

    def wait_until(self, time: float) -> None:
        """Sleep for as long as it takes."""
        while (seconds := time - self.clock()) > 0:
            self.sleep(seconds)

    def add(self, i: int, arrival: Arrival, prompt: list[int] | None) -> None:
        """Queue request i. Raises ValueError without a prompt."""
        if prompt is None:
            raise ValueError("prompt=None: an engine needs token ids")
        self.engine.add_request(
            prompt,
            SamplingParams(max_new_tokens=arrival.output_len),
            arrival.time,
            request_id=i,
            priority=arrival.priority,
            ttft_slo=arrival.ttft_slo,
            tbt_slo=arrival.tbt_slo,
            user=arrival.user,
        )


def serve(
    model: GPT,
    config: EngineConfig,
    arrivals: Sequence[Arrival],
    prompts: Sequence[list[int]],
    *,
    progress: Callable[[], object] = no_progress,
    recorder: Recorder | None = None,
    now: Callable[[], float] = time.perf_counter,
    sleep: Callable[[float], object] = time.sleep,
) -> Run:
    """Serve `arrivals` with `prompts` by an engine of `config`, in real time.

    `progress` and `recorder`: see LoadRun. `now` and `sleep` are the time that the run lives in."""
    gc.collect()  # frees the cache of the engine before
    clock = Clock(now)
    engine = engine_for(model)(model, config, clock=clock)
    engine.warm_up()
    server = EngineServer(engine, clock, sleep)
    load = LoadRun(server, arrivals, prompts, progress, recorder)
    gc.collect()
    gc.freeze()  # so that no pause of the run grows with what Python held before
    try:
        clock.set(0.0)
        return load.run()
    finally:
        gc.unfreeze()
