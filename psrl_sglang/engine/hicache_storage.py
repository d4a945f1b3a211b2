"""Our store behind HiCache: the storage that SGLang calls for what neither the device nor its host pools have.

SGLang makes the object and calls it from threads of its own: to look up and to read before a request is admitted,
and to write what has reached the host pools. The tree (see `hicache_tree`) opens the store, and tells in advance
whose pages these calls will be about.

Every call says which sequence it is about: ``prefix_keys`` and ``keys`` together are its hashes from the start,
and the first of them stands for a tag (see `tagbook`). A call about a sequence that nobody has told of is a miss,
stores nothing, and is counted.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorage,
    HiCacheStorageConfig,
    HiCacheStorageExtraInfo,
    PoolHitPolicy,
    PoolName,
    PoolTransfer,
    PoolTransferResult,
)

from psrl_sglang.engine.hicache_pages import HostCopier, HostPool
from psrl_sglang.engine.tagbook import TagBook
from psrl_sglang.keys import KEY_BYTES, count, key_at, page_keys, pool_salt
from psrl_sglang.store.chunk import Wanted
from psrl_sglang.store.fetch import Fetch
from psrl_sglang.store.store import KVStore
from psrl_sglang.store.windows import complete_at

logger = logging.getLogger(__name__)

_KV = str(PoolName.KV)
_MOST_SALTS = 1024
_POLL_S = 0.001


class _Place(NamedTuple):
    """Where the pages of a call are: the first hash of their sequence, its tag, the first page's place, and the
    hash of the page before that."""

    sequence: str
    tag: str
    start: int
    before: str | None


class PsrlHiCacheStorage(HiCacheStorage):
    """Made for ``--hicache-storage-backend dynamic``. Until ``open``, and after ``close``, every call raises, which
    SGLang takes for a miss."""

    def __init__(self, storage_config: HiCacheStorageConfig, kwargs: Any = None) -> None:
        if not (storage_config.extra_config or {}).get("interface_v1"):
            raise ValueError('PsrlHiCacheStorage needs "interface_v1": 1 among the backend\'s extra settings')
        self.config = storage_config
        self.is_replicated = storage_config.is_mla_model
        # SGLang lets one rank write what all have alike. Our DRAM and disk belong to a rank, so each has to write;
        # to a remote store only one does.
        storage_config.is_mla_model = False
        self.store: KVStore | None = None
        self.tags = TagBook()
        self._committing = threading.Lock()
        self._pools: dict[str, tuple[HostPool, HostCopier]] = {}
        self._salts: dict[tuple[str, str], bytes] = {}
        self._rates = _Rates() if storage_config.enable_storage_metrics else None

    def open(
        self, store: KVStore, pools: Sequence[HostPool], identity: Callable[[str], str], *, wait_s: float
    ) -> None:
        """Take the store, which ``close`` closes. ``identity`` says whose weights a tag names; reading from disk or
        a remote store takes at most ``wait_s`` a call."""
        self._identity = identity
        self._wait_s = wait_s
        self._pools = {pool.name: (pool, HostCopier(store.dram.arena.memory, pool)) for pool in pools}
        self.store = store

    def drop_tag(self, tag: str) -> dict[str, int]:
        """As ``KVStore.drop_tag``; what waits to be written under the tag, or is being written, is dropped too."""
        with self._committing:
            self.tags.forget(tag)
        return self._opened().drop_tag(tag)

    # ---- what SGLang asks about the KV pool alone ----

    def batch_exists(self, keys: list[str], extra_info: HiCacheStorageExtraInfo | None = None) -> int:
        place = self._place(keys, extra_info, "look-up")
        return 0 if place is None else self._probe(self._wanted(_KV, keys, place))

    def batch_get_v1(
        self,
        keys: list[str],
        host_indices: torch.Tensor,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> list[bool]:
        return self._get(_KV, keys, host_indices, extra_info)

    def batch_set_v1(
        self,
        keys: list[str],
        host_indices: torch.Tensor,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> list[bool]:
        return self._set(_KV, keys, host_indices, extra_info)

    # ---- and about several pools ----

    def batch_exists_v2(
        self,
        keys: list[str],
        pool_transfers: list[PoolTransfer] | None = None,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> PoolTransferResult:
        place = self._place(keys, extra_info, "look-up")
        kv_pages = 0 if place is None else self._probe(self._wanted(_KV, keys, place))
        if place is None or not kv_pages:
            return PoolTransferResult.empty()
        hits: dict[str, int] = {PoolName.KV: kv_pages}
        restorable = np.ones(kv_pages + 1, dtype=bool)
        restorable[0] = False
        for transfer in pool_transfers or ():
            wanted = self._wanted(str(transfer.name), keys[:kv_pages], place)
            if transfer.hit_policy == PoolHitPolicy.ALL_PAGES:
                fits = np.arange(kv_pages + 1) <= self._probe(wanted)
            elif transfer.hit_policy == PoolHitPolicy.TRAILING_PAGES:
                fits = self._windows(wanted, max(1, len(transfer.keys or ())))
            else:
                raise ValueError(f"pool {transfer.name} with the hit policy {transfer.hit_policy.value}")
            hits[transfer.name] = int(np.flatnonzero(fits)[-1])
            restorable &= fits
        lengths = np.flatnonzero(restorable).tolist()
        return PoolTransferResult(lengths[-1] if lengths else 0, hits, lengths)

    def batch_get_v2(
        self, transfers: list[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[str, list[bool]]:
        return {
            transfer.name: self._get(str(transfer.name), transfer.keys or [], transfer.host_indices, extra_info)
            for transfer in transfers
        }

    def batch_set_v2(
        self, transfers: list[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[str, list[bool]]:
        return {
            transfer.name: self._set(str(transfer.name), transfer.keys or [], transfer.host_indices, extra_info)
            for transfer in transfers
        }

    # ---- the calls without ``extra_info``: nobody says which sequence a page is of, so there is no such page ----

    def exists(self, key: str) -> bool:
        return self.batch_exists([key]) > 0

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> None:
        self._unknown(1, "read")

    def batch_get(
        self, keys: list[str], target_locations: Any = None, target_sizes: Any = None
    ) -> list[torch.Tensor | None]:
        self._unknown(len(keys), "read")
        return [None] * len(keys)

    def set(self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None) -> bool:
        self._unknown(1, "write")
        return False

    def batch_set(
        self, keys: list[str], values: Any = None, target_locations: Any = None, target_sizes: Any = None
    ) -> bool:
        self._unknown(len(keys), "write")
        return False

    # ---- life cycle ----

    def clear(self) -> None:
        """Empty every tier; what waits to be written, or is being written, is dropped too."""
        with self._committing:
            self.tags.forget()
        self._opened().clear()

    def get_stats(self) -> Any:
        return None if self._rates is None else self._rates.take()

    def close(self) -> None:
        store, self.store = self.store, None
        if store is not None:
            store.close()

    # ---- pages ----

    def _opened(self) -> KVStore:
        if self.store is None:
            raise RuntimeError(
                "psrl: the storage behind HiCache is not open; was SGLang started with --psrl-config?"
            )
        return self.store

    def _unknown(self, pages: int, call: str) -> None:
        self._opened().stats.add("untold_pages", pages, call=call)

    def _place(
        self, hashes: Sequence[str], extra_info: HiCacheStorageExtraInfo | None, call: str
    ) -> _Place | None:
        before = (extra_info.prefix_keys if extra_info is not None else None) or []
        sequence = (before or hashes)[0] if hashes else ""
        tag = self.tags.tag_of(sequence)
        if tag is None:
            self._unknown(len(hashes), call)
            return None
        return _Place(sequence, tag, len(before), before[-1] if before else None)

    def _keys(self, pool: str, hashes: Sequence[str], tag: str) -> bytes:
        salt = self._salts.get((pool, tag))
        if salt is None:
            if len(self._salts) > _MOST_SALTS:
                self._salts.clear()
            salt = self._salts[pool, tag] = pool_salt(self._opened().layout, pool, self._identity(tag))
        return page_keys(hashes, salt)

    def _wanted(self, pool: str, hashes: Sequence[str], place: _Place) -> Wanted:
        return Wanted(pool, place.tag, self._keys(pool, hashes, place.tag), place.start)

    def _probe(self, wanted: Wanted) -> int:
        """How many pages, from the first one on, some tier has."""
        store = self._opened()
        at, total = 0, count(wanted.keys)
        while at < total:
            rest = _behind(wanted, at)
            here = sum(piece.pages for piece in store.dram.match(rest.keys))
            for tier in (store.disk, store.remote):
                if not here and tier is not None:
                    here = sum(found.pages for found in tier.find(rest))
            if not here:
                break
            at += here
        return at

    def _windows(self, wanted: Wanted, window: int) -> np.ndarray:
        """For each length: whether the last ``window`` pages up to it are all here. A remote store, which each
        question takes a round trip, is asked about the longest only."""
        store = self._opened()
        pages = count(wanted.keys)
        here = np.zeros(pages, dtype=bool)
        for page in range(pages):
            one = Wanted(wanted.pool, wanted.tag, key_at(wanted.keys, page), wanted.start + page)
            on_disk = store.disk.find(one) if store.disk is not None else []
            here[page] = bool(store.dram.match(one.keys) or on_disk)
        last = _behind(wanted, max(0, pages - window))
        if not here[-window:].all():
            here[-window:] = self._probe(last) == count(last.keys)
        return complete_at(here, window)

    def _get(
        self,
        name: str,
        hashes: Sequence[str],
        host_indices: torch.Tensor | None,
        extra_info: HiCacheStorageExtraInfo | None,
    ) -> list[bool]:
        """Fill host pages from the first one on, as far as it goes."""
        if not hashes:
            return []
        place = self._place(hashes, extra_info, "read")
        pages = self._host_pages(name, hashes, host_indices, "load")
        if place is None or pages is None:
            return [False] * len(hashes)
        wanted = self._wanted(name, hashes, place)
        began_s = time.perf_counter()
        deadline_s = time.monotonic() + self._wait_s
        done = self._to_host(wanted, pages)
        while done < len(hashes):
            rest = _behind(wanted, done)
            fetch = self._read_up(rest, deadline_s)
            if fetch is None:
                break
            done += self._to_host(rest, pages[done:])
            fetch.release()
        if self._rates is not None and done:
            size_bytes = done * self._pools[name][0].page_bytes
            self._rates.loaded(done, size_bytes, time.perf_counter() - began_s)
        return [page < done for page in range(len(hashes))]

    def _read_up(self, wanted: Wanted, deadline_s: float) -> Fetch | None:
        """Bring pages to DRAM that only disk or a remote store has, and hold them there; None if none came."""
        store = self._opened()
        seconds = deadline_s - time.monotonic()
        fetch = store.fetch([wanted], seconds=seconds) if seconds > 0 else None
        if fetch is None:
            return None
        while not fetch.is_over:
            time.sleep(_POLL_S)
        if store.dram.match(key_at(wanted.keys, 0)):
            return fetch
        fetch.release()
        return None

    def _to_host(self, wanted: Wanted, pages: np.ndarray) -> int:
        """Copy what DRAM has of the first pages; returns how many."""
        store = self._opened()
        pool, copier = self._pools[wanted.pool]
        with store.dram.lease(wanted.keys) as lease:
            if lease.pages:
                with store.stats.timed("dram", "load", lease.pages * pool.page_bytes):
                    copier.to_host(pages[: lease.pages], store.dram.offsets(lease.pieces))
            return lease.pages

    def _set(
        self,
        name: str,
        hashes: Sequence[str],
        host_indices: torch.Tensor | None,
        extra_info: HiCacheStorageExtraInfo | None,
    ) -> list[bool]:
        """Copy what DRAM does not have; from there it goes on to the lower tiers."""
        if not hashes:
            return []
        place = self._place(hashes, extra_info, "write")
        pages = self._host_pages(name, hashes, host_indices, "store")
        if place is None or pages is None:
            return [False] * len(hashes)
        store = self._opened()
        pool, copier = self._pools[name]
        parent = self._keys(name, [place.before], place.tag) if place.before else b""
        if name != _KV and not store.dram.match(parent):
            parent = b""  # the head of a window: its pool has not got what comes before
        began_s = time.perf_counter()
        keys = self._keys(name, hashes, place.tag)
        with store.dram.reserve(name, place.tag, keys, place.start, parent) as room:
            if room.writes:
                new = np.concatenate([np.arange(w.source, w.source + w.pages) for w in room.writes])
                with store.stats.timed("dram", "store", room.pages * pool.page_bytes):
                    copier.to_arena(pages[new], store.dram.offsets(room.writes))
                with self._committing:
                    if self.tags.tag_of(place.sequence) != place.tag:
                        return [False] * len(hashes)  # dropped meanwhile
                    store.commit(room)
                if self._rates is not None:
                    self._rates.stored(len(new), len(new) * pool.page_bytes, time.perf_counter() - began_s)
            kept = len(hashes) - room.rejected_pages
        return [page < kept for page in range(len(hashes))]

    def _host_pages(
        self, name: str, hashes: Sequence[str], host_indices: torch.Tensor | None, direction: str
    ) -> np.ndarray | None:
        pages = self._pools[name][0].pages(host_indices, len(hashes)) if name in self._pools else None
        if pages is None:
            logger.error("psrl: %d pages of pool %s are not where SGLang says", len(hashes), name)
            self._opened().stats.add("errors", tier="dram", direction=direction, reason="host_pages")
        return pages


def _behind(wanted: Wanted, page: int) -> Wanted:
    """The same without its first ``page`` pages."""
    return Wanted(wanted.pool, wanted.tag, wanted.keys[page * KEY_BYTES :], wanted.start + page)


class _Rates:
    """Sizes and speeds of calls since SGLang last asked, for its own metrics. Thread-safe."""

    def __init__(self) -> None:
        from sglang.srt.observability.metrics_collector import StorageMetrics

        self._new = StorageMetrics
        self._now = StorageMetrics()
        self._lock = threading.Lock()

    def loaded(self, pages: int, size_bytes: int, seconds: float) -> None:
        with self._lock:
            self._now.prefetch_pgs.append(pages)
            self._now.prefetch_bandwidth.append(size_bytes / seconds / 1e9)

    def stored(self, pages: int, size_bytes: int, seconds: float) -> None:
        with self._lock:
            self._now.backup_pgs.append(pages)
            self._now.backup_bandwidth.append(size_bytes / seconds / 1e9)

    def take(self) -> Any:
        with self._lock:
            now, self._now = self._now, self._new()
            return now
