"""Who may use the server: those who send its key. Read next: app.py."""

import hmac
from dataclasses import dataclass

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from server.protocol import ApiError, error_response

OPEN = {"/", "/health", "/metrics", "/metrics/"}  # they show no prompt, no text and no token


@dataclass
class Gate:
    """Middleware: all addresses but those in OPEN need `Authorization: Bearer KEY`."""

    app: ASGIApp
    key: str

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or answer it with an error."""
        app = self.app
        if scope["type"] != "lifespan" and scope["path"] not in OPEN:
            scheme, _, key = Headers(scope=scope).get("authorization", "").partition(" ")
            is_right = hmac.compare_digest(key.strip().encode("latin-1"), self.key.encode())
            if scheme.lower() != "bearer" or not is_right:
                message = "Authorization: must be Bearer and the key"
                app = error_response(ApiError(401, message, code="invalid_api_key"))
        await app(scope, receive, send)
