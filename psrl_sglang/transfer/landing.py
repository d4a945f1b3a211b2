"""The destination of moves: takes offered pages into the arena, checks them, and only then makes them visible."""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from psrl_sglang.keys import KEY_BYTES, count, key_at
from psrl_sglang.store.dram import Reservation
from psrl_sglang.store.store import KVStore
from psrl_sglang.transfer.auth import Signer
from psrl_sglang.transfer.exchange import Commit, Done, Grant, Granted, Offer, Run, checksum, cut
from psrl_sglang.transfer.handshake import Greeting, Party
from psrl_sglang.transfer.link import (
    Deadline,
    DeadlinePassed,
    Link,
    PeerLost,
    PeerRefused,
    Refused,
    TransferError,
    shutdown,
)
from psrl_sglang.transfer.transport import Transport, Transports

logger = logging.getLogger(__name__)

_GREETING_S = 5.0
_LONGEST_MOVE_S = 120.0
_IDLE_S = 300.0  # a link nobody uses; sources close theirs earlier
_MOST_LINKS = 256
_MOST_RUNS = 4096
_QUARANTINE_S = 30.0
_STEP_S = 0.005
_LATE_S = 0.5  # the source gives up a little earlier than we, so that it hears what we have to say


class LandingRules(Protocol):
    """What the engine says about KV that comes in. Called on threads of the landing."""

    def salts_for(self, tag: str, fingerprint: str) -> Callable[[str], bytes]:
        """For a tag of which this engine wants KV: the salt of each pool's keys. Raises `PeerRefused`."""
        ...

    def require_worth(self, missing_tokens: int, missing_bytes: int, transport: str) -> None:
        """Raises `PeerRefused` where computing that much would be the cheaper."""
        ...

    def landed(self, size_bytes: int, seconds: float, transport: str, outcome: str) -> None:
        """A move ended; ``seconds`` is what its bytes took."""
        ...


@dataclass(slots=True)
class _Part:
    """What one run lacked here: the room for it, in pieces."""

    pool: str
    reservation: Reservation
    pieces: list[memoryview]
    is_good: bool = True


class Landing:
    """Listens on ``sock``, which it owns, with a thread for each link. A reservation whose one-sided writer was
    lost is kept for ``_QUARANTINE_S``: until then its bytes may still be written to."""

    def __init__(
        self,
        sock: socket.socket,
        store: KVStore,
        transports: Transports,
        rules: LandingRules,
        party: Party,
        signer: Signer,
    ) -> None:
        self._store = store
        self._transports = transports
        self._rules = rules
        self._party = party
        self._signer = signer
        self._socket = sock
        self._links: set[Link] = set()
        self._quarantine: list[tuple[float, Reservation]] = []
        self._running = 0
        self._lock = threading.Lock()
        self._is_closing = False
        self._accepting = threading.Thread(target=self._accept, name="psrl-move-accept", daemon=True)
        self._accepting.start()

    @property
    def links(self) -> int:
        return len(self._links)

    @property
    def running(self) -> int:
        """Moves that are coming in now."""
        return self._running

    @property
    def quarantined(self) -> int:
        self.release_quarantined()
        return len(self._quarantine)

    def release_quarantined(self) -> None:
        now_s = time.monotonic()
        with self._lock:
            over = [kept for end_s, kept in self._quarantine if end_s <= now_s]
            self._quarantine = [one for one in self._quarantine if one[0] > now_s]
        for reservation in over:
            reservation.abort()

    def close(self) -> None:
        with self._lock:
            self._is_closing = True
            links = list(self._links)
            kept, self._quarantine = self._quarantine, []
        for link in links:
            link.shutdown()
        shutdown(self._socket)
        self._socket.close()
        self._accepting.join(_GREETING_S)
        for _, reservation in kept:
            reservation.abort()

    def _accept(self) -> None:
        while True:
            try:
                sock, address = self._socket.accept()
            except OSError:
                if self._is_closing:
                    return
                time.sleep(_STEP_S)  # out of descriptors: others may give some back
                continue
            link = Link(sock, f"{address[0]}:{address[1]}")
            with self._lock:
                is_welcome = not self._is_closing and len(self._links) < _MOST_LINKS
                if is_welcome:
                    self._links.add(link)
            if not is_welcome:
                link.close()
                continue
            name = f"psrl-move-in-{address[1]}"
            threading.Thread(target=self._serve, args=(link,), name=name, daemon=True).start()

    def _serve(self, link: Link) -> None:
        try:
            greeting = Greeting(link, self._party, self._signer)
            deadline = Deadline(_GREETING_S)
            met = greeting.hear(deadline)
            chosen = greeting.answer(self._transports.accepted(met.offers), deadline)
            transport = self._transports.usable[chosen]
            while True:
                offer = link.receive(Offer, Deadline(_IDLE_S))
                self._land(link, transport, met.offers[chosen], offer)
        except PeerLost:
            pass  # how links end
        except DeadlinePassed as error:
            logger.info("psrl: a link for moves is closed: %s", error)
        except TransferError as error:
            logger.warning("psrl: a link for moves is closed: %s", error)
        except Exception:
            logger.exception("psrl: a link for moves failed")
        finally:
            with self._lock:
                self._links.discard(link)
            link.close()

    def _land(self, link: Link, transport: Transport, theirs: bytes, offer: Offer) -> None:
        deadline = Deadline(min(max(offer.limit_s, 0.0), _LONGEST_MOVE_S) + _LATE_S)
        with self._lock:
            self._running += 1
        outcome = "failed"
        try:
            outcome = self._take(link, transport, theirs, offer, deadline)
        except PeerRefused as refusal:
            outcome = "refused"
            link.send(Refused(str(refusal)), deadline)
        finally:
            with self._lock:
                self._running -= 1
            if outcome != "landed":
                self._rules.landed(0, 0.0, transport.name, outcome)

    def _take(self, link: Link, transport: Transport, theirs: bytes, offer: Offer, deadline: Deadline) -> str:
        self.release_quarantined()
        runs = self._checked(offer)
        salt = self._rules.salts_for(offer.tag, offer.fingerprint)
        keys = [salted(run.digests, salt(run.pool)) for run in runs]
        self._require_worth(runs, keys, transport)
        parts: list[_Part] = []
        has_ended = False  # whether the source is known to write no more
        try:
            for index, run in enumerate(runs):
                before = salted(run.before, salt(run.pool))
                room = self._store.dram.reserve(run.pool, offer.tag, keys[index], run.start, before)
                views = [self._store.dram.payload(write) for write in room.writes]
                parts.append(_Part(run.pool, room, [piece for view in views for piece in cut(view)]))
            link.send(Grant(self._granted(parts)), deadline)
            if any(part.pieces for part in parts):
                began_s = time.perf_counter()
                sums = self._receive(link, transport, theirs, parts, deadline)
                told = link.receive(Commit, deadline).sums
                has_ended = True
                self._commit(parts, sums, told)
                size_bytes = sum(len(piece) for part in parts for piece in part.pieces)
                self._rules.landed(size_bytes, time.perf_counter() - began_s, transport.name, "landed")
        finally:
            self._end(parts, must_wait=transport.is_one_sided and not has_ended)
        prefix = _prefix(runs, keys)
        self._await_others(prefix, deadline)
        present = sum(piece.pages for piece in self._store.dram.match(prefix))
        moved = sum(part.reservation.pages for part in parts if part.is_good and part.pool == runs[0].pool)
        link.send(Done(present, moved, _what_is_wrong(parts)), deadline)
        return "landed"

    def _checked(self, offer: Offer) -> list[Run]:
        pools = self._store.dram.page_bytes
        if not 0 < len(offer.runs) <= _MOST_RUNS:
            raise PeerRefused(f"a move of {len(offer.runs)} runs of pages; at most {_MOST_RUNS}")
        for run in offer.runs:
            if run.pool not in pools or run.start < 0 or not run.digests or len(run.digests) % KEY_BYTES:
                raise PeerRefused(f"a run of {len(run.digests)} bytes of hashes at {run.start} of {run.pool!r}")
            if len(run.before) != (KEY_BYTES if run.start else 0):
                raise PeerRefused(f"a run at page {run.start} after a hash of {len(run.before)} bytes")
        before = b""
        for run in (run for run in offer.runs if run.pool == offer.runs[0].pool):
            if run.before != before:
                raise PeerRefused(f"the run at page {run.start} does not continue the one before it")
            before = run.digests[-KEY_BYTES:]
        return offer.runs

    def _require_worth(self, runs: Sequence[Run], keys: Sequence[bytes], transport: Transport) -> None:
        dram = self._store.dram
        prefix = _prefix(runs, keys)
        here = sum(piece.pages for piece in dram.match(prefix))
        missing = [
            sum(not dram.is_pending(key) and key not in dram.index for key in _each(one)) for one in keys
        ]
        size_bytes = sum(pages * dram.page_bytes[run.pool] for run, pages in zip(runs, missing, strict=True))
        if size_bytes:
            tokens = (count(prefix) - here) * self._store.layout.page_tokens
            self._rules.require_worth(tokens, size_bytes, transport.name)

    def _granted(self, parts: Sequence[_Part]) -> list[Granted]:
        return [
            Granted(index, write.source, write.pages, int(self._store.dram.offsets([write])[0]))
            for index, part in enumerate(parts)
            for write in part.reservation.writes
        ]

    def _receive(
        self, link: Link, transport: Transport, theirs: bytes, parts: Sequence[_Part], deadline: Deadline
    ) -> list[bytes]:
        pieces = [piece for part in parts for piece in part.pieces]
        sums = [b""] * len(pieces)
        for index in transport.receive(link, theirs, pieces, deadline):
            sums[index] = checksum(pieces[index])
        return sums

    def _commit(self, parts: Sequence[_Part], sums: Sequence[bytes], told: bytes) -> None:
        width = len(sums[0])
        if len(told) != width * len(sums):
            raise TransferError(f"{len(told)} bytes of checksums for {len(sums)} pieces")
        at = 0
        damaged: set[str] = set()
        for part in parts:
            mine = b"".join(sums[at : at + len(part.pieces)])
            if mine != told[at * width : at * width + len(mine)]:
                damaged.add(part.pool)  # and all behind it: what is here of a sequence is a prefix
                logger.error("psrl: KV of pool %s arrived damaged and is dropped", part.pool)
            at += len(part.pieces)
            part.is_good = part.pool not in damaged
            if part.is_good:
                self._store.commit(part.reservation)

    def _end(self, parts: Sequence[_Part], *, must_wait: bool) -> None:
        for part in parts:
            if must_wait and part.pieces:
                with self._lock:
                    self._quarantine.append((time.monotonic() + _QUARANTINE_S, part.reservation))
            else:
                part.reservation.abort()  # nothing, once committed

    def _await_others(self, keys: bytes, deadline: Deadline) -> None:
        """What another move brings of the same prefix counts too."""
        dram = self._store.dram
        while any(dram.is_pending(key) for key in _each(keys)) and deadline.left_s > 2 * _LATE_S:
            time.sleep(_STEP_S)


def salted(digests: bytes, salt: bytes) -> bytes:
    """This engine's keys of pages that another one names."""
    number = int.from_bytes(salt * count(digests), "big") ^ int.from_bytes(digests, "big")
    return number.to_bytes(len(digests), "big")


def _prefix(runs: Sequence[Run], keys: Sequence[bytes]) -> bytes:
    return b"".join(one for run, one in zip(runs, keys, strict=True) if run.pool == runs[0].pool)


def _each(keys: bytes) -> list[bytes]:
    return [key_at(keys, page) for page in range(count(keys))]


def _what_is_wrong(parts: Sequence[_Part]) -> str:
    if not all(part.is_good for part in parts):
        return "the destination found bytes damaged on the way and dropped them"
    rejected = sum(part.reservation.rejected_pages for part in parts)
    return f"the destination had no room for {rejected} pages" if rejected else ""
