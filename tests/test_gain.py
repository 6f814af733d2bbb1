"""What is measured is a full pipeline, whatever the policy; and what is explained adds up."""

import json
from dataclasses import replace
from itertools import accumulate, pairwise
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch

import bench
from lab.commands import offline
from lab.measure import gain, timing
from lab.measure.gain import COMPARED, explain_gain
from lab.measure.metrics import steady
from lab.measure.offline_load import OfflineLoad
from lab.simulator.simulation import simulate
from policies import POLICIES
from policies.observers import ChunkRecord, Iteration
from tests.helpers import tiny_model
from tests.test_simulation import Law

BATCH = 6
CHUNK = 128
CUTS_AND_BEGINS = ("chunked-only", "sarathi-serve", "priority")  # in one chunk: two prompts


def load_of(rounds):
    """A load of so many whole rounds of requests, and one more, at the balanced ratio."""
    return OfflineLoad(
        seq_len=1000, pd_ratio=CHUNK / (BATCH - 1), batch=BATCH, requests=rounds * BATCH + 1
    )


def run_of(policy, load, law):
    """The Run of a load under a policy, in which batches take what the law says."""
    config = replace(load.config(CHUNK), policy=policy)
    return simulate(law, config, load.arrivals()).run


def first_iteration_of(request_id, iterations):
    """The index of the first iteration that computes tokens of a request."""
    ids = [{chunk.request_id for chunk in iteration.chunks} for iteration in iterations]
    return next(index for index, requests in enumerate(ids) if request_id in requests)


@pytest.mark.parametrize("policy", [name for name in POLICIES if name != "dynamic"])
def test_a_full_pipeline_turns_out_what_it_takes_in(policy):
    """A round computes all of B requests, but for the last token: neither more nor fewer decodes
    beside its prefills; and a longer run, from the middle of it, is no faster."""
    load = load_of(3)
    a_second_each = Law(seconds=lambda batch: 1.0)
    iterations = run_of(policy, load, a_second_each).iterations
    in_round, rate, seconds = steady(iterations, BATCH, rounds=1)
    assert seconds == len(in_round)
    prefill = sum(iteration.prefill_tokens for iteration in in_round)
    decode = sum(iteration.decode_tokens for iteration in in_round)
    assert rate == (prefill + decode) / seconds
    slack = CHUNK if policy in CUTS_AND_BEGINS else 0
    assert prefill == pytest.approx(BATCH * load.prompt_len, abs=slack)
    assert decode == pytest.approx(BATCH * (load.output_len - 1), abs=BATCH if slack else 0)

    iterations = run_of(policy, load_of(9), a_second_each).iterations
    first, end = (first_iteration_of(request_id, iterations) for request_id in (24, 48))
    tokens = sum(i.prefill_tokens + i.decode_tokens for i in iterations[first:end])
    assert rate == pytest.approx(tokens / (end - first), rel=0.01)


def history(*batches):
    """An iteration of 0.75 s each second, of chunks (request, start, length)."""
    return [
        Iteration(
            start=second,
            end=second + 0.75,
            chunks=[ChunkRecord(*chunk, is_decode=chunk[1] > 0) for chunk in batch],
        )
        for second, batch in enumerate(batches)
    ]


def test_ramp_and_tail_are_not_counted():
    iterations = history(
        [(0, 0, 9), (1, 0, 9)],
        [(0, 9, 1), (1, 9, 1)],
        [(2, 0, 9), (3, 0, 9)],
        [(2, 9, 1), (3, 9, 1)],
        [(4, 0, 9), (5, 0, 9)],
        [(4, 9, 1), (5, 9, 1)],
        [(6, 0, 9)],
        [(6, 9, 1)],
    )
    assert steady(iterations, 2) == (iterations[2:6], 40 / 4, 4)  # and not request 6's
    assert steady(iterations, 2, rounds=1) == (iterations[4:6], 20 / 2, 2)
    assert steady(iterations[:5], 2) == (iterations[2:4], 20 / 2, 2)  # 5's come with those of 4
    in_turn = history(*([(i, 0, 9)] for i in range(6)))  # the last begins no round
    assert steady(in_turn, 2) == (in_turn[2:4], 18 / 2, 2)
    assert steady(iterations[:4], 2) == steady([], 2) == ([], None, None)


def products_s(rows, logits):
    """Seconds of the products of a batch: dearer per row beyond 500, and beside a pass over all."""
    return 0.02 + 1e-3 * rows + 2e-4 * max(0, rows - 500) + 1e-4 * logits


def attention_s(shapes):
    """Seconds of the attention of [(start, length)]."""
    return 1e-7 * sum(length * (start + length) for start, length in shapes)


FLATTEN = 0.003  # seconds per batch, as all of these
SAMPLING = 0.002
SMALL = 0.03
SCHEDULE = 0.004
BETWEEN = 0.001


def shapes_of(spans):
    """[(start, length)] of spans or chunks."""
    return [(span.start, span.length) for span in spans]


class FakeRunner:
    """Takes the times above, on a clock that is not real; keeps the batches that it computed."""

    def __init__(self, model):
        self.model = model
        self.cache = SimpleNamespace(data=model.head.weight)
        self.now = 0.0
        self.batches = []

    def wait(self, seconds):
        """Let time pass."""
        self.now += seconds

    attention = None

    def flatten(self, spans):
        """All that is not computed on the device."""
        self.wait(FLATTEN)

    def fetch(self, logits, params, positions):
        """Sampling alone."""
        assert len(logits) == len(params) == len(positions)
        self.wait(SAMPLING)

    def greedy(self, spans):
        """All of it."""
        pages = [page for span in spans for page in span.pages]
        assert len(set(pages)) == len(spans) and set(pages) <= set(range(BATCH))
        self.batches.append(spans)
        self.flatten(spans)
        rows = sum(span.length for span in spans)
        logits = sum(span.yields_token for span in spans)
        self.wait(products_s(rows, logits) + attention_s(shapes_of(spans)) + SMALL)
        self.fetch(*[range(logits)] * 3)


@pytest.fixture
def runner(monkeypatch):
    """A FakeRunner, on whose clock every part of an iteration takes what it is known to take."""
    fake = FakeRunner(tiny_model())

    def products_alone(model, rows, logits):
        return lambda: fake.wait(products_s(rows, logits))

    def attention_alone(runner, spans):
        return lambda: fake.wait(attention_s(shapes_of(spans)))

    monkeypatch.setattr(
        gain, "FlatBatch", SimpleNamespace(build=lambda chunks, _: fake.flatten(chunks))
    )
    monkeypatch.setattr(gain, "products_alone", products_alone)
    monkeypatch.setattr(timing, "attention_alone", attention_alone)
    monkeypatch.setattr(timing.time, "perf_counter", lambda: fake.now)
    monkeypatch.setattr(timing.Probe, "take", lambda self, *_: 0.0)
    monkeypatch.setattr(timing, "fastest_cpu_dtype", lambda: torch.float32)  # nothing takes time
    return fake


def run_at_known_costs(policy, load):
    """What run_policies would return for a policy, of the attributes that explain_gain reads."""

    def seconds(chunks):
        logits = sum(start + length >= load.prompt_len for _, start, length in chunks)
        products = products_s(sum(length for *_, length in chunks), logits)
        attention = attention_s([(start, length) for _, start, length in chunks])
        return SCHEDULE + FLATTEN + products + attention + SMALL + SAMPLING

    law = Law(seconds=seconds)
    law.cpu_s = SCHEDULE + FLATTEN  # until the launch
    run = run_of(policy, load, law)
    iterations = [later(each, n * BETWEEN) for n, each in enumerate(run.iterations)]
    return SimpleNamespace(
        run=replace(run, iterations=iterations),
        summary=SimpleNamespace(tokens_per_s=load.requests * load.seq_len / iterations[-1].end),
        tokens_per_s=steady(iterations, load.batch)[1],
        busy=False,
    )


def later(iteration, seconds):
    """The same iteration so many seconds later."""
    times = {name: getattr(iteration, name) + seconds for name in ("start", "launch", "end")}
    return iteration._replace(**times)


def ms_per_token(step, policy):
    """A step's cost under one policy."""
    return step.request_level_ms if policy == "request-level" else step.sarathi_ms


def test_the_steps_add_up_to_the_gain(runner):
    load = load_of(2)
    runs = {name: run_at_known_costs(name, load) for name in ("vllm", *COMPARED)}
    explanation = explain_gain(runner, runs, CHUNK, BATCH)
    steps = explanation.steps
    assert steps[0].name.startswith("products, ") and len(steps) == 8 and not explanation.busy
    assert explanation.difference == pytest.approx(0, abs=1e-9)
    for policy in COMPARED:
        summed, run, whole_run = (ms_per_token(step, policy) for step in steps[-3:])
        assert summed == pytest.approx(run)
        assert whole_run == pytest.approx(1e3 / runs[policy].summary.tokens_per_s)

        iterations = steady(runs[policy].run.iterations, BATCH).iterations
        shapes = [shapes_of(iteration.chunks) for iteration in iterations]
        rows = [sum(length for _, length in shape) for shape in shapes]
        logits = [
            sum(start + length >= load.prompt_len for start, length in shape) for shape in shapes
        ]
        parts = [
            sum(map(products_s, rows, logits)),
            sum(map(attention_s, shapes)),
            SMALL * len(shapes),
            (SAMPLING + SCHEDULE + FLATTEN + BETWEEN) * len(shapes),
        ]
        for step, seconds in zip(steps[2:6], accumulate(parts), strict=True):
            expected = pytest.approx(1e3 * seconds / sum(rows))
            assert ms_per_token(step, policy) == expected, (policy, step.name)
        run_again = [shapes_of(spans) for spans in runner.batches]
        assert all(shape in run_again for shape in shapes)

    promise, chunk_rate, filled, *_ = steps
    assert promise.request_level_ms == chunk_rate.request_level_ms == filled.request_level_ms
    prompts = BATCH * load.prompt_len  # request-level computes them in one batch
    assert promise.sarathi_ms == pytest.approx(1e3 * products_s(prompts, BATCH) / prompts)
    assert chunk_rate.sarathi_ms == pytest.approx(1e3 * products_s(CHUNK, BATCH) / CHUNK)
    assert filled.sarathi_ms > chunk_rate.sarathi_ms  # the last chunks of prompts are shorter


def test_a_busy_machine_explains_nothing(runner, monkeypatch, capsys):
    load = load_of(3)
    runs = {name: run_at_known_costs(name, load) for name in COMPARED}
    monkeypatch.setattr(offline, "runner_for", lambda model: lambda *_: runner)
    for busy, title in ((False, "Where the gain goes: "), (True, "Where the gain goes (busy)")):
        runs["sarathi"].busy = busy
        options = SimpleNamespace(load=load, chunk=CHUNK, model=SimpleNamespace(attention="auto"))
        report = offline.explain(runner.model, runs, options)
        text = capsys.readouterr().out
        assert report["busy"] == busy and title in text
        steps = report["steps"]
        assert all(f"{step['gain']:.3f}x |" in text for step in steps)
        losses = {}
        for before, after in pairwise(steps[:-2]):
            losses[after["step"]] = after["gain"] / before["gain"]
        largest = min(losses, key=losses.get)
        assert (f"most is lost to {largest.strip('+ ')}, " in text) != busy


TINY = (
    "--explain --policies request-level,sarathi --preset llama-tiny --chunk 32 --batch 3 "
    "--seq-len 80 --requests 10 --device cpu --dtype float32"
).split()


def test_what_is_explained_is_written(tmp_path, capsys):
    file = tmp_path / "r.json"
    bench.main([*TINY, f"--json={file}"])
    text = capsys.readouterr().out
    report = json.loads(file.read_text())
    assert "Where the gain goes" in text and f"\nwrote {file}" in text
    steps = report["explained"]["steps"]
    runs = report["end_to_end"]
    assert steps[0].keys() == {"step", "request-level", "sarathi", "gain"}
    assert len(steps) == 8 and all(f"| {step['step']} " in text for step in steps)
    assert steps[-2]["gain"] == pytest.approx(runs["sarathi"]["gain"])
    assert steps[-1]["gain"] == pytest.approx(runs["sarathi"]["whole_run_gain"])


def test_an_interrupt_keeps_the_runs_that_are_done(tmp_path, monkeypatch):
    monkeypatch.setattr(gain, "explain_gain", Mock(side_effect=KeyboardInterrupt))
    file = tmp_path / "r.json"
    with pytest.raises(KeyboardInterrupt):
        bench.main([*TINY, f"--json={file}"])
    report = json.loads(file.read_text())
    assert list(report["end_to_end"]) == list(COMPARED) and "explained" not in report
