"""The store: DRAM in front, and behind it, where configured, disk and a remote store.

Look-ups see DRAM only. What is written to DRAM goes on to the lower tiers by itself; what only they have is
brought up by a `Fetch` (see `fetch`), before the request that needs it is admitted.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from psrl_sglang.keys import KVLayout
from psrl_sglang.store.arena import Arena
from psrl_sglang.store.chunk import ChunkImage, Wanted
from psrl_sglang.store.disk import DiskTier
from psrl_sglang.store.dram import DramTier, Lease, Reservation
from psrl_sglang.store.fetch import Fetch, FetchPool
from psrl_sglang.store.index import Chunk, DeadRank
from psrl_sglang.store.remote import RemoteTier
from psrl_sglang.store.stats import StoreStats
from psrl_sglang.store.sums import checksum, cut

logger = logging.getLogger(__name__)

_CLOSE_S = 10.0


@dataclass(frozen=True, slots=True)
class LowerTiers:
    """What is behind DRAM. ``writes_remote`` is false on a rank whose pages another rank writes as well;
    ``landing_s``: how long a request may wait for pages that another engine is sending, 0 if none does."""

    disk: DiskTier | None = None
    remote: RemoteTier | None = None
    writes_remote: bool = True
    save_unfull_chunk: bool = False
    landing_s: float = 0.0


def slot_bytes_of(layout: KVLayout, chunk_tokens: int) -> int:
    """The size of a chunk of the first pool, or of the largest page where that is more."""
    pages = chunk_tokens // layout.page_tokens
    return max(pages * layout.pools[0].page_bytes, *(pool.page_bytes for pool in layout.pools))


class KVStore:
    """Thread-safe. Owns its tiers and their threads until ``close``."""

    def __init__(
        self,
        layout: KVLayout,
        arena: Arena,
        lower: LowerTiers,
        *,
        policy: str,
        dead_rank: DeadRank,
        stats: StoreStats,
        io_threads: int = 4,
    ) -> None:
        self.layout = layout
        self.stats = stats
        self.dram = DramTier(arena, layout.pools, policy=policy, dead_rank=dead_rank, stats=stats)
        self.disk = lower.disk
        self.remote = lower.remote
        self._save_unfull_chunk = lower.save_unfull_chunk
        self._keeps_sums = bool(lower.landing_s)
        self._first_pool = layout.pools[0].name
        queue_chunks = max(1, arena.slots // 4)
        self._writers: list[_Writer] = []
        self._indexing: threading.Thread | None = None
        if self.disk is not None:
            self._writers.append(_Writer("disk", self.disk.write, self, queue_chunks))
            self._indexing = threading.Thread(target=self.disk.load_index, name="psrl-disk-index", daemon=True)
            self._indexing.start()
        if self.remote is not None and lower.writes_remote:
            self._writers.append(_Writer("remote", self.remote.write, self, queue_chunks))
        self._fetches = (
            FetchPool(self.dram, self.disk, self.remote, io_threads, landing_s=lower.landing_s)
            if self.has_lower_tiers or lower.landing_s
            else None
        )

    @property
    def has_lower_tiers(self) -> bool:
        return self.disk is not None or self.remote is not None

    @property
    def has_late_pages(self) -> bool:
        """Whether a request may find more in DRAM if it waits."""
        return self._fetches is not None

    def commit(self, reservation: Reservation) -> None:
        """Make the pages visible and send what is complete on to the lower tiers. The window of a sliding-window
        pool ends anywhere, so its chunks are always complete."""
        for chunk in reservation.commit():
            if self._keeps_sums and not chunk.sums and self.dram.is_full(chunk):
                self._sum(chunk)  # here, so that a move of the chunk need not wait for it
            if self._save_unfull_chunk or self.dram.is_full(chunk) or chunk.pool != self._first_pool:
                for writer in self._writers:
                    writer.offer(chunk)

    def _sum(self, chunk: Chunk) -> None:
        lease = self.dram.lease_chunk(chunk)
        if lease is not None:
            with lease:
                pieces = cut(self.dram.payload(lease.pieces[0]))
                chunk.sums = b"".join(checksum(piece) for piece in pieces)

    def fetch(self, wanted: Sequence[Wanted], *, seconds: float) -> Fetch | None:
        """Bring up what of ``wanted`` only the lower tiers have, and wait for what others bring; None where nothing
        can come."""
        return None if self._fetches is None else self._fetches.start(wanted, seconds=seconds)

    def drop_tag(self, tag: str) -> dict[str, int]:
        """Drop every page of a tag that nobody uses; returns the pages dropped, by tier."""
        dropped = {"dram": self.dram.drop_tag(tag)}
        if self.disk is not None:
            dropped["disk"] = self.disk.drop_tag(tag)
        return dropped

    def clear(self) -> None:
        """Empty every tier, the remote store's part of this layout included; what is in use in DRAM stays."""
        for writer in self._writers:
            writer.discard()
        self.dram.clear()
        if self.disk is not None:
            self.disk.clear()
        if self.remote is not None:
            self.remote.clear()

    def settle(self, timeout_s: float) -> bool:
        """Wait until everything offered to the lower tiers is written; False if it takes longer."""
        return all([writer.settle(timeout_s) for writer in self._writers])

    def status(self) -> dict[str, Any]:
        """Plain values: use and budget by tier, queue depths, and every counter of ``stats``."""
        dram = self.dram
        tiers: dict[str, Any] = {
            "dram": {
                "used_bytes": dram.used_bytes,
                "budget_bytes": dram.arena.size_bytes,
                "pages": len(dram.index),
                "busy_chunks": dram.busy_chunks(),
                "huge_pages": dram.arena.has_huge_pages,
                "page_locked": dram.arena.is_page_locked,
                "pages_by_tag": dram.pages_by_tag(),
            }
        }
        if self.disk is not None:
            tiers["disk"] = self.disk.status()
        if self.remote is not None:
            tiers["remote"] = self.remote.status()
        return {"tiers": tiers, "queues": self.queues(), "counters": self.stats.snapshot()}

    def queues(self) -> dict[str, int]:
        """How many chunks wait to be written or read, by queue."""
        depths = {f"write_{writer.name}": writer.depth for writer in self._writers}
        if self._fetches is not None:
            depths["fetch"] = self._fetches.depth
        return depths

    def check_integrity(self) -> list[str]:
        wrong = self.dram.check_integrity()
        return wrong + (self.disk.check_integrity() if self.disk is not None else [])

    def close(self) -> None:
        """Write what is queued, within a limit, and release everything."""
        for writer in self._writers:
            writer.close()
        if self._fetches is not None:
            self._fetches.close()
        if self.disk is not None:
            self.disk.close()
        if self._indexing is not None:
            self._indexing.join()
        if self.remote is not None:
            self.remote.close()
        self.dram.arena.close()


class _Writer:
    """Takes chunks down to one tier, one at a time. A chunk stays in DRAM while it waits; when too many do, it
    is not taken, and it is offered again with the next chunk that continues it."""

    def __init__(
        self, name: str, write: Callable[[ChunkImage], bool], store: KVStore, most_waiting: int
    ) -> None:
        self.name = name
        self._write = write
        self._store = store
        self._most_waiting = most_waiting
        self._waiting: deque[Chunk] = deque()
        self._leases: dict[Chunk, Lease] = {}
        self._is_writing = False
        self._closing = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name=f"psrl-write-{name}", daemon=True)
        self._thread.start()

    @property
    def depth(self) -> int:
        return len(self._waiting)

    def offer(self, chunk: Chunk) -> None:
        """Take a chunk, and before it what it continues and the tier has not got: else nobody would find it."""
        with self._changed:
            for one in self._store.dram.line(chunk):
                if one in self._leases or one.stored.get(self.name, 0) >= one.pages:
                    continue
                if self._closing or len(self._waiting) >= self._most_waiting:
                    self._store.stats.add("rejected", chunk.pages, tier=self.name, reason="queue")
                    return
                lease = self._store.dram.lease_chunk(one)
                if lease is not None:
                    self._leases[one] = lease
                    self._waiting.append(one)
                    self._changed.notify_all()

    def discard(self) -> None:
        """Forget what waits, and wait for the write under way."""
        with self._changed:
            while self._waiting:
                self._leases.pop(self._waiting.popleft()).release()
        self.settle(_CLOSE_S)

    def settle(self, timeout_s: float) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: not self._waiting and not self._is_writing, timeout_s)

    def close(self) -> None:
        self.settle(_CLOSE_S)
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self.discard()
        self._thread.join(_CLOSE_S)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._closing)
                if not self._waiting:
                    return
                chunk = self._waiting.popleft()
                lease = self._store.dram.lease_chunk(chunk)  # anew: it may have grown while it waited
                self._leases.pop(chunk).release()
                self._is_writing = True
            try:
                if lease is not None:
                    with lease:
                        image = self._image(lease)
                        if self._write(image):
                            chunk.stored[self.name] = image.pages
                        else:  # perhaps for want of what it continues, which the tier may have evicted
                            for one in self._store.dram.line(chunk):
                                one.stored.pop(self.name, None)
            except Exception:
                logger.exception("psrl: writing a chunk to the %s tier failed", self.name)
                self._store.stats.add("errors", tier=self.name, direction="write", reason="unexpected")
            finally:
                with self._changed:
                    self._is_writing = False
                    self._changed.notify_all()

    def _image(self, lease: Lease) -> ChunkImage:
        (piece,) = lease.pieces
        chunk = piece.chunk
        return ChunkImage(
            layout=self._store.layout.digest,
            pool=chunk.pool,
            tag=chunk.tag,
            start=chunk.start,
            parent=chunk.before,
            page_bytes=self._store.dram.page_bytes[chunk.pool],
            keys=piece.keys,
            payload=self._store.dram.payload(piece),
        )
