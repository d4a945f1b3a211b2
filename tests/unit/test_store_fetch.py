"""Reading ahead: what only disk or a later tier has comes to DRAM, in order, once, and in bounded room."""

import random
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from store_support import (
    CHUNK_PAGES,
    DEADLINE_S,
    MemoryTier,
    check_content,
    cut,
    fetch,
    is_empty,
    keys_of,
    make_disk,
    make_dram,
    pages_in,
    put,
    reserve,
    wait_until,
    wanted,
    write_all,
)

from psrl_sglang.keys import KEY_BYTES, count, key_at
from psrl_sglang.store.chunk import Found
from psrl_sglang.store.dram import DramTier
from psrl_sglang.store.fetch import FetchPool


class Gate:
    """Holds reads until they may go on, and says how many wait."""

    def __init__(self) -> None:
        self.waiting = 0
        self._open = threading.Semaphore(0)
        self._lock = threading.Lock()

    def __call__(self, _found: Found) -> None:
        with self._lock:
            self.waiting += 1
        assert self._open.acquire(timeout=DEADLINE_S)

    def open(self, reads: int = 10_000) -> None:
        self._open.release(reads)


@pytest.fixture
def pools() -> Iterator[list[FetchPool]]:
    opened: list[FetchPool] = []
    yield opened
    for pool in opened:
        pool.close()


def make(
    pools: list[FetchPool],
    *,
    slots: int = 32,
    disk: Any = None,
    remote: Any = None,
    threads: int = 4,
    **options: Any,
) -> tuple[DramTier, FetchPool]:
    dram = make_dram(slots, **options)
    pool = FetchPool(dram, disk, remote, threads)
    pools.append(pool)
    return dram, pool


def source(*sequences: bytes, **options: Any) -> MemoryTier:
    tier = MemoryTier(**options)
    for keys in sequences:
        tier.put(keys)
    return tier


def check_prefix(dram: DramTier, keys: bytes) -> int:
    """How much of the sequence is here; it must be a prefix, and right."""
    with dram.lock:
        here = [page for page in range(count(keys)) if key_at(keys, page) in dram.index]
        assert here == list(range(len(here)))
        return check_content(dram, dram.match(keys))


# ---- what comes, and from where ----


@pytest.mark.parametrize("pages", [1, 3, 4, 5, 8, 30])
def test_what_only_disk_has_comes_to_dram(tmp_path: Path, pools: list[FetchPool], pages: int) -> None:
    disk = make_disk(tmp_path)
    keys = keys_of(pages)
    write_all(disk, keys)
    dram, pool = make(pools, disk=disk)
    one = fetch(pool, keys_of(40))
    assert pages_in(dram, keys_of(40)) == pages
    assert one.pages == {"disk": pages, "remote": 0}
    assert (one.read_pages, one.first_page) == (pages, 0)
    assert disk._stats.total("bytes", tier="disk", direction="load") == pages * 4096
    one.release()
    assert dram.busy_chunks() == 0
    disk.close()


def test_a_later_tier_has_the_rest(tmp_path: Path, pools: list[FetchPool]) -> None:
    disk = make_disk(tmp_path)
    keys = keys_of(20)
    write_all(disk, cut(keys, 0, 8))
    remote = source(keys)
    dram, pool = make(pools, disk=disk, remote=remote)
    put(dram, cut(keys, 0, 3))
    one = fetch(pool, keys)
    assert pages_in(dram, keys) == 20
    assert one.pages == {"disk": 5, "remote": 12}
    assert (one.read_pages, one.first_page) == (17, 3)
    assert sorted(remote.reads) == sorted(cut(keys, at, at + CHUNK_PAGES) for at in (8, 12, 16))
    disk.close()


def test_what_is_here_is_not_read(pools: list[FetchPool]) -> None:
    keys = keys_of(8)
    remote = source(keys)
    dram, pool = make(pools, slots=4, remote=remote)
    put(dram, keys)
    one = fetch(pool, keys)
    assert remote.reads == []
    assert one.pages == {"disk": 0, "remote": 0}
    assert put(dram, keys_of([7] * 16)).pages == 8, "it is held, all the same"
    one.release()
    assert dram.busy_chunks() == 0


def test_pools_are_read_side_by_side(pools: list[FetchPool]) -> None:
    kv, swa = keys_of(8), keys_of(8, pool="swa")
    remote = source(kv)
    remote.put(swa, 2048)
    dram, pool = make(pools, remote=remote)
    one = pool.start([wanted(kv), wanted(swa, pool="swa")], seconds=DEADLINE_S)
    wait_until(lambda: one.is_complete)
    assert pages_in(dram, kv) == 8
    assert pages_in(dram, swa) == 8
    assert one.pages["remote"] == 16
    assert one.read_pages == 8, "of the first pool"
    one.release()


def test_a_hole_is_filled_around_what_is_here(pools: list[FetchPool]) -> None:
    keys = keys_of(12)
    remote = source(keys, chunk_pages=12)
    dram, pool = make(pools, remote=remote)
    put(dram, keys, start=6)
    dram.drop([chunk for chunk in dram.index.chunks() if chunk.start == 8], "test")
    assert [key_at(keys, page) in dram.index for page in range(12)] == [6 <= page < 8 for page in range(12)]
    one = fetch(pool, keys)
    assert pages_in(dram, keys) == 12
    assert one.pages["remote"] == 10
    one.release()


# ---- the order in which it shows ----


@pytest.mark.parametrize("seed", range(8))
def test_what_shows_is_always_a_prefix_however_late_its_chunks_come(pools: list[FetchPool], seed: int) -> None:
    choose = random.Random(seed)
    keys = keys_of(40)
    remote = source(keys)
    delays = {key_at(keys, page): choose.uniform(0, 0.02) for page in range(0, 40, CHUNK_PAGES)}
    failing = key_at(keys, choose.choice([8, 20, 400 % 40]))

    def before_read(found: Found) -> bool | None:
        time.sleep(delays[found.keys[:KEY_BYTES]])
        return False if found.keys[:KEY_BYTES] == failing else None

    remote.before_read = before_read
    dram, pool = make(pools, remote=remote, threads=6)
    one = pool.start([wanted(keys)], seconds=DEADLINE_S)
    seen = [0]
    while not one.is_complete:
        seen.append(check_prefix(dram, keys))
    seen.append(check_prefix(dram, keys))
    assert seen == sorted(seen)
    assert key_at(keys, seen[-1]) == failing
    one.release()
    assert dram.busy_chunks() == 0
    assert dram.check_integrity() == []


@pytest.mark.parametrize("how", ["false", "raises"])
def test_after_a_chunk_that_fails_nothing_shows_and_all_room_comes_back(
    pools: list[FetchPool], how: str
) -> None:
    keys = keys_of(20)
    remote = source(keys)

    def before_read(found: Found) -> bool | None:
        if found.keys[:KEY_BYTES] != key_at(keys, 8):
            return None
        if how == "raises":
            raise OSError("gone")
        return False

    remote.before_read = before_read
    dram, pool = make(pools, remote=remote)
    one = fetch(pool, keys)
    assert check_prefix(dram, keys) == 8
    assert one.pages["remote"] == one.read_pages == 8
    assert dram.arena.used_slots == 2
    assert not any(dram.is_pending(key_at(keys, page)) for page in range(20))
    remote.before_read = None
    other = fetch(pool, keys)
    assert check_prefix(dram, keys) == 20
    for each in (one, other):
        each.release()
    assert pool.depth == 0


def test_a_chunk_whose_beginning_another_gave_up_does_not_count(pools: list[FetchPool]) -> None:
    keys = keys_of(16)
    remote = source(keys, chunk_pages=8)
    dram, pool = make(pools, remote=remote)
    begun = reserve(dram, cut(keys, 0, 2))  # someone else's offload, which fails
    gate = Gate()
    remote.before_read = gate
    one = pool.start([wanted(keys)], seconds=DEADLINE_S)
    wait_until(lambda: gate.waiting >= 2)
    begun.abort()
    gate.open()
    wait_until(lambda: one.is_complete)
    assert check_prefix(dram, keys) == 0
    assert one.pages["remote"] == one.read_pages == 0
    one.release()
    assert dram.busy_chunks() == 0
    fetch(pool, keys).release()
    assert check_prefix(dram, keys) == 16


# ---- together with others ----


def test_two_fetches_of_a_prefix_read_it_once_and_both_wait(pools: list[FetchPool]) -> None:
    shared, longer = keys_of(12), keys_of(20)
    remote = source(longer)
    gate = Gate()
    remote.before_read = gate
    dram, pool = make(pools, remote=remote, threads=2)
    one = pool.start([wanted(shared)], seconds=DEADLINE_S)
    wait_until(lambda: gate.waiting == 2)
    others = [FetchPool(dram, None, remote, 4) for _ in range(2)]  # their plans do not queue behind the reads
    pools += others
    late = [other.start([wanted(longer)], seconds=DEADLINE_S) for other in others]
    wait_until(lambda: gate.waiting == 4)
    assert not any(fetching.is_complete for fetching in (one, *late))
    gate.open()
    wait_until(lambda: all(fetching.is_complete for fetching in (one, *late)))
    assert pages_in(dram, longer) == 20
    assert sorted(remote.reads) == sorted(cut(longer, at, at + CHUNK_PAGES) for at in range(0, 20, CHUNK_PAGES))
    for fetching in (one, *late):
        fetching.release()
    assert dram.busy_chunks() == 0


def test_many_fetches_at_once_read_every_chunk_once(pools: list[FetchPool]) -> None:
    sequences = [keys_of([0] * head + [1] * 8) for head in (8, 12, 16) for _ in range(6)]
    remote = source(*sequences)
    dram, pool = make(pools, slots=64, remote=remote, threads=8)
    every = [pool.start([wanted(keys)], seconds=DEADLINE_S) for keys in sequences]
    wait_until(lambda: all(one.is_complete for one in every))
    for keys in sequences:
        assert pages_in(dram, keys) == count(keys)
    assert len(remote.reads) == len(set(remote.reads)) == 4 + 3 * 2
    for one in every:
        one.release()
    assert dram.check_integrity() == []


def test_a_fetch_that_waits_for_another_ends_when_that_one_fails(pools: list[FetchPool]) -> None:
    keys = keys_of(4)
    remote = source(keys)
    gate = Gate()
    remote.before_read = lambda found: bool(gate(found))  # False, once it may go on
    dram, pool = make(pools, remote=remote)
    one = pool.start([wanted(keys)], seconds=DEADLINE_S)
    wait_until(lambda: gate.waiting == 1)
    other = pool.start([wanted(keys)], seconds=DEADLINE_S)
    wait_until(lambda: other._open == 0)
    assert not other.is_over
    gate.open()
    wait_until(lambda: other.is_complete and one.is_complete)
    assert check_prefix(dram, keys) == 0


# ---- in bounded room and time ----


@pytest.mark.parametrize("slots", [1, 2, 3, 6])
def test_lmcache_18_dram_smaller_than_the_sequence_takes_what_fits(pools: list[FetchPool], slots: int) -> None:
    """LMCache#2942: a request larger than the staging buffer waited for ever."""
    sequences = [keys_of([n] * 60) for n in range(5)]
    remote = source(*sequences)
    dram, pool = make(pools, slots=slots, remote=remote)
    for keys in sequences:
        one = fetch(pool, keys)
        assert check_prefix(dram, keys) == max(1, slots // 2) * CHUNK_PAGES, (
            "reading ahead leaves the other half"
        )
        one.release()
        assert dram.busy_chunks() == 0
    every = [pool.start([wanted(keys)], seconds=DEADLINE_S) for keys in sequences]
    wait_until(lambda: all(one.is_complete for one in every))
    assert max(check_prefix(dram, keys) for keys in sequences) >= CHUNK_PAGES
    for one in every:
        one.release()
    dram.clear()
    assert is_empty(dram)


def test_a_fetch_is_over_at_its_deadline_and_what_comes_later_still_serves(pools: list[FetchPool]) -> None:
    keys = keys_of(8)
    remote = source(keys)
    gate = Gate()
    remote.before_read = gate
    dram, pool = make(pools, remote=remote)
    one = pool.start([wanted(keys)], seconds=0.05)
    wait_until(lambda: gate.waiting == 2 and one.is_over)
    assert not one.is_complete
    one.release()
    gate.open()
    wait_until(lambda: one.is_complete)
    assert dram.busy_chunks() == 0, "nothing is held for a request that has gone"
    assert check_prefix(dram, keys) == 8
    fetch(pool, keys)
    assert len(remote.reads) == 2


def test_fetched_pages_stay_until_the_fetch_is_released(pools: list[FetchPool]) -> None:
    keys = keys_of(8)
    dram, pool = make(pools, slots=4, remote=source(keys))
    one = fetch(pool, keys)
    put(dram, keys_of([5] * 60))
    assert check_prefix(dram, keys) == 8
    one.release()
    one.release()
    put(dram, keys_of([6] * 60))
    assert check_prefix(dram, keys) == 0


def test_a_fetch_that_is_dropped_holds_nothing(pools: list[FetchPool]) -> None:
    keys = keys_of(8)
    dram, pool = make(pools, slots=4, remote=source(keys))
    one = fetch(pool, keys)
    assert dram.busy_chunks() == 2
    del one
    wait_until(lambda: dram.busy_chunks() == 0)


def test_closing_ends_what_is_queued_and_what_is_asked_for_later(pools: list[FetchPool]) -> None:
    keys = keys_of(40)
    remote = source(keys)
    gate = Gate()
    remote.before_read = gate
    dram, pool = make(pools, remote=remote, threads=1)
    one = pool.start([wanted(keys)], seconds=DEADLINE_S)
    wait_until(lambda: gate.waiting == 1)
    closing = threading.Thread(target=pool.close)
    closing.start()
    gate.open()
    closing.join(DEADLINE_S)
    assert not closing.is_alive()
    assert one.is_complete
    assert pool.start([wanted(keys)], seconds=DEADLINE_S).is_complete
    assert pool.depth == 0
    one.release()
    wait_until(lambda: dram.busy_chunks() == 0)
    assert check_prefix(dram, keys) <= 4
    assert dram.check_integrity() == []


@pytest.mark.parametrize("pages", [7, 8, 9])
def test_lmcache_8_sequences_around_a_multiple_of_the_chunk(pools: list[FetchPool], pages: int) -> None:
    keys = keys_of(pages)
    dram, pool = make(pools, remote=source(keys))
    for asked in (pages - 1, pages, pages + 1):
        fetch(pool, keys_of(asked)).release()
        assert pages_in(dram, keys_of(asked)) == min(asked, pages)
    assert pages_in(dram, keys_of([*range(pages - 1), "else"])) == pages - 1
