"""Loads for the exercises: small, random, and made smaller where a policy goes wrong.

    load = random_load(Random("6 17"), size=0.5)
    load = shrink(load, fails)          the smallest load nearby for which fails(load) is true

Plain Python. Read next: lockstep.py, which runs two policies on a load."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from random import Random

from policies.pages import make_pages
from scheduler import Request, Scheduler

MAX_PROMPT = 40
MAX_CHUNK = 32
MAX_PAGES = 40
PAGE_SIZES = (1, 2, 4, 8)
NUM_LOADS = 240  # of one check
COMMON = 1  # the token of the beginning that prompts share; others begin at 2


@dataclass(frozen=True)
class LoadRequest:
    """A request that arrives. The first `shared` tokens of its prompt are those of all others."""

    arrival: float  # in seconds
    prompt_len: int
    output_len: int
    shared: int = 0


@dataclass(frozen=True)
class Load:
    """Requests in order of arrival, and the sizes of the scheduler that serves them."""

    requests: tuple[LoadRequest, ...]
    chunk: int
    max_batch: int
    pages: int
    page_size: int
    prefix_caching: bool = False

    @property
    def max_len(self) -> int:
        """The length of the longest request, prompt and output."""
        return max(request.prompt_len + request.output_len for request in self.requests)

    @property
    def is_possible(self) -> bool:
        """Whether the longest request fits into the pages."""
        return self.pages * self.page_size >= self.max_len

    def make_scheduler(self, policy: type[Scheduler], clock: Callable[[], float]) -> Scheduler:
        """A scheduler of this policy and of these sizes."""
        return policy(
            make_pages(self.pages, self.page_size, self.prefix_caching),
            chunk=self.chunk,
            max_batch=self.max_batch,
            max_len=self.max_len,
            clock=clock,
        )


def make_request(request_id: int, request: LoadRequest) -> Request:
    """The Request with this id."""
    shared = min(request.shared, request.prompt_len)
    prompt = [COMMON] * shared + [request_id + 2] * (request.prompt_len - shared)
    return Request(
        id=request_id,
        tokens=prompt,
        prompt_len=request.prompt_len,
        max_new_tokens=request.output_len,
        arrival=request.arrival,
    )


def ample(*requests: LoadRequest, chunk: int, page_size: int = 16) -> Load:
    """A load with memory for all of its requests at once."""
    longest = max(request.prompt_len + request.output_len for request in requests)
    pages = len(requests) * -(-longest // page_size)
    return Load(requests, chunk=chunk, max_batch=len(requests), pages=pages, page_size=page_size)


def random_load(random: Random, size: float, prefix_caching: bool = False) -> Load:
    """A load. `size` goes from 0, two short requests, to 1: eight, of up to MAX_PROMPT tokens.

    No two requests arrive at the same time. Half of the loads have little memory."""
    longest = round(3 + (MAX_PROMPT - 3) * size)
    arrival = 0.0
    requests = []
    for _ in range(random.randint(2, 2 + round(6 * size))):
        prompt_len = random.randint(1, longest)
        if prefix_caching and random.random() < 0.5:
            prompt_len = min(longest, -(-prompt_len // 4) * 4)  # whole pages of 1, 2 or 4
        shared = random.choice([0, prompt_len, random.randint(0, prompt_len)])
        requests.append(
            LoadRequest(
                arrival=arrival,
                prompt_len=prompt_len,
                output_len=random.randint(1, 3 + round(9 * size)),
                shared=shared if prefix_caching else 0,
            )
        )
        arrival += random.choice([0.25, 1, 2, random.randint(1, 8)])
    load = Load(
        requests=tuple(requests),
        chunk=random.randint(1, round(4 + (MAX_CHUNK - 4) * size)),
        max_batch=random.randint(min(3, len(requests)), len(requests)),
        pages=MAX_PAGES,
        page_size=2,
        prefix_caching=prefix_caching,
    )
    sizes = [n for n in PAGE_SIZES if n * MAX_PAGES >= load.max_len]
    page_size = random.choice(sizes)
    smallest = -(-load.max_len // page_size)
    largest = max(smallest, MAX_PAGES if random.random() < 0.5 else min(2 * smallest, MAX_PAGES))
    return replace(load, pages=random.randint(smallest, largest), page_size=page_size)


def shrink(load: Load, fails: Callable[[Load], bool]) -> Load:
    """A load that fails as this one does, and of which no smaller neighbour fails.

    It has ample memory, if that fails, too."""
    ample = replace(load, pages=MAX_PAGES)
    if fails(ample):
        load = ample
    smaller: Load | None = load
    while smaller:
        load = smaller
        smaller = next((each for each in smaller_loads(load) if fails(each)), None)
    return load


def smaller_loads(load: Load) -> Iterator[Load]:
    """The neighbours of a load that are a little simpler: fewer requests, then shorter ones."""
    for i in range(len(load.requests)):
        remaining = load.requests[:i] + load.requests[i + 1 :]
        if remaining:
            yield replace(load, requests=remaining)
    for i, request in enumerate(load.requests):
        for smaller in smaller_requests(request):
            requests = (*load.requests[:i], smaller, *load.requests[i + 1 :])
            arrivals = [r.arrival for r in requests]
            smaller_load = replace(load, requests=requests)
            if arrivals == sorted(arrivals) and smaller_load.is_possible:
                yield smaller_load
    if load.pages < MAX_PAGES:  # else memory does not matter
        for pages in smaller_numbers(load.pages):
            if replace(load, pages=pages).is_possible:
                yield replace(load, pages=pages)
    for chunk in smaller_numbers(load.chunk):
        yield replace(load, chunk=chunk)
    if load.max_batch > len(load.requests):
        yield replace(load, max_batch=len(load.requests))


def smaller_requests(request: LoadRequest) -> Iterator[LoadRequest]:
    """The request with fewer tokens, or an earlier arrival."""
    for prompt_len in smaller_numbers(request.prompt_len):
        yield replace(request, prompt_len=prompt_len, shared=min(request.shared, prompt_len))
    for output_len in smaller_numbers(request.output_len):
        yield replace(request, output_len=output_len)
    if request.arrival > 0:
        yield replace(request, arrival=0)
        yield replace(request, arrival=request.arrival // 2)


def smaller_numbers(number: int) -> list[int]:
    """Half of a number, and one less; at least 1."""
    return [smaller for smaller in dict.fromkeys((number // 2, number - 1)) if smaller >= 1]


# The loads of the exercises.


def small_loads(number: int, prefix_caching: bool = False) -> Iterator[Load]:
    """NUM_LOADS random loads, the smallest first."""
    for i in range(NUM_LOADS):
        yield random_load(Random(f"{number} {i}"), i / NUM_LOADS, prefix_caching)


def slo_loads() -> Iterator[Load]:
    """Loads for exercise 9: long prompts, and ample memory."""
    for i in range(15):
        random = Random(f"9 {i}")
        arrivals = sorted(random.sample(range(40), k=random.randint(2, 6)))
        requests = [
            LoadRequest(
                arrival=0.02 * arrival,
                prompt_len=random.choice([random.randint(1, 30), random.randint(30, 300)]),
                output_len=random.randint(2, 30),
            )
            for arrival in arrivals
        ]
        yield ample(*requests, chunk=random.choice([8, 16, 32, 64]))
    # three decodes of such contexts leave no time for any prefill
    three = [LoadRequest(arrival=0.0, prompt_len=250, output_len=120) for _ in range(3)]
    yield ample(*three, LoadRequest(arrival=0.0, prompt_len=20, output_len=2), chunk=32)


def mixed_loads() -> Iterator[Load]:
    """Loads for exercise 10: a long prompt in a steady stream of short ones."""
    for seed in range(3):
        random = Random(f"10 {seed}")
        requests = [
            LoadRequest(
                arrival=0.2 * i,
                prompt_len=random.randint(20, 40),
                output_len=random.randint(4, 8),
            )
            for i in range(30)
        ]
        requests.append(LoadRequest(arrival=0.3 + 0.1 * seed, prompt_len=2000, output_len=4))
        requests.sort(key=lambda request: (request.arrival, -request.prompt_len))
        yield ample(*requests, chunk=64)
