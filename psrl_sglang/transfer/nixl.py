"""NIXL (UCX): RDMA where there are cards for it, else shared memory or sockets. An optional extra.

The source writes straight into the destination's arena. A NIXL request cannot be cancelled: given up, it may
still be read at the source and still be written at the destination, so both keep the memory until it has ended
(``is_drained``), or long enough. Peers of other NIXL versions do not understand each other and are refused.
"""

from __future__ import annotations

import os
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np

from psrl_sglang.store.arena import Arena
from psrl_sglang.transfer.link import Deadline, Link, PeerLost, TransferError
from psrl_sglang.transfer.transport import TransportUnusable

_MOST_BYTES = 64 << 20  # of one request: its post holds the agent's lock while it copies
_LEAST_BYTES = 2 << 20  # of the last ones: little is left to check when they are there
_PROGRESS_US = 50_000  # NIXL asks for 0, at which an idle agent burns a core; events wake the thread anyhow
_LONGEST_PAUSE_S = 0.001
_MOST_READERS = 64  # threads of all moves; made when they are needed
_ENVIRONMENT = {
    "UCX_TCP_CONN_NB": "y",  # else a peer that is silent blocks the agent for minutes
    "UCX_LOG_FILE": "stderr",
    "NIXL_LOG_LEVEL": "ERROR",
}
# The wheel brings its own RDMA libraries but takes libefa from the system, and with it the system's copies of the
# same libraries. Both then call each other's functions, and the process ends with a segmentation fault.
_WITHOUT_EFA = {"UCX_MODULES": "^efa"}
_EFA_DRIVER = Path("/sys/bus/pci/drivers/efa")


class NixlOffer(msgspec.Struct, frozen=True):
    version: str
    metadata: bytes
    address: Annotated[int, msgspec.Meta(ge=0)]
    size_bytes: Annotated[int, msgspec.Meta(ge=0)]


class Written(msgspec.Struct, tag="written", frozen=True):
    """The first ``pieces`` pieces have been written."""

    pieces: int


@dataclass(frozen=True, slots=True)
class _Way:
    peer: str
    agent: str
    address: int
    size_bytes: int


class NixlTransport:
    name = "nixl"
    is_one_sided = True

    def __init__(self, arena: Arena) -> None:
        self._version, api = _load()
        self._errors = _error_types(api)
        self._lock = threading.RLock()
        self._ways: dict[str, _Way] = {}
        self._leaving: list[_Way] = []  # forgotten, and still in use by what was given up
        self._given_up: list[tuple[Link, _Way, Any]] = []
        self._readers = ThreadPoolExecutor(_MOST_READERS, thread_name_prefix="psrl-move-nixl")
        self._memory = arena.memory  # keeps the mapping for as long as it is registered
        try:
            self._agent: Any = _make_agent(api)
            self._registered = self._agent.register_memory([(arena.address, arena.size_bytes, 0, "")], "DRAM")
            metadata = self._agent.get_agent_metadata()
        except (*self._errors, RuntimeError) as error:
            raise TransportUnusable(f"NIXL {self._version} does not start: {error}") from error
        mine = NixlOffer(self._version, metadata, arena.address, arena.size_bytes)
        self._offer = msgspec.msgpack.encode(mine)

    def offer(self) -> bytes:
        return self._offer

    def accept(self, offer: bytes) -> None:
        self._decode(offer)

    def connect(self, peer: str, offer: bytes) -> _Way:
        theirs = self._decode(offer)
        with self._lock:
            self._reap()
            if any(way.peer == peer for _, way, _ in self._given_up):
                raise TransportUnusable("an earlier write has not ended")
            way = self._ways.get(peer)
            if way is None:
                try:
                    agent = self._agent.add_remote_agent(theirs.metadata)
                except self._errors as error:
                    raise TransportUnusable(f"{type(error).__name__}: {error}") from error
                name = agent.decode() if isinstance(agent, bytes) else agent
                way = self._ways[peer] = _Way(peer, name, theirs.address, theirs.size_bytes)
            return way

    def send(
        self,
        link: Link,
        way: _Way,
        pieces: Sequence[memoryview],
        places: Sequence[int],
        read: Callable[[int], None] | None,
        deadline: Deadline,
    ) -> None:
        done = 0
        reading: list[Future[None]] = []
        try:
            for upto in _batches(pieces):
                self._write(link, way, _ranges(link, way, pieces[done:upto], places[done:upto]), deadline)
                link.send(Written(upto), deadline)
                # NIXL copies in this thread where it cannot leave that to a card, and has just had these at hand.
                if read is not None:
                    reading.append(self._readers.submit(_each, read, done, upto))
                done = upto
        finally:
            wait(reading)
        for one in reading:
            one.result()

    def receive(
        self,
        link: Link,
        offer: bytes,
        pieces: Sequence[memoryview],
        landed: Callable[[int], None],
        deadline: Deadline,
    ) -> None:
        done = 0
        while done < len(pieces):
            upto = link.receive(Written, deadline).pieces
            if not done < upto <= len(pieces):
                raise TransferError(f"{link.peer} says {upto} of {len(pieces)} pieces are written")
            _each(landed, done, upto)
            done = upto

    def is_drained(self, link: Link) -> bool:
        with self._lock:
            self._reap()
            return all(one is not link for one, _, _ in self._given_up)

    def forget(self, peer: str) -> None:
        with self._lock:
            way = self._ways.pop(peer, None)
            if way is not None:
                self._leaving.append(way)
                self._reap()

    def close(self) -> None:
        """The agent ends with its last request; until then it and the memory stay."""
        self._readers.shutdown(wait=True)
        with self._lock:
            for peer in list(self._ways):
                self.forget(peer)
            if self._given_up:
                _unfinished.append((self._agent, self._memory))
            else:
                self._agent.deregister_memory(self._registered)
            self._agent = self._registered = self._memory = None

    def _reap(self) -> None:
        """With the lock: let go of the requests that have ended, and then of the peers they were for."""
        self._given_up = [one for one in self._given_up if not self._has_ended(one[2])]
        in_use = {way.agent for _, way, _ in self._given_up}
        for way in [way for way in self._leaving if way.agent not in in_use]:
            self._leaving.remove(way)
            try:
                self._agent.remove_remote_agent(way.agent)
            except self._errors:
                pass  # NIXL dropped it by itself when the connection broke

    def _write(self, link: Link, way: _Way, batch: list[tuple[int, int, int]], deadline: Deadline) -> None:
        with self._lock:
            deadline.require(f"writing to {link.peer}")
            local, remote = (
                self._agent.get_xfer_descs([(row[side], row[2], 0) for row in batch], "DRAM") for side in (0, 1)
            )
            handle = None
            try:
                handle = self._agent.initialize_xfer("WRITE", local, remote, way.agent)
                state = self._agent.transfer(handle)
            except self._errors as error:
                self._release(handle)
                raise PeerLost(f"{link.peer}: {type(error).__name__}: {error}") from error
        pause_s = 0.0
        while state == "PROC":
            try:
                if not link.is_quiet():
                    raise PeerLost(f"{link.peer} closed the connection")
                deadline.require(f"writing to {link.peer}")
            except TransferError:
                with self._lock:
                    self._given_up.append((link, way, handle))
                raise
            time.sleep(pause_s)
            pause_s = min(pause_s + 5e-5, _LONGEST_PAUSE_S)
            with self._lock:
                try:
                    state = self._agent.check_xfer_state(handle)
                except self._errors as error:
                    self._release(handle)
                    raise PeerLost(f"{link.peer}: {type(error).__name__}: {error}") from error
        self._release(handle)
        if state != "DONE":
            raise TransferError(f"a write to {link.peer} ended as {state}")

    def _has_ended(self, handle: Any) -> bool:
        try:
            if self._agent.check_xfer_state(handle) == "PROC":
                return False
        except self._errors:
            pass  # an error is an end
        self._release(handle)
        return True

    def _release(self, handle: Any) -> None:
        if handle is None:
            return
        with self._lock:
            try:
                self._agent.release_xfer_handle(handle)
            except self._errors:
                pass  # of a peer that is gone; NIXL has freed it

    def _decode(self, offer: bytes) -> NixlOffer:
        try:
            theirs = msgspec.msgpack.decode(offer, type=NixlOffer)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise TransportUnusable(f"its offer: {error}") from error
        if theirs.version != self._version:
            raise TransportUnusable(f"NIXL {theirs.version} there, {self._version} here")
        return theirs


def _batches(pieces: Sequence[memoryview]) -> Iterator[int]:
    """Up to which piece each request goes: half of what is left, within limits."""
    size, left = 0, sum(map(len, pieces))
    for index, piece in enumerate(pieces, 1):
        size += len(piece)
        if size >= min(_MOST_BYTES, max(_LEAST_BYTES, left // 2)) or index == len(pieces):
            yield index
            left -= size
            size = 0


def _ranges(
    link: Link, way: _Way, pieces: Sequence[memoryview], places: Sequence[int]
) -> list[tuple[int, int, int]]:
    """Where from, where to, and how much, neighbours at both ends in one. Raises `TransferError`."""
    ranges: list[tuple[int, int, int]] = []
    for piece, place in zip(pieces, places, strict=True):
        size = len(piece)
        if not 0 <= place <= way.size_bytes - size:
            raise TransferError(f"{link.peer} grants {size} bytes at {place}, outside of its arena")
        here, there = np.frombuffer(piece, dtype=np.uint8).ctypes.data, way.address + place
        if ranges and ranges[-1][0] + ranges[-1][2] == here and ranges[-1][1] + ranges[-1][2] == there:
            here, there, size = ranges[-1][0], ranges[-1][1], ranges.pop()[2] + size
        ranges.append((here, there, size))
    return ranges


def _each(call: Callable[[int], None], first: int, upto: int) -> None:
    for index in range(first, upto):
        call(index)


# Agents that were closed with requests under way, and what these read or write: kept for as long as the process.
_unfinished: list[Any] = []


def _load() -> tuple[str, Any]:
    for name, value in (_ENVIRONMENT | ({} if _EFA_DRIVER.exists() else _WITHOUT_EFA)).items():
        os.environ.setdefault(name, value)
    reasons = []
    for package in ("nixl-cu12", "nixl-cu13"):
        try:
            return version(package), import_module(f"{package.replace('-', '_')}._api")
        except PackageNotFoundError:
            continue
        except ImportError as error:
            reasons.append(f"{package}: {error}")
    raise TransportUnusable("; ".join(reasons) or "neither nixl-cu12 nor nixl-cu13 is installed")


def _error_types(api: Any) -> tuple[type[Exception], ...]:
    bindings = api.nixlBind
    return tuple(
        kind
        for name in dir(bindings)
        if isinstance(kind := getattr(bindings, name), type) and issubclass(kind, Exception)
    )


def _make_agent(api: Any) -> Any:
    class Config(api.nixlBind.nixlAgentConfig):
        def __setattr__(self, name: str, value: Any) -> None:
            super().__setattr__(name, _PROGRESS_US if name == "pthrDelay" else value)

    theirs, api.nixlBind.nixlAgentConfig = api.nixlBind.nixlAgentConfig, Config
    try:
        strict = api.nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT  # the default is not safe with threads
        return api.nixl_agent(f"{os.getpid()}-{uuid.uuid4()}", api.nixl_agent_config(sync_mode=strict))
    finally:
        api.nixlBind.nixlAgentConfig = theirs
