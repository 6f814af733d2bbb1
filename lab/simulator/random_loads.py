"""Small random loads, and servers of all sizes for them, to check policies with.

Read next: referee.py, which checks."""

from random import Random
from typing import NamedTuple

from config import EngineConfig
from lab.measure.workload import Arrival
from policies.priority import PRIORITIES

VOCABULARY = 2  # of random prompts: they often begin alike


class RandomLoad(NamedTuple):
    """A small load, and the server that it is brought to."""

    config: EngineConfig
    arrivals: list[Arrival]
    prompts: list[list[int]]


def random_load(policy: str, seed: int) -> RandomLoad:
    """The random load of that number, the same for each policy."""
    draw = Random(seed)
    max_len = draw.choice([8, 24, 60, 120])
    page_size = draw.choice([size for size in (1, 2, 4, 16) if size < max_len])
    max_batch = draw.choice([1, 2, 4, 8, 16])
    least_pages = -(-max_len // page_size)
    pages = draw.randint(least_pages, least_pages * max(2, max_batch // draw.choice([1, 4])))
    config = EngineConfig(
        policy,
        chunk=draw.choice([1, 2, 5, 8, 16, 32, 64]),
        max_batch=max_batch,
        max_len=max_len,
        page_size=page_size,
        pages=pages,
        prefix_caching=draw.random() < 0.5,
    )
    mean_gap_s = draw.choice([0.0, 0.01, 0.1])
    arrivals = []
    prompts = []
    time = 0.0
    for _ in range(draw.randint(1, 16)):
        time += mean_gap_s * draw.expovariate(1.0)
        prompt_len = draw.choice([draw.randint(1, max_len - 1), max_len // 4, max_len // 2])
        output_len = draw.randint(1, max_len - prompt_len)
        priority = draw.choice(PRIORITIES)
        user = draw.choice("ab")
        arrivals.append(Arrival(time, prompt_len, output_len, priority=priority, user=user))
        beginning = [draw.randrange(VOCABULARY)] * draw.randint(0, prompt_len)
        ending = [draw.randrange(VOCABULARY) for _ in range(prompt_len - len(beginning))]
        prompts.append(beginning + ending)
    return RandomLoad(config, arrivals, prompts)
