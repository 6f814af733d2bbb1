"""The engine in a thread of its own, which steps it while there is work; the rest is asyncio's.

Only that thread touches the engine: what `call` has done in it is done between two steps. It makes
the engine, too: with OpenMP a thread is slow if another one used it before.
Read first: engine.py. Read next: app.py."""

import asyncio
import logging
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

from views.page import Recorder

RECORDS = 1000  # that are kept, at least, for who looks at the schedule page
log = logging.getLogger(__name__)


class EngineThread:
    """Steps the `engine` that `make_engine()` returns, and records what it does. `call` is for
    asyncio, all other methods for its thread; `observe` is called there with each Completion."""

    def __init__(self, make_engine):
        self.thread, self.stepping = ThreadPoolExecutor(1, "engine"), False
        self.engine = self.thread.submit(make_engine).result()
        self.loop, self.queues = None, {}  # asyncio's; request id -> what `add` returns
        self.recorder, self.forgotten = Recorder(), 0  # how many records are not kept any more
        self.recorder.watch(self.engine.schedulers)
        self.observe = lambda completion: None

    async def call(self, function, *arguments):
        """function(*arguments), between two steps. Raises what it raises."""
        self.loop = asyncio.get_running_loop()
        return await self.loop.run_in_executor(self.thread, function, *arguments)

    def add(self, prompt, params, arrival, promised):
        """Engine.add_request, with a dict of what is `promised`: the scheduler.Request, and an
        asyncio.Queue that gets each Event of it, or None if a step failed that computed it."""
        request_id = self.engine.add_request(prompt, params, arrival, **promised)
        queue = self.queues[request_id] = asyncio.Queue()
        if not self.stepping:
            self.stepping = True
            self.thread.submit(self.step)
        return self.engine.scheduler.requests[request_id], queue

    def end(self, request_id):
        """End a request, if it has not ended, and free its pages."""
        del self.queues[request_id]
        if request := self.engine.scheduler.requests.get(request_id):
            try:
                self.observe(self.engine.abort(request_id))
            except Exception:  # of a policy of one's own
                log.exception("a request could not be ended")
                self.engine.drop([request])

    def step(self):
        """Compute a batch, and have this called again if there is more work."""
        last = self.engine.last_iteration
        try:
            told = [(event.request_id, event) for event in self.engine.step()]
        except BaseException:  # whatever it was, nobody may wait for ever
            log.exception("a step of the engine failed")
            scheduler, failed = self.engine.scheduler, []
            with suppress(Exception):  # the batch may hold anything
                failed = [chunk.request for chunk in scheduler.batch]
            failed = failed or [*scheduler.requests.values()]  # what might fail for ever
            self.engine.drop(failed)
            told = [(request.id, None) for request in failed]
        if self.engine.last_iteration and self.engine.last_iteration is not last:
            self.recorder.add(self.engine.last_iteration)
        if len(self.recorder.records) > 2 * RECORDS:
            del self.recorder.records[:RECORDS]
            self.forgotten += RECORDS
        for _, event in told:
            if event and event.completion:
                self.observe(event.completion)
        told = [(self.queues[i], event) for i, event in told if i in self.queues]
        self.loop.call_soon_threadsafe(lambda: [queue.put_nowait(event) for queue, event in told])
        self.stepping = self.engine.has_work
        if self.stepping:
            self.thread.submit(self.step)

    def look(self, place):
        """What views/page.py can draw from there on: {"records", "place": the next one}.
        A snapshot, for who comes from a place that is not there."""
        records, first = self.recorder.records, self.forgotten
        known = first <= place <= first + len(records)
        new = records[place - first :] if known else [self.recorder.snapshot()]
        return {"records": new, "place": first + len(records)}
