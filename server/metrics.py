"""The numbers for Prometheus: of requests that have ended, and of the present. See README.md."""

from collections.abc import Sequence
from functools import partial
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from request import Request
from scheduler import Scheduler

BUCKETS_S = [0.005 * 2**n for n in range(15)]  # upper ends of the histograms' buckets, to 82 s


class Metrics:
    """The numbers for Prometheus: of requests that have ended, and of the present."""

    def __init__(self, schedulers: Sequence[Scheduler]) -> None:
        self.registry = CollectorRegistry()
        place: dict[str, Any] = {"namespace": "nanosarathi", "registry": self.registry}
        seconds = partial(Histogram, buckets=BUCKETS_S, **place)
        self.ttft = seconds("ttft_seconds", "arrival to first token")
        self.tbt = seconds("tbt_seconds", "between two tokens")
        count = partial(Counter, documentation="of requests that have ended", **place)
        self.prompt_tokens = count("prompt_tokens")
        self.output_tokens = count("output_tokens")
        self.cached_tokens = count("cached_tokens")
        self.preemptions = count("preemptions")

        def free_pages() -> int:
            return sum(scheduler.pages.num_free for scheduler in schedulers)

        def running_requests() -> int:
            return sum(len(scheduler.running) for scheduler in schedulers)

        def waiting_requests() -> int:
            return len(schedulers[0].waiting)  # all schedulers share one queue

        for value in (free_pages, running_requests, waiting_requests):
            Gauge(value.__name__, "at this moment", **place).set_function(value)

    def observe(self, request: Request) -> None:
        """Count a request that has ended."""
        self.prompt_tokens.inc(request.prompt_len)
        self.output_tokens.inc(len(request.output))
        self.cached_tokens.inc(request.cached_tokens)
        self.preemptions.inc(request.preemptions)
        if request.ttft is not None:
            self.ttft.observe(request.ttft)
        for seconds in request.tbt:
            self.tbt.observe(seconds)
