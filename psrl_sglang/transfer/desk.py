"""Where a move worker takes commands: a ZeroMQ socket that any number of callers may use at once.

LMCache's controller speaks REQ and gives each worker one call at a time; a ROUTER understands it, and a caller
that went away, or a command that takes long, stops nobody.
"""

from __future__ import annotations

import logging
import os
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

import zmq

from psrl_sglang.transfer.auth import NotAuthorized, Signer
from psrl_sglang.transfer.link import clipped
from psrl_sglang.transfer.messages import (
    MAX_MESSAGE_BYTES,
    BadMessage,
    Command,
    ErrorMsg,
    decode,
    encode,
)

logger = logging.getLogger(__name__)

_CLOSE_S = 5.0
_LINGER_MS = 200

Reply = Callable[[Any], None]


class CommandDesk:
    """Owns its socket and thread. ``handle`` gets each command and what answers it: to be called once, on any
    thread; ``handle`` itself runs on the desk's thread and must not wait. What was answered before ``close`` goes
    out; later answers go nowhere."""

    def __init__(self, host: str, port: int, signer: Signer, handle: Callable[[Any, Reply], None]) -> None:
        self._signer = signer
        self._handle = handle
        self._answers: deque[list[bytes]] = deque()
        self._lock = threading.Lock()
        self._is_free = False
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._context = zmq.Context(io_threads=1)
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, _LINGER_MS)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        self._is_closing = False
        try:
            self.port = self._bind(host, port)
        except zmq.ZMQError as error:
            self._free()
            raise OSError(error.errno, f"cannot listen on {host}:{port}: {error}") from error
        self._thread = threading.Thread(target=self._run, name="psrl-move-desk", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._is_closing = True
        os.eventfd_write(self._wake, 1)
        self._thread.join(_CLOSE_S)
        self._free()

    def _bind(self, host: str, port: int) -> int:
        if ":" in host:
            self._socket.setsockopt(zmq.IPV6, 1)
            host = f"[{host}]"
        if port:
            self._socket.bind(f"tcp://{host}:{port}")
            return port
        return self._socket.bind_to_random_port(f"tcp://{host}")

    def _free(self) -> None:
        self._socket.close()
        self._context.term()
        with self._lock:
            self._is_free = True
            os.close(self._wake)

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._wake, zmq.POLLIN)
        while not self._is_closing:
            try:
                self._serve(dict(poller.poll()))
            except zmq.ZMQError as error:
                logger.warning("psrl: a move worker's command socket: %s", error)
        self._send_answers()

    def _serve(self, ready: dict[Any, int]) -> None:
        if self._wake in ready:
            os.eventfd_read(self._wake)
        self._send_answers()
        if self._socket in ready:
            self._take(self._socket.recv_multipart())

    def _send_answers(self) -> None:
        while self._answers:
            self._socket.send_multipart(self._answers.popleft())

    def _take(self, frames: list[bytes]) -> None:
        # A REQ caller's message has an empty frame in front, which its answer needs too.
        head = 2 if len(frames) > 2 and not frames[1] else 1
        envelope = frames[:head]

        def reply(answer: Any) -> None:
            self._answers.append([*envelope, *self._signer.sign(encode(answer))])
            with self._lock:
                if not self._is_free:
                    os.eventfd_write(self._wake, 1)

        try:
            command = decode(self._signer.check(frames[head:]), Command)
        except (BadMessage, NotAuthorized) as error:
            logger.info("psrl: a move worker refuses a message: %s", error)
            reply(ErrorMsg(clipped(str(error))))
            return
        try:
            self._handle(command, reply)
        except Exception as error:
            logger.exception("psrl: command %s failed", type(command).__name__)
            reply(ErrorMsg(clipped(f"{type(command).__name__}: {error!r}")))
