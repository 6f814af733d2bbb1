"""A soak: thousands of requests in bursts, aborts, faults, too little memory; nothing is lost and
nothing leaks."""

import ctypes
import functools
import gc
import random
import sys
from collections import Counter

import pytest
import torch

from engine import Engine, QueueFull
from model import GPT, GPTConfig
from sampling import SamplingParams
from tests.helpers import alone, check_integrity, guard

MAX_LEN = 32
MAX_BATCH = 32
PAGE_SIZE = 4
PAGES = MAX_BATCH * MAX_LEN // PAGE_SIZE // 10  # memory for a tenth of them
SIZES = dict(n_layer=1, n_head=2, n_embd=8, n_kv_head=1, n_inner=16, max_positions=32)
CONFIG = GPTConfig("llama", vocab_size=17, **SIZES)


BEGINNINGS = [[begins] * 8 + [*range(10)] for begins in (5, 6, 7)]  # of all prompts


@functools.cache
def workload():
    """The model, and 150 different requests with the tokens that each has alone."""
    # in float64 no library compiles a kernel for each number of rows, and keeps it: that is no leak
    model = GPT(CONFIG, dtype=torch.float64, seed=1)
    for p in model.parameters():
        p.mul_(10 if p.ndim > 1 else 1)
    rng = random.Random(2)
    requests = []
    for seed in range(150):
        prompt = [rng.randrange(17) for _ in range(rng.choice([1, 3, 6, 10, 20]))]
        prompt[:-2] = BEGINNINGS[seed % 3][: max(0, len(prompt) - 2)]
        sampling = dict(temperature=seed % 2, seed=seed, stop_token_ids=(3, 4) * (seed % 3 == 0))
        params = SamplingParams(rng.randint(1, 12), **sampling)
        requests.append((prompt, params, alone(model, prompt, params)))
    return model, requests


class Fault(Exception):  # noqa: N818
    """What a broken forward raises."""


class MallocInfo(ctypes.Structure):
    """What glibc's mallinfo2 returns (man 3 mallinfo)."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    ]


def bytes_in_use() -> int:
    """The bytes that malloc has given out and not got back, 0 where the C library does not say.

    What is resident would tell less: freed memory stays resident, and hides a leak that fills it
    or grows by a step when it is fragmented.
    """
    try:
        mallinfo = ctypes.CDLL(None).mallinfo2
    except (AttributeError, OSError, TypeError):
        return 0
    mallinfo.restype = MallocInfo
    info = mallinfo()
    return info.uordblks + info.hblkhd


def measure():
    """The containers that Python knows, its small objects of any kind, and malloc's bytes."""
    gc.collect()
    return len(gc.get_objects()), sys.getallocatedblocks(), bytes_in_use()


@pytest.mark.slow
@pytest.mark.parametrize(
    "policy, total, mean, shares",  # requests in all; in an iteration, as many as can be served
    [
        *(("sarathi-serve", 7500, 1.0, False), ("request-level", 400, 0.25, False)),
        *(("orca", 400, 0.25, False), ("vllm", 400, 0.7, False), ("sarathi", 400, 0.25, False)),
        *(("chunked-only", 400, 0.5, False), ("hybrid-only", 400, 1.0, False)),
        *(("priority", 400, 1.0, False), ("sarathi-serve", 1000, 1.3, True)),
        *(("vllm", 400, 1.0, True), ("orca", 400, 0.4, True), ("priority", 400, 1.3, True)),
    ],
)
def test_nothing_is_lost_and_nothing_leaks(policy, total, mean, shares, monkeypatch):
    model, requests = workload()
    sizes = dict(max_batch=MAX_BATCH, max_len=MAX_LEN, page_size=PAGE_SIZE, pages=PAGES)
    options = {"ageing": 0.01} if policy == "priority" else {}
    sizes |= dict(chunk=24, max_waiting=60, prefix_caching=shares)
    engine = guard(Engine(model, policy=policy, **sizes, policy_options=options))
    scheduler = engine.scheduler
    rng = random.Random(3)
    seen = Counter()
    measured = []
    live = {}  # id -> (index of the request, tokens that its events brought)
    forward = GPT.forward
    fault = None

    def flaky(self, batch, cache):
        if fault == "before":
            raise Fault
        logits = forward(self, batch, cache)
        if fault == "after":
            raise Fault
        return logits

    monkeypatch.setattr(GPT, "forward", flaky)

    def add():
        index = rng.randrange(len(requests))
        priority = rng.choice(["high", "low"])
        try:
            live[engine.add_request(*requests[index][:2], priority=priority)] = index, []
            seen["accepted"] += 1
            assert len(scheduler.waiting) <= 60
        except QueueFull:
            seen["refused"] += 1
            assert len(scheduler.waiting) >= 60

    def end(completion):
        """Compare with what the request has alone, and forget it."""
        index, tokens = live.pop(completion.request_id)
        prompt, params, expected = requests[index]
        assert completion.tokens == tokens and completion.prompt == prompt
        assert len(completion.token_times) == len(tokens)
        if completion.finish_reason == "abort":
            assert tokens == expected[: len(tokens)] and len(tokens) < len(expected)
        else:
            reason = "stop" if tokens[-1] in params.stop_token_ids else "length"
            assert tokens == expected and completion.finish_reason == reason
        seen[completion.finish_reason] += 1
        seen["ended"] += 1
        seen["preemptions"] += completion.preemptions
        seen["cached"] += completion.cached_tokens

    burst = iteration = 0
    while seen["accepted"] < total or engine.has_work:
        iteration += 1
        assert iteration < 100 * total
        if burst == 0 and rng.random() < 0.01:
            burst = 10  # iterations with ten times as many
        burst = max(0, burst - 1)
        factor = rng.choices(range(4), [0.4, 0.3, 0.2, 0.1])[0]  # 1 on average
        for _ in range(int(factor * mean * (10 if burst else 1) + rng.random())):
            if seen["accepted"] < total:
                add()
        fault = rng.choices([None, "before", "after"], [96, 2, 2])[0]
        try:
            for event in engine.step():
                live[event.request_id][1].append(event.token)
                if event.completion:
                    end(event.completion)
        except Fault:
            seen["faults"] += 1
        if live and rng.random() < 0.03:
            end(engine.abort(rng.choice(list(live))))
        assert live.keys() == scheduler.requests.keys()
        if iteration % 10 == 0:
            check_integrity(scheduler.pages, [request.pages for request in scheduler.running])
            assert {r.id for r in (*scheduler.running, *scheduler.waiting)} == live.keys()
        # measured at the beginning and at the end, with about as many requests inside
        if seen["accepted"] >= (total // 5, total, 2 * total)[len(measured)]:
            measured.append(measure())

    ended = seen["stop"] + seen["length"] + seen["abort"]
    assert seen["accepted"] == seen["ended"] == total == ended
    assert not (live or scheduler.requests or scheduler.running or scheduler.waiting)
    check_integrity(scheduler.pages, [])
    assert scheduler.pages.num_free == PAGES
    for what in ("faults", "abort", "stop", "refused"):  # or this test would not test it
        assert seen[what] > total / 500, what
    assert seen["cached"] > total if shares else not seen["cached"]
    assert bool(seen["preemptions"]) == (policy not in ("request-level", "orca", "sarathi"))
    # up to 80 requests are inside at either moment; 6,000 have gone through
    growth = [end - begin for begin, end in zip(*measured, strict=True)]
    containers, small_objects, malloced = growth
    assert containers < 2000
    assert small_objects < 4000
    assert malloced < 1e6
