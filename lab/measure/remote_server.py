"""A load for a server that speaks OpenAI's HTTP, and what its clients see of it.

    server = RemoteServer("http://127.0.0.1:8000/v1")
    run = server.serve(arrivals, prompts)

Clients see when each event of an answer comes; of batches and iterations they see nothing. Read
first: workload.py, run_loop.py. Read next: server/README.md.
"""

import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from http.client import HTTPException, HTTPResponse
from queue import SimpleQueue
from threading import Thread
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from pydantic import BaseModel

from lab.measure.machine_info import MachineInfo
from lab.measure.run_loop import LoadInterrupted, Run
from lab.measure.workload import Arrival
from policies.priority import PRIORITIES
from pretrained.checks import one_line
from request import Completion

TIMEOUT_S = 600
TOO_MANY_REQUESTS = 429  # the status of an answer to a request that is refused
NO_KEY = "none"
LONGEST_LINE = 2**20  # bytes of an event
LONGEST_ANSWER = 2**24  # bytes of the list of models
MORE_EVENTS = 100  # than two for each token that was asked for, in one answer


class Usage(BaseModel, strict=True):
    """How many tokens an answer had, as the server says."""

    completion_tokens: int


class StreamEvent(BaseModel):
    """The part of an event that is read."""

    choices: list[Any] | None = None
    usage: Usage | None = None


class Model(BaseModel, strict=True):
    """A model that a server knows."""

    id: str


class ModelList(BaseModel):
    """All models that a server knows."""

    data: list[Model]


class RemoteServer:
    """A server at a URL. Whatever goes wrong is a ConnectionError of one line."""

    def __init__(self, url: str, model: str | None = None, api_key: str = NO_KEY) -> None:
        """`model` is by default the first that the server names."""
        self.url = url.rstrip("/")
        self.api_key = api_key
        self.model = model or self._first_model()
        name = one_line(self.model)[:200]
        self.info = MachineInfo(device=url, model=name, dtype="as it was started")

    def serve(
        self,
        arrivals: Sequence[Arrival],
        prompts: Sequence[list[int]],
        progress: Callable[[], object] = lambda: None,
    ) -> Run:
        """Send each request when it is due: a Run without iterations.

        A request that is answered 429 is refused. `progress` is called after each request that
        ended. Raises ConnectionError at once when one fails, and LoadInterrupted, with those that
        have ended, for a KeyboardInterrupt.
        """
        completions: list[Completion] = []
        ended: SimpleQueue[Completion | Exception] = SimpleQueue()
        start = time.perf_counter()

        def run(cut_short: str | None = None) -> Run:
            return Run(
                completions=sorted(completions, key=lambda completion: completion.request_id),
                iterations=[],
                seconds=time.perf_counter() - start,
                own_fraction=None,
                refused=sum(not completion.token_times for completion in completions),
                cut_short=cut_short,
            )

        try:
            for i, (arrival, prompt) in enumerate(zip(arrivals, prompts, strict=True)):
                completion = Completion(
                    request_id=i,
                    prompt=prompt,
                    arrival=arrival.time,
                    priority=PRIORITIES.index(arrival.priority),
                )
                client = Thread(
                    target=self._complete, args=(completion, arrival, start, ended), daemon=True
                )
                client.start()
            for _ in arrivals:
                answer = ended.get()
                if isinstance(answer, Exception):
                    raise self._connection_error(answer)
                completions.append(answer)
                progress()
        except KeyboardInterrupt as interrupt:
            raise LoadInterrupted(run("interrupted")) from interrupt
        return run()

    def _first_model(self) -> str:
        """The first of the models that the server names."""
        try:
            with self._open("/models") as response:
                models = ModelList.model_validate_json(response.read(LONGEST_ANSWER))
            return models.data[0].id
        except Exception as error:  # any server may be there, and answer anything
            raise self._connection_error(error) from error

    def _open(self, path: str, body: dict[str, Any] | None = None) -> HTTPResponse:
        """The response to a GET, or to a POST of `body`."""
        headers = {"Authorization": f"Bearer {self.api_key}", "Content-Type": "application/json"}
        data = json.dumps(body).encode() if body else None
        return urlopen(Request(self.url + path, data, headers), timeout=TIMEOUT_S)

    def _connection_error(self, error: Exception) -> ConnectionError:
        """An error of one line, with the beginning of the server's answer, if it sent one."""
        answer = ""
        if isinstance(error, HTTPError):
            with suppress(OSError, HTTPException):
                answer = error.read(300).decode(errors="replace")
        reason = one_line(f"{error!r} {answer}")
        return ConnectionError(f"--url {self.url}: {reason[:500]}")

    def _complete(
        self,
        completion: Completion,
        arrival: Arrival,
        start: float,
        ended: SimpleQueue[Completion | Exception],
    ) -> None:
        """Send one request when it is due, and fill in the completion; runs in a thread.

        Puts into `ended` the completion, or what went wrong.
        """
        time.sleep(max(0.0, start + arrival.time - time.perf_counter()))
        answer: Completion | Exception = completion
        try:
            self._stream(completion, arrival, start)
        except Exception as error:
            completion.finish_reason = "abort"
            if not isinstance(error, HTTPError) or error.code != TOO_MANY_REQUESTS:
                answer = error
        ended.put(answer)

    def _stream(self, completion: Completion, arrival: Arrival, start: float) -> None:
        """Stream one completion: its token times and finish reason.

        Tokens may share an event, and some events have none: the last one says how many there were.
        Raises ValueError if these are more than were asked for.
        """
        times = completion.token_times
        max_tokens = arrival.output_len
        text = b"none"
        event = StreamEvent()
        with self._open("/completions", self._body(completion.prompt, arrival)) as response:
            for text in events(response):
                event = StreamEvent.model_validate_json(text)
                if event.choices:
                    times.append(time.perf_counter() - start)
        if event.usage is None or not times:
            last = text.decode(errors="replace")
            raise ValueError(f"no tokens, or no usage: the last event was {last[:200]}")
        count = event.usage.completion_tokens
        shared = times[-1:] * (count - len(times))
        completion.token_times = times[:count] + shared
        completion.finish_reason = "stop" if count < max_tokens else "length"

    def _body(self, prompt: Sequence[int], arrival: Arrival) -> dict[str, Any]:
        """The body of a request. Its class and SLOs are sent if it has any."""
        service = {
            "priority": arrival.priority if arrival.priority != "normal" else None,
            "ttft_slo": arrival.ttft_slo,
            "tbt_slo": arrival.tbt_slo,
            "user": arrival.user or None,
        }
        return {
            "model": self.model,
            "prompt": prompt,
            "max_tokens": arrival.output_len,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
            **{name: value for name, value in service.items() if value is not None},
        }


def events(response: HTTPResponse) -> Iterator[bytes]:
    """The JSON of the events of a stream, until its end. Raises ValueError for a very long one."""
    while line := response.readline(LONGEST_LINE + 1):
        if len(line) > LONGEST_LINE:
            raise ValueError(f"an event has more than {LONGEST_LINE} bytes")
        if line.startswith(b"data:") and b"[DONE]" not in line[:12]:
            yield line.removeprefix(b"data:")
