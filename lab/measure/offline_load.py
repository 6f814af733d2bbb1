"""The policies end to end, on one load that is there at the start (SARATHI §5.1.3 to §5.3).

    load = OfflineLoad(seq_len=1024, pd_ratio=50, batch=6, requests=25)
    runs = dict(run_policies(model, ["request-level", "sarathi"], load, chunk=256))
    policy_runs([*runs], runs, load.batch)["sarathi"].gain    throughput over request-level's

Read first: load_run.py. Read next: lab/commands/offline.py, which prints the table."""

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from config import EngineConfig
from lab.measure import metrics, timing, workload
from lab.measure.load_run import Clock, EngineServer
from lab.measure.run_loop import LoadRun, Run
from lab.measure.run_plan import run_plan
from model import GPT
from parallel.shard import stages_of
from parallel.stages import engine_for

BASE = "request-level"  # gains are over its throughput


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
    round_rates: Sequence[float]  # tokens/s of each round with a full batch, see full_rounds
    tokens_per_s: float | None  # of all these rounds; None: too few requests for one
    gain: float | None = None  # of that, over request-level's
    gain_range: tuple[float, float] | None = (
        None  # of two rounds or more, each over request-level's
    )


def run_policies(
    model: GPT,
    policies: Sequence[str],
    load: OfflineLoad,
    *,
    chunk: int,
    attention: str = "auto",
    progress: Callable[[int], object] | None = None,
    now: Callable[[], float] = timing.wall_time,
    limit_s: float = math.inf,
) -> Iterator[tuple[str, Run]]:
    """Serve the load under each policy: (name, Run), as each is done.

    On a CPU the policies take turns, which is steadier. On a GPU there is room for one at a time;
    in a pipeline the batches of one would be on their way when it is another's turn. `progress` is
    called with the number of tokens of each iteration. `now` is the time that the engines live in:
    wall time, or timing.cpu_time in a block of timing.one_thread. After `limit_s` seconds of wall
    time the rest is left out."""
    arrivals = load.arrivals()
    prompts = workload.prompts(arrivals, model.config.vocab_size, load.seed)
    configs = run_plan(policies, [load.seq_len], load.config(chunk, attention))
    one_at_a_time = model.device.type == "cuda" or stages_of(model) > 1
    deadline = time.perf_counter() + limit_s
    for group in [[name] for name in configs] if one_at_a_time else [list(configs)]:
        clocks = {name: Clock(now) for name in group}
        loads: dict[str, LoadRun] = {}
        for name, clock in clocks.items():
            engine = engine_for(model)(model, configs[name], clock=clock)
            engine.warm_up()
            loads[name] = LoadRun(EngineServer(engine, clock), arrivals, prompts)
        yield from take_turns(loads, clocks, progress, deadline)


def take_turns(
    loads: Mapping[str, LoadRun],
    clocks: Mapping[str, Clock],
    progress: Callable[[int], object] | None = None,
    deadline: float = math.inf,
) -> Iterator[tuple[str, Run]]:
    """Run these loads of EngineServers, a step of one after another: (name, Run), as each is done.

    The engine that has used the least time is next: when the machine slows down for a while, it
    slows down for all of them. The clock of an engine stands still while it is another's turn.
    When time.perf_counter is at the `deadline`, what is not done is left out."""
    used_s = dict.fromkeys(loads, 0.0)  # of the engines that are not done
    while used_s and time.perf_counter() < deadline:
        name = min(used_s, key=lambda name: used_s[name])
        load = loads[name]
        clocks[name].set(used_s[name])
        count = len(load.iterations)
        if load.step():
            used_s[name] = clocks[name]()
            for iteration in load.iterations[count:]:
                if progress:
                    progress(iteration.prefill_tokens + iteration.decode_tokens)
        else:
            del used_s[name]
            yield name, load.result()


def policy_runs(
    policies: Sequence[str], runs: Mapping[str, Run], batch: int
) -> dict[str, PolicyRun]:
    """The PolicyRun of each of these policies that was run, with at most `batch` requests at once;
    request-level first.

    The policies took turns, so that their first rounds ran at about the same time, and so on: a
    gain is also taken round by round."""
    rows: dict[str, PolicyRun] = {}
    base: PolicyRun | None = None
    names = [name for name in policies if name in runs]
    for name in sorted(names, key=lambda name: name != BASE):
        run = runs[name]
        rounds = metrics.full_rounds(run.iterations, batch)
        tokens = sum(each.tokens for each in rounds)
        row = PolicyRun(
            run=run,
            summary=metrics.summarize_run(run.completions, run.iterations, run.seconds),
            busy=run.drift > timing.BUSY,
            round_rates=[each.tokens / each.seconds for each in rounds],
            tokens_per_s=metrics.ratio(tokens, sum(each.seconds for each in rounds)),
        )
        base = row if name == BASE else base
        if base:
            gains = [rate / b for rate, b in zip(row.round_rates, base.round_rates, strict=False)]
            row = replace(
                row,
                gain=metrics.ratio(row.tokens_per_s, base.tokens_per_s),
                gain_range=(min(gains), max(gains)) if len(gains) > 1 else None,
            )
        rows[name] = row
    return rows
