"""Redis and Valkey as a remote store.

redis-py parses the URL, connects, authenticates and pools. The commands are sent and the replies read here,
straight from and into the pages, for two reasons. redis-py has a time-out for each piece that arrives, which
bounds nothing on a slow network; here the whole call has a deadline. And its own reader takes 11 ms for a chunk
of 4 MB on loopback and hiredis's packer 8 ms, where this takes 1.3 and 0.9 ms.

One server, or a proxy that looks like one: Redis Cluster's redirections are errors.
"""

from __future__ import annotations

import io
import re
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from redis import ConnectionPool, RedisError
from redis import TimeoutError as RedisTimeoutError
from redis.backoff import NoBackoff
from redis.retry import Retry

from psrl_sglang.store.chunk import Buffer
from psrl_sglang.store.remote_client import RemoteError, masked

Reply = bytes | int | None | list["Reply"]

_SCAN_COUNT = 1000
_SWEEP_S = 60.0
_JOIN_BELOW_BYTES = 1 << 14
_MAX_REPLY_BYTES = 1 << 29  # Redis's own limit of a value
_MAX_LINE_BYTES = 1 << 16


class RedisClient:
    """A `RemoteClient`; `url` as redis-py takes it, or with ``valkey`` for ``redis`` in it."""

    def __init__(self, url: str, *, timeout_s: float, ttl_s: float = 0.0) -> None:
        self._url = masked(url)
        self._timeout_s = timeout_s
        self._expiry = (b"PX", b"%d" % max(1, round(ttl_s * 1000))) if ttl_s else ()
        options: dict[str, Any] = {
            "socket_timeout": timeout_s,
            "socket_connect_timeout": timeout_s,
            "retry": Retry(NoBackoff(), 0),
            "protocol": 2,  # what `_Replies` reads
        }
        if not url.startswith("unix:"):
            options["socket_keepalive"] = True
        try:
            url = re.sub(r"([?&]protocol)=\d+", r"\1=2", re.sub("^valkey", "redis", url))
            self._pool = ConnectionPool.from_url(url, **options)
        except (ValueError, RedisError) as error:
            raise ValueError(f"remote store {self._url!r}: {masked(str(error))}") from error

    @property
    def url(self) -> str:
        return self._url

    def put(self, items: Sequence[tuple[str, Sequence[Buffer]]]) -> None:
        commands = [(b"SET", name.encode(), tuple(buffers), *self._expiry) for name, buffers in items]
        with self._exchange(commands) as replies:
            for _ in commands:
                replies.next()

    def get_small(self, names: Sequence[str]) -> list[bytes | None]:
        if not names:
            return []
        values = self._ask(b"MGET", *names)
        if not isinstance(values, list) or len(values) != len(names):
            raise RemoteError(f"{self._url}: MGET of {len(names)} names got {values!r:.80}")
        return [value if isinstance(value, bytes) else None for value in values]

    def read(self, name: str, offset_bytes: int, size_bytes: int) -> bytes | None:
        # An absent value reads as an empty one, and we never store an empty one.
        value = self._ask(b"GETRANGE", name, offset_bytes, offset_bytes + size_bytes - 1)
        return value if isinstance(value, bytes) and value else None

    def read_into(self, name: str, offset_bytes: int, into: Sequence[memoryview]) -> bool:
        size_bytes = sum(view.nbytes for view in into)
        command = (b"GETRANGE", name.encode(), b"%d" % offset_bytes, b"%d" % (offset_bytes + size_bytes - 1))
        with self._exchange([command]) as replies:
            return replies.next_into(into, size_bytes)

    def delete(self, names: Sequence[str]) -> None:
        if names:
            self._ask(b"UNLINK", *names)

    def delete_matching(self, prefix: str) -> int:
        pattern = re.sub(r"([*?\[\]\\^])", r"\\\1", prefix) + "*"
        ends_s = time.monotonic() + _SWEEP_S
        deleted = 0
        cursor: Reply = b"0"
        while True:
            if time.monotonic() > ends_s:
                raise RemoteError(
                    f"{self._url}: deleted {deleted} values of {prefix!r} and no end", reason="timeout"
                )
            match self._ask(b"SCAN", cursor, b"MATCH", pattern, b"COUNT", _SCAN_COUNT):
                case [bytes() as cursor, list() as names]:
                    if names:
                        count = self._ask(b"UNLINK", *names)
                        deleted += count if isinstance(count, int) else 0
                case other:
                    raise RemoteError(f"{self._url}: SCAN got {other!r:.80}")
            if cursor == b"0":
                return deleted

    def ping(self) -> None:
        self._ask(b"PING")

    def close(self) -> None:
        self._pool.disconnect(inuse_connections=False)

    def _ask(self, *words: Reply | str) -> Reply:
        """One command and its reply."""
        command = [word if isinstance(word, bytes) else str(word).encode() for word in words]
        with self._exchange([command]) as replies:
            return replies.next()

    @contextmanager
    def _exchange(self, commands: Sequence[Sequence[Buffer | tuple[Buffer, ...]]]) -> Iterator[_Replies]:
        """Send commands, and let the body read their replies, all of them, before the deadline."""
        try:
            connection = self._pool.get_connection()
            try:
                ends_s = time.monotonic() + self._timeout_s
                wire: Any = connection._sock  # redis-py has no public way to the socket
                for piece in _packed(commands):
                    wire.settimeout(_left(ends_s))
                    wire.sendall(piece)
                yield _Replies(wire, ends_s)
                wire.settimeout(self._timeout_s)
            except BaseException:
                # Half a command or half a reply: nothing that follows on it would make sense.
                connection.disconnect()
                raise
            finally:
                self._pool.release(connection)
        except RemoteError as error:
            raise RemoteError(f"{self._url}: {error}", reason=error.reason) from error
        except (TimeoutError, RedisTimeoutError) as error:
            raise RemoteError(f"{self._url}: no answer in {self._timeout_s} s", reason="timeout") from error
        except (OSError, ValueError, RedisError) as error:
            raise RemoteError(f"{self._url}: {type(error).__name__}: {error}") from error


class _Replies:
    """The replies (RESP2) that arrive on a connection until a deadline."""

    def __init__(self, connection: socket.socket, ends_s: float) -> None:
        self._reader = io.BufferedReader(_DeadlineReader(connection, ends_s), _MAX_LINE_BYTES)

    def next(self) -> Reply:
        kind, text = self._line()
        if kind == b"*":
            return [self.next() for _ in range(int(text))]
        if kind == b"$":
            size_bytes = _checked(int(text))
            return None if size_bytes < 0 else self._exactly(size_bytes + 2)[:-2]
        return int(text) if kind == b":" else text

    def next_into(self, into: Sequence[memoryview], size_bytes: int) -> bool:
        """Read a string into the views; False, with the string skipped, if it is shorter than they are."""
        kind, text = self._line()
        if kind != b"$" or int(text) > size_bytes:
            raise RemoteError(f"expected a string of {size_bytes} bytes, got {kind + text!r:.80}")
        if int(text) < size_bytes:
            self._exactly(max(int(text), 0) + 2)
            return False
        for view in into:
            if self._reader.readinto(view) != view.nbytes:
                raise ConnectionError("closed by the server")
        self._exactly(2)
        return True

    def _line(self) -> tuple[bytes, bytes]:
        line = self._reader.readline(_MAX_LINE_BYTES)
        if not line:
            raise ConnectionError("closed by the server")
        if not line.endswith(b"\r\n") or line[:1] not in b"+-:$*":
            raise RemoteError(f"not a reply of Redis: {line!r:.80}")
        if line[:1] == b"-":
            raise RemoteError(line[1:-2].decode(errors="replace"), reason="refused")
        return line[:1], line[1:-2]

    def _exactly(self, size_bytes: int) -> bytes:
        data = self._reader.read(size_bytes)
        if len(data) != size_bytes:
            raise ConnectionError("closed by the server")
        return data


class _DeadlineReader(io.RawIOBase):
    """Reads a socket until a point of time, however the bytes trickle in."""

    def __init__(self, connection: socket.socket, ends_s: float) -> None:
        self._connection = connection
        self._ends_s = ends_s

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        self._connection.settimeout(_left(self._ends_s))
        return self._connection.recv_into(buffer)


def _left(ends_s: float) -> float:
    left_s = ends_s - time.monotonic()
    if left_s <= 0:
        raise TimeoutError
    return left_s


def _checked(size_bytes: int) -> int:
    if size_bytes > _MAX_REPLY_BYTES:
        raise RemoteError(f"a reply of {size_bytes} bytes")
    return size_bytes


def _packed(commands: Sequence[Sequence[Buffer | tuple[Buffer, ...]]]) -> Iterator[Buffer]:
    """Commands as they go over the wire, a tuple being one argument in parts; large parts are not copied."""
    small = bytearray()
    for command in commands:
        small += b"*%d\r\n" % len(command)
        for argument in command:
            parts = argument if isinstance(argument, tuple) else (argument,)
            small += b"$%d\r\n" % sum(memoryview(part).nbytes for part in parts)
            for part in parts:
                if memoryview(part).nbytes < _JOIN_BELOW_BYTES:
                    small += part
                else:
                    yield bytes(small)
                    small.clear()
                    yield part
            small += b"\r\n"
    yield bytes(small)
