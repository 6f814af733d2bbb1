"""A soak: thousands of requests in bursts, aborts, faults, too little memory; nothing is lost and
nothing leaks."""

import gc
import random
import sys
from collections import Counter

import pytest

from config import QueueFull
from sampling import SamplingParams
from tests.test_properties import MAX_LEN, Watched

MAX_BATCH = 32
MAX_WAITING = 60
PAGE_SIZE = 4
PAGES = MAX_BATCH * MAX_LEN // PAGE_SIZE // 10  # memory for a tenth of them


def random_requests(count):
    """(prompt, params) of different requests; the prompts begin in three ways."""
    draw = random.Random(2)
    requests = []
    for seed in range(count):
        length = draw.choice([1, 3, 6, 10, 15])
        prompt = [seed % 3] * (length - 2) + [draw.randrange(17) for _ in range(min(length, 2))]
        params = SamplingParams(
            draw.randint(1, MAX_LEN - 15),
            temperature=seed % 2,
            seed=seed,
            stop_token_ids=() if seed % 3 else (3, 4),
        )
        requests.append((tuple(prompt), params))
    return requests


def measure():
    """The containers that Python knows, and its small objects of any kind: tensors, too."""
    gc.collect()
    return len(gc.get_objects()), sys.getallocatedblocks()


class Soak(Watched):
    """Requests that come in bursts, some of which are aborted, and steps of which some fail."""

    def __init__(self, **options):
        super().__init__(**options)
        self.draw = random.Random(3)
        self.seen = Counter()
        self.requests = random_requests(150)

    def run(self, total, mean):
        """Until so many have been accepted; in an iteration `mean` of them come, on average."""
        while self.seen["accepted"] < total:
            factor = self.draw.choices(range(4), [0.4, 0.3, 0.2, 0.1])[0]  # 1 on average
            count = int(factor * mean + self.draw.random())
            for _ in range(80 if self.draw.random() < 0.02 else count):
                self.add_one()
            if self.draw.random() < 0.04:
                self.fail(after=self.draw.random() < 0.5)
                self.seen["faults"] += 1
            self.step()
            if self.asked and self.draw.random() < 0.03:
                self.abort(self.draw.choice(list(self.asked)))
        for counts in (self.times, self.computed, self.preempted):
            for i in counts.keys() - self.asked.keys():  # this test's own notes
                del counts[i]

    def add_one(self):
        waiting = len(self.engine.scheduler.waiting)  # who was preempted waits, too
        try:
            self.add(*self.draw.choice(self.requests), priority=self.draw.choice(["high", "low"]))
            self.seen["accepted"] += 1
            assert waiting < MAX_WAITING
        except QueueFull:
            self.seen["refused"] += 1
            assert waiting >= MAX_WAITING

    def end(self, completion):
        super().end(completion)
        self.seen[completion.finish_reason] += 1
        self.seen["preemptions"] += completion.preemptions
        self.seen["cached"] += completion.cached_tokens


@pytest.mark.slow
@pytest.mark.parametrize(
    "policy, total, mean, shares",  # in an iteration, as many as can be served
    [
        ("sarathi-serve", 7500, 1.0, False),
        ("orca", 400, 0.25, False),
        ("vllm", 400, 0.7, False),
        ("priority", 400, 1.0, False),
        ("sarathi-serve", 1000, 1.3, True),
        ("priority", 400, 1.3, True),
    ],
)
def test_nothing_is_lost_and_nothing_leaks(policy, total, mean, shares):
    soak = Soak(
        policy=policy,
        chunk=24,
        max_batch=MAX_BATCH,
        page_size=PAGE_SIZE,
        pages=PAGES,
        max_waiting=MAX_WAITING,
        prefix_caching=shares,
        policy_options={"ageing": 0.01} if policy == "priority" else {},
    )
    soak.run(total // 5, mean)
    begin = measure()
    soak.run(total, mean)
    end = measure()
    soak.finish()
    seen = soak.seen
    assert seen["accepted"] == seen["stop"] + seen["length"] + seen["abort"] >= total
    for name in ("faults", "abort", "stop", "refused"):  # or this test would not test it
        assert seen[name] > total / 500, name
    assert seen["cached"] > total / 2 if shares else not seen["cached"]
    assert bool(seen["preemptions"]) == (policy != "orca")
    # about as many requests are inside at either moment; thousands have gone through
    containers, small_objects = (later - earlier for earlier, later in zip(begin, end, strict=True))
    assert containers < 2000 and small_objects < 4000
