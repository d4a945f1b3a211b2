"""Connections to the engines: one request at a time on each, kept open between them, and replies as they come.

A general HTTP client spends more on a request than all else here does; this one knows what SGLang's server speaks.
"""

from __future__ import annotations

import asyncio
import ssl
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import cast
from urllib.parse import urlsplit

from psrl_sglang.gateway.framing import BadReply, Chunks, Head, read_head

# SGLang's server closes a connection that was idle for 5 s; one that is used again must not be about to be.
_IDLE_S = 4.0
_HIGH_BYTES = 128 << 10
_LOW_BYTES = 32 << 10
_JOINED_BYTES = 64 << 10


class ConnectionEnded(Exception):
    """It ended, or was ended, before the reply did; the text says why."""


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a base URL leads. ``prefix`` is its path, without a slash at the end."""

    host: str
    port: int
    tls: ssl.SSLContext | None
    name: bytes
    prefix: str


class Connection(asyncio.Protocol):
    """``head`` and `read` are of the request under way. Its bytes wait here up to a bound; then the engine does."""

    def __init__(self, loop: asyncio.AbstractEventLoop, silence_s: float) -> None:
        self._loop = loop
        self._silence_s = silence_s
        self._transport: asyncio.Transport | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._heard_s = 0.0
        self._is_asked = False
        self._is_paused = False
        self._is_spoiled = False  # bytes came behind the end of a reply
        self._buffer = b""
        self._pieces: deque[bytes] = deque()
        self._size = 0
        self._left: int | None = None
        self._chunks: Chunks | None = None
        self._problem = ""
        self.head: Head | None = None
        self.is_complete = False
        self.idle_since_s = 0.0

    @property
    def is_open(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    @property
    def is_reusable(self) -> bool:
        is_over = self.is_complete and not self._is_paused and not self._is_spoiled
        return self.is_open and is_over and self.head is not None and self.head.keeps_alive

    def ask(self, head: bytes, body: bytes) -> None:
        assert self._transport is not None
        self._is_asked, self.is_complete, self.head = True, False, None
        self._buffer, self._left, self._chunks = b"", None, None
        self._pieces.clear()
        self._size = 0
        self._heard_s = self._loop.time()
        if self._timer is None:
            self._timer = self._loop.call_later(self._silence_s, self._check_silence)
        if len(body) <= _JOINED_BYTES:
            self._transport.write(head + body)
        else:
            self._transport.writelines((head, body))

    async def wait_head(self) -> Head:
        """Raises `ConnectionEnded`."""
        while self.head is None:
            await self._wait()
        return self.head

    async def read(self) -> bytes:
        """What has come of the body, at least a byte; empty at its end. Raises `ConnectionEnded`."""
        while not self._pieces:
            if self.is_complete:
                return b""
            await self._wait()
        data = self._pieces[0] if len(self._pieces) == 1 else b"".join(self._pieces)
        self._pieces.clear()
        self._size = 0
        self._resume()
        return data

    def rest(self) -> None:
        """Between two requests."""
        self._is_asked, self.idle_since_s = False, self._loop.time()

    def abort(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's are not instances of it

    def data_received(self, data: bytes) -> None:
        self._heard_s = self._loop.time()
        try:
            self._take(data)
        except BadReply as error:
            self._end(str(error))
        self._wake()

    def connection_lost(self, exc: Exception | None) -> None:
        ends_here = self.head is not None and self.head.length is None and not self.head.is_chunked
        if ends_here and exc is None and not self._problem:
            self.is_complete = True
        self._problem = self._problem or (
            f"the connection was lost: {exc}" if exc else "the connection was closed"
        )
        self._transport = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._wake()

    def _take(self, data: bytes) -> None:
        if not self._is_asked or self.is_complete:
            raise BadReply("bytes that nobody asked for")
        while self.head is None:
            found = read_head(self._buffer + data)
            if found is None:
                self._buffer += data
                return
            self._buffer, (head, data) = b"", found
            if head.status >= 200:
                self.head = head
                self._left, self._chunks = head.length, Chunks() if head.is_chunked else None
        if self._chunks is not None:
            data = self._chunks.take(data)
            self.is_complete, self._is_spoiled = self._chunks.is_complete, self._chunks.has_more
        elif self._left is not None:
            self._is_spoiled = len(data) > self._left
            data = data[: self._left]
            self._left -= len(data)
            self.is_complete = not self._left
        if data:
            self._pieces.append(data)
            self._size += len(data)
            if self._size > _HIGH_BYTES and not self._is_paused and self._transport is not None:
                self._is_paused = True
                self._transport.pause_reading()

    def _resume(self) -> None:
        if self._is_paused and self._size <= _LOW_BYTES:
            self._is_paused = False
            self._heard_s = self._loop.time()
            if self._transport is not None:
                self._transport.resume_reading()

    async def _wait(self) -> None:
        if self._problem:
            raise ConnectionEnded(self._problem)
        self._waiter = self._loop.create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _end(self, problem: str) -> None:
        self._problem = problem
        self.abort()
        self._wake()

    def _check_silence(self) -> None:
        self._timer = None
        silent_s = self._loop.time() - self._heard_s
        if self._is_asked and not self.is_complete and not self._is_paused and silent_s >= self._silence_s:
            self._end(f"silent for {self._silence_s:g} s")
            return
        if self._is_asked:
            left_s = max(0.01, self._silence_s - silent_s) if not self._is_paused else self._silence_s
            self._timer = self._loop.call_later(left_s, self._check_silence)


class Pool:
    """Idle connections by origin. Create it on the event loop it is used on. Close it."""

    def __init__(self, *, connect_timeout_s: float, silence_s: float) -> None:
        self._loop = asyncio.get_running_loop()
        self._connect_timeout_s = connect_timeout_s
        self._silence_s = silence_s
        self._origins: dict[str, Origin] = {}
        self._idle: dict[str, list[Connection]] = {}
        self._timer: asyncio.TimerHandle | None = None

    def origin(self, base: str) -> Origin:
        """Raises ``ValueError``."""
        found = self._origins.get(base)
        if found is None:
            parts = urlsplit(base)
            is_tls = parts.scheme == "https"
            if not parts.hostname:
                raise ValueError(f"{base!r} names no host")
            found = self._origins[base] = Origin(
                parts.hostname,
                parts.port or (443 if is_tls else 80),
                ssl.create_default_context() if is_tls else None,
                parts.netloc.encode(),
                parts.path.rstrip("/"),
            )
        return found

    async def take(self, base: str) -> Connection:
        """One that is open: an idle one, or a new one. Raises ``OSError``, ``TimeoutError`` or ``ValueError``."""
        idle = self._idle.get(base)
        while idle:
            connection = idle.pop()
            if connection.is_open and self._loop.time() - connection.idle_since_s < _IDLE_S:
                return connection
            connection.abort()
        origin = self.origin(base)
        async with asyncio.timeout(self._connect_timeout_s):
            _, connection = await self._loop.create_connection(
                lambda: Connection(self._loop, self._silence_s), origin.host, origin.port, ssl=origin.tls
            )
        return connection

    def give_back(self, base: str, connection: Connection) -> None:
        """One whose reply is over goes into the pool; any other ends, and with it what the engine does for it."""
        if not connection.is_reusable:
            connection.abort()
            return
        connection.rest()
        self._idle.setdefault(base, []).append(connection)
        if self._timer is None:
            self._timer = self._loop.call_later(_IDLE_S, self._sweep)

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        for idle in self._idle.values():
            for connection in idle:
                connection.abort()
        self._idle.clear()

    def _sweep(self) -> None:
        self._timer = None
        oldest_s = self._loop.time() - _IDLE_S
        for base, idle in list(self._idle.items()):
            for connection in idle:
                if not connection.is_open or connection.idle_since_s <= oldest_s:
                    connection.abort()
            kept = [one for one in idle if one.is_open and one.idle_since_s > oldest_s]
            if kept:
                self._idle[base] = kept
            else:
                del self._idle[base]
        if self._idle:
            self._timer = self._loop.call_later(_IDLE_S, self._sweep)


def request_head(
    method: str, target: str, host: bytes, headers: Iterable[tuple[str, str]], length: int | None
) -> bytes:
    """Headers come from a parser, so no line of them holds another."""
    lines = [f"{method} {target} HTTP/1.1".encode("utf-8", "surrogateescape"), b"host: " + host]
    lines += [f"{name}: {value}".encode("utf-8", "surrogateescape") for name, value in headers]
    if length is not None:
        lines.append(b"content-length: %d" % length)
    return b"\r\n".join(lines) + b"\r\n\r\n"
