"""The thread that steps the engine while there is work. All else runs in asyncio's thread.

Only this thread touches the engine: a function that is passed to `call` runs in it, between two
steps. It also makes the engine, because with OpenMP a thread is slow if another one used it before.
Read first: engine.py. Read next: responses.py."""

import asyncio
import logging
import os
import signal
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from statistics import median
from typing import Any, ParamSpec, TypeVar

from engine import Engine
from page.records import Record, Recorder
from policies.observers import Iteration
from request import Event, Request
from sampling import SamplingParams
from server.metrics import Metrics

RECORDS = 1000  # at least this many are kept for the schedule page
OUTPUTS = 40  # of so many requests the last tokens are kept for it, too
OUTPUT_TAIL = 60  # tokens
IDLE_DECODES = 9  # decode iterations whose median is that of an idle engine
log = logging.getLogger(__name__)
P = ParamSpec("P")
T = TypeVar("T")
EventQueue = asyncio.Queue[Event | None]  # None: a step of the engine failed
Choice = tuple[list[int], SamplingParams]  # a prompt, and how one answer to it is sampled


class EngineThread:
    """Steps the `engine` that `make_engine()` returns, and records and counts what it does.

    `call` and `end` are for asyncio's thread, all other methods for this one."""

    def __init__(self, make_engine: Callable[[], Engine]) -> None:
        self.executor = ThreadPoolExecutor(1, "engine")
        self.engine = self.executor.submit(make_engine).result()
        self.idle_decode_s = self.executor.submit(idle_decode_seconds, self.engine).result()
        self.metrics = Metrics(self.engine.schedulers)
        self.queues: dict[int, EventQueue] = {}  # request id -> where its events go
        self.loop: asyncio.AbstractEventLoop | None = None  # asyncio's, known after the first call
        self.stepping = False  # whether a step runs or is due
        self.recorder = Recorder()
        self.recorder.watch(self.engine.schedulers)
        self.forgotten = 0  # records that are not kept any more
        self.outputs: dict[int, list[int]] = {}  # request id -> its output, of the last requests

    async def call(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """function(*args, **kwargs), between two steps. Raises what it raises."""
        self.loop = asyncio.get_running_loop()
        return await self.loop.run_in_executor(self.executor, partial(function, *args, **kwargs))

    def end(self, request_id: int) -> None:
        """Have a request ended between two steps, if it has not ended, and its pages freed."""
        self.executor.submit(self._end, request_id)

    def add(
        self, choices: Iterable[Choice], arrival: float, **service: Any
    ) -> tuple[list[Request], EventQueue]:
        """Queue requests, all or none, as Engine.add_request does, and step until they are done."""
        requests: list[Request] = []
        events: EventQueue = asyncio.Queue()
        try:
            for prompt, params in choices:
                request_id = self.engine.add_request(prompt, params, arrival, **service)
                requests.append(self.engine.scheduler.requests[request_id])
        except ValueError:
            for request in requests:
                self.engine.abort(request.id)
            raise
        self.queues.update((request.id, events) for request in requests)
        if not self.stepping:
            self.stepping = True
            self.executor.submit(self.step)
        return requests, events

    def step(self) -> None:
        """Compute a batch, and have this called again if there is more work.

        If that fails, all requests end: their clients get an error."""
        deliveries: list[tuple[EventQueue, Event | None]] = []
        try:
            events = self.engine.step()
        except Exception:
            log.exception("a step of the engine failed")
            self._fail()
            return
        if self.engine.last_iteration:
            self._record(self.engine.last_iteration)
        for event in events:
            self._keep_token(event)
            if event.request.id in self.queues:
                deliveries.append((self.queues[event.request.id], event))
            if event.finish_reason:
                self.metrics.observe(event.request)
        self._deliver(deliveries)
        self.stepping = self.engine.has_work
        if self.stepping:
            self.executor.submit(self.step)

    def _deliver(self, deliveries: list[tuple[EventQueue, Event | None]]) -> None:
        if self.loop is not None:
            self.loop.call_soon_threadsafe(_put_all, deliveries)

    def _fail(self) -> None:
        """End all requests. Where the engine cannot be reset, as with ranks that are out of step,
        the server ends."""
        self._deliver([(queue, None) for queue in self.queues.values()])
        self.queues.clear()
        self.stepping = False
        try:
            self.engine.reset()
        except Exception:
            log.exception("the engine cannot go on, the server ends")
            os.kill(os.getpid(), signal.SIGTERM)

    def _end(self, request_id: int) -> None:
        self.queues.pop(request_id, None)
        if request_id in self.engine.scheduler.requests:
            self.metrics.observe(self.engine.abort(request_id))

    def _keep_token(self, event: Event) -> None:
        self.outputs.setdefault(event.request.id, []).append(event.token)
        if len(self.outputs) > OUTPUTS:
            del self.outputs[next(iter(self.outputs))]

    def _record(self, iteration: Iteration) -> None:
        records = self.recorder.records
        self.recorder.add(iteration)
        if len(records) > 2 * RECORDS:
            del records[:RECORDS]
            self.forgotten += RECORDS

    def records_since(self, place: int) -> tuple[list[Record], int, dict[int, list[int]]]:
        """For the schedule page: the records from number `place` on, the number that comes after
        them, and {request id: its last output tokens}.

        A snapshot of the present instead, if those records are not kept or not there yet."""
        end = self.forgotten + len(self.recorder.records)
        records: list[Record] = [self.recorder.snapshot()]
        if self.forgotten <= place <= end:
            records = self.recorder.records[place - self.forgotten :]
        outputs = {request_id: tokens[-OUTPUT_TAIL:] for request_id, tokens in self.outputs.items()}
        return records, end, outputs


def idle_decode_seconds(engine: Engine) -> float | None:
    """The median of IDLE_DECODES decode iterations with one request, in seconds.

    A single slow one does not move it. None if a request has no room for two output tokens."""
    num_tokens = min(IDLE_DECODES + 1, engine.scheduler.max_len - 1)
    (request,) = engine.generate([[0]], SamplingParams(num_tokens), progress=False)
    engine.reset()  # nothing of it is found in the cache later
    return median(request.tbt) if request.tbt else None


def _put_all(deliveries: list[tuple[EventQueue, Event | None]]) -> None:
    for queue, event in deliveries:
        queue.put_nowait(event)
