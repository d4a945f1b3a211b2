"""The store as the engine sees it: DRAM in front, what is written behind it, and the end of it all."""

import gc
import json
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from store_support import (
    CHUNK_PAGES,
    DEADLINE_S,
    LAYOUT,
    SLOT_BYTES,
    MemoryTier,
    check_content,
    cut,
    fill,
    hashes,
    keys_of,
    kv_files,
    make_disk,
    never_dead,
    pages_in,
    payload_of,
    put,
    reserve,
    wait_until,
    wanted,
)

from psrl_sglang.keys import count, key_at
from psrl_sglang.store.arena import Arena
from psrl_sglang.store.chunk import ChunkImage
from psrl_sglang.store.directory import disk_bytes
from psrl_sglang.store.stats import StoreStats
from psrl_sglang.store.store import KVStore, LowerTiers


@dataclass
class MemoryRemote(MemoryTier):
    """In place of the remote tier: keeps what is written."""

    before_write: Callable[[ChunkImage], bool | None] | None = None
    closed: bool = False

    def write(self, image: ChunkImage) -> bool:
        if self.before_write is not None and self.before_write(image) is False:
            return False
        for page in range(image.pages):
            at = page * image.page_bytes
            self.pages[key_at(image.keys, page)] = bytes(image.payload[at : at + image.page_bytes])
        return True

    def drop_tag(self, _tag: str) -> int:
        return 0

    def clear(self) -> int:
        self.pages.clear()
        return 0

    def status(self) -> dict[str, Any]:
        return {"url": "memory://"}

    def close(self) -> None:
        self.closed = True


OpenStore = Callable[..., KVStore]


@pytest.fixture
def open_store() -> Iterator[OpenStore]:
    stores: list[KVStore] = []

    def start(
        slots: int = 16, *, disk: Path | None = None, remote: Any = None, load: bool = True, **options: Any
    ) -> KVStore:
        stats = StoreStats()
        lower = LowerTiers(
            disk=None if disk is None else make_disk(disk, load=False, stats=stats, **options.pop("tier", {})),
            remote=remote,
            save_unfull_chunk=options.pop("save_unfull_chunk", False),
        )
        options = {"policy": "LRU", "dead_rank": never_dead, **options}
        store = KVStore(LAYOUT, Arena(slots, SLOT_BYTES), lower, stats=stats, **options)
        stores.append(store)
        if disk is not None and load:
            wait_until(lambda: store.disk.is_loaded)  # type: ignore[union-attr]
        return store

    yield start
    for store in stores:
        store.close()


def save(store: KVStore, keys: bytes, *, settle: bool = True, **options: Any) -> None:
    room = reserve(store.dram, keys, **options)
    fill(store.dram, room)
    store.commit(room)
    assert not settle or store.settle(DEADLINE_S)


def bring_up(store: KVStore, keys: bytes, *, tag: str = "1") -> int:
    """Read a sequence ahead; returns how much of it is in DRAM then, and right."""
    fetch = store.fetch([wanted(keys, tag=tag)], seconds=DEADLINE_S)
    assert fetch is not None
    wait_until(lambda: fetch.is_complete)
    pages = pages_in(store.dram, keys)
    fetch.release()
    return pages


def chunks_on_disk(path: Path) -> int:
    return len(kv_files(path))


# ---- what goes down ----


def test_only_full_chunks_are_written_through(tmp_path: Path, open_store: OpenStore) -> None:
    store = open_store(disk=tmp_path)
    keys = keys_of(10)
    for pages, files in ((3, 0), (4, 1), (7, 1), (9, 2), (10, 2)):
        save(store, cut(keys, 0, pages))
        assert chunks_on_disk(tmp_path) == files
    assert store.disk.status()["pages"] == 8  # type: ignore[union-attr]


def test_unfull_chunks_are_written_where_that_is_asked_for(tmp_path: Path, open_store: OpenStore) -> None:
    store = open_store(disk=tmp_path, save_unfull_chunk=True)
    keys = keys_of(10)
    for pages in (1, 3, 4, 7, 10):
        save(store, cut(keys, 0, pages))
        assert store.disk.status()["pages"] == pages  # type: ignore[union-attr]
        assert chunks_on_disk(tmp_path) == -(-pages // CHUNK_PAGES), "a longer chunk replaces the shorter one"
    store.close()
    again = open_store(disk=tmp_path)
    assert bring_up(again, keys) == 10


def test_row_10_bytes_are_equal_through_every_tier(tmp_path: Path, open_store: OpenStore) -> None:
    """sglang#38031: a round trip through the host corrupted KV."""
    remote = MemoryRemote()
    store = open_store(4, disk=tmp_path / "a", remote=remote)
    keys = keys_of(16)
    for pages in (4, 8, 12, 16):  # the queue of so small a store takes one at a time
        save(store, cut(keys, 0, pages))
    put(store.dram, keys_of([9] * 16))
    assert pages_in(store.dram, keys) == 0, "evicted from DRAM"
    assert bring_up(store, keys) == 8, "from disk, as much as reading ahead may take"
    store.close()
    for path in ("a", "b"):  # with the files, and with the remote store alone
        again = open_store(16, disk=tmp_path / path, remote=remote)
        assert bring_up(again, keys) == 16
        assert b"".join(bytes(again.dram.payload(piece)) for piece in again.dram.match(keys)) == payload_of(
            keys
        )
        tier = "disk" if path == "a" else "remote"
        assert again.stats.total("bytes", tier="disk", direction="load") == (16 * 4096 if tier == "disk" else 0)


def test_what_is_continued_goes_down_before_what_continues_it(tmp_path: Path, open_store: OpenStore) -> None:
    """What was not taken when it was offered would make all that follows unreachable after a restart."""
    store = open_store(disk=tmp_path)
    keys = keys_of(16)
    store.disk.is_loaded = False  # type: ignore[union-attr]
    save(store, cut(keys, 0, 8))
    assert store.stats.total("rejected", tier="disk", reason="loading") == 8
    store.disk.is_loaded = True  # type: ignore[union-attr]
    save(store, keys)
    assert store.disk.status()["pages"] == 16  # type: ignore[union-attr]
    store.close()
    assert bring_up(open_store(disk=tmp_path), keys) == 16


def test_a_branch_of_an_unfull_chunk_takes_it_down_too(tmp_path: Path, open_store: OpenStore) -> None:
    store = open_store(disk=tmp_path)
    save(store, keys_of([0, 0, 0]))
    branch = keys_of([0, 0, 1, 1, 2, 2, 2, 2])
    save(store, branch)
    store.close()
    assert bring_up(open_store(disk=tmp_path), branch) == 8


def test_what_a_lower_tier_has_lost_is_given_to_it_again(tmp_path: Path, open_store: OpenStore) -> None:
    store = open_store(disk=tmp_path)
    keys = keys_of(16)
    save(store, cut(keys, 0, 8))
    store.disk.clear()  # type: ignore[union-attr]
    save(store, cut(keys, 0, 12))
    assert store.disk.status()["pages"] == 0, "there is nothing it could continue"  # type: ignore[union-attr]
    save(store, keys)
    assert store.disk.status()["pages"] == 16  # type: ignore[union-attr]


def test_a_full_queue_takes_nothing_and_holds_nobody_up(open_store: OpenStore) -> None:
    remote = MemoryRemote()
    may_write = threading.Event()
    remote.before_write = lambda _image: None if may_write.wait(DEADLINE_S) else False
    store = open_store(16, remote=remote)
    for n in range(12):
        save(store, keys_of([n] * 4), settle=False)
    assert store.stats.total("rejected", tier="remote", reason="queue") >= 4 * (12 - 5)
    assert store.status()["queues"]["write_remote"] <= 4
    assert put(store.dram, keys_of([99] * 60)).pages >= 4 * 11, (
        "what waits takes no more than its share of DRAM"
    )
    may_write.set()
    assert store.settle(DEADLINE_S)
    assert len(remote.pages) >= 16
    assert store.dram.busy_chunks() == 0


def test_a_tier_that_raises_is_counted_and_the_next_chunk_is_written(open_store: OpenStore) -> None:
    remote = MemoryRemote()

    def before_write(image: ChunkImage) -> None:
        if image.keys == keys_of(4):
            raise RuntimeError("a bug")

    remote.before_write = before_write
    store = open_store(remote=remote)
    save(store, keys_of(4))
    save(store, keys_of([5] * 4))
    assert store.stats.total("errors", tier="remote") == 1
    assert len(remote.pages) == 4
    assert store.dram.busy_chunks() == 0


def test_lmcache_5_a_failed_store_does_not_show(
    tmp_path: Path, open_store: OpenStore, monkeypatch: Any
) -> None:
    """LMCache#4991: a store to the second level failed, stayed visible, and served gibberish."""
    store = open_store(disk=tmp_path)
    write = os.pwritev

    def short(file: int, parts: Sequence[Any], offset: int) -> int:
        if offset:
            raise OSError(28, "No space left on device")
        return write(file, [memoryview(parts[0]), memoryview(parts[1])[:4096]], offset)

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwritev", short)
        save(store, keys_of(4))
    assert store.disk.status()["pages"] == 0  # type: ignore[union-attr]
    assert store.stats.total("errors", tier="disk", direction="write", reason="ENOSPC") == 1
    assert [path.name for path in store.disk.directory.path.rglob("*")] == ["LOCK"]  # type: ignore[union-attr]
    store.dram.clear()
    assert bring_up(store, keys_of(4)) == 0


def test_row_5_pages_of_another_version_are_not_found_after_a_restart(
    tmp_path: Path, open_store: OpenStore
) -> None:
    """sglang#26792: files were found again under keys that lacked the version."""
    store = open_store(disk=tmp_path)
    save(store, keys_of(8, tag="v1"), tag="v1")
    store.close()
    again = open_store(disk=tmp_path, tier={"dead_rank": {"v1": 1}.get, "budget_bytes": 140_000})
    assert bring_up(again, keys_of(8, tag="v2"), tag="v2") == 0
    assert bring_up(again, keys_of(8, tag="v1"), tag="v1") == 8
    for n in range(5):
        save(again, keys_of([n] * 4, tag="v2"), tag="v2")
    assert again.disk.status()["pages_by_tag"].get("v1", 0) == 0, "and its files make room first"  # type: ignore[union-attr]


# ---- dropping ----


@pytest.mark.parametrize("slow", [False, True])
def test_clear_leaves_no_page_and_no_file(tmp_path: Path, open_store: OpenStore, slow: bool) -> None:
    remote = MemoryRemote()
    if slow:
        remote.before_write = lambda _image: threading.Event().wait(0.02) or None
    store = open_store(disk=tmp_path, remote=remote)
    for n in range(8):
        save(store, keys_of([n] * 8), settle=not slow)
    store.clear()
    assert store.settle(DEADLINE_S)
    assert len(store.dram.index) == 0
    assert store.dram.used_bytes == 0
    assert remote.pages == {}
    assert kv_files(tmp_path) == []
    assert bring_up(store, keys_of([1] * 8)) == 0
    assert store.check_integrity() == []
    save(store, keys_of(8))
    assert chunks_on_disk(tmp_path) == 2


def test_dropping_a_tag_drops_it_everywhere_and_nothing_else(tmp_path: Path, open_store: OpenStore) -> None:
    store = open_store(disk=tmp_path)
    for tag in ("1", "2"):
        save(store, keys_of(8, tag=tag), tag=tag)
    assert store.drop_tag("1") == {"dram": 8, "disk": 8}
    assert store.drop_tag("1") == {"dram": 0, "disk": 0}
    assert bring_up(store, keys_of(8, tag="1")) == 0
    store.dram.clear()
    assert bring_up(store, keys_of(8, tag="2"), tag="2") == 8


def test_lmcache_9_the_books_return_to_nothing(tmp_path: Path, open_store: OpenStore) -> None:
    store = open_store(8, disk=tmp_path, tier={"budget_bytes": 300_000})
    empty = store.status()["tiers"]["disk"]["used_bytes"]
    for turn in range(20):
        save(store, keys_of([turn] * 12))
        if turn % 3 == 2:
            store.clear()
            assert store.status()["tiers"]["disk"]["used_bytes"] == empty
            assert store.dram.used_bytes == 0
    assert store.stats.total("rejected", tier="disk", reason="full") == 0


# ---- status and the end ----


def test_status_is_plain_and_says_what_there_is(tmp_path: Path, open_store: OpenStore) -> None:
    store = open_store(disk=tmp_path, remote=MemoryRemote())
    save(store, keys_of(8))
    status = json.loads(json.dumps(store.status()))
    assert status["tiers"]["dram"]["pages"] == status["tiers"]["disk"]["pages"] == 8
    assert status["tiers"]["dram"]["pages_by_tag"] == {"1": 8}
    assert status["tiers"]["dram"]["page_locked"] is False
    assert status["tiers"]["dram"]["used_bytes"] == 2 * SLOT_BYTES
    assert status["tiers"]["disk"]["used_bytes"] >= disk_bytes(tmp_path)
    assert status["queues"] == {"write_disk": 0, "write_remote": 0, "fetch": 0}
    names = {(one["name"], one["labels"].get("tier")) for one in status["counters"]}
    assert {("bytes", "disk"), ("seconds", "disk"), ("transfers", "disk")} <= names


def test_a_store_without_lower_tiers_reads_nothing_ahead(open_store: OpenStore) -> None:
    store = open_store()
    save(store, keys_of(8))
    assert store.fetch([wanted(keys_of(8))], seconds=1.0) is None
    assert set(store.status()["tiers"]) == {"dram"}


def test_closing_writes_what_waits_and_leaves_nothing_behind(tmp_path: Path, open_store: OpenStore) -> None:
    gc.collect()
    threads, files = set(threading.enumerate()), set(os.listdir("/proc/self/fd"))
    remote = MemoryRemote()
    store = open_store(disk=tmp_path, remote=remote)
    for n in range(3):
        save(store, keys_of([n] * 4), settle=False)
    bring_up(store, keys_of([0] * 12))
    view = store.dram.arena.view(0, 0, 4096)
    store.close()
    store.close()
    assert chunks_on_disk(tmp_path) == 3
    assert remote.closed
    assert set(threading.enumerate()) <= threads
    assert set(os.listdir("/proc/self/fd")) <= files
    assert len(bytes(view)) == 4096, "memory stays for who still looks at it"
    save(store, keys_of(0), settle=False)
    assert open_store(disk=tmp_path).disk.directory.path == store.disk.directory.path  # type: ignore[union-attr]


def test_closing_while_the_index_loads_waits_for_it(tmp_path: Path, open_store: OpenStore) -> None:
    store = open_store(disk=tmp_path)
    for n in range(20):
        save(store, keys_of([n] * 4))
    store.close()
    for _ in range(10):
        threads = set(threading.enumerate())
        open_store(disk=tmp_path, load=False).close()
        assert set(threading.enumerate()) <= threads
    assert chunks_on_disk(tmp_path) == 20


def test_lmcache_12_keys_that_are_found_depend_on_no_process_state(
    tmp_path: Path, open_store: OpenStore
) -> None:
    store = open_store(disk=tmp_path)
    keys = keys_of(["a", None, 3, "b"])
    save(store, keys)
    assert hashes(["a", None, 3, "b"]) == hashes(iter(["a", None, 3, "b"]))
    assert [file.stem for file in kv_files(tmp_path)] == [key_at(keys, 3).hex()]
    assert check_content(store.dram, store.dram.match(keys)) == count(keys)
