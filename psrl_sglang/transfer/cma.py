"""Between processes of one host: the destination copies straight out of the source's memory.

Cross Memory Attach, process_vm_readv(2). The destination does the copying, so nothing can land late. It needs one
PID namespace and the permission to trace the source: the same user, and where Yama is on (scope 1) the source
allows it for itself.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Annotated

import msgspec
import numpy as np

from psrl_sglang.store.arena import Arena
from psrl_sglang.transfer.link import Deadline, Link, TransferError
from psrl_sglang.transfer.transport import TransportUnusable

_PR_SET_PTRACER = 0x59616D61
_ANY = ctypes.c_ulong(-1)
_TOKEN_BYTES = 32
_COPIERS = 2  # of one move; one alone does not use all that memory can do
_MOST_HELPERS = 64  # of all moves; made when they are needed


class CmaOffer(msgspec.Struct, frozen=True):
    """Where a process keeps a random number: who reads it there reads the right process."""

    host: str
    pid: Annotated[int, msgspec.Meta(gt=0, lt=1 << 31)]
    token_address: Annotated[int, msgspec.Meta(ge=0)]
    token: bytes


class Addresses(msgspec.Struct, tag="addresses", frozen=True):
    """Of all pieces, as little-endian 64-bit numbers."""

    addresses: bytes


class CmaTransport:
    name = "cma"
    is_one_sided = False

    def __init__(self, arena: Arena) -> None:
        self._helpers = ThreadPoolExecutor(_MOST_HELPERS, thread_name_prefix="psrl-move-copy")
        self._library = ctypes.CDLL(None, use_errno=True)
        try:
            self._read = self._library.process_vm_readv
        except AttributeError:
            raise TransportUnusable("this system has no process_vm_readv") from None
        number, pointer = ctypes.c_ulong, ctypes.c_void_p
        self._read.argtypes = [ctypes.c_int, pointer, number, pointer, number, number]
        self._read.restype = ctypes.c_ssize_t
        self._library.prctl(_PR_SET_PTRACER, _ANY, 0, 0, 0)  # refused, harmlessly, where there is no Yama
        self._token = np.frombuffer(os.urandom(_TOKEN_BYTES), dtype=np.uint8)
        mine = CmaOffer(_host(), os.getpid(), self._token.ctypes.data, self._token.tobytes())
        self._offer = msgspec.msgpack.encode(mine)
        self.accept(self._offer)  # itself: where even that is forbidden nothing will work

    def offer(self) -> bytes:
        return self._offer

    def accept(self, offer: bytes) -> None:
        theirs = _decode(offer)
        if theirs.host != _host():
            raise TransportUnusable("another host or PID namespace")
        seen = np.zeros(_TOKEN_BYTES, dtype=np.uint8)
        try:
            self._copy(theirs.pid, theirs.token_address, seen.data)
        except TransferError as error:
            raise TransportUnusable(str(error)) from error
        if seen.tobytes() != theirs.token:
            raise TransportUnusable(f"process {theirs.pid} is another one")

    def connect(self, peer: str, offer: bytes) -> None:
        if _decode(offer).host != _host():
            raise TransportUnusable("another host or PID namespace")

    def send(
        self,
        link: Link,
        way: None,
        pieces: Sequence[memoryview],
        places: Sequence[int],
        read: Callable[[int], None] | None,
        deadline: Deadline,
    ) -> None:
        addresses = np.array([_address(piece) for piece in pieces], dtype="<u8")
        link.send(Addresses(addresses.tobytes()), deadline)
        if read is not None:
            for index in range(len(pieces)):
                read(index)

    def receive(
        self,
        link: Link,
        offer: bytes,
        pieces: Sequence[memoryview],
        landed: Callable[[int], None],
        deadline: Deadline,
    ) -> None:
        pid = _decode(offer).pid
        data = link.receive(Addresses, deadline).addresses
        if len(data) != 8 * len(pieces):
            raise TransferError(f"{len(data)} bytes of addresses for {len(pieces)} pieces")
        addresses = np.frombuffer(data, dtype="<u8")
        left = iter(range(len(pieces)))
        must_stop = threading.Event()

        def copy() -> None:
            try:
                for index in left:
                    if must_stop.is_set():
                        return
                    deadline.require("copying")
                    self._copy(pid, int(addresses[index]), pieces[index])
                    landed(index)
            finally:
                must_stop.set()  # all are taken, or one failed

        helpers = [self._helpers.submit(copy) for _ in range(min(_COPIERS, len(pieces)) - 1)]
        try:
            copy()
        finally:
            wait(helpers)
        for helper in helpers:
            helper.result()

    def is_drained(self, link: Link) -> bool:
        return True

    def forget(self, peer: str) -> None:
        pass

    def close(self) -> None:
        self._helpers.shutdown(wait=True)

    def _copy(self, pid: int, address: int, into: memoryview) -> None:
        at = 0
        while at < len(into):
            local = np.array([_address(into) + at, len(into) - at], dtype=np.uint64)
            remote = np.array([address + at, len(into) - at], dtype=np.uint64)
            got = self._read(pid, local.ctypes.data, 1, remote.ctypes.data, 1, 0)
            if got <= 0:
                error = ctypes.get_errno()
                raise TransferError(f"process_vm_readv of process {pid}: {os.strerror(error)}")
            at += got


def _address(view: memoryview) -> int:
    return np.frombuffer(view, dtype=np.uint8).ctypes.data


def _host() -> str:
    with open("/proc/sys/kernel/random/boot_id") as file:
        return file.read().strip() + os.readlink("/proc/self/ns/pid")


def _decode(offer: bytes) -> CmaOffer:
    try:
        return msgspec.msgpack.decode(offer, type=CmaOffer)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise TransportUnusable(f"its offer: {error}") from error
