"""Reading ahead: pages that only disk or a remote store has are brought to DRAM for a request that waits."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Protocol

from psrl_sglang.keys import KEY_BYTES, count, key_at
from psrl_sglang.store.chunk import Found, Wanted
from psrl_sglang.store.dram import DramTier, Lease, Reservation

logger = logging.getLogger(__name__)

_HELD_S = 60.0  # how long fetched pages wait for their request once room is needed


class ReadSpan(NamedTuple):
    """Pages of a sequence that were read from one tier, and where in it they begin."""

    tier: str
    start: int
    pages: int


class LowerTier(Protocol):
    """Disk or remote, as a source. Neither call raises for trouble with the tier."""

    def find(self, wanted: Wanted) -> list[Found]: ...

    def read(self, found: Found, wanted: Wanted, into: Sequence[memoryview]) -> bool: ...


class _NoTier:
    def find(self, wanted: Wanted) -> list[Found]:
        return []

    def read(self, found: Found, wanted: Wanted, into: Sequence[memoryview]) -> bool:
        return False


@dataclass(slots=True)
class _Part:
    """One chunk to be read, and the room for it."""

    found: Found
    wanted: Wanted
    tier: LowerTier
    tier_name: str
    reservation: Reservation
    is_read: bool | None = None


@dataclass(eq=False)
class Fetch:
    """What is being read for one request. The pages that have come stay in DRAM until ``release``."""

    dram: DramTier
    deadline_s: float
    pool: str = ""
    read_pages: int = 0  # of ``pool``, the first one asked for, and where in the sequence they begin
    first_page: int = 0
    pages: dict[str, int] = field(default_factory=lambda: {"disk": 0, "remote": 0})
    spans: list[ReadSpan] = field(default_factory=list)  # of ``pool``
    began_s: float = field(default_factory=time.monotonic)
    _open: int = 1
    _released: bool = False
    _awaited: list[bytes] = field(default_factory=list)  # another fetch reads up to these
    _leases: list[Lease] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def is_complete(self) -> bool:
        """Nothing more will come."""
        return not self._open and not any(self.dram.is_pending(key) for key in self._awaited)

    @property
    def is_over(self) -> bool:
        """Nothing more will come, or it would come too late."""
        return self.is_complete or time.monotonic() >= self.deadline_s

    def release(self) -> None:
        """The request was admitted, or is gone. What is still on its way will not be held."""
        with self._lock:
            self._released = True
            leases, self._leases = self._leases, []
        for lease in leases:
            lease.release()

    def count(self, tier_name: str, read: Wanted) -> None:
        pages = count(read.keys)
        with self._lock:
            self.pages[tier_name] += pages
            if read.pool == self.pool:
                if not self.read_pages:
                    self.first_page = read.start
                self.read_pages += pages
                self.spans.append(ReadSpan(tier_name, read.start, pages))

    def _hold(self, lease: Lease) -> None:
        with self._lock:
            if not self._released:
                self._leases.append(lease)
                return
        lease.release()

    def _enter(self, tasks: int) -> None:
        with self._lock:
            self._open += tasks

    def _leave(self) -> None:
        with self._lock:
            self._open -= 1


class FetchPool:
    """The threads that read. Two requests that want the same pages read them once."""

    def __init__(
        self,
        dram: DramTier,
        disk: LowerTier | None,
        remote: LowerTier | None,
        threads: int,
        *,
        landing_s: float = 0.0,
    ) -> None:
        self._dram = dram
        self._landing_s = landing_s
        self._tiers: list[tuple[str, LowerTier]] = [
            (name, tier) for name, tier in (("disk", disk), ("remote", remote)) if tier is not None
        ]
        if landing_s:
            self._tiers.append(("", _NoTier()))  # the last look: another engine may be sending the rest
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="psrl-read")
        self._most_slots = max(1, dram.arena.slots // 2)  # reading ahead must not push out all there is
        self._depth = 0
        self._lock = threading.Lock()

    @property
    def depth(self) -> int:
        """Chunks that are being read or wait to be."""
        return self._depth

    def start(self, wanted: Sequence[Wanted], *, seconds: float) -> Fetch:
        fetch = Fetch(self._dram, time.monotonic() + seconds, wanted[0].pool)
        self._submit(self._plan, fetch, list(wanted))
        return fetch

    def close(self) -> None:
        self._threads.shutdown(wait=True, cancel_futures=True)

    def _submit(self, task: object, fetch: Fetch, *args: object) -> None:
        def run() -> None:
            try:
                task(fetch, *args)  # type: ignore[operator]
            except Exception:
                logger.exception("psrl: reading ahead failed")

        def leave(_: object = None) -> None:
            with self._lock:
                self._depth -= 1
            fetch._leave()

        with self._lock:
            self._depth += 1
        try:
            self._threads.submit(run).add_done_callback(leave)
        except RuntimeError:  # closed
            leave()

    def _plan(self, fetch: Fetch, wanted: list[Wanted]) -> None:
        slots = self._most_slots
        for one in wanted:
            parts, slots = self._find(fetch, one, slots)
            run = _Run(fetch, parts, self._dram)
            fetch._enter(len(parts))
            for part in parts:
                self._submit(run.read, fetch, part)

    def _find(self, fetch: Fetch, wanted: Wanted, slots: int) -> tuple[list[_Part], int]:
        """What to read, and the slots left. What is here is held, and what others bring is awaited."""
        parts: list[_Part] = []
        at, total = 0, count(wanted.keys)
        for name, tier in self._tiers:
            while at < total:
                rest = Wanted(wanted.pool, wanted.tag, wanted.keys[at * KEY_BYTES :], wanted.start + at)
                here = self._dram.lease(rest.keys, seconds=_HELD_S)
                if here.pages:
                    fetch._hold(here)
                    at += here.pages
                    continue
                on_way = self._pages_on_way(rest.keys)
                if on_way:
                    fetch._awaited.append(key_at(rest.keys, on_way - 1))
                    fetch.deadline_s = max(fetch.deadline_s, fetch.began_s + self._landing_s)
                    at += on_way
                    continue
                if slots <= 0:
                    return parts, 0
                absent = self._dram.absent_pages(rest.keys)
                if not absent:
                    continue
                found = tier.find(replace(rest, keys=rest.keys[: absent * KEY_BYTES]))
                if not found:
                    break
                for one in found:
                    before = key_at(wanted.keys, at - 1) if at else b""
                    place = Wanted(wanted.pool, wanted.tag, one.keys, wanted.start + at)
                    room = self._dram.reserve(place.pool, place.tag, one.keys, place.start, before)
                    if room.rejected_pages:
                        room.abort()
                        return parts, 0
                    if room.pages < one.pages:  # another fetch was faster with some of it: look again
                        room.abort()
                        break
                    parts.append(_Part(one, place, tier, name, room))
                    at += one.pages
                    slots -= len(room.writes)
                    if slots <= 0:
                        break
        return parts, slots

    def _pages_on_way(self, keys: bytes) -> int:
        page = 0
        while page < count(keys) and self._dram.is_pending(key_at(keys, page)):
            page += 1
        return page


class _Run:
    """The chunks of one sequence. They become visible in order, head first, and after one that failed none
    does: what is in DRAM of a sequence is a prefix."""

    def __init__(self, fetch: Fetch, parts: list[_Part], dram: DramTier) -> None:
        self._fetch = fetch
        self._parts = parts
        self._dram = dram
        self._done = 0
        self._has_failed = False
        self._lock = threading.Lock()

    def read(self, fetch: Fetch, part: _Part) -> None:
        size = self._dram.page_bytes[part.wanted.pool]
        into = [
            payload[at : at + size]
            for write in part.reservation.writes
            for payload in (self._dram.payload(write),)
            for at in range(0, len(payload), size)
        ]
        is_read = False
        try:
            is_read = part.tier.read(part.found, part.wanted, into)
        finally:
            with self._lock:
                part.is_read = is_read
                self._advance()

    def _advance(self) -> None:
        while self._done < len(self._parts) and self._parts[self._done].is_read is not None:
            part = self._parts[self._done]
            self._done += 1
            self._has_failed = self._has_failed or not part.is_read
            if self._has_failed:
                part.reservation.abort()
                continue
            part.reservation.commit()
            here = self._dram.lease(part.found.keys, seconds=_HELD_S)
            self._fetch._hold(here)
            if here.pages < part.found.pages:  # what it continues was given up
                self._has_failed = True
            else:
                self._fetch.count(part.tier_name, part.wanted)
