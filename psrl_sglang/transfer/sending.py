"""The source of moves: leases what is asked for, and gives it to a destination over a link that it keeps."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from psrl_sglang.store.dram import DramTier, Lease
from psrl_sglang.transfer.auth import Signer
from psrl_sglang.transfer.exchange import Commit, Done, Grant, Granted, Offer, Run, cut, sums_of
from psrl_sglang.transfer.handshake import Party, Use, meet_destination
from psrl_sglang.transfer.link import Deadline, Link, TransferError
from psrl_sglang.transfer.transport import Transport, Transports

_KEPT_LINKS = 2  # idle ones to each destination
_KEPT_S = 120.0


@dataclass(frozen=True, slots=True)
class Cargo:
    """Pages that are leased in DRAM, as the runs of an `Offer`: each lies in one range of the arena, which begins
    at its entry in ``places``. Owns the leases."""

    tag: str
    fingerprint: str
    runs: list[Run]
    places: list[int]
    leases: list[Lease]

    def release(self) -> None:
        for lease in self.leases:
            lease.release()


@dataclass(frozen=True, slots=True)
class Sent:
    """What came of one move. The destination has the first ``present_pages`` pages of the prefix."""

    present_pages: int
    moved_pages: int
    size_bytes: int
    transport: str
    reason: str = ""


@dataclass(slots=True)
class _Way:
    """A link that has shaken hands."""

    link: Link
    peer: str
    transport: Transport
    way: Any
    used_s: float = field(default_factory=time.monotonic)


class Sender:
    """Thread-safe; one move uses one link. Owns the links, and the leases of moves that NIXL may still read."""

    def __init__(self, dram: DramTier, transports: Transports, party: Party, signer: Signer) -> None:
        self._dram = dram
        self._transports = transports
        self._party = party
        self._signer = signer
        self._idle: dict[str, list[_Way]] = {}
        self._undrained: list[Cargo] = []
        self._is_closed = False
        self._lock = threading.Lock()
        self._summing = ThreadPoolExecutor(2, thread_name_prefix="psrl-move-sum")

    def send(self, cargo: Cargo, address: str, deadline: Deadline) -> Sent:
        """Give ``cargo`` to the worker at ``address``. Takes the cargo and releases it. Raises `TransferError`."""
        is_over = False
        way: _Way | None = None
        try:
            way = self._take(address, deadline)
            sent = self._exchange(way, cargo, deadline)
            is_over = True
            self._keep(address, way)
            return sent
        except TransferError:
            if way is not None:
                way.link.close()
                self._forget_if_last(way.peer)
            raise
        finally:
            if is_over or self._transports.is_drained():
                cargo.release()
            else:
                with self._lock:
                    self._undrained.append(cargo)

    def tidy(self) -> None:
        """Close links that nobody used for long, and release what is no longer read. Call now and then."""
        oldest_s = time.monotonic() - _KEPT_S
        with self._lock:
            for address, ways in list(self._idle.items()):
                for way in [way for way in ways if way.used_s < oldest_s or not way.link.is_quiet()]:
                    ways.remove(way)
                    way.link.close()
                    if not any(one.peer == way.peer for one in ways):
                        self._transports.forget(way.peer)
                if not ways:
                    del self._idle[address]
            if self._undrained and self._transports.is_drained():
                for cargo in self._undrained:
                    cargo.release()
                self._undrained.clear()

    @property
    def held(self) -> int:
        """Cargos of moves that broke off and may still be read."""
        return len(self._undrained)

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            for way in [way for ways in self._idle.values() for way in ways]:
                way.link.close()
            self._idle.clear()
        self._summing.shutdown(wait=True, cancel_futures=True)

    def _exchange(self, way: _Way, cargo: Cargo, deadline: Deadline) -> Sent:
        link = way.link
        left_s = deadline.require(f"offering to {link.peer}")
        link.send(Offer(cargo.tag, cargo.fingerprint, left_s, cargo.runs), deadline)
        granted = link.receive(Grant, deadline).granted
        pieces, places = self._pieces(cargo, granted, link.peer)
        size_bytes = sum(map(len, pieces))
        if pieces:
            sums: Future[bytes] = self._summing.submit(sums_of, pieces)
            try:
                way.transport.send(link, way.way, pieces, places, deadline)
                told = sums.result(max(0.0, deadline.left_s))
            finally:
                sums.cancel()
            link.send(Commit(told), deadline)
        done = link.receive(Done, deadline)
        return Sent(done.present_pages, done.moved_pages, size_bytes, way.transport.name, done.reason)

    def _pieces(
        self, cargo: Cargo, granted: Sequence[Granted], peer: str
    ) -> tuple[list[memoryview], list[int]]:
        """What was granted, cut as the destination cuts it: its ranges are whole there and may not be here."""
        pieces: list[memoryview] = []
        places: list[int] = []
        memory = memoryview(self._dram.arena.memory)
        for grant in granted:
            if not 0 <= grant.run < len(cargo.runs):
                raise TransferError(f"{peer} asks for run {grant.run} of {len(cargo.runs)}")
            run = cargo.runs[grant.run]
            if grant.first < 0 or grant.pages <= 0 or grant.first + grant.pages > run.pages:
                raise TransferError(f"{peer} asks for {grant.pages} pages from {grant.first} of {run.pages}")
            size = self._dram.page_bytes[run.pool]
            begin = cargo.places[grant.run] + grant.first * size
            at = grant.place
            for piece in cut(memory[begin : begin + grant.pages * size]):
                pieces.append(piece)
                places.append(at)
                at += len(piece)
        return pieces, places

    def _take(self, address: str, deadline: Deadline) -> _Way:
        with self._lock:
            ways = self._idle.get(address, [])
            while ways:
                way = ways.pop()
                if way.link.is_quiet():
                    return way
                way.link.close()
        return self._dial(address, deadline)

    def _dial(self, address: str, deadline: Deadline) -> _Way:
        link = Link.dial(address, deadline)
        try:
            met = meet_destination(link, self._party, self._transports.offers(), self._signer, deadline)
            peer = met.party.incarnation
            transport, way = self._transports.connect(peer, met.offers)
            link.send(Use(transport.name), deadline)
        except BaseException:
            link.close()
            raise
        return _Way(link, peer, transport, way)

    def _keep(self, address: str, way: _Way) -> None:
        way.used_s = time.monotonic()
        with self._lock:
            ways = self._idle.setdefault(address, [])
            if len(ways) < _KEPT_LINKS and not self._is_closed:
                ways.append(way)
                return
        way.link.close()

    def _forget_if_last(self, peer: str) -> None:
        """What a transport keeps for a peer goes when the last link to it broke: it may be another one by now."""
        with self._lock:
            if any(way.peer == peer for ways in self._idle.values() for way in ways):
                return
        self._transports.forget(peer)
