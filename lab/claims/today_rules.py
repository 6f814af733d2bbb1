"""What each of today's policies does, found out by trying it, and where two of them differ.

    conduct_of("vllm-v1"), first_difference("vllm-v1", "sarathi-serve", load)

Schedulers on a clock that counts iterations: no model, no times. Read next: today.py."""

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import NamedTuple

from kv_cache import Pages
from lab.simulator.random_loads import RandomLoad
from policies import make_scheduler, scheduler_of
from scheduler import Request, Scheduler

CHUNK = 8  # of all trials
MAX_LEN = 64
LONGEST = 30  # tokens of the longer of two requests that share little memory


@dataclass(frozen=True)
class Conduct:
    """What a policy does, as the trials below show it."""

    batch: str
    long_prompt: str  # in front of a short one
    pages_for_two: int  # so many tokens of memory let two requests run at once
    out_of_memory: str


class TinyLoad(NamedTuple):
    """Requests that are all there at the beginning, and the sizes of a server for them."""

    requests: tuple[tuple[int, int], ...]  # prompt and output, in tokens
    chunk: int
    pages: int  # of one token


Step = dict[int, str]  # {request: "decode", or the number of its prompt tokens}


def conduct_of(policy: str) -> Conduct:
    """Try out what a policy does."""
    return Conduct(
        batch=_batch(policy),
        long_prompt=_long_prompt(policy),
        pages_for_two=_pages_for_two(policy),
        out_of_memory=_out_of_memory(policy),
    )


def new_scheduler(
    policy: str, pages: int = 1024, chunk: int = CHUNK, max_len: int = MAX_LEN
) -> Scheduler:
    """A scheduler with pages of one token."""
    return make_scheduler(policy, Pages(pages, 1), chunk=chunk, max_batch=16, max_len=max_len)


def add(scheduler: Scheduler, request_id: int, prompt_len: int, output_len: int) -> Request:
    """Queue a request that arrives as the one of that number."""
    tokens = [0] * prompt_len
    request = Request(request_id, tokens, prompt_len, output_len, arrival=float(request_id))
    scheduler.add(request)
    return request


def step(scheduler: Scheduler) -> Step:
    """Compute one batch."""
    batch = scheduler.next_batch()
    chunks: Step = {}
    tokens = []
    for chunk in batch:
        request = chunk.request
        chunks[request.id] = "decode" if request.is_decoding else str(chunk.length)
        tokens.append(0 if chunk.yields_token else None)
    scheduler.advance(batch, tokens, 0.0)
    return chunks


def _batch(policy: str) -> str:
    """Whether prompts that arrive while a request decodes share its batches."""
    scheduler = new_scheduler(policy)
    add(scheduler, 0, 4, 60)
    step(scheduler)
    step(scheduler)
    for number in (1, 2, 3):
        add(scheduler, number, 20, 2)
    kinds = [_kind(step(scheduler)) for _ in range(40)]
    if "mixed" in kinds:
        return "mixed"
    if "prefill" not in kinds:
        return "one batch after the other"
    last_prefill = len(kinds) - kinds[::-1].index("prefill")
    between = kinds[kinds.index("prefill") : last_prefill]
    return "in turn" if "decode" in between else "prefill first, alone"


def _kind(chunks: Step) -> str:
    """What a batch is made of."""
    decodes = sum(chunk == "decode" for chunk in chunks.values())
    if not decodes:
        return "prefill"
    return "decode" if decodes == len(chunks) else "mixed"


def _long_prompt(policy: str) -> str:
    """Whether a short prompt is computed before the long one in front of it."""
    scheduler = new_scheduler(policy)
    long = add(scheduler, 0, 48, 9)
    step(scheduler)
    short = add(scheduler, 1, 4, 9)
    while len(long.tokens) == 48 and len(short.tokens) == 4:
        step(scheduler)
    return "blocks" if len(short.tokens) == 4 else "is passed"


def _pages_for_two(policy: str) -> int:
    """The least memory, in tokens, with which two requests, 10 + 20 and 10 + 12, run at once."""
    for pages in range(LONGEST, 2 * LONGEST + 1):
        scheduler = new_scheduler(policy, pages, max_len=LONGEST)
        add(scheduler, 0, 10, 20)
        add(scheduler, 1, 10, 12)
        for _ in range(4):
            step(scheduler)
            if len(scheduler.running) == 2:
                return pages
    raise AssertionError(f"{policy}: never runs two")


def _out_of_memory(policy: str) -> str:
    """Who pays if two requests decode, and the older one finds no page."""
    few_outputs = _who_pays(policy, outputs=(1, 3))
    many_outputs = _who_pays(policy, outputs=(3, 1))
    if few_outputs == many_outputs == "older":
        return "who finds none"
    payers = {"older": "the fewest outputs", "newer": "the newest"}
    return payers.get(few_outputs, few_outputs)


def _who_pays(policy: str, outputs: tuple[int, int]) -> str:
    """ "older" or "newer" if that one is preempted; "waits" or "never" if nobody is."""
    scheduler = new_scheduler(policy)
    requests = [add(scheduler, number, 10, 20) for number in (0, 1)]
    while len(scheduler.running) < 2:
        step(scheduler)
    for request, count in zip(requests, outputs, strict=True):
        request.tokens += [0] * (10 + count - len(request.tokens))
        request.num_computed = len(request.tokens) - 1
        scheduler.grow(request, request.num_computed + request.id)
    scheduler.pages.allocate(scheduler.pages.num_free)
    for _ in range(4):
        preempted = scheduler.next_batch().preempted
        if preempted:
            return "older" if preempted == [0] else "newer"
        if len(step(scheduler)) < 2:
            return "waits"
    return "never"


# ---- Two policies in lock step -------------------------------------------------------------------


class Difference(NamedTuple):
    """A load on which two policies decide differently."""

    load: TinyLoad
    steps: tuple[list[Step], list[Step]]  # of both, to the end


def history(scheduler: Scheduler) -> list[Step]:
    """The batches of a scheduler until all requests have ended."""
    steps = []
    while scheduler.requests:
        steps.append(step(scheduler))
    return steps


def steps_of(policy: str, load: TinyLoad) -> list[Step]:
    """The batches of a policy for a load."""
    scheduler = new_scheduler(policy, load.pages, load.chunk, max_len=load.pages)
    for number, (prompt_len, output_len) in enumerate(load.requests):
        add(scheduler, number, prompt_len, output_len)
    return history(scheduler)


def tiny_loads(size: int) -> Iterator[TinyLoad]:
    """All loads of two or three requests of so many tokens in all, with little memory."""
    for count in (2, 3):
        for lengths in product(range(1, size), repeat=2 * count):
            if sum(lengths) != size:
                continue
            prompts = lengths[::2]
            outputs = lengths[1::2]
            requests = tuple(zip(prompts, outputs, strict=True))
            longest = max(sum(request) for request in requests)
            for chunk, pages in product((1, 2, 3, 4), range(longest, size)):
                yield TinyLoad(requests, chunk, pages)


def smallest_difference(first: str, second: str, largest: int = 14) -> Difference | None:
    """The first difference on the load with the fewest tokens; None if there is none."""
    for size in range(4, largest + 1):
        for load in tiny_loads(size):
            steps = steps_of(first, load), steps_of(second, load)
            if steps[0] != steps[1]:
                return Difference(load, steps)
    return None


def differs(first: str, second: str, load: RandomLoad, ample: bool) -> bool:
    """Whether two policies decide differently on a random load, with its memory or with enough."""
    config = load.config
    if ample:
        positions = (config.max_batch or 1) * (config.max_len or 1)
        config = replace(config, pages=positions)
    histories = []
    for policy in (first, second):
        scheduler = scheduler_of(replace(config, policy=policy), time.monotonic)
        for number, arrival in enumerate(load.arrivals):
            request = add(scheduler, number, arrival.prompt_len, arrival.output_len)
            request.tokens[:] = load.prompts[number]
        histories.append(history(scheduler))
    return histories[0] != histories[1]
