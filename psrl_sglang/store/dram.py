"""The DRAM tier: chunks in an arena, written through reservations and read under leases."""

from __future__ import annotations

import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from psrl_sglang.keys import KEY_BYTES, PoolLayout, count, key_at
from psrl_sglang.store.arena import Arena
from psrl_sglang.store.holds import Lease, Reservation, Write
from psrl_sglang.store.index import Chunk, DeadRank, PageIndex, Piece
from psrl_sglang.store.stats import StoreStats


@dataclass(slots=True)
class _Growth:
    """The reservations under way on one chunk: how many, where the next one would begin, and behind which page.
    While there are any, what one of them gave up is not given out again."""

    writers: int = 0
    end: int = 0
    last: bytes = b""


class DramTier:
    """Thread-safe. ``pools`` share the arena: each packs as many of its pages into a slot as fit."""

    def __init__(
        self, arena: Arena, pools: Sequence[PoolLayout], *, policy: str, dead_rank: DeadRank, stats: StoreStats
    ) -> None:
        self.arena = arena
        self.page_bytes = {pool.name: pool.page_bytes for pool in pools}
        self.chunk_pages = {pool.name: arena.slot_bytes // pool.page_bytes for pool in pools}
        small = [pool for pool in pools if pool.page_bytes > arena.slot_bytes]
        if small:
            raise ValueError(f"a slot of {arena.slot_bytes} bytes holds no page of {small}")
        self.index = PageIndex(policy, dead_rank)
        self.lock = threading.RLock()
        self._dead_rank = dead_rank
        self._stats = stats
        # Told, under the lock, of each chunk that grew (True) or goes (False).
        self.watch: Callable[[bool, Chunk], None] | None = None
        self._pending: dict[bytes, Chunk] = {}
        self._growing: dict[Chunk, _Growth] = {}
        self._leases: weakref.WeakSet[Lease] = weakref.WeakSet()
        # Ends of leases and reservations that the collector took. It runs on any thread, inside of anything, so
        # that it may not lock: whoever next needs the books in order does this first.
        self._dropped: deque[Callable[[], None]] = deque()

    @property
    def used_bytes(self) -> int:
        return self.arena.used_slots * self.arena.slot_bytes

    def match(self, keys: bytes) -> list[Piece]:
        """The longest prefix that is here. A probe: nothing is protected, nothing counts as used."""
        with self.lock:
            return self.index.match(keys)

    def lease(self, keys: bytes, *, seconds: float | None = None) -> Lease:
        """As ``match``, but counts as a use, and the pages stay until the lease ends. After ``seconds`` the
        lease ends by itself as soon as its room is needed."""
        with self._settled():
            pieces = self.index.match(keys)
            self.index.touch(pieces)
            return self._hold(pieces, seconds)

    def lease_chunk(self, chunk: Chunk) -> Lease | None:
        """All pages that a chunk has now; None if it has been evicted."""
        with self.lock:
            if not chunk.keys or self.index.chunk_of(key_at(chunk.keys, 0)) is not chunk:
                return None
            return self._hold([Piece(chunk, 0, chunk.pages)], None)

    def line(self, chunk: Chunk) -> list[Chunk]:
        """A chunk and those it continues, as far as they are here, the head of the sequence first."""
        with self.lock:
            line = [chunk]
            while (parent := line[-1].parent) is not None:
                line.append(parent)
            return line[::-1]

    def reserve(self, pool: str, tag: str, keys: bytes, start: int, parent: bytes) -> Reservation:
        """Room for those of ``keys`` that are neither here nor on their way, evicting what must go.

        ``start`` is the place of the first key in its sequence, in pages, and ``parent`` the key before it.
        What finds no room is cut off at the tail and counted in ``rejected_pages``.
        """
        with self._settled():
            room = Reservation(self, keys)
            held = self._hold(self.index.match(keys), None)  # room must not be made at this run's own cost
            with held:
                for source, pages in self._missing(keys):
                    before = key_at(keys, source - 1) if source else parent
                    taken = self._place(pool, tag, keys, start, before, source, pages, room.writes)
                    if taken < pages:
                        room.rejected_pages = self._count_missing_from(keys, source + taken)
                        break
            if room.rejected_pages:
                self._stats.add("rejected", room.rejected_pages, tier="dram", reason="full")
            return room

    def offsets(self, spans: Sequence[Piece | Write]) -> np.ndarray:
        """Where in ``arena.memory`` each page begins, in bytes, in order (int64)."""
        parts = [
            span.chunk.place * self.arena.slot_bytes
            + np.arange(span.first, span.first + span.pages, dtype=np.int64) * self.page_bytes[span.chunk.pool]
            for span in spans
        ]
        return np.concatenate(parts) if parts else np.empty(0, dtype=np.int64)

    def payload(self, piece: Piece | Write) -> memoryview:
        size = self.page_bytes[piece.chunk.pool]
        return self.arena.view(piece.chunk.place, piece.first * size, piece.pages * size)

    def is_pending(self, key: bytes) -> bool:
        """Whether a page is on its way here."""
        return key in self._pending

    def absent_pages(self, keys: bytes) -> int:
        """How many pages at the start of ``keys`` are neither here nor on their way."""
        with self.lock:
            first, pages = next(self._missing(keys), (0, 0))
            return 0 if first else pages

    def is_full(self, chunk: Chunk) -> bool:
        """Whether the chunk reaches its end in its sequence, so that nothing will be added to it."""
        return chunk.pages >= self.capacity_of(chunk)

    def capacity_of(self, chunk: Chunk) -> int:
        """The pages of a chunk once it is full."""
        return self._capacity(chunk.pool, chunk.start)

    def drop(self, chunks: Sequence[Chunk], reason: str) -> int:
        """Evict those of ``chunks`` that nobody uses or continues, in this order; returns how many pages."""
        with self._settled():
            return self._drop(chunks, reason)

    def drop_tag(self, tag: str) -> int:
        with self._settled():
            return self._drop(self.index.of_tag(tag), "retired")

    def clear(self) -> int:
        with self._settled():
            return sum(self._drop(self.index.of_tag(tag), "retired") for tag in self.index.tags())

    def check_integrity(self) -> list[str]:
        """What is wrong with the books; empty when nothing is. Safe while others read and write."""
        with self._settled():
            wrong = self.index.wrong()
            chunks = list(self.index.chunks())
            places = [chunk.place for chunk in chunks]
            if len(set(places)) != len(places):
                wrong.append("two chunks share a slot")
            if len(places) != self.arena.used_slots:
                wrong.append(f"{len(places)} chunks, {self.arena.used_slots} slots in use")
            wrong += [
                f"a chunk of tag {chunk.tag} holds more pages than fit"
                for chunk in chunks
                if chunk.pages > self._capacity(chunk.pool, chunk.start)
            ]
            return wrong

    def pages_by_tag(self) -> dict[str, int]:
        with self.lock:
            return self.index.pages_by_tag()

    def busy_chunks(self) -> int:
        with self._settled():
            return sum(bool(chunk.busy) for chunk in self.index.chunks())

    @contextmanager
    def _settled(self) -> Iterator[None]:
        with self.lock:
            while self._dropped:
                self._dropped.popleft()()
            yield

    def _capacity(self, pool: str, start: int) -> int:
        # Chunks end at multiples of their size in the sequence, so that engines cut it at the same places.
        pages = self.chunk_pages[pool]
        return pages - start % pages

    def _hold(self, pieces: Sequence[Piece], seconds: float | None) -> Lease:
        for piece in pieces:
            piece.chunk.busy += 1
        expires_s = float("inf") if seconds is None else time.monotonic() + seconds
        lease = Lease(self, pieces, expires_s)
        if seconds is not None:
            self._leases.add(lease)
        return lease

    def _release(self, chunks: list[Chunk]) -> None:
        with self.lock:
            for chunk in chunks:
                chunk.busy -= 1

    def _missing(self, keys: bytes) -> Iterator[tuple[int, int]]:
        """Runs (first page, pages) of ``keys`` that are neither here nor on their way."""
        begin: int | None = None
        total = count(keys)
        for page in range(total):
            key = key_at(keys, page)
            if key in self.index or key in self._pending:
                if begin is not None:
                    yield begin, page - begin
                    begin = None
            elif begin is None:
                begin = page
        if begin is not None:
            yield begin, total - begin

    def _count_missing_from(self, keys: bytes, page: int) -> int:
        return sum(pages for _, pages in self._missing(keys[page * KEY_BYTES :]))

    def _place(
        self,
        pool: str,
        tag: str,
        keys: bytes,
        start: int,
        before: bytes,
        source: int,
        pages: int,
        writes: list[Write],
    ) -> int:
        """Find room for a run, from its head on; returns how many pages got some."""
        taken = 0
        chunk = self._pending.get(before) or self.index.chunk_of(before)
        while taken < pages:
            at = start + source + taken
            first = self._open_at(chunk, before)
            if chunk is None or first is None or chunk.start + first != at:
                new = self._new_chunk(pool, tag, at, before, chunk)
                if new is None:
                    break
                chunk, first = new, 0
            room = min(pages - taken, self._capacity(pool, chunk.start) - first)
            chunk.busy += 1
            writes.append(Write(chunk, first, source + taken, room))
            for page in range(source + taken, source + taken + room):
                self._pending[key_at(keys, page)] = chunk
            taken += room
            before = key_at(keys, source + taken - 1)
            growth = self._growing.setdefault(chunk, _Growth())
            growth.writers += 1
            growth.end, growth.last = first + room, before
        return taken

    def _open_at(self, chunk: Chunk | None, before: bytes) -> int | None:
        """The place behind the last page of a chunk, if that page is ``before`` and there is room."""
        if chunk is None:
            return None
        growth = self._growing.get(chunk)
        if growth is None:
            end, last = chunk.pages, chunk.keys[-KEY_BYTES:]
        else:
            end, last = growth.end, growth.last
        return end if last == before and end < self._capacity(chunk.pool, chunk.start) else None

    def _new_chunk(self, pool: str, tag: str, start: int, before: bytes, parent: Chunk | None) -> Chunk | None:
        if parent is not None:
            parent.busy += 1  # eviction must not take what this one continues
        try:
            slot = self._take_slot()
        finally:
            if parent is not None:
                parent.busy -= 1
        if slot is None:
            return None
        chunk = Chunk(pool, tag, start, before, slot)
        self.index.add(chunk, parent)
        return chunk

    def _take_slot(self) -> int | None:
        slot = self.arena.take()
        if slot is not None:
            return slot
        victim = self.index.victim()
        if victim is None:
            self._expire_leases()
            victim = self.index.victim()
        if victim is None:
            return None
        self._evict(victim, "dead" if self._dead_rank(victim.tag) is not None else "full")
        return self.arena.take()

    def _expire_leases(self) -> None:
        now_s = time.monotonic()
        for lease in [lease for lease in self._leases if lease.expires_s <= now_s]:
            lease.release()

    def _drop(self, chunks: Sequence[Chunk], reason: str) -> int:
        pages = 0
        for chunk in chunks:
            if self.index.holds(chunk) and not chunk.busy and not chunk.children:
                pages += self._evict(chunk, reason)
        return pages

    def _evict(self, chunk: Chunk, reason: str) -> int:
        pages = chunk.pages
        if self.watch is not None:
            self.watch(False, chunk)
        self.index.remove(chunk)
        self.arena.give(chunk.place)
        self._stats.add("evicted_pages", pages, tier="dram", reason=reason)
        return pages

    def _commit(self, keys: bytes, writes: list[Write]) -> list[Chunk]:
        grown: list[Chunk] = []
        lost: list[Write] = []
        with self.lock:
            for write in writes:
                chunk = write.chunk
                run = self._unreserve(keys, write)
                if lost or chunk.pages != write.first:  # what it continues was given up, or is still to come
                    lost.append(write)
                else:
                    self.index.extend(chunk, run)
                    grown.append(chunk)
                    if self.watch is not None:
                        self.watch(True, chunk)
            for write in reversed(lost):
                self._give_back(write.chunk)
            self.index.touch([Piece(chunk, 0, chunk.pages) for chunk in grown])
        return grown

    def _abort(self, keys: bytes, writes: list[Write]) -> None:
        with self.lock:
            for write in reversed(writes):
                self._unreserve(keys, write)
                self._give_back(write.chunk)

    def _forsake(self, keys: bytes, writes: list[Write]) -> None:
        with self.lock:
            for write in writes:
                self._expect_no_more(keys, write)
                # Nothing is put behind pages that will never be here.
                self._growing[write.chunk].end = self._capacity(write.chunk.pool, write.chunk.start)

    def _expect_no_more(self, keys: bytes, write: Write) -> bytes:
        run = keys[write.source * KEY_BYTES : (write.source + write.pages) * KEY_BYTES]
        for page in range(write.pages):
            if self._pending.get(key := key_at(run, page)) is write.chunk:  # else it was forsaken
                del self._pending[key]
        return run

    def _unreserve(self, keys: bytes, write: Write) -> bytes:
        run = self._expect_no_more(keys, write)
        write.chunk.busy -= 1
        growth = self._growing[write.chunk]
        growth.writers -= 1
        if not growth.writers:
            del self._growing[write.chunk]
        return run

    def _give_back(self, chunk: Chunk) -> None:
        """A reservation on a chunk ended without pages."""
        if not chunk.keys and not chunk.busy:
            self.index.remove(chunk)
            self.arena.give(chunk.place)
