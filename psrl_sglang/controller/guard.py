"""In front of every route: who may ask, and how much may be sent."""

from __future__ import annotations

import hmac
import json
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from psrl_sglang.controller.metrics import Metrics

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

MAX_BODY_BYTES = 32 << 20  # a million tokens with room to spare
_OPEN_PATHS = ("/healthz", "/")  # the page itself says nothing; what it shows it asks for with the token


class Guard:
    """ASGI middleware. With an empty token everybody may ask."""

    def __init__(self, app: Any, token: str, metrics: Metrics) -> None:
        self._app = app
        self._expected = f"Bearer {token}".encode() if token else b""
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
            return
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        if self._expected and scope["path"] not in _OPEN_PATHS:
            given = headers.get(b"authorization", b"")
            if not hmac.compare_digest(given, self._expected):
                self._metrics.unauthorized.inc()
                text = "send `Authorization: Bearer <token>` with the token of the controller's --token-file"
                await _refuse(send, 401, text, (b"www-authenticate", b"Bearer"))
                return
        if b"transfer-encoding" in headers:
            await _refuse(send, 411, "send the body with a Content-Length, not in pieces")
            return
        length = headers.get(b"content-length", b"")
        if length.isdigit() and int(length) > MAX_BODY_BYTES:
            await _refuse(send, 413, f"a body of {int(length)} bytes; at most {MAX_BODY_BYTES}")
            return
        await self._app(scope, receive, send)


async def _refuse(send: Send, status: int, text: str, *headers: tuple[bytes, bytes]) -> None:
    body = json.dumps({"detail": text}).encode()
    every = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode()), *headers]
    await send({"type": "http.response.start", "status": status, "headers": every})
    await send({"type": "http.response.body", "body": body})
