"""What is measured is a full pipeline, whatever the policy; and what is explained adds up."""

import json
from types import SimpleNamespace

import pytest

from engine import Completion, Iteration
from kv_cache import Pages
from lab.measure import timing as measure
from lab.measure.metrics import steady
from lab.measure.offline_load import OfflineLoad
from policies import POLICIES, make_scheduler
from scheduler import ChunkRecord, Request
from tests import explain_gain
from tests.explain_gain import COMPARED
from tests.helpers import tiny_model

SIZES = dict(batch=6, chunk=128, seq_len=1000, pd_ratio=128 / 5)
CUT = (
    "chunked-only",
    "sarathi-serve",
    "priority",
)  # a chunk may hold the end of a prompt and begin another


def load_of(args):
    """The OfflineLoad of these options."""
    return OfflineLoad(
        seq_len=args.seq_len, pd_ratio=args.pd_ratio, batch=args.batch, requests=args.requests
    )


def simulate(policy, args, cost=None):
    """The completions and Iterations of a run in which each takes `cost(chunks)`, the seconds until
    the launch, until the tokens are there, and until the next; (0, 1, 0) if it is None."""
    now, iterations, requests = 0.0, [], []
    sizes = dict(chunk=args.chunk, max_batch=args.batch, max_len=args.seq_len)
    pages = Pages(args.batch, args.seq_len)
    scheduler = make_scheduler(policy, pages, clock=lambda: now, **sizes)
    for i, arrival in enumerate(load_of(args).arrivals()):
        n = arrival.prompt_len
        requests.append(Request(i, [0] * n, n, arrival.output_len))
        scheduler.add(requests[-1])
    while batch := scheduler.next_batch():
        before, during, after = cost(batch.record()) if cost else (0.0, 1.0, 0.0)
        launch = now + before
        iterations.append(Iteration(now, launch + during, batch.record(), launch))
        now = iterations[-1].end + after
        scheduler.advance(batch, [0 if c.yields_token else None for c in batch], now - after)
    return [Completion.of(request) for request in requests], iterations


def load(rounds, **changes):
    """The options of a load of so many whole rounds of requests, and one more."""
    sizes = SIZES | changes
    return SimpleNamespace(
        **sizes, requests=rounds * sizes["batch"] + 1, attention="auto", lockstep=False
    )


@pytest.mark.parametrize("policy", [name for name in POLICIES if name != "dynamic"])
@pytest.mark.parametrize("chunk", [64, 256])
def test_a_full_pipeline_turns_out_what_it_takes_in(policy, chunk):
    """A round computes all of B requests, but for the last token: neither more nor fewer decodes
    beside its prefills; and a longer run, from the middle of it, is no faster."""
    args = load(3, chunk=chunk, pd_ratio=chunk / 5)
    _, prompt, output, *_ = load_of(args).arrivals()[-1]
    _, iterations = simulate(policy, args)
    its, rate, seconds = steady(iterations, args.batch, rounds=1)
    prefill, decode = sum(i.prefill_tokens for i in its), sum(i.decode_tokens for i in its)
    assert rate == (prefill + decode) / seconds and seconds == len(its)
    slack = chunk if policy in CUT else 0
    assert prefill == pytest.approx(6 * prompt, abs=slack)
    assert decode == pytest.approx(6 * (output - 1), abs=6 if slack else 0)

    _, iterations = simulate(policy, load(9, chunk=chunk, pd_ratio=chunk / 5))
    first, *_, end = (
        next(n for n, i in enumerate(iterations) if who in {w for w, *_ in i.chunks})
        for who in (24, 48)
    )
    tokens = sum(i.prefill_tokens + i.decode_tokens for i in iterations[first:end])
    assert rate == pytest.approx(tokens / (end - first), rel=0.01)


def test_ramp_and_tail_are_not_counted():
    def iteration(start, *chunks):
        records = [ChunkRecord(*chunk, is_decode=chunk[1] > 0) for chunk in chunks]
        return Iteration(start, start + 0.75, records)

    batches = [[(i, 0, 9), (i + 1, 0, 9)] for i in (0, 2, 4)] + [[(6, 0, 9)]]
    iterations = []
    for requests in batches:
        iterations.append(iteration(len(iterations), *requests))
        iterations.append(iteration(len(iterations), *((who, 9, 1) for who, *_ in requests)))
    assert steady(iterations, 2) == (iterations[2:6], 40 / 4, 4)  # and not request 6's
    assert steady(iterations, 2, rounds=1) == (iterations[4:6], 20 / 2, 2)
    assert steady(iterations[:5], 2) == (iterations[2:4], 20 / 2, 2)  # 5's come with those of 4
    alone = iterations[:4] + [iteration(6, (4, 0, 9))]  # 2 B + 1 requests are just enough
    assert steady(alone, 2) == (iterations[2:4], 20 / 4, 4)
    in_turn = [iteration(who, (who, 0, 9)) for who in range(6)]  # the last begins no round
    assert steady(in_turn, 2) == (in_turn[2:4], 18 / 2, 2)
    assert steady(iterations[:4], 2) == steady([], 2) == ([], None, None)


def products_s(rows, logits):
    """Seconds of the products of a batch: dearer per row beyond 500, and beside a pass over all."""
    return 0.02 + 1e-3 * rows + 2e-4 * max(0, rows - 500) + 1e-4 * logits


def attention_s(chunks):
    """Seconds of the attention of [(start, length)]."""
    return 1e-7 * sum(length * (start + length) for start, length in chunks)


FLATTEN, SAMPLING, SMALL, SCHEDULE, BETWEEN = 0.003, 0.002, 0.03, 0.004, 0.001  # per batch


class FakeRunner:
    """Takes the times above, on a clock that is not real; `seen` are the batches it computed."""

    def __init__(self, clock, seen, model, pages, page_size, max_len, attention):
        self.clock, self.seen, self.cache = clock, seen, SimpleNamespace(data=model.head.weight)
        assert (pages, page_size, max_len, attention) == (6, 1000, 1000, "auto")

    def wait(self, seconds):
        """Let time pass."""
        self.clock[0] += seconds

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
        assert len(set(pages)) == len(spans) and set(pages) <= set(range(6))
        self.seen.append(spans)
        self.flatten(spans)
        its = sum(s.length for s in spans), sum(s.wants_logits for s in spans)
        self.wait(products_s(*its) + attention_s([(s.start, s.length) for s in spans]) + SMALL)
        self.fetch(*[range(its[1])] * 3)


@pytest.fixture
def known_costs(monkeypatch):
    """Every part of an iteration takes what it is known to take. The batches that are run again."""
    clock, seen = [0.0], []
    make = lambda *args: FakeRunner(clock, seen, *args)
    products = lambda model, *its: lambda: make_wait(products_s(*its))
    make_wait = lambda seconds: clock.__setitem__(0, clock[0] + seconds)
    alone = lambda runner, spans: (
        lambda: runner.wait(attention_s([(s.start, s.length) for s in spans]))
    )
    monkeypatch.setattr(explain_gain, "runner_for", lambda model: make)
    monkeypatch.setattr(explain_gain, "products_of", products)
    monkeypatch.setattr(measure, "attention_alone", alone)
    monkeypatch.setattr(measure.time, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(measure.Probe, "take", lambda self, *_: 0.0)
    return seen


def run_of(policy, args):
    """(completions, iterations) at the known costs, and the row of the table of policies."""
    prompt = load_of(args).arrivals()[0].prompt_len

    def cost(chunks):
        logits = sum(start + length >= prompt for _, start, length, _ in chunks)
        seconds = products_s(sum(length for _, _, length, _ in chunks), logits) + SMALL + SAMPLING
        seconds += attention_s([(start, length) for _, start, length, _ in chunks])
        return SCHEDULE + FLATTEN, seconds, BETWEEN

    completions, iterations = simulate(policy, args, cost)
    whole = len(completions) * args.seq_len / iterations[-1].end
    rate = steady(iterations, args.batch)[1]
    row = {"tokens_per_s": rate, "whole_run_tokens_per_s": whole, "busy": False}
    return (completions, iterations), row


def test_the_steps_add_up_to_the_gain(known_costs):
    args, timelines, policies = load(2), {}, {}
    for name in ("vllm", *COMPARED):
        timelines[name], policies[name] = run_of(name, args)
    found = explain_gain.explain(tiny_model(), policies, timelines, args)
    steps = {step.pop("step"): step for step in found["steps"]}
    assert list(steps)[0].startswith("products, ") and len(steps) == 8 and not found["busy"]
    assert found["difference"] == pytest.approx(0, abs=1e-9)
    summed, run, whole = list(steps.values())[-3:]
    assert summed == pytest.approx(run)
    for step in steps.values():
        assert step["gain"] == pytest.approx(step["request-level"] / step["sarathi"])
    for name in COMPARED:
        assert whole[name] == pytest.approx(1e3 / policies[name]["whole_run_tokens_per_s"])

        its, _, _ = steady(timelines[name][1], 6)
        prompt = len(timelines[name][0][0].prompt)
        shapes = [[chunk[1:3] for chunk in i.chunks] for i in its]
        rows = [sum(length for _, length in shape) for shape in shapes]
        logits = [sum(start + length >= prompt for start, length in shape) for shape in shapes]
        parts = [sum(map(products_s, rows, logits)), sum(map(attention_s, shapes))]
        parts += [SMALL * len(its), (SAMPLING + SCHEDULE + FLATTEN + BETWEEN) * len(its)]
        for n, step in enumerate(list(steps.values())[2:6]):
            assert step[name] == pytest.approx(1e3 * sum(parts[: n + 1]) / sum(rows)), (name, n)
        again = [[(s.start, s.length) for s in spans] for spans in known_costs]
        assert all(shape in again for shape in shapes)

    promise, own, filled, *_ = steps.values()
    assert promise["request-level"] == own["request-level"] == filled["request-level"]
    prompts = 6 * prompt  # request-level computes them in one batch
    assert promise["sarathi"] == pytest.approx(1e3 * products_s(prompts, 6) / prompts)
    assert own["sarathi"] == pytest.approx(1e3 * products_s(128, 6) / 128)
    assert filled["sarathi"] > own["sarathi"]  # some chunks are shorter: the prompt's last ones


def test_a_busy_machine_explains_nothing(known_costs, capsys):
    args, timelines, policies = load(3), {}, {}
    for name in COMPARED:
        timelines[name], policies[name] = run_of(name, args)
    for busy, title in ((False, "Where the gain goes: "), (True, "Where the gain goes (busy)")):
        policies["sarathi"]["busy"] = busy
        found = explain_gain.explain(tiny_model(), policies, timelines, args)
        explain_gain.print_explained(found)
        text = capsys.readouterr().out
        assert found["busy"] == busy and title in text
        assert all(f"{step['gain']:.3f}x |" in text for step in found["steps"])
        steps = found["steps"][:6]
        losses = {b["step"]: b["gain"] / a["gain"] for a, b in zip(steps, steps[1:])}
        most = min(losses, key=losses.get)
        assert (f"most is lost to {most.strip('+ ')}, " in text) != busy
    last_rounds = [len(steady(its, 6, rounds=1)[0]) for _, its, *_ in timelines.values()]
    assert len(known_costs) == 2 * (measure.WARMUP + 3) * sum(last_rounds)  # one is enough


TINY = "--model llama-tiny --chunk 32 --batch 3 --seq-len 80 --device cpu --dtype float32".split()


def test_what_is_explained_is_written(tmp_path, capsys):
    explain_gain.main([*TINY, f"--json={tmp_path / 'r.json'}"])
    text, report = capsys.readouterr().out, json.loads((tmp_path / "r.json").read_text())
    assert "10 requests of 75 + 5 tokens, batch 3, chunk 32\n" in text
    assert "Where the gain goes" in text and f"\nwrote {tmp_path}/r.json" in text
    steps, rows = report["explained"]["steps"], report["end_to_end"]
    assert len(steps) == 8 and all(f"| {step['step']} " in text for step in steps)
    assert steps[-2]["gain"] == pytest.approx(rows["sarathi"]["gain"])
    assert steps[-1]["gain"] == pytest.approx(rows["sarathi"]["whole_run_gain"])


@pytest.mark.parametrize(
    "words, message",
    [
        ("--requests 12", "--requests 12: must be at least 13, 2 B + 1"),
        ("--chunk 4", "--chunk 4: must be at least --batch 6"),
    ],
)
def test_what_cannot_be_explained_is_refused(words, message, capsys):
    explain_gain.parse_args(["--requests", "13"])
    with pytest.raises(SystemExit):
        explain_gain.parse_args(words.split())
    assert message in capsys.readouterr().err
