"""The numbers for Prometheus: of requests that have ended, and of the present. See README.md."""

from collections.abc import Callable, Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from request import Completion
from scheduler import Scheduler

BUCKETS_S = [0.005 * 2**n for n in range(15)]  # upper ends of the histograms' buckets, to 82 s


class Metrics:
    """The numbers for Prometheus: of requests that have ended, and of the present."""

    def __init__(self, schedulers: Sequence[Scheduler]) -> None:
        self.schedulers = schedulers
        self.registry = CollectorRegistry()
        self.ttft = self._histogram("ttft_seconds", "arrival to first token")
        self.tbt = self._histogram("tbt_seconds", "between two tokens")
        self.prompt_tokens = self._counter("prompt_tokens")
        self.output_tokens = self._counter("output_tokens")
        self.preemptions = self._counter("preemptions")
        self.cached_tokens = self._counter("cached_tokens")
        self._gauge("waiting_requests", self._waiting_requests)
        self._gauge("running_requests", self._running_requests)
        self._gauge("free_pages", self._free_pages)

    def _histogram(self, name: str, description: str) -> Histogram:
        return Histogram(
            name, description, namespace="nanosarathi", registry=self.registry, buckets=BUCKETS_S
        )

    def _counter(self, name: str) -> Counter:
        description = "of requests that have ended"
        return Counter(name, description, namespace="nanosarathi", registry=self.registry)

    def _gauge(self, name: str, value: Callable[[], float]) -> None:
        gauge = Gauge(name, "at this moment", namespace="nanosarathi", registry=self.registry)
        gauge.set_function(value)

    def _waiting_requests(self) -> int:
        return len(self.schedulers[0].waiting)  # all schedulers share one queue

    def _running_requests(self) -> int:
        return sum(len(scheduler.running) for scheduler in self.schedulers)

    def _free_pages(self) -> int:
        return sum(scheduler.pages.num_free for scheduler in self.schedulers)

    def observe(self, completion: Completion) -> None:
        """Count a request that has ended."""
        self.prompt_tokens.inc(len(completion.prompt))
        self.output_tokens.inc(len(completion.tokens))
        self.preemptions.inc(completion.preemptions)
        self.cached_tokens.inc(completion.cached_tokens)
        if completion.ttft is not None:
            self.ttft.observe(completion.ttft)
        for seconds in completion.tbt:
            self.tbt.observe(seconds)

    def text(self) -> bytes:
        """All numbers, in Prometheus' format."""
        return generate_latest(self.registry)
