"""SGLang's external linker over our store: device pools on one side, the DRAM arena on the other.

Look-ups, reservations and leases happen on the scheduler thread; bytes move on two threads of our own. Made
for ``--unified-cache-external-linker-backend dynamic``; the tree calls ``open`` before anything else.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from sglang.srt.mem_cache.hicache_storage import PoolHitPolicy, PoolName, PoolTransfer
from sglang.srt.mem_cache.unified_cache.unified_cache_linker import UnifiedCacheLinker

from psrl_sglang.engine.copier import Copier, make_copier, page_lock
from psrl_sglang.engine.estimates import LoadOrRecompute
from psrl_sglang.engine.geometry import PoolGeometry, build_pool_group, pool_geometry
from psrl_sglang.engine.layers import LoadCounter, load_layers
from psrl_sglang.engine.linker_jobs import Load, LookedUp, Offload, Place
from psrl_sglang.keys import count, page_keys, pool_salt
from psrl_sglang.platforms.device import open_queue
from psrl_sglang.store.chunk import Wanted
from psrl_sglang.store.dram import Lease, Reservation
from psrl_sglang.store.store import KVStore
from psrl_sglang.store.windows import complete_at, lease_everywhere, worth_reading

logger = logging.getLogger(__name__)

_LOOKED_UP_S = 5.0  # what a look-up protects, should no batch follow it
_MOST_WAITING_OFFLOADS = 256
_QUIESCE_S = 60.0
_CLOSE_S = 10.0


class PsrlLinker(UnifiedCacheLinker):
    layer_done_counter: LoadCounter
    pools: dict[PoolName, Any]

    def __init__(
        self,
        server_args: Any,
        params: Any,
        *,
        components: set[Any],
        extra_config: dict[str, Any],
        forward_stream: Any = None,
        **_: Any,
    ) -> None:
        self.forward_stream = forward_stream
        self.page_tokens: int = params.page_size
        kvcache = params.token_to_kv_pool_allocator.get_kvcache()
        self.group = build_pool_group(kvcache, params, self.page_tokens, components)
        self.pools = dict(self.group.entry_map)
        self.geometry: dict[str, PoolGeometry] = {
            str(name): pool_geometry(entry, self.group.num_layers) for name, entry in self.pools.items()
        }
        self.device = self.group.entries[0].kv_buffer[0].device
        self.layer_done_counter = LoadCounter(self.group.num_layers)
        self.place = Place("", 0, None, 0)
        self.agree: Callable[[bool], bool] = bool  # whether something holds on every rank
        # For tests: called on the loader thread before each layer, and on the offload thread before each job.
        self.before_layer: Callable[[int], None] | None = None
        self.before_offload: Callable[[], None] | None = None
        self.windows: dict[str, int] = {}  # pools that keep windows, and the pages of one, as last looked up
        self.declined: set[str] = set()  # requests of the last batch that had better recompute than load
        self._looked_up: dict[str, LookedUp] = {}
        self._pending: dict[str, Load] = {}
        self._results: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._unfinished = 0
        self._ended = 0
        self._offered = 0  # offloads so far, and up to which of them none may be stored any more
        self._given_up = 0
        self._storing = threading.Lock()
        self._changed = threading.Condition()
        self._salts: dict[tuple[str, str], bytes] = {}
        self._threads: list[threading.Thread] = []

    def open(
        self,
        store: KVStore,
        identity: Callable[[str], str],
        choice: LoadOrRecompute,
        *,
        is_async: bool,
        pin_arena: bool,
    ) -> None:
        """Take the store, which is closed together with the linker, and start the threads. ``identity`` says
        whose weights a tag names."""
        self.store = store
        self.choice = choice
        self._identity = identity
        arena = store.dram.arena
        if pin_arena:
            page_lock(arena, self.device)
        self._copiers: list[Copier] = [
            make_copier(arena, list(self.geometry.values()), open_queue(self.device)) for _ in range(2)
        ]
        self._loads: queue.SimpleQueue[tuple[int, list[Load], list[Any]] | None] = queue.SimpleQueue()
        self._offloads: queue.SimpleQueue[Offload | None] = queue.SimpleQueue()
        self._is_async = is_async
        for name, run in (("psrl-load", self._load_loop), ("psrl-offload", self._offload_loop)):
            thread = threading.Thread(target=run, name=name, daemon=True)
            thread.start()
            self._threads.append(thread)

    def keys(self, pool: str, hashes: list[str], tag: str) -> bytes:
        return page_keys(hashes, self.salt(pool, tag))

    def salt(self, pool: str, tag: str) -> bytes:
        """On any thread."""
        salt = self._salts.get((pool, tag))
        if salt is None:
            if len(self._salts) > 1024:
                self._salts.clear()
            salt = self._salts[pool, tag] = pool_salt(self.store.layout, pool, self._identity(tag))
        return salt

    # ---- look-up and load ----

    def lookup(self, rid: str, transfers: list[PoolTransfer]) -> list[int]:
        self.forget(rid)
        resolved = self.group.resolve_transfers(transfers)
        if not resolved:
            return []
        tag, start = self.place.tag, self.place.start
        hashes = next(transfer.keys for transfer in transfers if transfer.name == PoolName.KV)
        assert hashes is not None
        wanted: list[Wanted] = []
        leases: list[Lease] = []
        windows: dict[str, int] = {}
        restorable = np.ones(len(hashes) + 1, dtype=bool)
        restorable[0] = False
        for transfer in resolved:
            keys = self.keys(str(transfer.name), hashes, tag)
            wanted.append(Wanted(str(transfer.name), tag, keys, start))
            if transfer.hit_policy == PoolHitPolicy.ALL_PAGES:
                lease = self.store.dram.lease(keys, seconds=_LOOKED_UP_S)
                leases.append(lease)
                restorable[lease.pages + 1 :] = False
            else:
                windows[str(transfer.name)] = window = max(1, len(transfer.keys or ()))
                here, held = lease_everywhere(self.store.dram, keys, seconds=_LOOKED_UP_S)
                leases += held
                restorable &= complete_at(here, window)
        if windows:
            self.windows = windows
        lengths = np.flatnonzero(restorable).tolist()
        longest = lengths[-1] if lengths else 0
        is_declined = bool(longest) and not self.choice.should_load(longest * self.page_tokens)
        self._looked_up[rid] = LookedUp(wanted, longest, leases, windows, is_declined)
        return [] if is_declined else lengths

    def missing(self, rid: str) -> tuple[list[Wanted], int]:
        """What is worth reading for a request, by pool, after its last look-up, and how many pages of it DRAM can
        restore; nothing if there was no look-up since the last batch."""
        seen = self._looked_up.get(rid)
        if seen is None:
            return [], 0
        return worth_reading(self.store, seen.wanted, seen.windows), seen.found_pages

    def forget(self, rid: str) -> None:
        """The request's look-up protects nothing any more."""
        seen = self._looked_up.pop(rid, None)
        if seen is not None:
            for lease in seen.leases:
                lease.release()

    def load(self, rid: str, transfers: list[PoolTransfer]) -> bool:
        load = self._prepared_load(rid, transfers)
        if not self.agree(load is not None):
            if load is not None:
                load.release()
            return False
        assert load is not None
        self._pending[rid] = load
        self.choice.loaded += 1
        return True

    def _prepared_load(self, rid: str, transfers: list[PoolTransfer]) -> Load | None:
        resolved = self.group.resolve_transfers(transfers, allow_partial=True, allow_missing_kv=True)
        seen = self._looked_up.get(rid)
        if not resolved or seen is None:
            return None
        load = Load()
        for transfer in resolved:
            pool = str(transfer.name)
            keys = self.keys(pool, list(transfer.keys or ()), seen.wanted[0].tag)
            lease = self.store.dram.lease(keys)
            load.leases.append(lease)
            if lease.pages < count(keys):
                load.release()
                return None
            assert transfer.host_indices is not None
            load.slots.append((pool, transfer.host_indices, self.store.dram.offsets(lease.pieces)))
        return load

    def cancel_queued_load(self, rid: str) -> bool:
        load = self._pending.pop(rid, None)
        if load is None:
            return False
        load.release()
        return True

    def start_layer_wise_loading(self) -> int:
        self.declined = {rid for rid, seen in self._looked_up.items() if seen.is_declined}
        for rid in list(self._looked_up):
            self.forget(rid)
        if not self._pending:
            return -1
        loads, self._pending = list(self._pending.values()), {}
        index = self.layer_done_counter.update_producer()
        # The slots may still be written by the forward that lost them, hence both events.
        ready = self.record_offload_ready()
        if self._is_async:
            self._loads.put((index, loads, ready))
        else:
            self._run_load(index, loads, ready)
        return index

    def finish_layer_wise_loading(self, counter_index: int) -> bool:
        return self.layer_done_counter.finish(counter_index)

    def _load_loop(self) -> None:
        torch.set_num_threads(1)  # of this thread: the forward has the rest
        while (job := self._loads.get()) is not None:
            self._run_load(*job)

    def _run_load(self, index: int, loads: list[Load], ready: list[Any]) -> None:
        began_s = time.perf_counter()
        try:
            for event in ready:
                event.synchronize()
            by_pool = [
                (pool, pool.page_rows(torch.cat(indices)), np.concatenate(offsets))
                for name, pool in self.geometry.items()
                if (indices := [i for load in loads for n, i, _ in load.slots if n == name])
                and (offsets := [o for load in loads for n, _, o in load.slots if n == name])
            ]
            load_layers(
                self._copiers[0], self.layer_done_counter, index, by_pool, before_layer=self.before_layer
            )
            size_bytes = sum(len(offsets) * pool.page_bytes for pool, _, offsets in by_pool)
            seconds = time.perf_counter() - began_s
            self.choice.observe_load(size_bytes, seconds)
            self.store.stats.observe("dram", "load", size_bytes, seconds)
        except Exception as error:
            logger.exception("psrl: a load failed; its requests are answered with 503")
            self.store.stats.add("errors", tier="dram", direction="load", reason=type(error).__name__)
            self.layer_done_counter.fail(index, error)
        finally:
            for load in loads:
                load.release()

    # ---- offload ----

    def offload(self, transfers: list[PoolTransfer], session_id: str | None = None) -> bool:
        """Always queued, so that the results stay in step on all ranks; what could not be stored, wholly or in
        part, is answered with False when its turn comes, and is offered again."""
        place = self.place
        kv_pages = max(len(transfer.keys or ()) for transfer in transfers)
        is_whole = place.most_pages >= kv_pages and self._unfinished < _MOST_WAITING_OFFLOADS
        writes: list[tuple[str, torch.Tensor, Reservation]] = []
        if self._unfinished < _MOST_WAITING_OFFLOADS:
            for transfer in self.group.resolve_transfers(transfers, allow_partial=True):
                pool = str(transfer.name)
                hashes = list(transfer.keys or ())
                skipped = kv_pages - len(hashes)
                keys = self.keys(pool, hashes[: max(0, place.most_pages - skipped)], place.tag)
                before = place.before if not skipped else None
                reservation = self.store.dram.reserve(
                    pool,
                    place.tag,
                    keys,
                    place.start + skipped,
                    self.keys(pool, [before], place.tag) if before else b"",
                )
                is_whole = is_whole and not reservation.rejected_pages
                if reservation.writes:
                    assert transfer.host_indices is not None
                    writes.append((pool, transfer.host_indices, reservation))
        else:
            self.store.stats.add("rejected", kv_pages, tier="dram", reason="queue")
        with self._changed:
            self._unfinished += 1
        self._offered += 1
        ready = self.record_offload_ready() if writes else []
        self._offloads.put(Offload(self._offered, writes, is_whole, ready))
        return True

    def num_completed_offloads(self) -> int:
        return self._results.qsize()

    def pop_completed_offload(self) -> bool:
        return self._results.get_nowait()

    @property
    def waiting_offloads(self) -> int:
        return self._unfinished

    @property
    def offered_offloads(self) -> int:
        """How many there have been."""
        return self._offered

    def wait_for_offload(self, number: int, timeout_s: float) -> bool:
        """Wait until the first ``number`` offloads have been copied; False if it takes longer. On any thread."""
        with self._changed:
            return self._changed.wait_for(lambda: self._ended >= number, timeout_s)

    def settle_offloads(self, timeout_s: float) -> bool:
        """Wait until every offload so far has been copied; False if it takes longer."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._unfinished, timeout_s)

    def give_up_offloads(self) -> None:
        """Nothing that was offloaded so far and is not stored yet will be."""
        with self._storing:
            self._given_up = self._offered

    def _offload_loop(self) -> None:
        torch.set_num_threads(1)
        while (job := self._offloads.get()) is not None:
            is_stored = False
            try:
                if self.before_offload is not None:
                    self.before_offload()
                is_stored = self._run_offload(job) and job.is_whole
            except Exception as error:
                logger.exception("psrl: an offload failed")
                self.store.stats.add("errors", tier="dram", direction="store", reason=type(error).__name__)
            finally:
                for _, _, reservation in job.writes:
                    reservation.abort()  # nothing, once committed
                self._results.put(is_stored)
                number = job.number
                del job
                with self._changed:
                    self._unfinished -= 1
                    self._ended = number
                    self._changed.notify_all()

    def _run_offload(self, job: Offload) -> bool:
        for event in job.ready:
            event.synchronize()
        for name, indices, reservation in job.writes:
            pool = self.geometry[name]
            size_bytes = reservation.pages * pool.page_bytes
            with self.store.stats.timed("dram", "store", size_bytes):
                rows = pool.page_rows(indices)
                wanted = np.concatenate([np.arange(w.source, w.source + w.pages) for w in reservation.writes])
                offsets = self.store.dram.offsets(reservation.writes)
                self._copiers[1].to_arena(pool, rows[torch.from_numpy(wanted)], offsets)
            with self._storing:
                if job.number <= self._given_up:
                    return False
                self.store.commit(reservation)
        return True

    # ---- life cycle ----

    def reset(self) -> None:
        """Everything under way ends; what is stored stays, because a tag keeps it from the wrong weights."""
        for rid in list(self._pending):
            self.cancel_queued_load(rid)
        for rid in list(self._looked_up):
            self.forget(rid)
        for index in list(self.layer_done_counter.futures):
            self.layer_done_counter.finish(index)
        if not self.settle_offloads(_QUIESCE_S):
            logger.error("psrl: an offload has not ended in %.0f s", _QUIESCE_S)
        while self._results.qsize():
            self._results.get_nowait()
        self.layer_done_counter.reset()

    def close(self) -> None:
        if not self._threads:
            return
        self.reset()
        self._loads.put(None)
        self._offloads.put(None)
        for thread in self._threads:
            thread.join(_CLOSE_S)
        self._threads.clear()
        self.store.close()
