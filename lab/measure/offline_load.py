"""The policies end to end, on one load that is there at the start (SARATHI §5.1.3 to §5.3).

    load = OfflineLoad(seq_len=1024, pd_ratio=50, batch=6, requests=25)
    for name, row in run_policies(model, ["request-level", "sarathi"], load, chunk=256):
        row.gain        throughput over request-level's

Read first: load_run.py. Read next: lab/commands/offline.py, which prints the table."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from config import EngineConfig
from lab.measure import metrics, timing, workload
from lab.measure.load_run import Clock, EngineServer
from lab.measure.run_loop import LoadRun, Recorder, Run
from lab.measure.run_plan import run_plan
from model import GPT
from parallel import engine_for


@dataclass(frozen=True, kw_only=True)
class OfflineLoad:
    """Requests that are all there at time 0; prompt and output are `seq_len` tokens together."""

    seq_len: int
    pd_ratio: float  # prompt tokens per output token
    batch: int  # the most requests at once
    requests: int
    lockstep: bool = False  # all requests want the whole output, and so begin and end together
    seed: int = 0  # of the prompts

    @property
    def output_len(self) -> int:
        """How many tokens a request wants, at least one."""
        output = round(self.seq_len / (1 + self.pd_ratio))
        return min(max(1, output), self.seq_len - 1)

    @property
    def prompt_len(self) -> int:
        """How long each prompt is."""
        return self.seq_len - self.output_len

    @property
    def tokens(self) -> int:
        """How many tokens a policy computes that preempts none. The last of an output is not."""
        return sum(a.prompt_len + a.output_len - 1 for a in self.arrivals())

    def config(self, chunk: int, attention: str = "auto") -> EngineConfig:
        """The EngineConfig of its engines, without a policy: a page for each request at once."""
        return EngineConfig(
            chunk=chunk,
            max_batch=self.batch,
            max_len=self.seq_len,
            page_size=self.seq_len,
            pages=self.batch,
            attention=attention,
        )

    def arrivals(self) -> list[workload.Arrival]:
        """The requests. The first B want 1/B, 2/B, … of the output, if not in lockstep: from then
        on one ends when another begins, and not all of them at once."""
        arrivals = []
        for index in range(self.requests):
            share = self.batch if self.lockstep else min(index + 1, self.batch)
            output = max(1, self.output_len * share // self.batch)
            arrivals.append(workload.Arrival(0.0, self.prompt_len, output))
        return arrivals


@dataclass(frozen=True, kw_only=True)
class PolicyRun:
    """What one policy made of the load."""

    run: Run
    summary: metrics.RunSummary
    busy: bool
    tokens_per_s: float | None  # of a full pipeline, see metrics.steady; None: too few requests
    gain: float | None = None  # of that, over request-level's
    whole_run_gain: float | None = None  # of all tokens over all the time

    def to_json(self) -> dict[str, object]:
        """The summary of the run, with the throughput of a full pipeline, and the gains."""
        return self.summary.to_json() | {
            "tokens_per_s": self.tokens_per_s,
            "busy": self.busy,
            "whole_run_tokens_per_s": self.summary.tokens_per_s,
            "gain": self.gain,
            "whole_run_gain": self.whole_run_gain,
        }


def nothing_to_show(tokens: int) -> None:
    """Called in the place of a progress bar."""


def nothing_to_say(name: str, seconds: float) -> None:
    """Called in the place of a line about a policy that is done."""


def run_policies(
    model: GPT,
    policies: Sequence[str],
    load: OfflineLoad,
    *,
    chunk: int,
    attention: str = "auto",
    progress: Callable[[int], object] = nothing_to_show,
    ended: Callable[[str, float], object] = nothing_to_say,
    recorders: Mapping[str, Recorder] | None = None,
) -> Iterator[tuple[str, PolicyRun]]:
    """Serve the load under each policy, request-level first: (name, PolicyRun), one by one.

    On a CPU the policies take turns, which is steadier. On a GPU there is room for one at a time;
    in a pipeline the batches of one would be on their way when it is another's turn. `progress` is
    called with the number of tokens of each iteration, `ended` with the name of a policy that is
    done and its seconds, and each of `recorders` sees the run of its policy."""
    arrivals = load.arrivals()
    prompts = workload.prompts(arrivals, model.config.vocab_size, load.seed)
    config = load.config(chunk, attention)
    names = sorted(policies, key=lambda name: name != "request-level")
    one_at_a_time = model.device.type == "cuda" or model.stages > 1
    groups = [[name] for name in names] if one_at_a_time else [names]
    base: PolicyRun | None = None
    for group in groups:
        configs = run_plan(group, [load.seq_len], config)
        runs: dict[str, Run] = {}
        try:
            for name, run in serve_in_turns(
                model, configs, arrivals, prompts, progress, ended, recorders or {}
            ):
                runs[name] = run
        finally:  # those that are done, too, when the others are interrupted
            for name in [name for name in configs if name in runs]:
                row = summarize_policy(runs[name], load.batch)
                if name == "request-level":
                    base = row
                yield name, with_gains(row, base)


def serve_in_turns(
    model: GPT,
    configs: Mapping[str, EngineConfig],
    arrivals: Sequence[workload.Arrival],
    prompts: Sequence[list[int]],
    progress: Callable[[int], object],
    ended: Callable[[str, float], object],
    recorders: Mapping[str, Recorder],
) -> Iterator[tuple[str, Run]]:
    """Serve the arrivals by an engine of each config, a step of one after another: (name, Run), as
    each is done.

    The engine that has used the least time is next: when the machine slows down for a while, it
    slows down for all of them. The clock of an engine stands still while it is another's turn."""
    clocks: dict[str, Clock] = {}
    loads: dict[str, LoadRun] = {}
    for name, config in configs.items():
        clock = Clock(time.perf_counter)
        engine = engine_for(model)(model, config, clock=clock)
        engine.warm_up()
        server = EngineServer(engine, clock)
        clocks[name] = clock
        loads[name] = LoadRun(server, arrivals, prompts, recorder=recorders.get(name))

    used_s = dict.fromkeys(configs, 0.0)  # of the engines that are not done
    while used_s:
        name = min(used_s, key=lambda name: used_s[name])
        clocks[name].set(used_s[name])
        load = loads[name]
        done = len(load.iterations)
        if load.step():
            used_s[name] = clocks[name]()
            for iteration in load.iterations[done:]:
                progress(iteration.prefill_tokens + iteration.decode_tokens)
        else:
            del used_s[name]
            ended(name, clocks[name]())
            yield name, loads[name].result()


def summarize_policy(run: Run, batch: int) -> PolicyRun:
    """The PolicyRun of a run of at most `batch` requests at once, without gains."""
    _, tokens_per_s, _ = metrics.steady(run.iterations, batch)
    return PolicyRun(
        run=run,
        summary=metrics.summarize_run(run.completions, run.iterations, run.seconds),
        busy=run.drift > timing.BUSY,
        tokens_per_s=tokens_per_s,
    )


def with_gains(row: PolicyRun, base: PolicyRun | None) -> PolicyRun:
    """The same with its gains over `base`, the row of request-level, if that was run."""
    if base is None:
        return row
    return replace(
        row,
        gain=over(row.tokens_per_s, base.tokens_per_s),
        whole_run_gain=over(row.summary.tokens_per_s, base.summary.tokens_per_s),
    )


def over(amount: float | None, base: float | None) -> float | None:
    """amount / base, or None if one of them is not there, or the base is 0."""
    return amount / base if amount is not None and base else None
