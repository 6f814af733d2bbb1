"""A soak: thousands of requests in bursts, aborts, faults, too little memory; nothing is lost and nothing leaks."""

import functools
import gc
import os
import random
from collections import Counter

import pytest

from tests.helpers import alone
from engine import Engine, QueueFull
from model import GPT, GPTConfig
from sampling import SamplingParams

MAX_LEN, MAX_BATCH, PAGE_SIZE = 32, 32, 4
CONFIG = GPTConfig("llama", vocab_size=17, n_layer=1, n_head=2, n_embd=8, n_kv_head=1, n_inner=16, max_positions=32)


@functools.cache
def workload():
    """The model, and 150 different requests with the tokens that each has alone."""
    model = GPT(CONFIG, seed=1)
    for p in model.parameters():
        p.mul_(10 if p.ndim > 1 else 1)
    rng, requests = random.Random(2), []
    for seed in range(150):
        prompt = [rng.randrange(17) for _ in range(rng.choice([1, 3, 6, 10, 20]))]
        stop = (3, 4) if seed % 3 == 0 else ()
        params = SamplingParams(rng.randint(1, 12), temperature=seed % 2, seed=seed, stop_token_ids=stop)
        requests.append((prompt, params, alone(model, prompt, params)))
    return model, requests


class Fault(Exception):
    """What a broken forward raises."""


def resident_bytes():
    """Memory of this process's own, files it has mapped left out, or None where /proc does not tell."""
    try:
        with open("/proc/self/statm") as file:
            _, resident, shared = map(int, file.read().split()[:3])
            return (resident - shared) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return None


@pytest.mark.parametrize(
    "policy, total",
    [
        ("sarathi-serve", 10_000),
        ("request-level", 700),
        ("orca", 700),
        ("vllm", 1000),
        ("sarathi", 700),
        ("chunked-only", 1000),
        ("hybrid-only", 1000),
        ("priority", 1000),
    ],
)
def test_nothing_is_lost_and_nothing_leaks(policy, total, monkeypatch):
    model, requests = workload()
    pages = MAX_BATCH * MAX_LEN // PAGE_SIZE // 10  # memory for a tenth of them
    options = {"ageing": 0.01} if policy == "priority" else {}
    engine = Engine(model, policy=policy, chunk=24, max_batch=MAX_BATCH, max_len=MAX_LEN, page_size=PAGE_SIZE, pages=pages, max_waiting=60, **options)
    rng, seen = random.Random(3), Counter()
    live = {}  # id -> (index of the request, tokens that its events brought)
    forward, fault = GPT.forward, [None]

    def flaky(self, batch, cache):
        if fault[0] == "before":
            raise Fault
        logits = forward(self, batch, cache)
        if fault[0] == "after":
            raise Fault
        return logits

    monkeypatch.setattr(GPT, "forward", flaky)

    def end(completion):
        """Compare with what the request has alone, and forget it."""
        index, tokens = live.pop(completion.request_id)
        prompt, params, expected = requests[index]
        assert completion.tokens == tokens and completion.prompt == prompt
        assert len(completion.token_times) == len(tokens)
        if completion.finish_reason == "abort":
            assert tokens == expected[: len(tokens)] and len(tokens) < len(expected)
        else:
            assert tokens == expected
            assert completion.finish_reason == ("stop" if tokens[-1] in params.stop_token_ids else "length")
        seen[completion.finish_reason] += 1
        seen["ended"] += 1
        seen["preemptions"] += completion.preemptions

    def step():
        fault[0] = rng.choices([None, "before", "after"], [96, 2, 2])[0]
        try:
            events = engine.step()
        except Fault:
            seen["faults"] += 1
            return
        for event in events:
            live[event.request_id][1].append(event.token)
            if event.completion:
                end(event.completion)

    # as many requests in an iteration as can be served, on average, but ten times as many in every burst
    mean = {"sarathi-serve": 1.0, "vllm": 0.7, "chunked-only": 0.5, "hybrid-only": 1.0, "priority": 1.0}.get(
        policy, 0.25
    )
    burst, iteration, measured = 0, 0, {}
    while seen["accepted"] < total or engine.has_work:
        iteration += 1
        assert iteration < 100 * total
        if burst == 0 and rng.random() < 0.01:
            burst = 10
        burst = max(0, burst - 1)
        arrivals = rng.choices(range(4), [0.4, 0.3, 0.2, 0.1])[0] * mean * (10 if burst else 1)  # 1 on average
        for _ in range(int(arrivals + rng.random())):
            if seen["accepted"] < total:
                index = rng.randrange(len(requests))
                try:
                    live[engine.add_request(*requests[index][:2], priority=rng.choice(["high", "low"]))] = index, []
                    seen["accepted"] += 1
                    assert len(engine.scheduler.waiting) <= 60
                except QueueFull:
                    seen["refused"] += 1
                    assert len(engine.scheduler.waiting) >= 60
        step()
        if live and rng.random() < 0.03:
            end(engine.abort(rng.choice(list(live))))
        seen["most at once"] = max(seen["most at once"], len(engine.scheduler.running))
        assert live.keys() == engine.scheduler.requests.keys()
        if iteration % 10 == 0:
            scheduler = engine.scheduler
            scheduler.pages.check_integrity([request.pages for request in scheduler.running])
            assert {request.id for request in (*scheduler.running, *scheduler.waiting)} == live.keys()
        # measured at the beginning and at the end, with about as many requests inside
        for moment in (total // 5, total):
            if seen["accepted"] >= moment and moment not in measured:
                gc.collect()
                measured[moment] = len(gc.get_objects()), resident_bytes()

    assert seen["accepted"] == seen["ended"] == total == seen["stop"] + seen["length"] + seen["abort"]
    assert not live and not engine.scheduler.requests and not engine.scheduler.running and not engine.scheduler.waiting
    engine.scheduler.pages.check_integrity([])
    assert engine.scheduler.pages.num_free == pages
    for what in ("faults", "abort", "stop", "refused"):  # or this test would not test it
        assert seen[what] > total / 500, what
    assert bool(seen["preemptions"]) == (policy not in ("request-level", "orca", "sarathi"))
    (objects, resident), (objects_at_end, resident_at_end) = measured.values()
    assert objects_at_end - objects < 2000  # up to 80 requests are inside at either moment; 8,000 have gone through
    assert resident is None or resident_at_end - resident < 4e6  # 500 bytes for each of these
