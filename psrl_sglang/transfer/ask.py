"""Asking workers over ZMQ: one socket a question, one deadline for all that are asked at once.

A question that is never answered leaves a REQ of ours unusable, so each gets a fresh one, which is closed with the
call. Trouble of the peer is an answer with a reason, never an exception.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Literal

import zmq
import zmq.asyncio

from psrl_sglang.transfer import messages as wire
from psrl_sglang.transfer.auth import NotAuthorized, Signer

Ask = tuple[str, wire.Message]
"""Whom, as ``host:port``, and what."""

_EXPECTED: dict[type[wire.Message], type[wire.Message]] = {
    wire.MoveWorkerMsg: wire.MoveWorkerRetMsg,
    wire.PinWorkerMsg: wire.PinWorkerRetMsg,
    wire.UnpinWorkerMsg: wire.UnpinWorkerRetMsg,
    wire.ClearWorkerMsg: wire.ClearWorkerRetMsg,
    wire.HealthWorkerMsg: wire.HealthWorkerRetMsg,
    wire.LookupWorkerMsg: wire.LookupWorkerRetMsg,
}


@dataclass(frozen=True, slots=True)
class Answer:
    """What became of one question. ``reply`` is of the type the question calls for, and set only with "ok";
    "refused": the worker said why not; "silent": nothing came in time; "garbled": no answer of ours came."""

    address: str
    kind: Literal["ok", "refused", "silent", "garbled"]
    reply: Any = None
    problem: str = ""


class AsyncAsker:
    """Asks from one event loop. Borrows the context. At most ``at_once`` questions have a socket at a time, for
    ZMQ ends the process when it has no file descriptor left; waiting for one counts as waiting for the answer."""

    def __init__(self, context: zmq.asyncio.Context, signer: Signer, at_once: int = 128) -> None:
        self._context = context
        self._signer = signer
        self._room = asyncio.Semaphore(at_once)

    async def ask_all(self, asks: Sequence[Ask], timeout_s: float) -> list[Answer]:
        """The answers of several workers at once, in the order of ``asks``, within ``timeout_s``."""
        return list(await asyncio.gather(*(self._ask(*ask, timeout_s) for ask in asks)))

    async def _ask(self, address: str, message: wire.Message, timeout_s: float) -> Answer:
        try:
            async with asyncio.timeout(timeout_s), self._room:
                frames = await self._exchange(address, wire.encode(message))
        except TimeoutError:
            return _silent(address, timeout_s)
        except zmq.ZMQError as error:
            return Answer(address, "garbled", problem=f"cannot ask {address}: {error.strerror}")
        return _read(address, message, frames, self._signer)

    async def _exchange(self, address: str, payload: bytes) -> list[bytes]:
        socket = self._context.socket(zmq.REQ)
        try:
            _connect(socket, address)
            await socket.send_multipart(self._signer.sign(payload))
            return await socket.recv_multipart()
        finally:
            socket.close(linger=0)


def ask_all_blocking(
    context: zmq.Context[Any], asks: Sequence[Ask], signer: Signer, timeout_s: float
) -> list[Answer]:
    """The answers of several workers at once, in the order of ``asks``, for a thread without an event loop."""
    deadline = time.monotonic() + timeout_s
    answers = {index: _silent(address, timeout_s) for index, (address, _) in enumerate(asks)}
    waiting: dict[Any, int] = {}
    poller = zmq.Poller()
    with ExitStack() as owned:
        for index, (address, message) in enumerate(asks):
            try:
                socket = context.socket(zmq.REQ)
                owned.callback(socket.close, linger=0)
                _connect(socket, address)
                socket.send_multipart(signer.sign(wire.encode(message)), zmq.DONTWAIT)
            except zmq.ZMQError as error:
                problem = f"cannot ask {address}: {error.strerror}"
                answers[index] = Answer(address, "garbled", problem=problem)
                continue
            poller.register(socket, zmq.POLLIN)
            waiting[socket] = index
        while waiting and (left_s := deadline - time.monotonic()) > 0:
            for socket, _ in poller.poll(int(left_s * 1000) + 1):
                index = waiting.pop(socket)
                poller.unregister(socket)
                answers[index] = _read(*asks[index], socket.recv_multipart(), signer)
    return [answers[index] for index in range(len(asks))]


def _connect(socket: Any, address: str) -> None:
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.MAXMSGSIZE, wire.MAX_MESSAGE_BYTES)
    if address.startswith(("[", "tcp://[")):
        socket.setsockopt(zmq.IPV6, 1)
    socket.connect(address if "://" in address else f"tcp://{address}")


def _silent(address: str, timeout_s: float) -> Answer:
    return Answer(address, "silent", problem=f"no answer from {address} in {timeout_s:g} s")


def _read(address: str, asked: wire.Message, frames: list[bytes], signer: Signer) -> Answer:
    try:
        reply = wire.decode(signer.check(frames), wire.CommandReply)
    except NotAuthorized as error:
        return Answer(address, "garbled", problem=f"an answer of {address} that cannot be trusted: {error}")
    except wire.BadMessage as error:
        return Answer(address, "garbled", problem=f"an answer of {address} that is none: {error}")
    if isinstance(reply, wire.ErrorMsg):
        return Answer(address, "refused", problem=f"{address}: {reply.error}")
    if not isinstance(reply, _EXPECTED.get(type(asked), wire.Message)):
        problem = f"{address} answered a {type(asked).__name__} with a {type(reply).__name__}"
        return Answer(address, "garbled", problem=problem)
    return Answer(address, "ok", reply)
