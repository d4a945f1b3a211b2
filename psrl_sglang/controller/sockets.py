"""The two sockets that workers speak to: a PULL for what they report, a ROUTER for what they ask.

Nothing that arrives stops a loop: what cannot be read is counted, logged now and then, and answered with an
`ErrorMsg` where the sender waits for an answer.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import zmq
import zmq.asyncio

from psrl_sglang.controller.frames import (
    BAD_FRAMING,
    NOT_TAKEN,
    Complaints,
    Rejected,
    decode,
    payloads,
    question,
)
from psrl_sglang.controller.inbox import Inbox, local_address
from psrl_sglang.controller.metrics import Metrics
from psrl_sglang.transfer import messages as wire
from psrl_sglang.transfer.auth import Signer

MAX_FRAME_BYTES = 16 << 20  # of one report: two million chunks
_WAITING_MESSAGES = 1000
_MAX_STATUS_BYTES = 256 << 10  # kept as long as the worker is


class PortInUse(Exception):
    """``port`` is what could not be had, ``option`` its name on the command line."""

    def __init__(self, host: str, port: int, option: str, why: str) -> None:
        super().__init__(f"cannot listen on {host}:{port}: {why}")
        self.port = port
        self.option = option


class WorkerSockets:
    """Owns both sockets: `bind`, `run` until cancelled, `close`."""

    def __init__(
        self, context: zmq.asyncio.Context, inbox: Inbox, signer: Signer, metrics: Metrics, advertise: str = ""
    ) -> None:
        self._inbox = inbox
        self._signer = signer
        self._metrics = metrics
        self._advertise = advertise
        self._complaints = Complaints()
        self._pull: zmq.asyncio.Socket = context.socket(zmq.PULL)
        self._router: zmq.asyncio.Socket = context.socket(zmq.ROUTER)
        for socket in (self._pull, self._router):
            socket.setsockopt(zmq.LINGER, 0)
            socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
            socket.setsockopt(zmq.RCVHWM, _WAITING_MESSAGES)
        self._host = ""
        self.pull_port = 0
        self.reply_port = 0

    def bind(self, host: str, pull_port: int, reply_port: int) -> None:
        """0 takes a free port. Raises `PortInUse`."""
        self._host = host
        self.pull_port = _bind(self._pull, host, pull_port, "--pull-port")
        self.reply_port = _bind(self._router, host, reply_port, "--reply-port")

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._hear())
            tasks.create_task(self._answer())

    def close(self) -> None:
        self._pull.close(linger=0)
        self._router.close(linger=0)

    async def _hear(self) -> None:
        while True:
            frames = await self._pull.recv_multipart()
            try:
                said = payloads(frames, self._signer)
            except Rejected as rejected:
                self._reject(rejected)
                said = []
            for payload in said:
                try:
                    self._inbox.hear(decode(payload, wire.WorkerEvent))
                except Rejected as rejected:
                    self._reject(rejected)
            await asyncio.sleep(0)  # a receive that finds a message waiting does not let others run

    async def _answer(self) -> None:
        while True:
            frames: list[Any] = await self._router.recv_multipart(copy=False)
            envelope = 2 if len(frames) > 1 and not frames[1].bytes else 1
            parts = [frame.bytes for frame in frames]
            try:
                reply = self._reply(parts[envelope:], _peer_ip(frames[-1]))
            except Rejected as rejected:
                self._reject(rejected)
                reply = wire.ErrorMsg(str(rejected))
            # A peer that has gone meanwhile, or does not read, gets nothing; a ROUTER does not wait for it.
            with contextlib.suppress(zmq.ZMQError):
                await self._router.send_multipart(parts[:envelope] + self._signer.sign(wire.encode(reply)))
            await asyncio.sleep(0)

    def _reply(self, frames: list[bytes], peer_ip: str) -> wire.Message:
        if not frames:
            raise Rejected(BAD_FRAMING, "a request without a payload")
        payload = question(frames, self._signer)
        request = decode(payload, wire.WorkerRequest)
        if isinstance(request, wire.RegisterMsg | wire.HeartbeatMsg) and len(payload) > _MAX_STATUS_BYTES:
            raise Rejected(NOT_TAKEN, f"{len(payload)} bytes about one worker; at most {_MAX_STATUS_BYTES}")
        host = self._advertise or local_address(self._host, peer_ip)
        return self._inbox.answer(
            request, f"[{host}]:{self.reply_port}" if ":" in host else f"{host}:{self.reply_port}"
        )

    def _reject(self, rejected: Rejected) -> None:
        self._metrics.rejected.labels(rejected.reason).inc()
        self._complaints.about(rejected)


def _peer_ip(frame: zmq.Frame) -> str:
    try:
        return str(frame.get("Peer-Address"))
    except zmq.ZMQError:
        return "127.0.0.1"


def _bind(socket: zmq.asyncio.Socket, host: str, port: int, option: str) -> int:
    if ":" in host:
        socket.setsockopt(zmq.IPV6, 1)
        host = f"[{host}]"
    try:
        socket.bind(f"tcp://{host}:{port or '*'}")
    except zmq.ZMQError as error:
        raise PortInUse(host, port, option, error.strerror or str(error)) from error
    return int(socket.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2])
