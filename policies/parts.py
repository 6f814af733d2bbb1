"""Parts of which several policies are made. Read first: scheduler.py. Read next: today.py."""

from scheduler import Batch, Request, Scheduler


def add_prefills(scheduler: Scheduler, batch: Batch) -> None:
    """Fill a batch with prefills: those that have begun, then new ones."""
    for request in scheduler.prefilling():
        batch.add(request)
    while batch.left > 0 and (request := scheduler.admit()):
        batch.add(request)


def move_to_front(scheduler: Scheduler, request: Request) -> None:
    """Let a waiting request be the first of the queue."""
    scheduler.waiting.remove(request)
    scheduler.waiting.appendleft(request)


def move_to_back(scheduler: Scheduler, request: Request) -> None:
    """Let a waiting request be the last of the queue."""
    scheduler.waiting.remove(request)
    scheduler.waiting.append(request)


def quarter_by_default(tokens: int | None, scheduler: Scheduler) -> int:
    """An option in tokens, which is a quarter of `chunk` by default."""
    return max(1, scheduler.chunk // 4) if tokens is None else tokens
