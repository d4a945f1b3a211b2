"""The DRAM tier against a model of it: whatever is done in whatever order, a page that matches is the right one,
what is in use stays, and what goes goes in the right order."""

from collections import Counter
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from store_support import check_content, cut, fill, is_empty, keys_of, make_dram

from psrl_sglang.keys import KEY_BYTES, PoolLayout, count, key_at
from psrl_sglang.store.dram import DramTier, Lease, Reservation
from psrl_sglang.store.index import Chunk

SLOTS = 6
POOLS = (PoolLayout("kv", 64), PoolLayout("swa", 32))
TAG = st.sampled_from(["a", "a", "a", "b", "b", "c"])
POOL = st.sampled_from(["kv", "kv", "swa"])
# Sequences that share their heads and grow by less than a chunk.
TOKENS = st.builds(
    lambda head, tail: [0] * head + [1] * tail, st.integers(1, 12), st.sampled_from([0, 0, 1, 5])
)
INDEX = st.integers(0, 1000)


class DramMachine(RuleBasedStateMachine):
    policy = "LRU"

    @initialize()
    def open(self) -> None:
        self.dead: dict[str, int] = {}
        self.deaths = 0
        self.clock = 0
        self.used: dict[Chunk, int] = {}
        self.rooms: list[Reservation] = []
        self.leases: list[Lease] = []
        self.sequences: dict[tuple[str, str, tuple[int, ...]], bytes] = {}
        self.visible: set[bytes] = set()
        self.tier: DramTier = make_dram(
            SLOTS, policy=self.policy, dead_rank=self.dead.get, slot_bytes=256, pools=POOLS
        )
        self._choose = self.tier.index.victim
        self.tier.index.victim = self._checked_victim  # type: ignore[method-assign]

    def _checked_victim(self) -> Chunk | None:
        """The index's choice must be what a search through everything would find."""
        choice = self._choose()
        free = [chunk for chunk in self.tier.index.chunks() if not chunk.busy and not chunk.children]
        dead = [chunk for chunk in free if chunk.tag in self.dead]
        first = min(self.dead[chunk.tag] for chunk in dead) if dead else None
        best = [chunk for chunk in free if self.dead.get(chunk.tag) == first]
        if choice is None:
            assert not free
        else:
            assert choice in best, "dead tags first, the longest dead before the others, and never a head"
            assert self.used[choice] == min(self.used[chunk] for chunk in best), "the oldest of them"
        return choice

    def _use(self, chunks: Any, *, is_new: bool = False) -> None:
        self.clock += 1
        if is_new or self.policy == "LRU":
            self.used.update(dict.fromkeys(chunks, self.clock))

    def _sequence(self, tag: str, pool: str, tokens: list[int]) -> bytes:
        keys = keys_of(tokens, tag=tag, pool=pool)
        self.sequences[tag, pool, tuple(tokens)] = keys
        while len(self.sequences) > 16:
            del self.sequences[next(iter(self.sequences))]
        return keys

    @precondition(lambda self: self.sequences)
    @rule(
        which=INDEX, kept=st.integers(0, 2), more=st.lists(st.sampled_from([0, 0, 1]), min_size=1, max_size=5)
    )
    def continue_one(self, which: int, kept: int, more: list[int]) -> None:
        """The next offload of a sequence, or of one that leaves it a page or two before its end."""
        tag, pool, tokens = list(self.sequences)[-1 - which % min(4, len(self.sequences))]
        head = list(tokens[: max(1, len(tokens) - kept)])
        self.reserve_run(tag, pool, (head + more)[:24], len(head) if which % 3 else 0)

    @rule(tag=TAG, pool=POOL, tokens=TOKENS)
    def reserve(self, tag: str, pool: str, tokens: list[int]) -> None:
        self.reserve_run(tag, pool, tokens, 0)

    def reserve_run(self, tag: str, pool: str, tokens: list[int], start: int) -> None:
        keys = self._sequence(tag, pool, tokens)
        start = min(start, len(tokens) - 1)
        adding = self.tier.index.add

        def add(chunk: Chunk, *args: Any, **options: Any) -> None:
            adding(chunk, *args, **options)
            self._use([chunk], is_new=True)

        self.tier.index.add = add  # type: ignore[method-assign]
        parent = key_at(keys, start - 1) if start else b""
        here = set(self.tier.index._pages) | set(self.tier._pending)
        room = self.tier.reserve(pool, tag, cut(keys, start), start, parent)
        self.tier.index.add = adding  # type: ignore[method-assign]
        offered = [key_at(keys, page) for page in range(start, len(tokens))]
        assert room.pages + room.rejected_pages >= sum(key not in here for key in offered)
        taken = [w.source + page for w in room.writes for page in range(w.pages)]
        assert taken == sorted(set(taken))
        fill(self.tier, room)
        self.rooms.append(room)

    @precondition(lambda self: self.rooms)
    @rule(which=INDEX)
    def commit(self, which: int) -> None:
        room = self.rooms.pop(which % len(self.rooms) if which % 2 else 0)  # mostly in order
        grown = room.commit()
        self._use(grown)
        with pytest.raises(RuntimeError):
            room.commit()
        for write in room.writes:
            if write.chunk in grown:
                run = cut(room.keys, write.source, write.source + write.pages)
                self.visible |= {key_at(run, page) for page in range(write.pages)}

    @precondition(lambda self: self.rooms)
    @rule(which=INDEX, is_dropped=st.booleans())
    def abort(self, which: int, is_dropped: bool) -> None:
        room = self.rooms.pop(which % len(self.rooms))
        if not is_dropped:
            room.abort()
            room.abort()

    @rule(tag=TAG, pool=POOL, tokens=TOKENS, seconds=st.sampled_from([None, None, 0.0, 3600.0]))
    def lease(self, tag: str, pool: str, tokens: list[int], seconds: float | None) -> None:
        keys = self._sequence(tag, pool, tokens)
        lease = self.tier.lease(keys, seconds=seconds)
        self._use({piece.chunk for piece in lease.pieces})
        assert lease.pages == check_content(self.tier, lease.pieces)
        self.leases.append(lease)

    @precondition(lambda self: self.leases)
    @rule(which=INDEX, is_dropped=st.booleans())
    def release(self, which: int, is_dropped: bool) -> None:
        lease = self.leases.pop(which % len(self.leases))
        if not is_dropped:
            lease.release()
            lease.release()

    @rule(tag=TAG, what=st.integers(0, 9))
    def bump(self, tag: str, what: int) -> None:
        if what < 4:
            self.deaths += 1
            self.dead.setdefault(tag, self.deaths)
        elif what < 7:  # installed again
            self.dead.pop(tag, None)
        elif what < 9:
            before = len(self.tier.index)
            dropped = self.tier.drop_tag(tag)
            assert before - len(self.tier.index) == dropped
            left = [chunk for chunk in self.tier.index.chunks() if chunk.tag == tag]
            assert all(chunk.busy or chunk.children for chunk in left)
        else:
            self.tier.clear()
            assert all(chunk.busy or chunk.children for chunk in self.tier.index.chunks())

    @invariant()
    def the_books_hold(self) -> None:
        if not hasattr(self, "tier"):
            return
        assert self.tier.check_integrity() == []
        users = Counter(piece.chunk for lease in self.leases if lease.is_held for piece in lease.pieces)
        users += Counter(write.chunk for room in self.rooms for write in room.writes)
        assert {chunk: chunk.busy for chunk in self.tier.index.chunks() if chunk.busy} == dict(users)

    @invariant()
    def no_page_was_lost_but_by_eviction(self) -> None:
        if hasattr(self, "tier"):
            assert set(self.tier.index._pages) <= self.visible
            held = {
                key_at(piece.keys, page)
                for lease in self.leases
                if lease.is_held
                for piece in lease.pieces
                for page in range(piece.pages)
            }
            assert held <= set(self.tier.index._pages), "what is in use stays"

    @invariant()
    def a_match_is_exact_and_holds_what_was_committed(self) -> None:
        if not hasattr(self, "tier"):
            return
        for keys in self.sequences.values():
            pieces = self.tier.match(keys)
            pages = check_content(self.tier, pieces)
            assert b"".join(piece.keys for piece in pieces) == keys[: pages * KEY_BYTES]
            assert pages == count(keys) or key_at(keys, pages) not in self.tier.index

    @invariant()
    def no_two_pages_share_memory(self) -> None:
        if not hasattr(self, "tier"):
            return
        taken: list[tuple[int, int]] = []
        for chunk in self.tier.index.chunks():
            size = self.tier.page_bytes[chunk.pool]
            begin = chunk.place * self.tier.arena.slot_bytes
            taken.append((begin, begin + chunk.pages * size))
        for room in self.rooms:
            for write in room.writes:
                (begin, *_), size = self.tier.offsets([write]), self.tier.page_bytes[write.chunk.pool]
                taken.append((int(begin), int(begin) + write.pages * size))
        taken = sorted(span for span in taken if span[1] > span[0])
        assert all(end <= begin for (_, end), (begin, _) in pairwise(taken))

    def teardown(self) -> None:
        if not hasattr(self, "tier"):
            return
        for room in self.rooms:
            room.abort()
        for lease in self.leases:
            lease.release()
        self.rooms.clear()
        self.leases.clear()
        self.tier.clear()
        assert is_empty(self.tier), "everything is free in the end"


class FifoMachine(DramMachine):
    policy = "FIFO"


_SETTINGS = settings(
    max_examples=50,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
TestLru = DramMachine.TestCase
TestLru.settings = _SETTINGS
TestFifo = FifoMachine.TestCase
TestFifo.settings = _SETTINGS


def test_offsets_are_where_the_payload_is() -> None:
    tier = make_dram(4)
    keys = keys_of(10)
    with tier.reserve("kv", "1", keys, 0, b"") as room:
        fill(tier, room)
        room.commit()
    pieces = tier.match(keys)
    size = tier.page_bytes["kv"]
    rows = np.stack([tier.arena.memory[at : at + size] for at in tier.offsets(pieces)])
    assert rows.tobytes() == b"".join(tier.payload(piece) for piece in pieces)
    assert tier.offsets([]).dtype == np.int64
