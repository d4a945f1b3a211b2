"""One connection between two move workers: small messages and raw bytes, every step under a deadline.

A message is four bytes of length and a MessagePack value. The end of the connection is the news of the other
side's death; within a move there is no other.
"""

from __future__ import annotations

import select
import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import msgspec

MAX_MESSAGE_BYTES = 64 << 20
MAX_GREETING_BYTES = 1 << 20  # before the other side has shown that it knows the secret
_MOST_VIEWS = 512  # of one sendmsg; the kernel takes 1024
_MOST_REASON = 2000
_MOST_HOST = 255
_BACKLOG = 64
# A host that vanished is found out in half a minute also where nothing is being sent.
_KEEPALIVE = ((socket.TCP_KEEPIDLE, 10), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 4))

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
    """A point in time (monotonic clock) that all steps of a move share. ``seconds`` is a number."""

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
    """Owns its socket. One thread at a time, but for ``shutdown``."""

    def __init__(self, sock: socket.socket, peer: str) -> None:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in _KEEPALIVE:
            sock.setsockopt(socket.IPPROTO_TCP, option, value)
        self.peer = peer
        self._socket = sock
        self.most_bytes = MAX_GREETING_BYTES

    @classmethod
    def dial(cls, address: str, deadline: Deadline) -> Link:
        """Connect to ``host:port``. Raises `TransferError`."""
        host, port = parse_address(address)
        trouble = f"{address}: no such host"
        for family, _, _, _, place in _resolved(host, port, address, deadline):
            left_s = deadline.require(f"connecting to {address}")
            sock = socket.socket(family, socket.SOCK_STREAM)
            try:
                sock.settimeout(left_s)
                sock.connect(place)
                return cls(sock, address)
            except TimeoutError:
                sock.close()
                raise DeadlinePassed(f"{address} did not accept a connection in {left_s:.1f} s") from None
            except OSError as error:
                sock.close()
                trouble = f"{address}: {error.strerror or error}"
        raise PeerLost(trouble)

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
        poller = select.poll()  # select() takes no descriptors from 1024 on
        poller.register(self._socket, select.POLLIN)
        return not poller.poll(0)

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


def listen(host: str, port: int) -> socket.socket:
    """Raises ``OSError`` with the address."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=_BACKLOG)
    except OSError as error:
        raise OSError(error.errno, f"cannot listen on {host}:{port}: {error.strerror}") from error


def address_of(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def parse_address(address: str) -> tuple[str, int]:
    """Of ``host:port``, ``[host]:port`` or either behind ``tcp://``. Raises `TransferError`."""
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    is_port = port.isascii() and port.isdigit() and len(port) <= 5 and 0 < int(port) < 1 << 16
    if not is_port or not 0 < len(host) <= _MOST_HOST:
        raise TransferError(f"{clipped(address)!r} is no address; it must be host:port")
    return host.strip("[]"), int(port)


def _resolved(host: str, port: int, address: str, deadline: Deadline) -> list[Any]:
    """What `socket.getaddrinfo` says. The system's resolver knows no deadline, so that names are looked up on a
    thread, which is left behind when that takes too long."""
    try:
        return socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)
    except (OSError, ValueError):
        pass  # a name
    found: list[Any] = []

    def look_up() -> None:
        try:
            found.append(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM))
        except (OSError, ValueError) as error:  # ValueError: such a thing cannot be a name
            found.append(error)

    thread = threading.Thread(target=look_up, name="psrl-move-resolve", daemon=True)
    thread.start()
    thread.join(deadline.require(f"looking up {address}"))
    if not found:
        raise DeadlinePassed(f"{address} was not found in {deadline.seconds:.1f} s")
    if isinstance(found[0], Exception):
        raise PeerLost(f"{address}: {getattr(found[0], 'strerror', None) or found[0]}")
    return found[0]


def clipped(text: str) -> str:
    """A text of others, to be repeated in a message or a log."""
    return text if len(text) <= _MOST_REASON else f"{text[:_MOST_REASON]}…"


def shutdown(sock: socket.socket) -> None:
    """Wake whoever waits on a socket, which ``close`` does not."""
    try:
        sock.shutdown(socket.SHUT_RDWR)
    except OSError:
        pass  # not connected, or closed by the other side


class Refused(msgspec.Struct, tag="refused", frozen=True):
    """In place of any message: no, and why."""

    reason: str

    @classmethod
    def because(cls, error: Exception) -> Refused:
        return cls(clipped(str(error)))
