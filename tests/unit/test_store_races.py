"""All threads of an engine on one small store: a scheduler that looks up and reserves, a copier that commits or
gives up, readers, a disk that reads into reservations and writes behind, versions that die, and a collector."""

import gc
import queue
import random
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from store_support import (
    DEADLINE_S,
    FILE_BYTES,
    LAYOUT,
    SLOT_BYTES,
    check_content,
    check_disk,
    fill,
    is_empty,
    keys_of,
    kv_files,
    make_disk,
    reserve,
    wanted,
)

from psrl_sglang.store.arena import Arena
from psrl_sglang.store.dram import Lease, Reservation
from psrl_sglang.store.fetch import Fetch
from psrl_sglang.store.stats import StoreStats
from psrl_sglang.store.store import KVStore, LowerTiers

TURNS = 500
SESSIONS = 8
SLOTS = 12


class Engine:
    def __init__(self, path: Path, policy: str, seed: int) -> None:
        self.choose = random.Random(seed)
        self.dead: dict[str, int] = {}
        stats = StoreStats()
        disk = make_disk(
            path,
            load=False,
            budget_bytes=300_000 + 10 * FILE_BYTES,
            stats=stats,
            policy=policy,
            dead_rank=self.dead.get,
        )
        self.store = KVStore(
            LAYOUT,
            Arena(SLOTS, SLOT_BYTES),
            LowerTiers(disk=disk, save_unfull_chunk=bool(seed % 2)),
            policy=policy,
            dead_rank=self.dead.get,
            stats=stats,
        )
        self.copies: queue.Queue[Reservation | None] = queue.Queue()
        self.reads: queue.Queue[Lease | None] = queue.Queue()
        self.wrong: list[BaseException] = []
        self.stopped = threading.Event()
        self.seen_pages = self.read_pages = 0

    def schedule(self) -> None:
        tag, sessions = "v0", {n: [n] for n in range(SESSIONS)}
        fetches: list[Fetch] = []
        leases: list[Lease] = []
        for turn in range(TURNS):
            if turn % 40 == 39:  # the weights change
                self.dead[tag] = turn
                tag = f"v{turn % 3}"
                self.dead.pop(tag, None)
                if turn % 80 == 79:
                    self.store.drop_tag(tag)
            n = self.choose.randrange(SESSIONS)
            tokens = sessions[n]
            if len(tokens) > 30:  # a compaction: it branches from an early page
                del tokens[self.choose.randint(1, 20) :]
            tokens += [self.choose.choice([0, 0, 1])] * self.choose.randint(1, 6)
            keys = keys_of(tokens, tag=tag)
            self.store.dram.match(keys)
            fetch = self.store.fetch([wanted(keys, tag=tag)], seconds=0.01)
            assert fetch is not None
            if self.choose.random() < 0.5:
                while not fetch.is_over:
                    self.stopped.wait(0.0005)
            lease = self.store.dram.lease(keys, seconds=self.choose.choice([None, 0.0, 60.0]))
            if lease.expires_s > 1e9:
                self.reads.put(lease)
            leases = [*leases, lease][-3:]  # the others are dropped, not released
            fetches.append(fetch)
            while len(fetches) > 2:
                late = fetches.pop(0)
                self.read_pages += late.pages["disk"]
                if self.choose.random() < 0.7:
                    late.release()
            start = self.choose.choice([0, lease.pages])
            if start < len(tokens):
                self.copies.put(reserve(self.store.dram, keys, tag=tag, start=start))
            if turn % 50 == 0:
                gc.collect(0)
        for late in fetches:
            late.release()

    def copy(self) -> None:
        while (room := self.copies.get()) is not None:
            fill(self.store.dram, room)
            if room.keys[0] % 5:
                self.store.commit(room)
            elif room.keys[0] % 2:
                room.abort()
            del room

    def read(self) -> None:
        while (lease := self.reads.get()) is not None:
            with lease:
                self.seen_pages += check_content(self.store.dram, lease.pieces)
            del lease

    def watch(self) -> None:
        while not self.stopped.is_set():
            assert self.store.dram.check_integrity() == []
            self.store.status()
            self.stopped.wait(0.002)

    def thread(self, work: Callable[[], None]) -> threading.Thread:
        def run() -> None:
            try:
                work()
            except BaseException as error:
                self.wrong.append(error)
                raise

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        return thread


@pytest.fixture(autouse=True)
def busy_switching() -> Iterator[None]:
    """Threads take turns a hundred times as often as usual."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(5e-5)
    yield
    sys.setswitchinterval(interval)


@pytest.mark.parametrize(("policy", "seed"), [("LRU", 0), ("FIFO", 1), ("LRU", 3)])
def test_threads_of_an_engine_see_only_right_pages_and_leave_nothing_held(
    tmp_path: Path, policy: str, seed: int
) -> None:
    engine = Engine(tmp_path, policy, seed)
    store = engine.store
    threads = [engine.thread(work) for work in (engine.copy, engine.read, engine.read, engine.watch)]
    scheduler = engine.thread(engine.schedule)
    scheduler.join(DEADLINE_S)
    engine.copies.put(None)
    for _ in range(2):
        engine.reads.put(None)
    for thread in threads[:3]:
        thread.join(DEADLINE_S)
    engine.stopped.set()
    threads[3].join(DEADLINE_S)
    assert not any(thread.is_alive() for thread in (scheduler, *threads))
    assert not engine.wrong
    assert store.settle(DEADLINE_S)
    assert engine.seen_pages > 50
    assert engine.read_pages > 0
    assert store.check_integrity() == []
    check_disk(store.disk, tmp_path)  # type: ignore[arg-type]
    stats = store.stats
    assert stats.total("checksum_failures") == stats.total("errors") == stats.total("bad_files") == 0
    store.close()
    gc.collect()
    assert store.dram.busy_chunks() == 0
    store.dram.clear()
    assert is_empty(store.dram)
    assert kv_files(tmp_path)
