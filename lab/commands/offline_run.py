"""How `bench.py offline` measures. What is done when it is interrupted is printed and written.

Read first: offline.py, lab/measure/decode_cost.py and offline_load.py. Read next:
offline_report.py, what it prints."""

import math
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

from tqdm import tqdm

from cli.files import options_json, write_json, wrote
from cli.loading import load_model, resolve_model
from cli.model import ModelOptions, split_names
from config import EngineConfig
from lab.commands.offline_report import (
    Costs,
    conclude,
    count_equal_texts,
    limits_line,
    print_costs,
    print_end_to_end,
    row_json,
)
from lab.commands.options import OfflineOptions
from lab.measure import timing
from lab.measure.batch_times import BatchTime, time_batches
from lab.measure.decode_cost import DecodeCost, measure_decode_cost, table_2_batches
from lab.measure.machine_info import measure_machine
from lab.measure.offline_load import OfflineLoad, policy_runs, run_policies
from lab.measure.run_loop import Run
from lab.measure.run_plan import run_plan
from model import GPT, GPTConfig
from parallel.stages import runner_for

CPU_LAYERS = 2  # of a geometry on a CPU: each layer does the same work
CPU_S = 12  # of the pairs in CPU time
WALL_S = 4  # and in wall time
SERVE_S = 40  # of all policies together
LIMIT_S = 120  # of wall time: what is not done then is left out
MOST_ROUNDS = 6  # the first of which fills the batch


def with_few_layers(model: ModelOptions) -> ModelOptions:
    """The same model with CPU_LAYERS on a CPU, unless it has fewer, is a checkpoint or compiled, or
    layers or processes are asked for."""
    is_fixed = model.layers or model.model or model.compile or model.tp * model.pp > 1
    if is_fixed or model.device != "cpu":
        return model
    if GPTConfig.preset(model.name).n_layer <= CPU_LAYERS:
        return model
    return replace(model, layers=CPU_LAYERS)


def run(options: OfflineOptions, model_options: ModelOptions) -> None:
    """The command. Raises ValueError for unknown policies and `dynamic`, which needs an SLO."""
    began = time.perf_counter()
    policies = split_names(options.policies)
    if "dynamic" in policies:
        raise ValueError("--policies dynamic: follows an SLO, see bench.py serve and capacity")
    run_plan(policies, [1], EngineConfig(page_size=1, pages=1))  # raises for unknown ones
    model_options = with_few_layers(resolve_model(model_options))
    attention = model_options.attention
    model = load_model(model_options, options.seq_len, positions_from="--seq-len")
    measure = partial(measure_machine, model, model_options.title, options.chunk, attention)
    machine = measure()
    busy = machine.busy and model.device.type != "cuda"
    if busy:
        with timing.one_thread():
            machine = measure(clock=timing.cpu_time)
    print(machine.heading() + limits_line(machine))
    costs = measure_costs(model, options, attention, busy)
    report: dict[str, Any] = {
        "options": options_json(options, model_options) | {"pd_ratio": options.pd_ratio},
        "machine": machine.to_json(),
        "decode_cost": print_costs(costs, model, options.seq_len),
    }
    load = OfflineLoad(
        seq_len=options.seq_len,
        pd_ratio=options.pd_ratio,
        batch=options.batch,
        requests=options.requests or affordable_requests(costs.served, options, len(policies)),
        seed=model_options.seed,
    )
    print(f"serving {load.requests} requests under each policy")
    runs: dict[str, Run] = {}
    in_cpu_time = costs.served.cpu_time
    try:
        with (
            timing.one_thread() if in_cpu_time else nullcontext(),
            tqdm(total=len(policies) * load.tokens, leave=False, disable=None) as bar,
        ):
            for name, run in run_policies(
                model,
                policies,
                load,
                chunk=options.chunk,
                attention=attention,
                progress=bar.update,
                now=timing.cpu_time if in_cpu_time else timing.wall_time,
                limit_s=math.inf if options.requests else LIMIT_S,
            ):
                runs[name] = run
    finally:
        rows = policy_runs(policies, runs, options.batch)
        if in_cpu_time:  # which no other program makes busy
            rows = {name: replace(row, busy=False) for name, row in rows.items()}
        conclusion = conclude(costs, rows)
        equal_texts = count_equal_texts(rows)
        report["end_to_end"] = {name: row_json(row) for name, row in rows.items()}
        report["conclusion"] = conclusion
        report["seconds"] = time.perf_counter() - began
        report["equal_texts"] = equal_texts
        print_end_to_end(rows, load, options.chunk, in_cpu_time)
        print(f"{conclusion}\n\nsame text under {', '.join(rows)}: {equal_texts} of the requests")
        print(f"(in {model_options.dtype} rounding depends on the batch that a token is in)")
        write_json(options.json, report)
        wrote(options.json)
        if runs and options.plot:
            from lab.pictures.timelines import plot_timelines

            anchor_s = 10 * costs.served.decode_only_ms.value / 1e3  # longer gaps are red
            ordered = {name: runs[name] for name in rows}
            plot_timelines(ordered, report["machine"], options.plot, anchor_s)
            wrote(options.plot)


def measure_costs(model: GPT, options: OfflineOptions, attention: str, busy: bool) -> Costs:
    """What a decode costs in CPU time on one thread, and in wall time on all unless the machine is
    busy; on a GPU in wall time alone."""
    runner = runner_for(model)(model, options.batch, options.seq_len, options.seq_len, attention)
    batches = table_2_batches(options.seq_len, options.batch, options.chunk)

    def measure_parts(clock: Callable[[], float]) -> dict[str, BatchTime]:
        times = time_batches(runner, [*batches.values()][1:], 3, clock=clock)
        return {name: times[batch] for name, batch in batches.items() if batch in times}

    if model.device.type == "cuda":
        wall = measure_decode_cost(runner, batches, limit_s=WALL_S)
        return Costs(cpu=None, wall=wall, parts=measure_parts(timing.wall_time))
    with timing.one_thread():
        cpu = measure_decode_cost(runner, batches, clock=timing.cpu_time, limit_s=CPU_S)
        parts = measure_parts(timing.cpu_time)
    if busy:
        return Costs(cpu=cpu, wall=None, parts=parts)
    wall = measure_decode_cost(runner, batches, limit_s=WALL_S)
    return Costs(cpu=cpu, wall=None if wall.busy else wall, parts=parts)


def affordable_requests(cost: DecodeCost, options: OfflineOptions, policies: int) -> int:
    """How many requests so many policies serve in SERVE_S, if a token costs what it costs in the
    hybrid batch: MOST_ROUNDS of B or fewer, and always more than B."""
    token_s = cost.hybrid_ms.value / options.chunk / 1e3 * cost.wall_per_clock
    round_s = policies * options.batch * options.seq_len * token_s
    rounds = min(int(SERVE_S / round_s), MOST_ROUNDS)
    return max(rounds, 1) * options.batch + 1
