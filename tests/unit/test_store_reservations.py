"""Room in DRAM that is taken, filled and given back: nothing half-written shows, and no two writers meet."""

import random
import threading
from itertools import pairwise

import pytest
from store_support import (
    DEADLINE_S,
    check_content,
    cut,
    fill,
    is_empty,
    keys_of,
    make_dram,
    never_dead,
    pages_in,
    put,
    reserve,
)

from psrl_sglang.keys import PoolLayout, count, key_at
from psrl_sglang.store.arena import Arena
from psrl_sglang.store.dram import DramTier, Reservation
from psrl_sglang.store.stats import StoreStats


def spans(tier: DramTier, rooms: list[Reservation]) -> list[tuple[int, int]]:
    """Where visible pages lie, and where those that are on their way will."""
    taken = [
        (chunk.place * tier.arena.slot_bytes, chunk.pages * tier.page_bytes[chunk.pool])
        for chunk in tier.index.chunks()
    ]
    for room in rooms:
        for write in room.writes:
            taken.append((int(tier.offsets([write])[0]), write.pages * tier.page_bytes[write.chunk.pool]))
    return sorted((begin, begin + size) for begin, size in taken if size)


def check_apart(tier: DramTier, rooms: list[Reservation]) -> None:
    assert all(before[1] <= after[0] for before, after in pairwise(spans(tier, rooms)))


def test_nothing_shows_before_the_commit() -> None:
    tier = make_dram(4)
    keys = keys_of(6)
    with reserve(tier, keys) as room:
        fill(tier, room)
        assert tier.match(keys) == []
        assert tier.is_pending(key_at(keys, 0))
        room.commit()
        assert pages_in(tier, keys) == 6
        assert not tier.is_pending(key_at(keys, 0))
    assert pages_in(tier, keys) == 6


@pytest.mark.parametrize("how", ["abort", "context", "drop"])
def test_room_that_is_not_filled_is_given_back(how: str) -> None:
    tier = make_dram(4)
    room = reserve(tier, keys_of(6))
    assert tier.arena.used_slots == 2
    if how == "abort":
        room.abort()
        room.abort()
    elif how == "context":
        with room:
            pass
    del room
    assert is_empty(tier) or (tier.busy_chunks() == 0 and is_empty(tier))


def test_what_is_here_or_on_its_way_gets_no_room_again() -> None:
    tier = make_dram(8)
    put(tier, keys_of(3))
    first = reserve(tier, keys_of(6))
    assert [(write.source, write.pages) for write in first.writes] == [(3, 1), (4, 2)]
    second = reserve(tier, keys_of(7))
    assert [(write.source, write.pages) for write in second.writes] == [(6, 1)]
    assert not reserve(tier, keys_of(7)).pages
    for room in (first, second):
        fill(tier, room)
        room.commit()
    assert pages_in(tier, keys_of(7)) == 7
    assert tier.arena.used_slots == 2, "the same chunks were continued"


def test_chunks_end_where_those_of_other_engines_do() -> None:
    tier = make_dram(8)
    keys = keys_of(10)
    put(tier, keys, start=6)
    assert [(chunk.start, chunk.pages) for chunk in sorted(tier.index.chunks(), key=lambda c: c.start)] == [
        (6, 2),
        (8, 2),
    ]


def test_a_branch_in_the_middle_of_a_chunk_shares_its_head() -> None:
    tier = make_dram(4)
    one, other = keys_of([0, 0, 0, 0]), keys_of([0, 0, 1, 1, 1])
    put(tier, one)
    room = put(tier, other)
    assert [write.source for write in room.writes] == [2, 4]
    assert pages_in(tier, one) == 4
    assert pages_in(tier, other) == 5
    tier.clear()
    assert is_empty(tier)


def test_later_pages_are_lost_with_the_earlier_ones_they_continue_in_a_chunk() -> None:
    tier = make_dram(4)
    put(tier, keys_of(1))
    earlier, later = reserve(tier, keys_of(2)), reserve(tier, keys_of(7))
    fill(tier, later)
    earlier.abort()
    later.commit()
    assert pages_in(tier, keys_of(7)) == 1
    assert len(tier.index) == 1, "nor is anything left that nobody would find"
    assert tier.arena.used_slots == 1
    put(tier, keys_of(7))
    assert pages_in(tier, keys_of(7)) == 7
    assert tier.check_integrity() == []


def test_a_given_up_place_is_not_given_out_while_a_later_one_is_being_written() -> None:
    tier = make_dram(4)
    put(tier, keys_of([0]))
    earlier, later = reserve(tier, keys_of([0, 0])), reserve(tier, keys_of([0, 0, 0]))
    earlier.abort()
    branch = reserve(tier, keys_of([0, 1, 1]))
    check_apart(tier, [later, branch])
    fill(tier, branch)
    branch.commit()
    fill(tier, later)
    later.commit()
    assert pages_in(tier, keys_of([0, 1, 1])) == 3


def test_a_given_up_tail_does_not_reopen_what_others_still_write() -> None:
    tier = make_dram(4)
    put(tier, keys_of([0]))
    rooms = [reserve(tier, keys_of([0] * pages)) for pages in (2, 3)]
    reserve(tier, keys_of([0] * 4)).abort()
    rooms.append(reserve(tier, keys_of([0, 1])))
    check_apart(tier, rooms)
    for room in rooms:
        fill(tier, room)
        room.commit()
    assert pages_in(tier, keys_of([0] * 3)) == 3
    assert pages_in(tier, keys_of([0, 1])) == 2


@pytest.mark.parametrize("seed", range(6))
def test_reservations_on_few_chunks_never_share_memory(seed: int) -> None:
    choose = random.Random(seed)
    tier = make_dram(3)
    for _ in range(300):
        rooms: list[Reservation] = []
        for _ in range(12):
            if not rooms or choose.random() < 0.6:
                tokens = [0] * choose.randint(1, 5) + [1] * choose.choice([0, 0, 0, 2, 4])
                rooms.append(reserve(tier, keys_of(tokens, pool="swa"), pool="swa"))
            else:
                room = rooms.pop(choose.choice([0, 0, -1, choose.randrange(len(rooms))]))
                if choose.random() < 0.5:
                    room.abort()
                else:
                    fill(tier, room)
                    room.commit()
            check_apart(tier, rooms)
        assert tier.check_integrity() == []
        for chunk in tier.index.chunks():
            check_content(tier, tier.match(chunk.keys))
        for room in rooms:
            room.abort()
        tier.clear()
        assert is_empty(tier)


def test_a_sequence_larger_than_the_arena_keeps_its_head() -> None:
    tier = make_dram(4)
    put(tier, keys_of([7, 7]), tag="1")
    room = reserve(tier, keys_of(25))
    assert (room.pages, room.rejected_pages) == (16, 9)
    assert tier._stats.total("rejected", tier="dram", reason="full") == 9
    fill(tier, room)
    room.commit()
    assert pages_in(tier, keys_of(25)) == 16
    assert put(tier, keys_of(25)).pages == 0, "nothing of it makes room for the rest"
    assert pages_in(tier, keys_of(25)) == 16


def test_room_is_not_made_at_the_cost_of_what_the_run_continues() -> None:
    tier = make_dram(2)
    keys = keys_of(12)
    put(tier, cut(keys, 0, 8))
    assert reserve(tier, keys, start=8).rejected_pages == 4
    assert pages_in(tier, keys) == 8


def test_nor_at_the_cost_of_what_it_has_in_common_with_others() -> None:
    tier = make_dram(4)
    keys = keys_of([0] * 10)
    put(tier, cut(keys, 0, 2))
    lost = reserve(tier, cut(keys, 0, 4))
    put(tier, cut(keys, 0, 8), start=4)
    lost.abort()
    put(tier, keys_of([0, 0, 1, 1]))  # takes the place behind the second page
    put(tier, cut(keys, 0, 8))
    assert len(tier.match(keys)) == 3
    put(tier, keys_of([9]))
    kept = tier.lease(keys_of([9]))
    assert reserve(tier, keys).rejected_pages == 2
    assert pages_in(tier, keys) == 8
    kept.release()
    assert reserve(tier, keys).pages == 2


def test_pools_share_the_arena_each_with_pages_of_its_own_size() -> None:
    tier = make_dram(4)
    for pool, pages in (("kv", 8), ("swa", 16)):
        put(tier, keys_of(pages, pool=pool), pool=pool)
    assert tier.arena.used_slots == 4
    assert pages_in(tier, keys_of(8)) == 8
    assert pages_in(tier, keys_of(16, pool="swa")) == 16
    put(tier, keys_of([9]))
    assert pages_in(tier, keys_of(8)) == 4, "a slot changes its pool"
    check_apart(tier, [])


def test_a_page_larger_than_a_slot_is_refused() -> None:
    with pytest.raises(ValueError, match="holds no page"):
        DramTier(Arena(1, 100), [PoolLayout("kv", 101)], policy="LRU", dead_rank=never_dead, stats=StoreStats())


def test_a_failing_callback_leaves_no_room_taken() -> None:
    def dead_rank(_tag: str) -> int | None:
        raise ZeroDivisionError

    tier = make_dram(2, dead_rank=dead_rank)
    put(tier, keys_of([5]))
    with pytest.raises(ZeroDivisionError):
        reserve(tier, keys_of(12))
    assert tier.busy_chunks() == 0
    assert tier.arena.used_slots == 1
    assert tier.check_integrity() == []


def test_threads_that_store_and_read_the_same_sequences_see_only_whole_pages() -> None:
    tier = make_dram(8, dead_rank={"2": 1}.get)
    wrong: list[BaseException] = []

    def work(seed: int) -> None:
        choose = random.Random(seed)
        try:
            for _ in range(400):
                tag = choose.choice("12")
                tokens = [choose.choice([0, 0, 0, 1]) for _ in range(choose.randint(1, 10))]
                keys = keys_of(tokens, tag=tag)
                pages_in(tier, keys)
                room = reserve(tier, keys, tag=tag, start=choose.choice([0, len(tokens) // 2]))
                fill(tier, room)
                if choose.random() < 0.3:
                    room.abort()
                else:
                    room.commit()
                    assert count(keys) >= pages_in(tier, keys)
                if choose.random() < 0.02:
                    tier.drop_tag(tag)
        except BaseException as error:
            wrong.append(error)
            raise

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_S)
        assert not thread.is_alive()
    assert not wrong
    assert tier.check_integrity() == []
    tier.clear()
    assert is_empty(tier)
