"""The side towards the engines, with errors by what may have happened to a request."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import aiohttp
from yarl import URL

from psrl_sglang.gateway.wire import Connection, ConnectionEnded, Pool, request_head


class WorkerUnreachable(Exception):
    """No connection: the worker never saw the request."""


class NoReply(Exception):
    """The connection ended before the first byte of a reply; the worker may have worked on it."""


class ReplyBroken(Exception):
    """The reply began, and ended before its end."""


class WorkerReply:
    """Owns its connection until it is closed. ``content_length`` is None where the reply does not say."""

    def __init__(self, pool: Pool, base: str, connection: Connection) -> None:
        assert connection.head is not None
        head = connection.head
        self._pool, self._base, self._connection = pool, base, connection
        self.status = head.status
        self.headers = head.headers
        self.content_type = head.content_type
        self.content_length = head.length

    async def read_some(self) -> bytes:
        """What has arrived, at least a byte of it; empty at the end. Raises `ReplyBroken`."""
        try:
            return await self._connection.read()
        except ConnectionEnded as error:
            raise ReplyBroken(str(error)) from error

    async def read_all(self) -> bytes:
        """The rest. Raises `ReplyBroken`."""
        pieces = []
        while piece := await self.read_some():
            pieces.append(piece)
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def close(self) -> None:
        """One that was read to its end leaves its connection to others; any other ends, and its generation too."""
        self._pool.give_back(self._base, self._connection)


class Upstream:
    """Create it on the event loop it is used on. Close it."""

    def __init__(self, *, connect_timeout_s: float, reply_timeout_s: float, worker_key: str = "") -> None:
        self._authorization = f"Bearer {worker_key}" if worker_key else ""
        self._pool = Pool(connect_timeout_s=connect_timeout_s, silence_s=reply_timeout_s)
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, force_close=True),
            timeout=aiohttp.ClientTimeout(sock_connect=connect_timeout_s),
            cookie_jar=aiohttp.DummyCookieJar(),
            trust_env=False,
        )

    async def close(self) -> None:
        self._pool.close()
        await self._session.close()

    async def send(
        self, method: str, base: str, target: str, headers: Iterable[tuple[str, str]], body: bytes | None
    ) -> WorkerReply:
        """The reply, its body not yet read; the caller closes it. Raises `WorkerUnreachable` or `NoReply`."""
        if self._authorization:
            headers = [(name, value) for name, value in headers if name.lower() != "authorization"]
            headers.append(("authorization", self._authorization))
        try:
            connection = await self._pool.take(base)
        except (OSError, TimeoutError, ValueError) as error:
            raise WorkerUnreachable(_reason(error)) from error
        try:
            origin = self._pool.origin(base)
            length = None if body is None else len(body)
            connection.ask(
                request_head(method, origin.prefix + target, origin.name, headers, length), body or b""
            )
            await connection.wait_head()
        except ConnectionEnded as error:
            connection.abort()
            raise NoReply(str(error)) from error
        except BaseException:
            connection.abort()
            raise
        return WorkerReply(self._pool, base, connection)

    async def ask(self, method: str, url: str, timeout_s: float, body: Any = None) -> tuple[int, Any]:
        """Status and JSON of a small reply, within the time. Raises as `send`."""
        headers = {"Authorization": self._authorization} if self._authorization else None
        timeout = aiohttp.ClientTimeout(total=timeout_s)
        try:
            async with self._session.request(
                method, URL(url, encoded=True), json=body, headers=headers, timeout=timeout
            ) as reply:
                raw = await reply.read()
                try:
                    return reply.status, await reply.json(content_type=None) if raw.strip() else None
                except ValueError:
                    return reply.status, None
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError, aiohttp.InvalidURL) as error:
            raise WorkerUnreachable(_reason(error)) from error
        except TimeoutError as error:
            raise NoReply(f"no answer in {timeout_s:g} s") from error
        except (aiohttp.ClientError, ConnectionError) as error:
            raise NoReply(_reason(error)) from error


def _reason(error: BaseException) -> str:
    text = str(error)
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
