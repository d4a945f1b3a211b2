"""What the index of pages and the arena cost, counted rather than timed."""

import gc
import os
import random
import tracemalloc
from dataclasses import replace
from typing import Any

import pytest
from store_support import LAYOUT, cut, keys_of, never_dead

from psrl_sglang.keys import KEY_BYTES, PoolLayout
from psrl_sglang.store.arena import Arena
from psrl_sglang.store.index import Chunk, PageIndex
from psrl_sglang.store.store import slot_bytes_of


class CountedPages(dict[bytes, Chunk]):
    gets = 0

    def get(self, *args: Any) -> Any:
        CountedPages.gets += 1
        return super().get(*args)


def test_a_look_up_costs_one_access_a_chunk() -> None:
    index = PageIndex("LRU", never_dead)
    keys, parent = keys_of(16_384), None
    for start in range(0, 16_384, 256):
        chunk = Chunk("kv", "1", start, cut(keys, start - 1, start) if start else b"", start)
        index.add(chunk, parent)
        index.extend(chunk, cut(keys, start, start + 256))
        parent = chunk
    index._pages = CountedPages(index._pages)
    for first, end, expected in ((0, 16_384, 64), (0, 256, 1), (100, 300, 2), (0, 16_000, 63)):
        CountedPages.gets = 0
        assert sum(piece.pages for piece in index.match(cut(keys, first, end))) == end - first
        assert CountedPages.gets == expected
    CountedPages.gets = 0
    assert sum(piece.pages for piece in index.match(cut(keys, 0, 1000) + keys_of([3] * 9))) == 1000
    assert CountedPages.gets == 5


def test_the_index_takes_at_most_200_bytes_a_page() -> None:
    pages, chunk_pages = 100_000, 16
    bytes_of = random.Random(0).randbytes
    keys = bytes_of(pages * KEY_BYTES)
    tracemalloc.start()
    try:
        index, parent = PageIndex("LRU", never_dead), None
        for start in range(0, pages, chunk_pages):
            before = keys[(start - 1) * KEY_BYTES : start * KEY_BYTES] if start else b""
            chunk = Chunk("kv", "1", start, before, start)
            index.add(chunk, parent)
            index.extend(chunk, keys[start * KEY_BYTES : (start + chunk_pages) * KEY_BYTES])
            parent = chunk
        assert tracemalloc.get_traced_memory()[0] / pages <= 200
    finally:
        tracemalloc.stop()
    assert len(index) == pages


# ---- the arena ----


def test_a_shared_arena_closes_its_file() -> None:
    files = set(os.listdir("/proc/self/fd"))
    arena = Arena(2, 4096, shared=True)
    assert os.fstat(arena.fd).st_size == 8192
    arena.memory[:] = 7
    assert os.pread(arena.fd, 1, 8191) == b"\7"
    arena.close()
    arena.close()
    assert arena.fd == -1
    gc.collect()
    assert set(os.listdir("/proc/self/fd")) <= files
    with pytest.raises(MemoryError, match="no mapping of"):
        Arena(1 << 40, 1 << 20)
    with pytest.raises(ValueError, match="an arena of 0 slots"):
        Arena(0, 4096)


def test_a_slot_is_a_chunk_of_the_first_pool_or_the_largest_page() -> None:
    assert slot_bytes_of(LAYOUT, 64) == 4 * 4096
    assert slot_bytes_of(LAYOUT, 1) == 4096
    assert slot_bytes_of(replace(LAYOUT, pools=(PoolLayout("kv", 100), PoolLayout("big", 5000))), 64) == 5000
