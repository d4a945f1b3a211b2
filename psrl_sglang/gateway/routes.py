"""From a path to what serves it. Requests that generate come first: they are what there are many of."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote

from aiohttp import web

from psrl_sglang.gateway.admin import (
    BadRequest,
    SessionRoutes,
    WorkerRoutes,
    read_object,
    turn_refusal,
    worker_view,
)
from psrl_sglang.gateway.answers import ClientAborts, broken, pass_on
from psrl_sglang.gateway.call import CONNECTION_HEADERS, GENERATE, read_call
from psrl_sglang.gateway.fleet import Fleet, Worker
from psrl_sglang.gateway.guard import Guard
from psrl_sglang.gateway.metrics import Metrics
from psrl_sglang.gateway.proxy import Proxy
from psrl_sglang.gateway.reply import ClientGone, ClientReply, head_of, json_response, refusal
from psrl_sglang.gateway.turns import TurnRefused, Turns
from psrl_sglang.gateway.upstream import NoReply, ReplyBroken, Upstream, WorkerUnreachable

logger = logging.getLogger(__name__)

CHAT = "/v1/chat/completions"
_GENERATING = frozenset({GENERATE, CHAT, "/v1/completions"})
_PASSED = frozenset({"/v1/models", "/model_info", "/get_model_info", "/server_info", "/get_server_info"})
_ABORT_TIMEOUT_S = 10.0
_BODY_TIMEOUT_S = 300.0
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"


@dataclass(frozen=True, slots=True)
class RouteParts:
    proxy: Proxy
    fleet: Fleet
    upstream: Upstream
    guard: Guard
    metrics: Metrics
    turns: Turns
    aborts: ClientAborts
    forget: Callable[[str], None]
    status: Callable[[], dict[str, Any]]
    is_draining: Callable[[], bool]
    queue_timeout_s: float
    max_body_bytes: int


class Routes:
    def __init__(self, parts: RouteParts) -> None:
        self._parts = parts
        self._workers = WorkerRoutes(parts.fleet)
        self._sessions = SessionRoutes(parts.turns, parts.forget)

    async def serve(self, request: web.BaseRequest) -> web.StreamResponse:
        parts = self._parts
        path = request.rel_url.raw_path
        if not parts.guard.lets_in(path, request.headers):
            parts.metrics.unauthorized.inc()
            text = "send `Authorization: Bearer <token>` with the token of the gateway's --token-file"
            return refusal(401, text, {"www-authenticate": "Bearer"})
        if (request.content_length or 0) > parts.max_body_bytes:
            return self._too_large(request)
        if request.headers.get("expect", "").lower() == "100-continue" and request.transport is not None:
            request.transport.write(_CONTINUE)
        try:
            if path in _GENERATING and request.method in ("POST", "PUT"):
                return await self._generate(request, path)
            return await self._other(request, path)
        except web.HTTPRequestEntityTooLarge:
            return self._too_large(request)
        except BadRequest as error:
            return refusal(400, str(error))
        except TurnRefused as error:
            parts.metrics.requests.labels("refused").inc()
            return turn_refusal(error)

    async def _generate(self, request: web.BaseRequest, path: str, session: str = "") -> web.StreamResponse:
        parts = self._parts
        try:
            async with asyncio.timeout(_BODY_TIMEOUT_S):
                body = await request.read()
        except TimeoutError:
            return refusal(408, f"the body was not whole in {_BODY_TIMEOUT_S:g} s")
        query = request.rel_url.raw_query_string
        consumed = parts.guard.consumed
        call = read_call(path, query, body, request.headers, parts.queue_timeout_s, consumed=consumed)
        call.session = session or call.session
        if not len(parts.turns):
            return await parts.proxy.serve(request, call)
        async with parts.turns.turn(call.session):
            call.restart_queue(parts.queue_timeout_s)
            return await parts.proxy.serve(request, call)

    async def _other(self, request: web.BaseRequest, path: str) -> web.StreamResponse:
        parts = self._parts
        method = request.method
        if path in ("/health", "/healthz"):
            return self._health()
        if method == "GET" and (path in _PASSED or path.startswith("/v1/models/")):
            return await self._pass(request)
        head, *rest = [unquote(part) for part in path.strip("/").split("/")]
        if head == "workers":
            return await self._workers.serve(request, rest)
        if head == "sessions":
            if method == "POST" and "/" + "/".join(rest[1:]) == CHAT:
                parts.turns.get(rest[0])
                return await self._generate(request, CHAT, rest[0])
            return await self._sessions.serve_sessions(request, rest)
        if head == "control":
            return await self._sessions.serve_control(request, rest)
        if path == "/abort_request" and method == "POST":
            return await self._abort(request)
        if path == "/status" and method == "GET":
            return json_response(200, parts.status())
        if path == "/metrics" and method == "GET":
            kind = {"content-type": "text/plain; version=0.0.4; charset=utf-8"}
            return web.Response(body=parts.metrics.text(), headers=kind)
        if path in _GENERATING:
            return refusal(405, "POST", {"allow": "POST"})
        return refusal(404, f"the gateway has no {path}; ask the worker itself")

    def _health(self) -> web.Response:
        parts = self._parts
        if parts.is_draining():
            return refusal(503, "the gateway is ending")
        if not any(worker.takes_requests for worker in parts.fleet.workers()):
            return refusal(503, "no worker takes requests")
        return web.Response(text="ok\n")

    async def _pass(self, request: web.BaseRequest) -> web.StreamResponse:
        """Any worker may answer this."""
        parts = self._parts
        dropped = CONNECTION_HEADERS | parts.guard.consumed
        headers = [(name, value) for name, value in request.headers.items() if name.lower() not in dropped]
        problem = "no worker takes requests"
        for worker in [one for one in parts.fleet.workers() if one.takes_requests]:
            try:
                reply = await parts.upstream.send("GET", worker.url, request.raw_path, headers, None)
            except (WorkerUnreachable, NoReply) as error:
                parts.fleet.fail(worker, str(error), is_gone=isinstance(error, WorkerUnreachable))
                problem = f"{worker.url}: {error}"
                continue
            return await self._passed_on(request, reply, worker)
        return refusal(503, problem, {"retry-after": "1"})

    @staticmethod
    async def _passed_on(request: web.BaseRequest, reply: Any, worker: Worker) -> web.StreamResponse:
        out = ClientReply(request)
        try:
            await pass_on(reply, out, head_of(reply.headers, x_psrl_worker=worker.url))
        except ReplyBroken as error:
            broken(out, error)
        except ClientGone:
            out.cut()
        finally:
            reply.close()
        assert out.response is not None
        return out.response

    async def _abort(self, request: web.BaseRequest) -> web.StreamResponse:
        """To all workers; what is aborted so is not continued."""
        parts = self._parts
        body = await read_object(request)
        if body.get("abort_all"):
            parts.aborts.add_all()
        elif isinstance(body.get("rid"), str):
            parts.aborts.add(body["rid"])
        problems = []
        for worker in [one for one in parts.fleet.workers() if one.is_up]:
            try:
                url = f"{worker.url}/abort_request"
                status, _ = await parts.upstream.ask("POST", url, _ABORT_TIMEOUT_S, body)
                if status != 200:
                    problems.append(f"{worker.url} answered {status}")
            except (WorkerUnreachable, NoReply) as error:
                problems.append(f"{worker.url}: {error}")
        return refusal(502, "; ".join(problems)) if problems else json_response(200, {})

    def _too_large(self, request: web.BaseRequest) -> web.Response:
        response = refusal(413, f"a body of more than {self._parts.max_body_bytes} bytes")
        response.force_close()
        return response


def status_of(fleet: Fleet, **more: Any) -> dict[str, Any]:
    return {"workers": [worker_view(worker) for worker in fleet.workers()], **more}
