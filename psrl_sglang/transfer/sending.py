"""The source of moves: leases what is asked for, and gives it to a destination over a link that it keeps."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from psrl_sglang.store.dram import DramTier, Lease
from psrl_sglang.store.index import Chunk
from psrl_sglang.store.sums import SUM_BYTES, checksum, cut
from psrl_sglang.transfer.auth import Signer
from psrl_sglang.transfer.exchange import Commit, Done, Grant, Granted, Offer, Run
from psrl_sglang.transfer.handshake import Party, Use, meet_destination
from psrl_sglang.transfer.link import Deadline, DeadlinePassed, Link, PeerLost, PeerRefused, TransferError
from psrl_sglang.transfer.transport import Transport, Transports

_KEPT_LINKS = 2  # idle ones to each destination
_KEPT_S = 120.0
_FORGET_S = 3600.0  # to forget a peer that lives costs it and us a descriptor or two


@dataclass(frozen=True, slots=True)
class Cargo:
    """Pages that are leased in DRAM, as the runs of an `Offer`: each lies in one range of the arena, which begins
    at its entry in ``places``, and is of its entry in ``chunks``. Owns the leases."""

    tag: str
    fingerprint: str
    runs: list[Run]
    places: list[int]
    chunks: list[Chunk]
    leases: list[Lease]

    @property
    def prefix_pages(self) -> int:
        return sum(run.pages for run in self.runs if run.pool == self.runs[0].pool)

    def release(self) -> None:
        for lease in self.leases:
            lease.release()


@dataclass(frozen=True, slots=True)
class Sent:
    """What came of one move. The destination has the first ``present_pages`` pages of the prefix; where it has
    none, ``failure`` says in one word why: "miss", "late", or "failed"."""

    present_pages: int = 0
    moved_pages: int = 0
    size_bytes: int = 0
    transport: str = ""
    reason: str = ""
    failure: str = "failed"

    @property
    def outcome(self) -> str:
        return "moved" if self.moved_pages else "present" if self.present_pages else self.failure


@dataclass(slots=True)
class _Way:
    """A link that has shaken hands."""

    address: str
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
        self._links: set[Link] = set()
        self._links_to: Counter[str] = Counter()
        self._resting: dict[str, float] = {}  # peers without a link, since when
        self._undrained: list[tuple[_Way, Cargo]] = []
        self._is_closed = False
        self._lock = threading.Lock()

    def send(self, cargo: Cargo, address: str, deadline: Deadline) -> Sent:
        """Give ``cargo`` to the worker at ``address``. Takes the cargo and releases it. Raises `TransferError`."""
        way: _Way | None = None
        try:
            way, granted = self._offer(cargo, address, deadline)
            sent = self._deliver(way, cargo, granted, deadline)
            self._keep(way)
            return sent
        except BaseException as error:
            if way is not None:
                self._drop(way, is_lost=not isinstance(error, DeadlinePassed))
            raise
        finally:
            if way is None or way.transport.is_drained(way.link):
                cargo.release()
            else:
                with self._lock:
                    self._undrained.append((way, cargo))
                self._close_idle(
                    way.peer
                )  # the next move finds another transport, or that this one is well again

    def tidy(self) -> None:
        """Close links that nobody used for long, and release what is no longer read. Call now and then."""
        now_s = time.monotonic()
        for way in self._pop_idle(now_s - _KEPT_S):
            self._drop(way, is_lost=not way.link.is_quiet())
        with self._lock:
            drained = [one for one in self._undrained if one[0].transport.is_drained(one[0].link)]
            self._undrained = [one for one in self._undrained if one not in drained]
            old = [peer for peer, since_s in self._resting.items() if since_s < now_s - _FORGET_S]
            for peer in old:
                del self._resting[peer]
                self._transports.forget(peer)
        for _, cargo in drained:
            cargo.release()

    @property
    def held(self) -> int:
        """Cargos of moves that broke off and may still be read."""
        return len(self._undrained)

    @property
    def links(self) -> int:
        return len(self._links)

    def interrupt(self) -> None:
        """Moves that are under way end, and new ones fail."""
        with self._lock:
            self._is_closed = True
            for link in self._links:
                link.shutdown()

    def close(self) -> None:
        """After the last ``send`` has returned."""
        self.interrupt()
        for way in self._pop_idle(float("inf")):
            self._drop(way, is_lost=False)
        self.tidy()

    # ---- one move ----

    def _offer(self, cargo: Cargo, address: str, deadline: Deadline) -> tuple[_Way, list[Granted]]:
        """A link on which the cargo was offered, and what the other side wants of it. Links that were kept may
        have died unnoticed; a new one must not."""
        while True:
            way = self._pop_one(address)
            is_new = way is None
            way = way or self._dial(address, deadline)
            try:
                left_s = deadline.require(f"offering to {address}")
                way.link.send(Offer(cargo.tag, cargo.fingerprint, left_s, cargo.runs), deadline)
                return way, way.link.receive(Grant, deadline).granted
            except PeerRefused:
                self._keep(way)
                raise
            except PeerLost:
                self._drop(way, is_lost=True)
                if is_new:
                    raise
            except BaseException as error:
                self._drop(way, is_lost=not isinstance(error, DeadlinePassed))
                raise

    def _deliver(self, way: _Way, cargo: Cargo, granted: Sequence[Granted], deadline: Deadline) -> Sent:
        link = way.link
        pieces, places, sums = self._pieces(cargo, granted, link.peer)
        if pieces:

            def read(index: int) -> None:
                sums[index] = sums[index] or checksum(pieces[index])

            is_all_known = all(sums)
            way.transport.send(link, way.way, pieces, places, None if is_all_known else read, deadline)
            link.send(Commit(b"".join(sums)), deadline)
        done = link.receive(Done, deadline)
        size_bytes = sum(map(len, pieces))
        return Sent(done.present_pages, done.moved_pages, size_bytes, way.transport.name, done.reason)

    def _pieces(
        self, cargo: Cargo, granted: Sequence[Granted], peer: str
    ) -> tuple[list[memoryview], list[int], list[bytes]]:
        """What was granted, cut as the destination cuts it, where it goes, and its checksums as far as known."""
        pieces: list[memoryview] = []
        sums: list[bytes] = []
        places: list[int] = []
        memory = memoryview(self._dram.arena.memory)
        offered, asked = sum(run.pages for run in cargo.runs), sum(grant.pages for grant in granted)
        if asked > offered:
            raise TransferError(f"{peer} asks for {asked} pages of {offered}")
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
            sums += self._known_sums(cargo, grant, len(pieces) - len(sums))
        return pieces, places, sums

    def _known_sums(self, cargo: Cargo, grant: Granted, pieces: int) -> list[bytes]:
        chunk = cargo.chunks[grant.run]
        if grant.pages < chunk.pages or len(chunk.sums) != pieces * SUM_BYTES:
            return [b""] * pieces
        return [chunk.sums[at : at + SUM_BYTES] for at in range(0, len(chunk.sums), SUM_BYTES)]

    # ---- links ----

    def _dial(self, address: str, deadline: Deadline) -> _Way:
        link = Link.dial(address, deadline)
        with self._lock:
            is_closed = self._is_closed
            self._links.add(link)
        try:
            if is_closed:
                raise TransferError("the engine is stopping")
            met = meet_destination(link, self._party, self._transports.offers(), self._signer, deadline)
            peer = met.party.incarnation
            with self._lock:  # from here on nobody forgets it
                self._links_to[peer] += 1
                self._resting.pop(peer, None)
        except BaseException:
            self._close(link)
            raise
        try:
            transport, way = self._transports.connect(peer, met.offers)
            link.send(Use(transport.name), deadline)
        except BaseException:
            self._close(link)
            self._leave(peer, is_lost=True)
            raise
        return _Way(address, link, peer, transport, way)

    def _pop_one(self, address: str) -> _Way | None:
        """An idle link on which the other side was not heard to end."""
        while True:
            with self._lock:
                ways = self._idle.get(address)
                if not ways:
                    return None
                way = ways.pop()
                if not ways:
                    del self._idle[address]
            if way.link.is_quiet():
                return way
            self._drop(way, is_lost=True)

    def _pop_idle(self, until_s: float) -> list[_Way]:
        """Idle links not used since, or no longer good."""
        with self._lock:
            kept: dict[str, list[_Way]] = {}
            popped: list[_Way] = []
            for address, ways in self._idle.items():
                for way in ways:
                    is_old = way.used_s < until_s or not way.link.is_quiet()
                    (popped if is_old else kept.setdefault(address, [])).append(way)
            self._idle = kept
        return popped

    def _close_idle(self, peer: str) -> None:
        with self._lock:
            popped = [way for ways in self._idle.values() for way in ways if way.peer == peer]
            kept = {address: [w for w in ways if w.peer != peer] for address, ways in self._idle.items()}
            self._idle = {address: ways for address, ways in kept.items() if ways}
        for way in popped:
            self._drop(way, is_lost=False)

    def _keep(self, way: _Way) -> None:
        way.used_s = time.monotonic()
        with self._lock:
            ways = self._idle.setdefault(way.address, [])
            if len(ways) < _KEPT_LINKS and not self._is_closed:
                ways.append(way)
                return
        self._drop(way, is_lost=False)

    def _drop(self, way: _Way, *, is_lost: bool) -> None:
        self._close(way.link)
        self._leave(way.peer, is_lost=is_lost)

    def _close(self, link: Link) -> None:
        link.close()
        with self._lock:
            self._links.discard(link)

    def _leave(self, peer: str, *, is_lost: bool) -> None:
        """What a transport keeps for a peer goes with the last link to it, if that was lost."""
        with self._lock:
            self._links_to[peer] -= 1
            if self._links_to[peer]:
                return
            del self._links_to[peer]
            if is_lost:
                self._transports.forget(peer)
            else:
                self._resting[peer] = time.monotonic()
