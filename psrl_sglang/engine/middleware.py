"""Around every request that generates, in SGLang's HTTP process: whose it is, where its KV may be, what was done.

Headers in: ``x-smg-routing-key`` (the session) and ``x-request-id-psrl-src`` (the address or the name of the engine
that has its KV); both pass through SGLang's router and smg. Headers out: what became of it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, MutableMapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

SESSION_HEADER = b"x-smg-routing-key"
SOURCE_HEADER = b"x-request-id-psrl-src"
_PATHS = frozenset({"/generate", "/v1/chat/completions", "/v1/completions"})

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]


@dataclass(slots=True)
class RequestNote:
    """What is known of one HTTP request. ``source`` is empty unless KV was asked for."""

    session: str = ""
    hint: str = ""
    source: str = ""
    moved_tokens: int = 0
    present_tokens: int = 0
    reason: str = ""
    oldest_version: str = ""
    weight_version: str = ""

    def headers(self) -> list[tuple[bytes, bytes]]:
        said: dict[str, Any] = {}
        if self.source:
            said = {
                "x-psrl-kv-source": self.source,
                "x-psrl-kv-moved-tokens": self.moved_tokens,
                "x-psrl-kv-present-tokens": self.present_tokens,
            }
        if self.reason:
            said["x-psrl-kv-reason"] = self.reason
        if self.oldest_version:
            said["x-psrl-oldest-version"] = self.oldest_version
        if self.weight_version:
            said["x-psrl-weight-version"] = self.weight_version
        return [(name.encode(), _header_value(value)) for name, value in said.items()]


current: ContextVar[RequestNote | None] = ContextVar("psrl_request", default=None)


class NoteMiddleware:
    """Pure ASGI. The head of a reply waits for its first byte, which is when its versions are known."""

    def __init__(self, app: Callable[[Message, Receive, Send], Awaitable[None]]) -> None:
        self._app = app

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] not in _PATHS:
            await self._app(scope, receive, send)
            return
        note = RequestNote()
        for name, value in scope["headers"]:
            if name == SESSION_HEADER:
                note.session = value.decode("latin-1")
            elif name == SOURCE_HEADER:
                note.hint = value.decode("latin-1")
        head: Message | None = None

        async def send_noted(message: Message) -> None:
            nonlocal head
            if message["type"] == "http.response.start":
                head = message
                return
            if head is not None:
                head["headers"] = [*head.get("headers", ()), *note.headers()]
                first, head = head, None
                await send(first)
            await send(message)

        token = current.set(note)
        try:
            await self._app(scope, receive, send_noted)
        finally:
            current.reset(token)


def _header_value(value: Any) -> bytes:
    # A reason may quote what another engine said: no line of it may become a header of its own.
    return "".join(c if c.isprintable() else " " for c in str(value))[:500].encode("latin-1", "replace")
