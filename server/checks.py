"""What is checked before a request is looked into: who sends it, and how long it is.

Each function raises ApiError. Read next: protocol.py, app.py."""

import asyncio
import hmac
import ipaddress
import re
from collections.abc import Collection
from dataclasses import dataclass

from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from server.protocol import ApiError

BODY_S = 60.0  # a body must arrive within this time
OPEN = {"/", "/health", "/metrics"}  # addresses that show no text, no prompt and no token


@dataclass
class Gate:
    """Middleware: all addresses but those in OPEN are for clients that may ask.

    They must send the `key`. If there is none, they must call this server by one of its names."""

    app: ASGIApp
    key: str | None
    hosts: Collection[str]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or refuse it."""
        app = self.app
        if scope["type"] == "http" and scope["path"] not in OPEN:
            try:
                self.check_client(HttpRequest(scope))
            except ApiError as error:
                app = JSONResponse(error.detail, error.status_code)
        await app(scope, receive, send)

    def check_client(self, request: HttpRequest) -> None:
        """Raise ApiError unless the client may ask."""
        if self.key:
            check_key(request, self.key)
        else:
            check_host(request, self.hosts)


def check_key(request: HttpRequest, key: str) -> None:
    """The request must send the key."""
    sent = request.headers.get("authorization", "").encode("latin-1")
    if not hmac.compare_digest(sent, f"Bearer {key}".encode()):
        message = "Authorization: must be Bearer and the key"
        raise ApiError(401, message, None, "invalid_api_key")


def check_host(request: HttpRequest, hosts: Collection[str]) -> None:
    """The request must call this server by an IP address, or by one of these names.

    Any web page can make its own name an address of this machine (DNS rebinding). A browser that
    has opened the page lets it read what is here then, but still sends the name of the page."""
    host = _host_name(request.headers.get("host", ""))
    if host not in hosts and not _is_address(host):
        message = "must be an IP address, localhost, or a name given by --host or --allowed-host"
        raise ApiError(421, f"Host {host[:100]}: {message}")


def _host_name(header: str) -> str:
    """The name or address in a Host header, without the port; "" if there is none."""
    match = re.fullmatch(r"(\[[^]]*\]|[^:]*)(:\d*)?", header)
    return match[1].strip("[]").lower() if match else ""


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


async def read_body(request: HttpRequest, max_body: int) -> bytes:
    """The body, which must be JSON of at most `max_body` bytes, and arrive in time."""
    content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if content_type != "application/json":
        raise ApiError(415, "Content-Type: must be application/json")
    length = request.headers.get("content-length")
    limit = f"Content-Length: must be there, and at most {max_body:,}"
    if not length:
        raise ApiError(411, limit)
    if int(length) > max_body:
        raise ApiError(413, limit)
    try:
        async with asyncio.timeout(BODY_S):
            return await request.body()
    except TimeoutError as error:
        message = f"the body must arrive within {BODY_S:g} s"
        raise ApiError(408, message, headers={"Connection": "close"}) from error
