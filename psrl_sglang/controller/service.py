"""A running controller: its sockets, its tasks, and their end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Iterator
from dataclasses import dataclass, field

import msgspec
import uvicorn
import zmq.asyncio

from psrl_sglang.commands import NotAllowed, is_loopback
from psrl_sglang.controller.app import create_app
from psrl_sglang.controller.core import Core
from psrl_sglang.controller.events import Feed
from psrl_sglang.controller.inbox import Inbox
from psrl_sglang.controller.jobs import MoveJobs
from psrl_sglang.controller.metrics import Metrics
from psrl_sglang.controller.orders import Orders
from psrl_sglang.controller.recent import Moves, Sessions
from psrl_sglang.controller.registry import Limits, Registry
from psrl_sglang.controller.sockets import PortInUse, WorkerSockets
from psrl_sglang.transfer.ask import AsyncAsker
from psrl_sglang.transfer.auth import Signer

logger = logging.getLogger(__name__)

_TICK_S = 0.5
_HTTP_GRACE_S = 2


@dataclass(frozen=True, slots=True)
class Options:
    """Ports of 0 take free ones. ``advertise``: the address that workers are told to send heartbeats to; by
    default that of this machine on the way to each."""

    host: str = "127.0.0.1"
    http_port: int = 9000
    pull_port: int = 8300
    reply_port: int = 8400
    advertise: str = ""
    token: str = field(default="", repr=False)
    secret: bytes = field(default=b"", repr=False)
    allow_unauthenticated: bool = False
    limits: Limits = field(default_factory=Limits)


@dataclass(frozen=True, slots=True)
class Ports:
    http: int
    pull: int
    reply: int


class ControllerService:
    """Binds on construction; `run` serves until `stop`, then everything is closed.

    Construct and use it on the event loop it is to run on. Raises `NotAllowed` or `PortInUse`.
    """

    def __init__(self, options: Options) -> None:
        _check(options)
        signer = Signer(options.secret)
        registry, sessions, moves, feed = Registry(options.limits), Sessions(), Moves(), Feed()
        metrics = Metrics(registry, sessions)
        inbox = Inbox(registry, sessions, moves, feed, metrics)
        self._closing = contextlib.ExitStack()
        with contextlib.ExitStack() as bound:
            context = zmq.asyncio.Context()
            bound.callback(context.destroy, linger=0)
            orders = Orders(AsyncAsker(context, signer), registry, sessions, inbox)
            self.core = Core(registry, sessions, moves, feed, metrics, inbox, orders, MoveJobs(orders))
            self._workers = WorkerSockets(context, inbox, signer, metrics, options.advertise)
            bound.callback(self._workers.close)
            address = _address(options.host, options.http_port)
            self._workers.bind(address, options.pull_port, options.reply_port)
            self._http = _listen(address, options.http_port)
            bound.callback(self._http.close)
            self._closing.push(bound.pop_all())
        self.ports = Ports(self._http.getsockname()[1], self._workers.pull_port, self._workers.reply_port)
        config = uvicorn.Config(
            create_app(self.core, options.token),
            log_config=None,
            access_log=False,
            lifespan="off",
            ws="none",
            server_header=False,
            timeout_graceful_shutdown=_HTTP_GRACE_S,
        )
        self._server = _Server(config)

    async def run(self) -> None:
        """Until `stop`; if a part of it fails, the rest ends and the failure is raised."""
        with self._closing:
            parts = [
                asyncio.create_task(self._server.serve(sockets=[self._http])),
                asyncio.create_task(self._workers.run()),
                asyncio.create_task(self._tick()),
                asyncio.create_task(self._sweep()),
            ]
            try:
                await asyncio.wait(parts, return_when=asyncio.FIRST_COMPLETED)
            finally:
                self.stop()
                for part in parts[1:]:
                    part.cancel()
                await self.core.jobs.close()
                results = await asyncio.gather(*parts, return_exceptions=True)
            for result in results:
                if isinstance(result, Exception):
                    raise result

    def stop(self) -> None:
        """May be called at any time, on the event loop."""
        self.core.stopping.set()
        self.core.feed.publish("stop", b"{}")
        self._server.should_exit = True

    async def _tick(self) -> None:
        """Leases run out, and whoever watches gets the state when it has changed."""
        last = b""
        while True:
            await asyncio.sleep(_TICK_S)
            for worker in self.core.registry.expire():
                logger.warning(
                    "worker %d of %s is gone: its lease ran out", worker.worker_id, worker.instance_id
                )
            if self.core.feed.watchers:
                state = msgspec.json.encode(self.core.snapshot())
                if state != last:
                    self.core.feed.publish("state", state)
                last = state

    async def _sweep(self) -> None:
        index = self.core.registry.index
        while True:
            await asyncio.sleep(_TICK_S)
            if index.needs_sweep:
                for _ in index.sweep():
                    await asyncio.sleep(0)


class _Server(uvicorn.Server):
    """Signals are for whoever runs the service."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _check(options: Options) -> None:
    if options.allow_unauthenticated or is_loopback(options.host):
        return
    missing = []
    if not options.token:
        missing.append("a token for HTTP (--token-file or PSRL_CONTROLLER_TOKEN)")
    if not options.secret:
        missing.append("the workers' secret (--secret-file, psrl.sglang.secret_file or PSRL_SECRET)")
    if missing:
        raise NotAllowed(
            f"on {options.host} anyone who can reach it could command the engines: give {' and '.join(missing)}, "
            "bind to 127.0.0.1, or say --allow-unauthenticated"
        )


def _address(host: str, port: int) -> str:
    """ZMQ binds to addresses, not to names."""
    try:
        return str(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][4][0])
    except OSError as error:
        raise PortInUse(
            host, port, "--host", f"{host!r} is no address of this machine: {error.strerror}"
        ) from error


def _listen(address: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # What is accepted inherits it; asyncio sees to that only where the protocol was named.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        listener.bind((address, port))
        listener.listen(1024)
    except OSError as error:
        listener.close()
        raise PortInUse(address, port, "--http-port", error.strerror or str(error)) from error
    listener.setblocking(False)
    return listener
