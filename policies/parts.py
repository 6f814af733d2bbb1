"""Parts of which several policies are made. Read first: scheduler.py. Read next: today.py."""

import sys

from scheduler import Batch, Request, Scheduler


def add_prefills(scheduler: Scheduler, batch: Batch, limit: int = sys.maxsize) -> None:
    """Fill a batch with prefills, those that have begun first; `limit` tokens of each at most."""
    for request in scheduler.prefilling():
        batch.add(request, limit)
    while batch.left > 0 and (request := scheduler.admit()):
        batch.add(request, limit)


def move_to_front(scheduler: Scheduler, request: Request) -> None:
    """Let a waiting request be the first of the queue."""
    scheduler.waiting.remove(request)
    scheduler.waiting.appendleft(request)


def output_left(request: Request) -> int:
    """How many tokens a request may still generate."""
    return request.prompt_len + request.max_new_tokens - len(request.tokens)


def quarter_by_default(tokens: int | None, scheduler: Scheduler) -> int:
    """An option in tokens, which is a quarter of `chunk` by default."""
    return max(1, scheduler.chunk // 4) if tokens is None else tokens
