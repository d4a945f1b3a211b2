"""A running gateway: its socket, its parts, and their end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from aiohttp import web

from psrl_sglang.commands import NotAllowed, is_loopback
from psrl_sglang.gateway.admission import Admission
from psrl_sglang.gateway.answers import ClientAborts, LoopLimits
from psrl_sglang.gateway.call import Call
from psrl_sglang.gateway.fleet import Fleet
from psrl_sglang.gateway.guard import Guard
from psrl_sglang.gateway.holders import Holders
from psrl_sglang.gateway.membership import Membership
from psrl_sglang.gateway.metrics import Metrics
from psrl_sglang.gateway.moves import Mover
from psrl_sglang.gateway.policies import make_policy
from psrl_sglang.gateway.probes import Prober
from psrl_sglang.gateway.proxy import Parts, Proxy
from psrl_sglang.gateway.routes import RouteParts, Routes, status_of
from psrl_sglang.gateway.selection import Selector
from psrl_sglang.gateway.settings import Settings
from psrl_sglang.gateway.turns import Turns
from psrl_sglang.gateway.upstream import Upstream
from psrl_sglang.transfer.client import AsyncMoveClient

logger = logging.getLogger(__name__)

Serve = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]

_BACKLOG = 4096
_READ_BUFFER_BYTES = 64 << 10
_WRITE_BUFFER_BYTES = 64 << 10
_CONTROLLER_TIMEOUT_S = 5.0
_CUT_S = 0.05  # aiohttp takes 0 for no limit


class PortInUse(OSError):
    """The text says which, and why."""


@dataclass(frozen=True, slots=True)
class Options:
    """A port of 0 takes a free one. ``worker_key``: what the engines' ``--api-key`` is."""

    settings: Settings = field(default_factory=Settings)
    host: str = "127.0.0.1"
    port: int = 8080
    token: str = field(default="", repr=False)
    worker_key: str = field(default="", repr=False)
    controller_token: str = field(default="", repr=False)
    secret: bytes = field(default=b"", repr=False)
    allow_unauthenticated: bool = False


class GatewayService:
    """Binds on construction; `run` serves until `stop` and what runs has ended, then everything is closed.

    Construct and use it on the event loop it is to run on. Raises `NotAllowed`, `PortInUse`, or ``ValueError`` for
    a cost model that cannot be used.
    """

    def __init__(self, options: Options) -> None:
        _check(options)
        self._options = options
        settings, ours = options.settings, options.settings.gateway
        self.fleet = Fleet()
        self.holders = Holders(self.fleet, ours.max_sessions)
        selector = Selector(self.fleet, self.holders, make_policy(settings, self.holders), settings.routing)
        self.admission = Admission(
            self.fleet,
            selector,
            most_queued=ours.max_queued_requests,
            interval_s=settings.routing.check_interval_in_ms / 1000,
        )
        self.metrics = Metrics(self.fleet, lambda: self.admission.queued, lambda: len(self.holders))
        self.turns = Turns(
            most=ours.max_sessions,
            most_waiting=ours.hung_turns_per_session,
            timeout_s=ours.hang_timeout_s,
            tokens_of=self.holders.tokens,
        )
        self._stopping = asyncio.Event()
        self._requests = 0
        self._listener = _listen(options.host, options.port)
        self.port: int = self._listener.getsockname()[1]

    async def run(self) -> None:
        """Until `stop`; if a part of it fails, the rest ends and the failure is raised."""
        async with contextlib.AsyncExitStack() as owned:
            owned.callback(self._listener.close)
            owned.callback(self.admission.close)
            server, background = await self._start(owned)
            runner = web.ServerRunner(server, handle_signals=False)
            await runner.setup()
            owned.push_async_callback(runner.cleanup)
            site = web.SockSite(runner, self._listener, backlog=_BACKLOG)
            await site.start()
            stopping = asyncio.create_task(self._stopping.wait())
            try:
                await asyncio.wait([stopping, *background], return_when=asyncio.FIRST_COMPLETED)
                await site.stop()
                await self._drain(server)
            finally:
                for task in (stopping, *background):
                    task.cancel()
                results = await asyncio.gather(*background, return_exceptions=True)
            # What is still there now is cut.
            await server.shutdown(_CUT_S)
            for result in results:
                if isinstance(result, Exception):
                    raise result

    def stop(self) -> None:
        """May be called at any time, on the event loop."""
        self._stopping.set()

    async def _start(self, owned: contextlib.AsyncExitStack) -> tuple[web.Server, list[asyncio.Task[None]]]:
        options, settings, ours = self._options, self._options.settings, self._options.settings.gateway
        upstream = Upstream(
            connect_timeout_s=ours.connect_timeout_s,
            reply_timeout_s=ours.reply_timeout_s,
            worker_key=options.worker_key,
        )
        owned.push_async_callback(upstream.close)
        client = AsyncMoveClient(options.secret)
        owned.callback(client.close)
        mover = Mover(
            settings.transfer,
            client,
            per_source=ours.max_concurrent_per_source,
            counted=self.metrics.count_move,
        )
        owned.push_async_callback(mover.close)
        prober = Prober(
            self.fleet,
            upstream,
            interval_s=ours.health_interval_s,
            timeout_s=ours.health_timeout_s,
            wants_addresses=settings.transfer.enable,
        )
        owned.push_async_callback(prober.close)
        for url in ours.workers:
            self.fleet.add(url, "static")
        background = [asyncio.create_task(self._log_moves())]
        membership = await self._join_controller(owned)
        if membership is not None:
            background.append(asyncio.create_task(membership.run()))
        aborts = ClientAborts()
        proxy = Proxy(
            Parts(
                self.fleet,
                self.holders,
                self.admission,
                mover,
                upstream,
                self.metrics,
                aborts,
                _lookup(settings, membership),
            ),
            limits=LoopLimits(settings.partial_rollout.enable, ours.max_loopbacks, ours.loopback_timeout_s),
            retries=ours.retries,
            queue_timeout_s=ours.queue_timeout_s,
        )
        routes = Routes(
            RouteParts(
                proxy=proxy,
                fleet=self.fleet,
                upstream=upstream,
                guard=Guard(options.token),
                metrics=self.metrics,
                turns=self.turns,
                aborts=aborts,
                forget=self.holders.forget,
                status=lambda: self._status(mover, membership),
                is_draining=self._stopping.is_set,
                queue_timeout_s=ours.queue_timeout_s,
                max_body_bytes=ours.max_body_bytes,
            )
        )
        return _server(self._counted(routes.serve), ours.max_body_bytes), background

    async def _join_controller(self, owned: contextlib.AsyncExitStack) -> Membership | None:
        url = self._options.settings.controller_url
        if url is None:
            return None
        upstream = Upstream(
            connect_timeout_s=_CONTROLLER_TIMEOUT_S,
            reply_timeout_s=_CONTROLLER_TIMEOUT_S,
            worker_key=self._options.controller_token,
        )
        owned.push_async_callback(upstream.close)
        interval_s = self._options.settings.gateway.controller_poll_s
        return Membership(self.fleet, upstream, url, interval_s=interval_s)

    def _status(self, mover: Mover, membership: Membership | None) -> dict[str, object]:
        return status_of(
            self.fleet,
            method=self._options.settings.routing.method,
            queued=self.admission.queued,
            sessions=len(self.holders),
            moves_running=mover.running,
            kv=dict(self.metrics.tally),
            draining=self._stopping.is_set(),
            controller=None if membership is None else membership.trouble or "ok",
        )

    def _counted(self, serve: Serve) -> Serve:
        async def counted(request: web.BaseRequest) -> web.StreamResponse:
            self._requests += 1
            try:
                return await serve(request)
            finally:
                self._requests -= 1

        return counted

    async def _drain(self, server: web.Server) -> None:
        """Until no request runs, or the time for that is over."""
        server.pre_shutdown()
        limit_s = self._options.settings.gateway.drain_timeout_s
        try:
            async with asyncio.timeout(limit_s):
                while self._requests:
                    await asyncio.sleep(0.02)
        except TimeoutError:
            logger.warning("%d requests did not end in %g s, and are cut", self._requests, limit_s)

    async def _log_moves(self) -> None:
        interval_s = self._options.settings.transfer.stats_log_interval_s
        while True:
            await asyncio.sleep(interval_s or 3600.0)
            if interval_s:
                self.metrics.log_moves()


def _server(serve: Serve, max_body_bytes: int) -> web.Server:
    loop = asyncio.get_running_loop()

    def make_request(message, payload, protocol, writer, task) -> web.BaseRequest:
        protocol.transport.set_write_buffer_limits(high=_WRITE_BUFFER_BYTES)
        return web.BaseRequest(message, payload, protocol, writer, task, loop, client_max_size=max_body_bytes)

    return web.Server(
        serve,
        request_factory=make_request,
        handler_cancellation=True,
        access_log=None,
        auto_decompress=False,
        read_bufsize=_READ_BUFFER_BYTES,
    )


def _lookup(settings: Settings, membership: Membership | None):
    is_wanted = (
        settings.routing.method.startswith("cache_aware") and settings.cache_aware.lmcache_overlap_weight
    )
    if membership is None or not is_wanted:
        return None
    timeout_s = settings.gateway.lookup_timeout_ms / 1000

    async def look_up(call: Call) -> None:
        await membership.look_up(call, timeout_s)

    return look_up


def _check(options: Options) -> None:
    if options.token or options.allow_unauthenticated or is_loopback(options.host):
        return
    raise NotAllowed(
        f"--host {options.host} lets anyone on the network use the engines: give a token with --token-file, bind "
        "to 127.0.0.1, or say --allow-unauthenticated"
    )


def _listen(host: str, port: int) -> socket.socket:
    try:
        family, kind, proto, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, proto)
    except OSError as error:
        raise PortInUse(f"--host {host!r} is no address of this machine: {error.strerror or error}") from error
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        raise PortInUse(f"--port {port} of {host}: {error.strerror or error}") from error
    listener.setblocking(False)
    return listener
