"""One incoming move: room for the offered pages, their bytes, the check, and only then are they visible."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from psrl_sglang.keys import KEY_BYTES, count, key_at
from psrl_sglang.store.dram import Reservation, Write
from psrl_sglang.store.store import KVStore
from psrl_sglang.store.sums import SUM_BYTES, checksum, cut
from psrl_sglang.transfer.exchange import (
    Commit,
    Done,
    Grant,
    Granted,
    Offer,
    Run,
    salted,
)
from psrl_sglang.transfer.link import Deadline, Link, PeerRefused, TransferError
from psrl_sglang.transfer.quarantine import Quarantine
from psrl_sglang.transfer.transport import Transport

logger = logging.getLogger(__name__)

LATE_S = 0.5  # the source gives up a little earlier than we, so that it hears what we have to say
_MOST_RUNS = 1 << 16
_MOST_PAGES = 1 << 20
_STEP_S = 0.002


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


@dataclass(frozen=True, slots=True)
class Channel:
    """An open link, how bytes come over it, and what the source offered for that."""

    link: Link
    transport: Transport
    theirs: bytes


@dataclass(slots=True)
class _Part:
    """What one run lacked here: the room for it, in pieces. ``before`` is the key of the page before the run."""

    pool: str
    before: bytes
    reservation: Reservation
    pieces: list[memoryview]
    is_good: bool = True


class Arrivals:
    """Thread-safe: one call of ``take`` is one move. Room of which the source may not have let go is left to
    ``quarantine``."""

    def __init__(self, store: KVStore, rules: LandingRules, quarantine: Quarantine) -> None:
        self._store = store
        self._dram = store.dram
        self._rules = rules
        self._quarantine = quarantine

    def take(self, channel: Channel, offer: Offer, deadline: Deadline) -> None:
        """The destination's part of an exchange, after the offer. Raises `TransferError`; `PeerRefused` before the
        source was granted anything, so that the link is still good."""
        runs = self._checked(offer)
        salt = self._rules.salts_for(offer.tag, offer.fingerprint)
        keys = [salted(run.digests, salt(run.pool)) for run in runs]
        self._require_worth(runs, keys, channel.transport)
        parts: list[_Part] = []
        may_write = False  # whether the source knows places, and may not have written the last of them
        try:
            for run, names in zip(runs, keys, strict=True):
                before = salted(run.before, salt(run.pool))
                room = self._dram.reserve(run.pool, offer.tag, names, run.start, before)
                views = [self._dram.payload(write) for write in room.writes]
                parts.append(_Part(run.pool, before, room, [piece for view in views for piece in cut(view)]))
            may_write = channel.transport.is_one_sided
            channel.link.send(Grant(self._granted(parts)), deadline)
            if any(part.pieces for part in parts):
                began_s = time.perf_counter()
                mine, told = self._receive(channel, parts, deadline)
                may_write = False
                self._commit(parts, mine, told, deadline)
                size_bytes = sum(len(piece) for part in parts for piece in part.pieces)
                seconds = time.perf_counter() - began_s
                self._rules.landed(size_bytes, seconds, channel.transport.name, "landed")
        finally:
            for part in parts:
                if may_write and part.pieces:
                    self._quarantine.add(part.reservation)
                else:
                    part.reservation.abort()  # nothing, once committed
        self._answer(channel.link, runs, keys, parts, deadline)

    def _checked(self, offer: Offer) -> list[Run]:
        """The runs, if they are those of one prompt: the prefix without a gap, of other pools parts of it."""
        if not 0 < len(offer.runs) <= _MOST_RUNS:
            raise PeerRefused(f"a move of {len(offer.runs)} runs of pages; at most {_MOST_RUNS}")
        if sum(map(len, (run.digests for run in offer.runs))) > _MOST_PAGES * KEY_BYTES:
            raise PeerRefused(f"a move of more than {_MOST_PAGES} pages")
        for run in offer.runs:
            if run.pool not in self._dram.page_bytes or not run.digests or len(run.digests) % KEY_BYTES:
                raise PeerRefused(f"a run of {len(run.digests)} bytes of hashes of pool {run.pool[:80]!r}")
        first_pool = self._store.layout.pools[0].name
        prefix = b"".join(run.digests for run in offer.runs if run.pool == first_pool)
        if not prefix or len(set(_each(prefix))) != count(prefix):
            raise PeerRefused(f"no pages of pool {first_pool}" if not prefix else "a page twice")
        ends = {pool: 0 for pool in self._dram.page_bytes}
        for run in offer.runs:
            end = run.start + run.pages
            is_behind = run.start == ends[run.pool] if run.pool == first_pool else run.start >= ends[run.pool]
            if not is_behind or end > count(prefix):
                raise PeerRefused(f"a run of pages {run.start} to {end} of {run.pool}, after {ends[run.pool]}")
            before = key_at(prefix, run.start - 1) if run.start else b""
            if run.before != before or run.digests != prefix[run.start * KEY_BYTES : end * KEY_BYTES]:
                raise PeerRefused(f"the run of {run.pool} at page {run.start} is not of this prompt")
            ends[run.pool] = end
        return offer.runs

    def _require_worth(self, runs: Sequence[Run], keys: Sequence[bytes], transport: Transport) -> None:
        dram = self._dram
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
            Granted(index, write.source, write.pages, int(self._dram.offsets([write])[0]))
            for index, part in enumerate(parts)
            for write in part.reservation.writes
        ]

    def _receive(self, channel: Channel, parts: Sequence[_Part], deadline: Deadline) -> tuple[bytes, bytes]:
        """The checksums of what came, and of what was sent."""
        pieces = [piece for part in parts for piece in part.pieces]
        sums = [b""] * len(pieces)

        def landed(index: int) -> None:
            sums[index] = checksum(pieces[index])  # at once, while the bytes are in this core's cache

        channel.transport.receive(channel.link, channel.theirs, pieces, landed, deadline)
        return b"".join(sums), channel.link.receive(Commit, deadline).sums

    def _commit(self, parts: Sequence[_Part], mine: bytes, told: bytes, deadline: Deadline) -> None:
        if len(told) != len(mine):
            raise TransferError(f"{len(told)} bytes of checksums for {len(mine) // SUM_BYTES} pieces")
        at = 0
        damaged: set[str] = set()
        for part in parts:
            end = at + len(part.pieces) * SUM_BYTES
            if mine[at:end] != told[at:end]:
                damaged.add(part.pool)  # and all behind it: what is here of a sequence is a prefix
                logger.error("psrl: KV of pool %s arrived damaged and is dropped", part.pool)
            part.is_good = part.pool not in damaged
            if part.is_good:
                self._await_turn(part, deadline)
                self._remember(part, mine[at:end])
                self._store.commit(part.reservation)
            at = end

    def _remember(self, part: _Part, sums: bytes) -> None:
        """The checksums of whole chunks are good for the next move of them."""
        at = 0
        for write in part.reservation.writes:
            pieces = sum(1 for _ in cut(self._dram.payload(write)))
            end = at + pieces * SUM_BYTES
            if write.pages == self._dram.capacity_of(write.chunk):
                write.chunk.sums = sums[at:end]
            at = end

    def _await_turn(self, part: _Part, deadline: Deadline) -> None:
        """What continues a chunk that another move is filling comes after it. Moves wait only for those that got
        their room earlier, so never for each other."""
        keys = part.reservation.keys
        writes = part.reservation.writes
        mine = {write.source + write.pages for write in writes}
        for write in writes:
            if write.first and write.source not in mine:
                self._await(key_at(keys, write.source - 1) if write.source else part.before, deadline)

    def _answer(
        self, link: Link, runs: Sequence[Run], keys: Sequence[bytes], parts: Sequence[_Part], deadline: Deadline
    ) -> None:
        prefix = _prefix(runs, keys)
        for key in _each(prefix):  # what another move brings of the same prompt counts too
            self._await(key, deadline)
        present = sum(piece.pages for piece in self._dram.match(prefix))
        moved = sum(
            write.pages
            for part in parts
            if part.is_good and part.pool == runs[0].pool
            for write in part.reservation.writes
            if self._is_here(part.reservation.keys, write)
        )
        link.send(Done(present, moved, _what_is_wrong(parts)), deadline)

    def _await(self, key: bytes, deadline: Deadline) -> None:
        while self._dram.is_pending(key) and deadline.left_s > 2 * LATE_S:
            time.sleep(_STEP_S)

    def _is_here(self, keys: bytes, write: Write) -> bool:
        return self._dram.index.chunk_of(key_at(keys, write.source + write.pages - 1)) is write.chunk


def _prefix(runs: Sequence[Run], keys: Sequence[bytes]) -> bytes:
    return b"".join(one for run, one in zip(runs, keys, strict=True) if run.pool == runs[0].pool)


def _each(keys: bytes) -> list[bytes]:
    return [key_at(keys, page) for page in range(count(keys))]


def _what_is_wrong(parts: Sequence[_Part]) -> str:
    if not all(part.is_good for part in parts):
        return "the destination found bytes damaged on the way and dropped them"
    rejected = sum(part.reservation.rejected_pages for part in parts)
    return f"the destination had no room for {rejected} pages" if rejected else ""
