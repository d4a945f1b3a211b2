"""The side towards the engines: one pool of connections, and errors by what may have happened to the request."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import aiohttp
from yarl import URL

# SGLang's server closes a connection that was idle for 5 s; one that we reuse must not be about to be.
_IDLE_S = 4.0
_READ_BUFFER_BYTES = 32 << 10
_OURS = ("User-Agent", "Accept-Encoding", "Accept", "Content-Type")


class WorkerUnreachable(Exception):
    """No connection: the worker never saw the request."""


class NoReply(Exception):
    """The connection ended before the first byte of a reply; the worker may have worked on it."""


class ReplyBroken(Exception):
    """The reply began, and ended before its end."""


class Upstream:
    """Create it on the event loop it is used on. Close it."""

    def __init__(self, *, connect_timeout_s: float, reply_timeout_s: float, worker_key: str = "") -> None:
        self._authorization = f"Bearer {worker_key}" if worker_key else ""
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_IDLE_S),
            timeout=aiohttp.ClientTimeout(
                total=None, sock_connect=connect_timeout_s, sock_read=reply_timeout_s
            ),
            auto_decompress=False,
            cookie_jar=aiohttp.DummyCookieJar(),
            read_bufsize=_READ_BUFFER_BYTES,
            trust_env=False,
        )

    async def close(self) -> None:
        await self._session.close()

    async def send(
        self, method: str, url: str, headers: Iterable[tuple[str, str]], body: bytes | None
    ) -> aiohttp.ClientResponse:
        """The reply, its body not yet read; the caller closes it. Raises `WorkerUnreachable` or `NoReply`."""
        head = list(headers)
        if self._authorization:
            head = [(name, value) for name, value in head if name.lower() != "authorization"]
            head.append(("Authorization", self._authorization))
        try:
            return await self._session.request(
                method,
                URL(url, encoded=True),
                data=body,
                headers=head,
                skip_auto_headers=_OURS,
                allow_redirects=False,
            )
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError, aiohttp.InvalidURL) as error:
            raise WorkerUnreachable(_reason(error)) from error
        except (aiohttp.ClientError, TimeoutError, ConnectionError) as error:
            raise NoReply(_reason(error)) from error

    async def ask(self, method: str, url: str, timeout_s: float, body: Any = None) -> tuple[int, Any]:
        """Status and JSON of a small reply, within the time. Raises as `send`, or `ReplyBroken`."""
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


async def read_all(reply: aiohttp.ClientResponse) -> bytes:
    """The rest of a reply. Raises `ReplyBroken`."""
    try:
        return await reply.read()
    except (aiohttp.ClientError, TimeoutError, ConnectionError) as error:
        raise ReplyBroken(_reason(error)) from error


async def read_some(reply: aiohttp.ClientResponse) -> bytes:
    """What has arrived, at least a byte of it; empty at the end. Raises `ReplyBroken`."""
    try:
        return await reply.content.readany()
    except (aiohttp.ClientError, TimeoutError, ConnectionError) as error:
        raise ReplyBroken(_reason(error)) from error


def _reason(error: BaseException) -> str:
    text = str(error)
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
