"""The routes that show what there is: JSON, Prometheus text, and a stream of events."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Annotated, Any

import msgspec
from fastapi import FastAPI, Query, Response
from fastapi.responses import PlainTextResponse, StreamingResponse

from psrl_sglang.controller.core import Core
from psrl_sglang.controller.orders import Refusal

_KEEP_ALIVE_S = 10.0
_MOST_MOVES = 1000
_MOVES_AT_START = 100


def add_view_routes(app: FastAPI, core: Core) -> None:
    @app.get("/healthz")
    async def healthz() -> PlainTextResponse:
        return PlainTextResponse("ok\n")

    @app.get("/status")
    async def status() -> Response:
        return _json(core.totals())

    @app.get("/instances")
    async def instances() -> Response:
        return _json({"instances": core.instances()})

    @app.get("/controller/workers")
    async def workers() -> Response:
        return _json({"workers": [core.worker(worker) for worker in core.registry.workers()]})

    @app.get("/moves")
    async def moves(most: Annotated[int, Query(ge=1, le=_MOST_MOVES)] = 100) -> Response:
        return _json({"moves": core.latest_moves(most)})

    @app.get("/sessions")
    async def sessions() -> Response:
        return _json({"sessions": core.latest_sessions()})

    @app.get("/sessions/{session:path}")
    async def session(session: str) -> Response:
        holder = core.sessions.holder(session)
        if holder is None:
            raise Refusal(404, f"session: no instance has reported {session!r}")
        view = core.session(session, holder)
        if not view["is_registered"]:
            raise Refusal(404, f"session: its holder {holder.instance_id!r} is gone")
        return _json(view)

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(core.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    @app.get("/events")
    async def events() -> Response:
        if core.feed.is_full:
            raise Refusal(
                503, f"{core.feed.watchers} watch already; close a page, or ask for /instances now and then"
            )
        headers = {"cache-control": "no-store", "x-accel-buffering": "no"}
        return StreamingResponse(_stream(core), media_type="text/event-stream", headers=headers)


async def _stream(core: Core) -> AsyncIterator[bytes]:
    with core.feed.watch() as watcher:
        yield _event("moves", msgspec.json.encode(core.latest_moves(_MOVES_AT_START)))
        yield _event("state", msgspec.json.encode(core.snapshot()))
        while not core.stopping.is_set():
            waiting = await watcher.take(_KEEP_ALIVE_S)
            yield b"".join(_event(kind, data) for kind, data in waiting) or b": alive\n\n"


def _event(kind: str, data: bytes) -> bytes:
    # JSON has no line breaks of its own, so one line of data is enough.
    return b"event: %s\ndata: %s\n\n" % (kind.encode(), data)


def _json(data: Any) -> Response:
    return Response(msgspec.json.encode(data), media_type="application/json")
