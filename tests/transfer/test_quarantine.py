"""Room that may still be written to: its pages can come another way, and it is not given out before its time."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from psrl_sglang.keys import PoolLayout
from psrl_sglang.store.arena import Arena
from psrl_sglang.store.dram import DramTier
from psrl_sglang.store.stats import StoreStats
from psrl_sglang.transfer import quarantine
from psrl_sglang.transfer.quarantine import Quarantine

PAGE_BYTES = 64


def tier(slots: int = 4, chunk_pages: int = 4) -> DramTier:
    arena = Arena(slots, chunk_pages * PAGE_BYTES)
    pools = [PoolLayout("kv", PAGE_BYTES)]
    return DramTier(arena, pools, policy="LRU", dead_rank=lambda tag: None, stats=StoreStats())


def keys(*numbers: int) -> bytes:
    return b"".join(number.to_bytes(16, "big") for number in numbers)


def test_forsaken_pages_can_be_brought_by_others_at_once() -> None:
    dram = tier()
    lost = dram.reserve("kv", "t", keys(1, 2), 0, b"")
    lost.forsake()
    assert not dram.is_pending(keys(1))
    other = dram.reserve("kv", "t", keys(1, 2, 3), 0, b"")
    assert other.pages == 3
    assert {write.chunk.place for write in other.writes}.isdisjoint(w.chunk.place for w in lost.writes)
    other.commit()
    assert sum(piece.pages for piece in dram.match(keys(1, 2, 3))) == 3
    assert dram.arena.used_slots == 2
    lost.abort()
    assert dram.arena.used_slots == 1
    assert sum(piece.pages for piece in dram.match(keys(1, 2, 3))) == 3
    assert dram.check_integrity() == []


def test_room_behind_forsaken_pages_is_not_given_out() -> None:
    dram = tier()
    dram.reserve("kv", "t", keys(1), 0, b"").commit()
    lost = dram.reserve("kv", "t", keys(2), 1, keys(1))
    lost.forsake()
    other = dram.reserve("kv", "t", keys(2, 3), 1, keys(1))
    (write,) = other.writes
    assert write.chunk is not lost.writes[0].chunk
    other.commit()
    assert sum(piece.pages for piece in dram.match(keys(1, 2, 3))) == 3
    lost.abort()
    assert dram.busy_chunks() == 0
    assert dram.check_integrity() == []


def test_forsaken_room_is_not_evicted() -> None:
    dram = tier(slots=2)
    lost = dram.reserve("kv", "t", keys(1), 0, b"")
    lost.forsake()
    for number in range(10, 20):
        dram.reserve("kv", "t", keys(number), 0, b"").commit()
    assert dram.reserve("kv", "t", keys(30, 31, 32, 33, 34), 0, b"").rejected_pages == 1
    lost.abort()
    assert dram.check_integrity() == []


def test_a_quarantine_ends_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    dram, kept = tier(), Quarantine()
    kept.add(dram.reserve("kv", "t", keys(1), 0, b""))
    kept.release()
    assert (len(kept), dram.arena.used_slots) == (1, 1)
    monkeypatch.setattr(quarantine, "QUARANTINE_S", 0.0)
    kept.add(dram.reserve("kv", "t", keys(2), 0, b""))
    kept.release()
    assert (len(kept), dram.arena.used_slots) == (1, 1)
    kept.close()
    assert (len(kept), dram.arena.used_slots) == (0, 0)


def test_keys_that_continue_each_other_in_a_circle_do_no_harm() -> None:
    dram = tier()
    dram.reserve("kv", "t", keys(3), 2, keys(2)).commit()  # waits for page 2
    dram.reserve("kv", "t", keys(2), 1, keys(3)).commit()  # says that page 3 comes before it
    for chunk in list(dram.index.chunks()):
        assert len(dram.line(chunk)) <= 2
    assert dram.check_integrity() == []
    assert dram.clear() == 2


step = st.tuples(
    st.lists(st.integers(1, 9), min_size=1, max_size=6, unique=True),
    st.integers(0, 6),
    st.one_of(st.just(b""), st.integers(1, 9).map(keys)),
    st.sampled_from(["commit", "abort", "forsake", "keep"]),
)


@settings(max_examples=300, deadline=None)
@given(st.lists(step, max_size=14))
def test_whatever_is_reserved_in_whatever_order_the_books_are_right(
    steps: list[tuple[list[int], int, bytes, str]],
) -> None:
    dram = tier()
    kept = []
    for numbers, start, parent, end in steps:
        room = dram.reserve("kv", "t", keys(*numbers), start, parent)
        if end == "commit":
            room.commit()
        elif end == "abort":
            room.abort()
        else:
            if end == "forsake":
                room.forsake()
            kept.append((room, end))
        assert dram.check_integrity() == []
        assert all(len(dram.line(chunk)) <= dram.arena.slots for chunk in dram.index.chunks())
    for room, end in kept:
        room.abort() if end == "forsake" else room.commit()
        assert dram.check_integrity() == []
    assert dram.busy_chunks() == 0
    dram.clear()
    assert dram.arena.used_slots == 0
