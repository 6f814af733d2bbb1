"""How the server listens: connections that send nothing are closed, and signals end it.

Read first: app.py. Read next: __main__.py."""

import asyncio
import os
import re
import signal
import time
from types import FrameType
from weakref import WeakSet

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from cli.console import TWICE_S
from server.app import Api

HEADERS_S = 10.0  # a connection is closed if no request's headers are complete within this time
UPGRADE = re.compile(rb"(?<=\r\n)upgrade(?=:)", re.IGNORECASE)  # a line that no JSON has
MAX_HEADER_BYTES = 65_536  # or if they are longer


class Connection(HttpToolsProtocol):
    """A connection whose requests have headers that end, and all end when it is lost.

    uvicorn's timeout between two requests also holds before the first, and until headers are
    complete. While a response is under way the next request's headers may wait for it."""

    header_bytes = 0  # of headers that are not complete

    def connection_made(self, transport: asyncio.Transport) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        super().connection_made(transport)
        self.cycles: WeakSet[RequestResponseCycle] = WeakSet()  # requests and their responses
        self.timeout_keep_alive_task = self.loop.call_later(
            self.timeout_keep_alive, self.timeout_keep_alive_handler
        )

    def connection_lost(self, exc: Exception | None) -> None:
        super()._unset_keepalive_if_required()
        for cycle in self.cycles:  # uvicorn knows of the last only
            cycle.disconnected = True
            cycle.message_event.set()
        super().connection_lost(exc)

    def _unset_keepalive_if_required(self) -> None:
        """Data alone does not end the timeout, as it would in uvicorn."""

    def data_received(self, data: bytes) -> None:
        self.header_bytes += len(data)
        super().data_received(UPGRADE.sub(b"ignored", data))
        if self.header_bytes > MAX_HEADER_BYTES:
            self.transport.close()

    def on_headers_complete(self) -> None:
        self.header_bytes = 0
        super()._unset_keepalive_if_required()
        super().on_headers_complete()
        if self.cycle is not None:  # there is none for an upgrade
            self.cycles.add(self.cycle)

    def on_body(self, body: bytes) -> None:
        self.header_bytes = 0
        super().on_body(body)


class Server(uvicorn.Server):
    """Serves an Api until a signal comes.

    After the first signal the requests that are there have `drain_s` seconds to finish. A second
    one, if it is not the first again, ends the process at once, whatever the engine does."""

    def __init__(self, api: Api, drain_s: float) -> None:
        config = uvicorn.Config(
            api.app(),
            http=Connection,
            ws="none",
            access_log=False,
            log_level="error",
            timeout_keep_alive=HEADERS_S,  # pyright: ignore[reportArgumentType]
            timeout_graceful_shutdown=drain_s,  # pyright: ignore[reportArgumentType]
        )
        super().__init__(config)
        self.signalled_s: float | None = None  # when the first signal came

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Handle a signal."""
        if self.signalled_s is None:
            self.signalled_s = time.monotonic()
            self.should_exit = True
        elif time.monotonic() > self.signalled_s + TWICE_S:
            os._exit(128 + sig)

    def on_signals(self) -> None:
        """Let Ctrl-C and SIGTERM end this server from here on, also before and after it runs."""
        signal.signal(signal.SIGINT, self.handle_exit)
        signal.signal(signal.SIGTERM, self.handle_exit)
