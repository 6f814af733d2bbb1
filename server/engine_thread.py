"""The thread that steps the engine while there is work. All else runs in FastAPI's threads.

Only this thread touches the engine: a function that is passed to `call` runs in it, between two
steps. It also makes the engine, because with OpenMP a thread is slow if another one used it before.
Read first: engine.py. Read next: responses.py."""

import logging
import os
import signal
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from statistics import median
from typing import Any, TypeVar

from engine import Engine
from page.records import Record, Recorder
from pretrained.tokenizers import Tokenizer
from request import Event, Request
from sampling import SamplingParams
from server.metrics import Metrics

RECORDS = 1000  # at least this many are kept for the schedule page
OUTPUTS = 40  # of so many requests it shows the text
OUTPUT_TAIL = 60  # tokens of it
IDLE_DECODES = 9  # decode iterations whose median is that of an idle engine
OPENAI_SAMPLING = SamplingParams(temperature=1.0)
log = logging.getLogger(__name__)
T = TypeVar("T")
JsonObject = dict[str, object]
Choice = tuple[Sequence[int], SamplingParams]  # a prompt, and how one answer to it is sampled
Deliver = Callable[[Event | None], object]  # takes an event; None: a step of the engine failed


class EngineThread:
    """Steps the `engine` that `make_engine()` returns, and records and counts what it does.

    That engine has no tokenizer of its own. `sampling` has the defaults of temperature, top_p and
    top_k. `call` and `end` are for other threads, all other methods for this one."""

    def __init__(
        self,
        make_engine: Callable[[], Engine],
        tokenizer: Tokenizer,
        name: str,
        sampling: SamplingParams = OPENAI_SAMPLING,
    ) -> None:
        self.tokenizer = tokenizer
        self.name = name  # of the model
        self.sampling = sampling
        self.executor = ThreadPoolExecutor(1, "engine")
        self.engine = self.call(make_engine)
        self.idle_decode_s = self.call(idle_decode_seconds, self.engine)
        self.metrics = Metrics(self.engine.schedulers)
        self.clients: dict[int, Deliver] = {}  # request id -> where its events go
        self.stepping = False  # whether a step runs or is due
        self.recorder = Recorder()
        self.recorder.watch(self.engine.schedulers)
        self.forgotten = 0  # records that are not kept any more
        self.latest: deque[Request] = deque(maxlen=OUTPUTS)

    def call(self, function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """function(*args, **kwargs), between two steps. Raises what it raises."""
        return self.executor.submit(function, *args, **kwargs).result()

    def end(self, request_id: int) -> None:
        """Have a request ended between two steps, if it has not ended, and its pages freed."""
        self.executor.submit(self._end, request_id)

    def add(
        self, choices: Iterable[Choice], arrival: float, deliver: Deliver, **service: Any
    ) -> list[Request]:
        """Queue requests, all or none, as Engine.add_request does, and step until they are done.

        Each event is passed to `deliver`, in this thread."""
        requests: list[Request] = []
        try:
            for prompt, params in choices:
                request_id = self.engine.add_request(prompt, params, arrival, **service)
                requests.append(self.engine.scheduler.requests[request_id])
        except ValueError:
            for request in requests:
                self.engine.abort(request.id)
            raise
        self.clients.update((request.id, deliver) for request in requests)
        self.latest.extend(requests)
        if not self.stepping:
            self.stepping = True
            self.executor.submit(self.step)
        return requests

    def step(self) -> None:
        """Compute a batch, and have this called again if there is more work.

        If that fails, all requests end: their clients get an error."""
        try:
            events = self.engine.step()
        except Exception:
            log.exception("a step of the engine failed")
            self._fail()
            return
        self._record()
        for event in events:
            if event.request.id in self.clients:
                self.clients[event.request.id](event)
            if event.finish_reason:
                self.metrics.observe(event.request)
        self.stepping = self.engine.has_work
        if self.stepping:
            self.executor.submit(self.step)

    def _fail(self) -> None:
        """End all requests. Where the engine cannot go on, as with ranks that are out of step, the
        server ends."""
        for deliver in self.clients.values():
            deliver(None)
        self.clients.clear()
        self.stepping = False
        try:
            self.engine.reset()
            self.engine.step()  # of nothing: raises where ranks are out of step
        except Exception:
            log.exception("the engine cannot go on, the server ends")
            os.kill(os.getpid(), signal.SIGTERM)

    def _end(self, request_id: int) -> None:
        self.clients.pop(request_id, None)
        if request_id in self.engine.scheduler.requests:
            self.metrics.observe(self.engine.abort(request_id))

    def _record(self) -> None:
        records = self.recorder.records
        if self.engine.last_iteration:
            self.recorder.add(self.engine.last_iteration)
        if len(records) > 2 * RECORDS:
            del records[:RECORDS]
            self.forgotten += RECORDS

    def records_since(self, place: int) -> JsonObject:
        """For the schedule page: the records from number `place` on, the number that comes after
        them, and the ends of the last texts.

        A snapshot of the present instead, if those records are not kept or not there yet."""
        end = self.forgotten + len(self.recorder.records)
        records: list[Record] = [self.recorder.snapshot()]
        if self.forgotten <= place <= end:
            records = self.recorder.records[place - self.forgotten :]
        decode = self.tokenizer.decode
        texts = {request.id: decode(request.output[-OUTPUT_TAIL:]) for request in self.latest}
        return {"records": records, "place": end, "texts": texts}


def idle_decode_seconds(engine: Engine) -> float:
    """The median of IDLE_DECODES decode iterations with one request, in seconds.

    A single slow one does not move it."""
    params = SamplingParams(IDLE_DECODES + 1)
    (request,) = engine.generate([[0]], params, progress=False)
    engine.reset()  # nothing of it is found in the cache later
    return median(request.tbt)
