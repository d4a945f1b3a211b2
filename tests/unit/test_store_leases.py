"""What keeps pages in DRAM, what does not, and in which order those go that nothing keeps."""

import gc
import threading
from typing import Any

import pytest
from store_support import (
    DEADLINE_S,
    check_content,
    fill,
    is_empty,
    keys_of,
    make_dram,
    pages_in,
    put,
    reserve,
)

from psrl_sglang.keys import count, key_at
from psrl_sglang.store.dram import DramTier


def crowd_out(tier: DramTier, chunks: int, *, tag: str = "crowd") -> int:
    """Offer as many new chunks; returns how many found room."""
    return sum(put(tier, keys_of([n], tag=tag), tag=tag).pages for n in range(10_000, 10_000 + chunks))


def held(tier: DramTier) -> list[bool]:
    return [tier.index.chunk_of(key_at(keys_of([n]), 0)) is not None for n in range(3)]


def three_sequences(**options: Any) -> DramTier:
    tier = make_dram(3, **options)
    for n in range(3):
        put(tier, keys_of([n]))
    return tier


# ---- leases ----


@pytest.mark.parametrize("how", ["release", "context", "drop", "collect"])
def test_a_lease_keeps_its_pages_until_it_ends(how: str) -> None:
    tier = make_dram(2)
    keys = keys_of(8)
    put(tier, keys)
    lease = tier.lease(keys)
    assert crowd_out(tier, 4) == 0
    assert check_content(tier, lease.pieces) == 8
    if how == "release":
        lease.release()
    elif how == "context":
        with lease:
            assert crowd_out(tier, 4) == 0
    elif how == "drop":
        del lease
    else:  # only the collector can find it
        loop: list[Any] = [lease]
        loop.append(loop)
        del lease, loop
        gc.collect()
    assert tier.busy_chunks() == 0
    assert crowd_out(tier, 4) == 4


def test_lmcache_19_a_lease_that_ends_twice_counts_once() -> None:
    """LMCache#3381: an asynchronous load gave its pin back twice."""
    tier = make_dram(2)
    keys = keys_of(4)
    put(tier, keys)
    mine, other = tier.lease(keys), tier.lease(keys)
    for _ in range(3):
        mine.release()
    with mine:
        pass
    assert not mine.is_held
    assert other.is_held
    assert [chunk.busy for chunk in tier.index.chunks()] == [1]
    assert crowd_out(tier, 2) == 2
    assert pages_in(tier, keys) == 4
    del mine
    gc.collect()
    assert [chunk.busy for chunk in tier.index.chunks() if chunk.tag == "1"] == [1]
    other.release()
    assert tier.busy_chunks() == 0
    assert tier.check_integrity() == []


def test_a_timed_lease_gives_way_when_its_time_is_over_and_room_is_needed() -> None:
    tier = make_dram(2)
    keys = keys_of(8)
    put(tier, keys)
    lease = tier.lease(keys, seconds=0.0)
    assert lease.is_held
    tier.check_integrity()
    assert pages_in(tier, keys) == 8
    assert lease.is_held, "nobody needs the room"
    assert crowd_out(tier, 2) == 2
    assert not lease.is_held
    lease.release()
    assert tier.check_integrity() == []


def test_a_timed_lease_holds_before_its_time_is_over() -> None:
    tier = make_dram(2)
    keys = keys_of(8)
    put(tier, keys)
    lease = tier.lease(keys, seconds=3600.0)
    assert crowd_out(tier, 2) == 0
    lease.release()
    assert crowd_out(tier, 2) == 2


def test_leases_end_only_if_no_other_room_is_left() -> None:
    tier = make_dram(3)
    keys = keys_of(8)
    put(tier, keys)
    lease = tier.lease(keys, seconds=0.0)
    assert crowd_out(tier, 5) == 5
    assert lease.is_held
    lease.release()


def test_row_24_probing_never_pins() -> None:
    """Mooncake#2187: asking whether something is there renewed its lease, and nothing could be evicted."""
    tier = three_sequences()
    found = [tier.match(keys_of([n])) for n in range(3) for _ in range(10)]
    assert all(found)
    assert tier.busy_chunks() == 0
    put(tier, keys_of([3]))
    assert held(tier) == [False, True, True], "nor does it count as a use"
    assert crowd_out(tier, 3) == 3


def test_row_14_reference_counts_do_not_leak() -> None:
    """LMCache#987: every turn left a count behind, until nothing could be stored any more."""
    tier = make_dram(12)
    hits = []
    for turn in range(3000):
        keys = keys_of([turn % 3] * (4 + turn % 17))
        lease = tier.lease(keys, seconds=3600.0)
        hits.append(lease.pages)
        room = reserve(tier, keys)
        fill(tier, room)
        if turn % 5:
            room.commit()
        if turn % 3:
            lease.release()
        assert not turn % 10 or tier.check_integrity() == []
    assert sum(hits[-1000:]) >= sum(hits[:1000]) > 0
    del lease, room
    assert tier.busy_chunks() == 0
    tier.clear()
    assert is_empty(tier)


def test_the_collector_may_take_a_lease_while_another_thread_has_the_books() -> None:
    """A finalizer that waits for a lock can be waited for by who has it."""
    tier = make_dram(2)
    keys = keys_of(4)
    put(tier, keys)
    leases = [tier.lease(keys), reserve(tier, keys_of([5]))]
    has_lock, is_done = threading.Event(), threading.Event()

    def hold() -> None:
        with tier.lock:
            has_lock.set()
            assert is_done.wait(DEADLINE_S)

    holder = threading.Thread(target=hold)
    holder.start()
    assert has_lock.wait(DEADLINE_S)
    dropper = threading.Thread(target=leases.clear)
    dropper.start()
    dropper.join(5.0)
    was_stuck = dropper.is_alive()
    is_done.set()
    holder.join(DEADLINE_S)
    dropper.join(DEADLINE_S)
    assert not was_stuck
    assert tier.busy_chunks() == 0


def test_the_collector_may_take_a_reservation_in_the_middle_of_an_eviction() -> None:
    rooms: list[Any] = []

    def dead_rank(_tag: str) -> int | None:
        rooms.clear()  # stands for the collector, which runs wherever something is allocated
        return None

    tier = make_dram(3, dead_rank=dead_rank)
    for tag in "ab":
        put(tier, keys_of([1], tag=tag), tag=tag)
    rooms.append(reserve(tier, keys_of([1], tag="c"), tag="c"))
    assert put(tier, keys_of([2], tag="d"), tag="d").pages == 1
    assert tier.check_integrity() == []
    assert tier.busy_chunks() == 0


def test_a_lease_of_a_chunk_holds_all_its_pages_and_none_that_is_gone() -> None:
    tier = make_dram(1)
    put(tier, keys_of(3))
    (chunk,) = tier.index.chunks()
    with tier.lease_chunk(chunk) as lease:  # type: ignore[union-attr]
        assert lease.pages == 3
        assert crowd_out(tier, 1) == 0
    assert crowd_out(tier, 1) == 1
    assert tier.lease_chunk(chunk) is None
    assert tier.drop([chunk], "late") == 0
    assert tier.check_integrity() == []


@pytest.mark.parametrize("pages", [7, 8, 9, 11, 12, 13])
def test_lmcache_8_a_match_at_an_exact_multiple_of_the_chunk_is_no_page_off(pages: int) -> None:
    """LMCache#5151: a full hit on a multiple of the chunk gave the wrong context."""
    tier = make_dram(8)
    keys = keys_of(pages)
    put(tier, keys)
    for asked in (pages - 1, pages, pages + 1):
        assert pages_in(tier, keys_of(asked)) == min(asked, pages)
    assert pages_in(tier, keys_of([*range(pages - 1), "else"])) == pages - 1
    assert pages_in(tier, keys_of(["else", *range(1, pages)])) == 0


# ---- the order of eviction ----


def test_lru_evicts_what_was_used_longest_ago() -> None:
    tier = three_sequences()
    tier.lease(keys_of([0])).release()
    put(tier, keys_of([3]))
    assert held(tier) == [True, False, True]


def test_fifo_evicts_what_came_first_whatever_was_used() -> None:
    tier = three_sequences(policy="FIFO")
    tier.lease(keys_of([0])).release()
    put(tier, keys_of([3]))
    assert held(tier) == [False, True, True]


def test_dead_tags_go_first_the_longest_dead_before_the_others() -> None:
    dead: dict[str, int] = {}
    tier = make_dram(3, dead_rank=dead.get)
    for tag in ("new", "old", "older"):
        put(tier, keys_of([0], tag=tag), tag=tag)
    dead.update(old=2, older=1)
    gone = []
    for n in range(2):
        put(tier, keys_of([n], tag="fresh"), tag="fresh")
        gone.append({"new", "old", "older"} - set(tier.pages_by_tag()))
    assert gone == [{"older"}, {"older", "old"}]
    assert tier._stats.total("evicted_pages", tier="dram", reason="dead") == 2
    put(tier, keys_of([9], tag="fresh"), tag="fresh")
    assert tier._stats.total("evicted_pages", tier="dram", reason="full") == 1
    assert "new" not in tier.pages_by_tag()


def test_a_dead_tag_that_is_in_use_does_not_stop_the_others() -> None:
    tier = make_dram(2, dead_rank={"dead": 1}.get)
    for tag in ("dead", "live"):
        put(tier, keys_of([0], tag=tag), tag=tag)
    with tier.lease(keys_of([0], tag="dead")):
        assert crowd_out(tier, 1) == 1
    assert set(tier.pages_by_tag()) == {"dead", "crowd"}


@pytest.mark.parametrize("policy", ["LRU", "FIFO"])
def test_tails_go_before_heads(policy: str) -> None:
    tier = make_dram(4, policy=policy)
    keys = keys_of(16)
    put(tier, keys)
    for left in (12, 8, 4, 0):
        assert crowd_out(tier, 1, tag=f"crowd{left}") == 1
        assert check_content(tier, tier.match(keys)) == left
        assert tier.pages_by_tag().get("1", 0) == left, "nothing but a prefix is left"


def test_a_head_goes_only_after_all_its_branches() -> None:
    tier = make_dram(3)
    one, other = keys_of([0] * 4 + [1]), keys_of([0] * 4 + [2])
    put(tier, one)
    put(tier, other)
    assert crowd_out(tier, 1) == 1
    assert (pages_in(tier, one), pages_in(tier, other)) == (4, 5)
    with tier.lease(other):
        assert crowd_out(tier, 3, tag="more") == 3
    assert pages_in(tier, other) == 5


def test_what_is_offered_again_after_its_head_was_lost_is_one_sequence_again() -> None:
    tier = make_dram(4)
    keys = keys_of(8)
    head = reserve(tier, keys_of(4))
    put(tier, keys, start=4)
    head.abort()
    assert tier.match(keys) == []
    put(tier, keys)
    assert pages_in(tier, keys) == 8
    assert tier.arena.used_slots == 2
    assert crowd_out(tier, 3) == 3
    assert pages_in(tier, keys) == 4, "the tail went first"


def test_dropping_a_tag_takes_all_of_it_that_nobody_uses() -> None:
    tier = make_dram(8)
    used, free = keys_of(8), keys_of([5, 6, 7, 8, 9])
    for keys in (used, free):
        put(tier, keys)
    put(tier, keys_of([1], tag="2"), tag="2")
    with tier.lease(used):
        assert tier.drop_tag("1") == count(free)
        assert pages_in(tier, used) == 8
    assert tier.drop_tag("1") == 8
    assert tier.pages_by_tag() == {"2": 1}
    assert tier.clear() == 1
    assert is_empty(tier)
