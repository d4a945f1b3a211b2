"""One connection between two move workers: small messages and raw bytes, every step under a deadline.

A message is four bytes of length and a MessagePack value. The end of the connection is the news of the other
side's death; within a move there is no other.
"""

from __future__ import annotations

import select
import socket
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import msgspec

MAX_MESSAGE_BYTES = 64 << 20
MAX_GREETING_BYTES = 1 << 20  # before the other side has shown that it knows the secret
_MOST_VIEWS = 512  # of one sendmsg; the kernel takes 1024

T = TypeVar("T")


class TransferError(Exception):
    """A move that did not succeed; the text is the reason that its caller is told."""


class PeerLost(TransferError):
    """The connection ended."""


class PeerRefused(TransferError):
    """The other side said no, and why."""


class DeadlinePassed(TransferError):
    """Nothing, or not enough, came in time."""


class Deadline:
    """A point in time (monotonic clock) that all steps of a move share."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.end_s = time.monotonic() + seconds

    @property
    def left_s(self) -> float:
        return self.end_s - time.monotonic()

    def require(self, what: str) -> float:
        """Seconds left, more than none. Raises `DeadlinePassed`."""
        left_s = self.left_s
        if left_s <= 0:
            raise DeadlinePassed(f"{what}: {self.seconds:.1f} s are over")
        return left_s


class Link:
    """Owns its socket. One thread at a time."""

    def __init__(self, sock: socket.socket, peer: str) -> None:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        self.peer = peer
        self._socket = sock
        self.most_bytes = MAX_GREETING_BYTES

    @classmethod
    def dial(cls, address: str, deadline: Deadline) -> Link:
        """Connect to ``host:port``. Raises `TransferError`."""
        host, _, port = address.removeprefix("tcp://").rpartition(":")
        if not host or not port.isdigit() or not 0 < int(port) < 1 << 16:
            raise TransferError(f"{address!r} is no address; it must be host:port")
        left_s = deadline.require(f"connecting to {address}")
        try:
            return cls(socket.create_connection((host.strip("[]"), int(port)), left_s), address)
        except TimeoutError:
            raise DeadlinePassed(f"{address} did not accept a connection in {left_s:.1f} s") from None
        except OSError as error:
            raise PeerLost(f"{address}: {error.strerror or error}") from error

    def close(self) -> None:
        self._socket.close()

    def shutdown(self) -> None:
        """End the connection for a thread that waits on it, which then closes it."""
        shutdown(self._socket)

    def is_quiet(self) -> bool:
        """Whether the other side is, as far as is known, still there. It never speaks unasked, so that anything to
        read between two moves is its end."""
        if self._socket.fileno() < 0:
            return False
        return not select.select([self._socket], [], [], 0)[0]

    def send(self, message: msgspec.Struct, deadline: Deadline) -> None:
        body = msgspec.msgpack.encode(message)
        if len(body) > MAX_MESSAGE_BYTES:
            raise TransferError(f"a message of {len(body)} bytes; at most {MAX_MESSAGE_BYTES}")
        self.send_views([len(body).to_bytes(4, "big"), body], deadline)

    def receive(self, kind: type[T] | Any, deadline: Deadline) -> T:
        """The next message, of the type or union ``kind``; a `Refused` is raised as `PeerRefused`."""
        head = bytearray(4)
        self.receive_into(memoryview(head), deadline)
        size = int.from_bytes(head, "big")
        if size > self.most_bytes:
            raise TransferError(f"{self.peer} announces a message of {size} bytes; at most {self.most_bytes}")
        body = bytearray(size)
        self.receive_into(memoryview(body), deadline)
        try:
            message = msgspec.msgpack.decode(body, type=kind | Refused)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise TransferError(f"{self.peer} sent something else than was due: {error}") from error
        if isinstance(message, Refused):
            raise PeerRefused(message.reason)
        return message

    def send_views(self, views: Sequence[bytes | memoryview], deadline: Deadline) -> None:
        left = [memoryview(view).cast("B") for view in views if len(view)]
        left.reverse()
        while left:
            batch = left[: -_MOST_VIEWS - 1 : -1]
            sent = self._call(self._socket.sendmsg, batch, deadline)
            while sent:
                size = len(left[-1])
                if sent < size:
                    left[-1] = left[-1][sent:]
                    break
                sent -= size
                left.pop()

    def receive_into(self, view: memoryview, deadline: Deadline) -> None:
        while view:
            got = self._call(self._socket.recv_into, view, deadline)
            if not got:
                raise PeerLost(f"{self.peer} closed the connection")
            view = view[got:]

    def _call(self, call: Callable[[Any], int], argument: Any, deadline: Deadline) -> int:
        self._socket.settimeout(deadline.require(f"waiting for {self.peer}"))
        try:
            return call(argument)
        except TimeoutError:
            raise DeadlinePassed(f"{self.peer} was silent until {deadline.seconds:.1f} s were over") from None
        except OSError as error:
            raise PeerLost(f"{self.peer}: {error.strerror or error}") from error


def shutdown(sock: socket.socket) -> None:
    """Wake whoever waits on a socket, which ``close`` does not."""
    try:
        sock.shutdown(socket.SHUT_RDWR)
    except OSError:
        pass  # not connected, or closed by the other side


class Refused(msgspec.Struct, tag="refused", frozen=True):
    """In place of any message: no, and why."""

    reason: str
