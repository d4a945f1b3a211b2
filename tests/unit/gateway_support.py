"""A gateway and engines that are nothing but HTTP, all on one event loop.

What an engine says follows from the prompt alone, so an answer that took several engines can be compared with one
that did not.
"""

from __future__ import annotations

import asyncio
import json
import zlib
from collections.abc import Callable, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import uvloop
from aiohttp import web

from psrl_sglang.gateway.call import read_call
from psrl_sglang.gateway.fleet import Fleet
from psrl_sglang.gateway.holders import Holders
from psrl_sglang.gateway.policies import make_policy
from psrl_sglang.gateway.selection import Selector
from psrl_sglang.gateway.service import GatewayService, Options
from psrl_sglang.gateway.settings_file import load_settings

WAIT_S = 10.0


def run(work: Coroutine[Any, Any, Any], timeout_s: float = 60.0) -> Any:
    async def limited() -> Any:
        async with asyncio.timeout(timeout_s):
            return await work

    return uvloop.run(limited())  # as the command does


async def until(holds: Callable[[], Any], what: str, timeout_s: float = WAIT_S) -> None:
    deadline_s = asyncio.get_running_loop().time() + timeout_s
    while not holds():
        assert asyncio.get_running_loop().time() < deadline_s, f"not in {timeout_s} s: {what}"
        await asyncio.sleep(0.005)


def next_token(tokens: list[int]) -> int:
    return zlib.crc32(json.dumps(tokens).encode()) % 1000


def logprob(token: int) -> float:
    return -(token % 97) / 16


def expected(prompt: list[int], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens))
    return tokens[len(prompt) :]


@dataclass
class Seen:
    """A request as it reached an engine. ``gone``: its client went away before the end."""

    path: str
    headers: dict[str, str]
    raw: bytes
    time_s: float
    gone: bool = False
    done: bool = False

    @property
    def body(self) -> dict[str, Any]:
        return json.loads(self.raw)


@dataclass
class FakeEngine:
    """``aborts``: after how many tokens each of the next requests is aborted; ``die``: where the next requests'
    connections end, "before" the reply, in the "body", or in the "stream"."""

    version: str = "1"
    tells_version: bool = False  # with each reply, as an engine with the plugin does
    token_s: float = 0.0
    incremental: bool = False
    reply_delay_s: float = 0.0
    aborts: list[int] = field(default_factory=list)
    abort_message: dict[str, Any] = field(default_factory=lambda: {"type": "abort", "message": "Aborted"})
    die: list[str] = field(default_factory=list)
    moves: dict[str, Any] | None = None
    seen: list[Seen] = field(default_factory=list)
    raw_reply: bytes | None = None
    stream_bytes: int = 0
    hold: asyncio.Event | None = None
    probes: int = 0

    async def start(self, port: int = 0) -> FakeEngine:
        app = web.Application(client_max_size=1 << 30)
        app.router.add_post("/generate", self._generate)
        app.router.add_post("/v1/chat/completions", self._chat)
        app.router.add_post("/v1/completions", self._chat)
        app.router.add_get("/model_info", self._info)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/psrl/v1/status", self._status)
        app.router.add_post("/abort_request", self._abort)
        self._runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", port, reuse_address=True)
        await site.start()
        self.port = site._server.sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        return self

    async def stop(self) -> None:
        await self._runner.cleanup()

    async def restart(self) -> None:
        await self.start(self.port)

    @property
    def bodies(self) -> list[bytes]:
        return [one.raw for one in self.seen]

    @property
    def running(self) -> int:
        return sum(not (one.done or one.gone) for one in self.seen)

    async def _take(self, request: web.Request) -> Seen:
        seen = Seen(
            request.raw_path,
            {name.lower(): value for name, value in request.headers.items()},
            await request.read(),
            asyncio.get_running_loop().time(),
        )
        self.seen.append(seen)
        return seen

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        seen = await self._take(request)
        try:
            response = await self._answer(request, seen)
            seen.done = True
            return response
        finally:
            seen.gone = not seen.done

    async def _answer(self, request: web.Request, seen: Seen) -> web.StreamResponse:
        death = self.die.pop(0) if self.die else ""
        if death == "before":
            request.transport.abort()
            await asyncio.sleep(WAIT_S)
        if self.hold is not None:
            await self.hold.wait()
        await asyncio.sleep(self.reply_delay_s)
        if self.raw_reply is not None:
            return web.Response(body=self.raw_reply, content_type="application/json")
        try:
            body = json.loads(seen.raw)
        except ValueError:
            return web.json_response({"error": "not JSON"}, status=400)
        if death == "body":
            response = web.StreamResponse(headers={"content-length": "1000"})
            await response.prepare(request)
            await response.write(b'{"text"')
            request.transport.close()
            await asyncio.sleep(WAIT_S)
        if not body.get("stream"):
            headers = {"X-Psrl-Weight-Version": self.version} if self.tells_version else {}
            return web.json_response(await self._whole(body), headers=headers)
        return await self._stream(request, body, death)

    async def _whole(self, body: dict[str, Any]) -> dict[str, Any]:
        last: dict[str, Any] = {}
        async for reply in self._replies(body):
            last = reply
            await asyncio.sleep(self.token_s)
        return last

    async def _stream(self, request: web.Request, body: dict[str, Any], death: str) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        count = 0
        async for reply in self._replies(body):
            if death == "stream" and count == 3:
                request.transport.close()
                await asyncio.sleep(WAIT_S)
            await asyncio.sleep(self.token_s)
            await response.write(b"data: " + json.dumps(reply, separators=(",", ":")).encode() + b"\n\n")
            count += 1
        await response.write(b"data: [DONE]\n\n")
        return response

    async def _replies(self, body: dict[str, Any]):
        prompt = body["input_ids"]
        wanted = body.get("sampling_params", {}).get("max_new_tokens", 128)
        aborted = self.aborts.pop(0) if self.aborts else None
        tokens: list[int] = []
        with_logprobs = body.get("return_logprob", False)
        for at in range(min(wanted, aborted) if aborted is not None else wanted):
            tokens.append(next_token([*prompt, *tokens]))
            ends = at + 1 == wanted and aborted is None
            yield self._reply(
                prompt, tokens, {"type": "length", "length": wanted} if ends else None, with_logprobs
            )
        if aborted is not None:
            yield self._reply(prompt, tokens, self.abort_message, with_logprobs, new_tokens=0)

    def _reply(self, prompt, tokens, finish, with_logprobs, new_tokens=1) -> dict[str, Any]:
        shown = tokens[len(tokens) - new_tokens :] if self.incremental else list(tokens)
        meta: dict[str, Any] = {
            "id": "r",
            "finish_reason": finish,
            "prompt_tokens": len(prompt),
            "weight_version": self.version,
            "completion_tokens": len(tokens),
            "cached_tokens": 3,
            "psrl": {"oldest_version": self.version, "version_lag": 0, "crossed_versions": False},
        }
        if with_logprobs:
            meta["output_token_logprobs"] = [[logprob(token), token, None] for token in shown]
            meta["output_token_logprobs_length"] = len(tokens)
        text = "".join(f"<{token}>" for token in shown)
        padding = {"padding": "x" * self.stream_bytes} if self.stream_bytes else {}
        return {"text": text, "output_ids": shown, "meta_info": meta, **padding}

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        seen = await self._take(request)
        seen.done = True
        return web.json_response({"choices": [{"message": {"content": "hello"}}], "engine": self.url})

    async def _info(self, request: web.Request) -> web.Response:
        self.probes += 1
        return web.json_response({"model_path": "m", "weight_version": self.version})

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "m"}]})

    async def _status(self, request: web.Request) -> web.Response:
        return web.json_response({"moves": self.moves or {}})

    async def _abort(self, request: web.Request) -> web.Response:
        await self._take(request)
        self.seen[-1].done = True
        return web.json_response({})


class Gateway:
    """A running gateway and a client of it."""

    def __init__(self, service: GatewayService, http: aiohttp.ClientSession, token: str) -> None:
        self.service = service
        self.url = f"http://127.0.0.1:{service.port}"
        self.http = http
        self._token = token

    @property
    def fleet(self):
        return self.service.fleet

    async def request(self, method: str, path: str, body: Any = None, **headers: str) -> Reply:
        data = body if isinstance(body, bytes | type(None)) else json.dumps(body).encode()
        head = {name.replace("_", "-"): value for name, value in headers.items()}
        if self._token:
            head.setdefault("Authorization", f"Bearer {self._token}")
        async with self.http.request(method, self.url + path, data=data, headers=head) as reply:
            return Reply(reply.status, dict(reply.headers), await reply.read())

    async def get(self, path: str, **headers: str) -> Reply:
        return await self.request("GET", path, **headers)

    async def generate(self, prompt: list[int], count: int = 4, **headers: str) -> Reply:
        return await self.request("POST", "/generate", ask(prompt, count), **headers)

    async def metric(self, name: str) -> float:
        text = (await self.get("/metrics")).raw.decode()
        return next(float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if line.startswith(name + " "))


@dataclass
class Reply:
    status: int
    headers: dict[str, str]
    raw: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.raw)

    @property
    def worker(self) -> str:
        return {name.lower(): value for name, value in self.headers.items()}["x-psrl-worker"]

    @property
    def kv(self) -> str:
        return {name.lower(): value for name, value in self.headers.items()}.get("x-psrl-kv", "")

    @property
    def events(self) -> list[dict[str, Any]]:
        parts = self.raw.split(b"\n\n")
        return [json.loads(part[6:]) for part in parts if part.startswith(b"data: {")]


def ask(prompt: list[int], count: int = 4, **extra: Any) -> dict[str, Any]:
    return {"input_ids": prompt, "sampling_params": {"max_new_tokens": count, "temperature": 0}, **extra}


def settings_of(urls: list[str], *, kv: dict | None = None, gateway: dict | None = None, **routing: Any):
    ours = {"workers": urls, "health_interval_s": 0.2, "drain_timeout_s": 2.0, **(gateway or {})}
    partial = routing.pop("partial", None)
    coordination: dict[str, Any] = {"routing_strategy": {"check_interval_in_ms": 50, **routing}}
    if kv is not None:
        coordination["routing_strategy"]["kv_transfer"] = {"enable": True, **kv}
    if partial is not None:
        coordination["partial_rollout"] = {"enable": partial}
    return load_settings({"psrl": {"rollout_coordination": coordination, "gateway": ours}})


@asynccontextmanager
async def gateway_of(*engines: FakeEngine, ready: bool = True, token: str = "", **settings: Any):
    """A gateway in front of engines, which are started if they were not. It has ended afterwards."""
    async with AsyncExitStack() as owned:
        for engine in engines:
            if not hasattr(engine, "url"):
                await engine.start()
                owned.push_async_callback(engine.stop)
        options = Options(settings_of([engine.url for engine in engines], **settings), port=0, token=token)
        service = GatewayService(options)
        serving = asyncio.create_task(service.run())
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        http = aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=40))
        gateway = Gateway(service, http, token)
        owned.push_async_callback(_end, service, serving, http)
        if ready:
            known = service.fleet.workers
            await until(
                lambda: len(known()) == len(engines) and all(one.version for one in known()), "all known"
            )
        yield gateway


async def _end(service: GatewayService, serving: asyncio.Task[None], http: aiohttp.ClientSession) -> None:
    await http.close()
    service.stop()
    await asyncio.wait_for(serving, WAIT_S)
    assert all(worker.in_flight == 0 for worker in service.fleet.workers()), "a slot was never given back"
    assert service.admission.queued == 0


def spread(engines: list[FakeEngine]) -> list[int]:
    return [len(engine.seen) for engine in engines]


class Bench:
    """A fleet and a selector without anything that sends."""

    def __init__(self, *loads: int, versions: tuple[str | None, ...] = (), **routing) -> None:
        self.fleet = Fleet()
        for at, load in enumerate(loads):
            worker = self.fleet.add(f"http://w{at}", "static")
            worker.in_flight = load
            self.fleet.restore(worker, versions[at] if versions else "1")
        self.workers = self.fleet.workers()
        self.holders = Holders(self.fleet, 100)
        settings = load_settings({"psrl": {"rollout_coordination": {"routing_strategy": routing}}})
        self.policy = make_policy(settings, self.holders)
        self.selector = Selector(self.fleet, self.holders, self.policy, settings.routing)

    def pick(self, body: bytes = b"{}", **headers: str) -> int | None:
        call = self.call(body, **headers)
        worker = self.selector.pick(call)
        if worker is None:
            return None
        self.selector.taken(call, worker)
        self.holders.served(call.session, worker, 1)
        return worker.index

    @staticmethod
    def call(body: bytes = b"{}", **headers: str):
        names = {name.replace("_", "-"): value for name, value in headers.items()}
        return read_call("/generate", "", body, names, 1.0, consumed=frozenset())
