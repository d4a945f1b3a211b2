"""The gateway's own routes: workers as smg has them, sessions and their control, status and metrics."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import web

from psrl_sglang.gateway.fleet import Fleet, Worker
from psrl_sglang.gateway.reply import json_response, refusal
from psrl_sglang.gateway.settings import clean_url
from psrl_sglang.gateway.turns import TurnRefused, Turns

Route = Callable[[web.BaseRequest, list[str]], Awaitable[web.StreamResponse]]


class BadRequest(ValueError):
    """The text says which field is wrong, and how."""


async def read_object(request: web.BaseRequest) -> dict[str, Any]:
    """The body as a JSON object; an empty one for no body. Raises `BadRequest`."""
    raw = await request.read()
    if not raw.strip():
        return {}
    try:
        data = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise BadRequest(f"the body is not JSON: {error}") from error
    if not isinstance(data, dict):
        raise BadRequest("the body is not an object")
    return data


class WorkerRoutes:
    """``/workers``"""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet

    async def serve(self, request: web.BaseRequest, rest: list[str]) -> web.StreamResponse:
        method = request.method
        if not rest:
            if method == "GET":
                return self._all()
            return await self._add(request) if method == "POST" else refusal(405, "GET or POST")
        is_drain = len(rest) > 1 and rest[-1] == "drain"
        name = "/".join(rest[:-1] if is_drain else rest)
        worker = self._fleet.find(name)
        if worker is None:
            return refusal(404, f"there is no worker {name!r}; GET /workers lists them")
        if is_drain:
            if method != "POST":
                return refusal(405, "POST")
            self._fleet.drain(worker)
            return json_response(200, worker_view(worker))
        if method == "GET":
            return json_response(200, worker_view(worker))
        if method == "DELETE":
            self._fleet.remove(worker)
            return _accepted(worker, "it leaves once its requests have ended")
        return refusal(405, "GET or DELETE")

    def _all(self) -> web.Response:
        workers = [worker_view(worker) for worker in self._fleet.workers()]
        healthy = sum(view["is_healthy"] for view in workers)
        stats = {"total_workers": len(workers), "healthy_workers": healthy}
        return json_response(200, {"workers": workers, "total": len(workers), "stats": stats})

    async def _add(self, request: web.BaseRequest) -> web.Response:
        body = await read_object(request)
        url = body.get("url")
        if not isinstance(url, str):
            raise BadRequest("url: the worker's address, such as http://10.0.0.7:30000")
        try:
            url = clean_url(url)
        except ValueError as error:
            raise BadRequest(f"url: {url!r} {error}") from error
        there = self._fleet.get(url)
        if there is not None and not there.is_draining:
            return refusal(409, f"url: {url} is a worker already")
        if there is not None:
            self._fleet.resume(there)
        return _accepted(there or self._fleet.add(url, "api"), "it gets requests once it answers")


def _accepted(worker: Worker, message: str) -> web.Response:
    location = f"/workers/{worker.id}"
    told = {"status": "accepted", "worker_id": worker.id, "url": worker.url, "location": location}
    return json_response(202, {**told, "message": message}, {"location": location})


def worker_view(worker: Worker) -> dict[str, Any]:
    """smg's fields of a worker, and ours."""
    return {
        "id": worker.id,
        "url": worker.url,
        "worker_type": "regular",
        "connection_mode": "http",
        "runtime_type": "sglang",
        "is_healthy": worker.takes_requests,
        "load": worker.in_flight,
        "state": "draining" if worker.is_draining else "up" if worker.is_up else "out",
        "trouble": worker.trouble,
        "version": worker.version,
        "instance_id": worker.instance_id,
        "origin": worker.origin,
        "served": worker.served,
        "tokens": worker.tokens,
        "moves_kv": worker.addresses is not None,
    }


class SessionRoutes:
    """``/sessions`` but for their turns, and ``/control``."""

    def __init__(self, turns: Turns, forget: Callable[[str], None]) -> None:
        self._turns = turns
        self._forget = forget

    async def serve_sessions(self, request: web.BaseRequest, rest: list[str]) -> web.StreamResponse:
        turns, method = self._turns, request.method
        if not rest:
            if method == "GET":
                return self._list()
            if method != "POST":
                return refusal(405, "GET or POST")
            session_id = (await read_object(request)).get("session_id")
            if session_id is not None and not (isinstance(session_id, str) and _is_name(session_id)):
                raise BadRequest("session_id: 1 to 256 printable ASCII characters without spaces and slashes")
            return json_response(200, turns.view(turns.create(session_id)))
        if len(rest) > 1:
            return refusal(404, "there is no such path; turns are POST /sessions/{id}/v1/chat/completions")
        if method == "GET":
            return json_response(200, turns.view(turns.get(rest[0])))
        if method == "DELETE":
            turns.delete(rest[0])
            self._forget(rest[0])
            return json_response(200, {"session_id": rest[0], "deleted": True})
        return refusal(405, "GET or DELETE")

    async def serve_control(self, request: web.BaseRequest, rest: list[str]) -> web.StreamResponse:
        if rest == ["sessions"] and request.method == "GET":
            return self._list()
        if rest not in (["hang"], ["continue"]) or request.method != "POST":
            return refusal(
                404, "there are GET /control/sessions, POST /control/hang and POST /control/continue"
            )
        body = await read_object(request)
        ids, count = body.get("session_ids"), body.get("count")
        if ids is not None and not (isinstance(ids, list) and all(isinstance(one, str) for one in ids)):
            raise BadRequest("session_ids: a list of ids, or left out for all")
        if count is not None and (type(count) is not int or count < 0):
            raise BadRequest("count: a whole number, or left out for all")
        act = self._turns.hang if rest == ["hang"] else self._turns.resume
        return json_response(200, {"session_ids": act(ids, count)})

    def _list(self) -> web.Response:
        return json_response(200, {"sessions": [self._turns.view(one) for one in self._turns.sessions()]})


def _is_name(text: str) -> bool:
    return 0 < len(text) <= 256 and all("!" <= mark <= "~" and mark != "/" for mark in text)


def turn_refusal(error: TurnRefused) -> web.Response:
    return refusal(error.status, str(error), {"retry-after": "1"} if error.status in (429, 503) else None)
