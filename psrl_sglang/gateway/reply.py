"""What one client gets: a status and a head, then bytes, and an end; or an end without one.

Writing waits for a slow client, so a reply holds no more than a few buffers of memory.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable
from typing import Any

from aiohttp import web
from multidict import CIMultiDict

from psrl_sglang.gateway.call import CONNECTION_HEADERS

_NOT_READING_S = 600.0


class ClientGone(Exception):
    """The client does not read any more, or has not for long. Nothing is wrong with the worker."""


class ClientReply:
    """``response`` is what the handler returns. Status and head are fixed by the first call that sends them."""

    def __init__(self, request: web.BaseRequest) -> None:
        self._request = request
        self.response: web.StreamResponse | None = None

    @property
    def has_begun(self) -> bool:
        """Whether the client may have a byte of it."""
        return self.response is not None

    def whole(self, status: int, headers: CIMultiDict[str], body: bytes) -> None:
        """All at once; it is sent when the handler returns."""
        self.response = web.Response(status=status, headers=headers, body=body)

    async def begin(self, status: int, headers: CIMultiDict[str], length: int | None = None) -> None:
        response = web.StreamResponse(status=status, headers=headers)
        if length is not None:
            response.content_length = length
        self.response = response
        try:
            await response.prepare(self._request)
        except ConnectionError as error:
            raise ClientGone from error

    async def write(self, data: bytes) -> None:
        assert self.response is not None
        try:
            async with asyncio.timeout(_NOT_READING_S):
                await self.response.write(data)
        except (ConnectionError, TimeoutError) as error:
            raise ClientGone from error

    async def end(self) -> None:
        assert self.response is not None
        try:
            await self.response.write_eof()
        except ConnectionError as error:
            raise ClientGone from error

    def cut(self) -> None:
        """End it so that the client sees that it is not whole."""
        if self._request.transport is not None:
            self._request.transport.close()


def head_of(headers: Iterable[tuple[str, str]], **ours: str) -> CIMultiDict[str]:
    """A worker's headers for the client, and ours: ``x_psrl_worker="…"`` is ``x-psrl-worker``."""
    head: CIMultiDict[str] = CIMultiDict()
    for name, value in headers:
        if name.lower() not in CONNECTION_HEADERS:
            head.add(name, value)
    for name, value in ours.items():
        if value:
            head[name.replace("_", "-")] = value
    return head


def json_response(status: int, data: Any, headers: dict[str, str] | None = None) -> web.Response:
    return web.Response(
        status=status, body=json.dumps(data).encode(), content_type="application/json", headers=headers
    )


def refusal(status: int, text: str, headers: dict[str, str] | None = None) -> web.Response:
    """An error of the gateway's own, in the form that OpenAI's clients read too."""
    kind = {503: "service_unavailable", 502: "bad_gateway", 401: "unauthorized", 413: "request_too_large"}
    error = {"message": text, "type": kind.get(status, "invalid_request_error"), "code": status}
    return json_response(status, {"error": error, "detail": text}, headers)
