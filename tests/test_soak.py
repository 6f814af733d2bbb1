"""A soak: thousands of requests in bursts, aborts, faults, too little memory; nothing is lost and
nothing leaks."""

import functools
import gc
import random
import sys
from collections import Counter

import pytest
import torch

from engine import Engine
from errors import QueueFull
from model import GPT, GPTConfig
from sampling import SamplingParams
from tests.helpers import Ledger, alone, guard

MAX_LEN = 32
MAX_BATCH = 32
MAX_WAITING = 60
PAGE_SIZE = 4
PAGES = MAX_BATCH * MAX_LEN // PAGE_SIZE // 10  # memory for a tenth of them
BEGINNINGS = [[begins] * 8 + [*range(10)] for begins in (5, 6, 7)]  # of all prompts


@functools.cache
def workload():
    """The model, and the tokens of 150 different requests, of each alone."""
    sizes = dict(n_layer=1, n_head=2, n_embd=8, n_kv_head=1, n_inner=16, max_positions=MAX_LEN)
    config = GPTConfig("llama", vocab_size=17, **sizes)
    # in float64 no library compiles a kernel for each number of rows, and keeps it: that is no leak
    model = GPT(config, dtype=torch.float64, seed=1)
    for p in model.parameters():
        p.mul_(10 if p.ndim > 1 else 1)
    draw = random.Random(2)
    tokens = {}
    for seed in range(150):
        prompt = [draw.randrange(17) for _ in range(draw.choice([1, 3, 6, 10, 20]))]
        prompt[:-2] = BEGINNINGS[seed % 3][: max(0, len(prompt) - 2)]
        params = SamplingParams(
            draw.randint(1, 12),
            temperature=seed % 2,
            seed=seed,
            stop_token_ids=() if seed % 3 else (3, 4),
        )
        tokens[tuple(prompt), params] = alone(model, prompt, params)
    return model, tokens


class Fault(Exception):  # noqa: N818
    """What a broken forward raises."""


def measure():
    """The containers that Python knows, and its small objects of any kind: tensors, too."""
    gc.collect()
    return len(gc.get_objects()), sys.getallocatedblocks()


class Soak(Ledger):
    """`total` requests that come in bursts; in an iteration `mean` of them, on average."""

    def __init__(self, engine, total, mean):
        super().__init__(engine, lambda *request: workload()[1][request])
        self.requests = list(workload()[1])
        self.total = total
        self.mean = mean
        self.draw = random.Random(3)
        self.seen = Counter()

    def run(self):
        """Until all have ended: what `measure` says at the beginning and at the end, when about
        as many requests are inside."""
        moments = [self.total // 5, self.total]
        measured = []
        for iteration in range(100 * self.total):
            if self.seen["accepted"] == self.total and not self.engine.has_work:
                break
            factor = self.draw.choices(range(4), [0.4, 0.3, 0.2, 0.1])[0]  # 1 on average
            count = int(factor * self.mean + self.draw.random())
            for _ in range(80 if self.draw.random() < 0.02 else count):
                self.add_one()
            self.step()
            if self.asked and self.draw.random() < 0.03:
                self.abort(self.draw.choice(list(self.asked)))
            assert self.asked.keys() == self.engine.scheduler.requests.keys()
            if iteration % 10 == 0:
                self.check()
            if moments and self.seen["accepted"] >= moments[0]:
                moments.pop(0)
                measured.append(measure())
        self.check_end()
        return measured

    def add_one(self):
        if self.seen["accepted"] == self.total:
            return
        waiting = len(self.engine.scheduler.waiting)
        try:
            self.add(*self.draw.choice(self.requests), priority=self.draw.choice(["high", "low"]))
            self.seen["accepted"] += 1
            assert waiting < MAX_WAITING
        except QueueFull:
            self.seen["refused"] += 1
            assert waiting >= MAX_WAITING  # who was preempted waits, too

    def step(self):
        """An iteration, in which forward may fail before or after it has written the cache."""
        before, after = (self.draw.random() < 0.02 for _ in range(2))

        def forward(model, batch, cache):
            if before:
                raise Fault
            logits = FORWARD(model, batch, cache)
            if after:
                raise Fault
            return logits

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(GPT, "forward", forward)
            try:
                self.take(self.engine.step())
            except Fault:
                self.seen["faults"] += 1

    def end(self, completion):
        super().end(completion)
        self.seen[completion.finish_reason] += 1
        self.seen["preemptions"] += completion.preemptions
        self.seen["cached"] += completion.cached_tokens


FORWARD = GPT.forward


@pytest.mark.slow
@pytest.mark.parametrize(
    "policy, total, mean, shares",  # in an iteration, as many as can be served
    [
        ("sarathi-serve", 7500, 1.0, False),
        ("request-level", 400, 0.25, False),
        ("orca", 400, 0.25, False),
        ("vllm", 400, 0.7, False),
        ("sarathi", 400, 0.25, False),
        ("chunked-only", 400, 0.5, False),
        ("hybrid-only", 400, 1.0, False),
        ("priority", 400, 1.0, False),
        ("sarathi-serve", 1000, 1.3, True),
        ("vllm", 400, 1.0, True),
        ("orca", 400, 0.4, True),
        ("priority", 400, 1.3, True),
    ],
)
def test_nothing_is_lost_and_nothing_leaks(policy, total, mean, shares):
    engine = Engine(
        workload()[0],
        policy=policy,
        chunk=24,
        max_batch=MAX_BATCH,
        max_len=MAX_LEN,
        page_size=PAGE_SIZE,
        pages=PAGES,
        max_waiting=MAX_WAITING,
        prefix_caching=shares,
        policy_options={"ageing": 0.01} if policy == "priority" else {},
    )
    soak = Soak(guard(engine), total, mean)
    begin, end = soak.run()
    seen = soak.seen
    assert seen["accepted"] == seen["stop"] + seen["length"] + seen["abort"] == total
    for name in ("faults", "abort", "stop", "refused"):  # or this test would not test it
        assert seen[name] > total / 500, name
    assert seen["cached"] > total if shares else not seen["cached"]
    assert bool(seen["preemptions"]) == (policy not in ("request-level", "orca", "sarathi"))
    # up to 80 requests are inside at either moment; 6,000 have gone through
    containers, small_objects = (later - earlier for earlier, later in zip(begin, end, strict=True))
    assert containers < 2000 and small_objects < 4000
