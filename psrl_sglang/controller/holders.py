"""Which chunk is held where: chunk key to holder numbers, for millions of entries.

A number stands for one set of chunks, such as "DRAM of rank 0 of engine A since its last full sync", and is
never used again; what it stands for is the caller's. So a set is dropped or replaced by forgetting its number,
at no cost, and `sweep` takes its entries out later, in slices. Chunks are spread over many dictionaries, so that
no one of them takes long to grow or to list.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

# By how many hold a chunk: nearly always one, or the ranks of an engine; a common system prompt may have all.
Holders = int | tuple[int, ...] | set[int]

_MOST_IN_TUPLE = 32
_SLICE_KEYS = 5_000
_SHARDS = 256  # a power of two


class HolderIndex:
    """At most ``max_entries`` (chunk, number) pairs, the forgotten and not yet swept included."""

    def __init__(self, max_entries: int) -> None:
        self._max_entries = max_entries
        self._shards: list[dict[int, Holders]] = [{} for _ in range(_SHARDS)]
        self._counts: dict[int, int] = {}
        self._living = 0
        self._forgotten: dict[int, int] = {}
        self._dead = 0
        self._numbers = 0

    def __len__(self) -> int:
        """Entries of living numbers."""
        return self._living

    @property
    def needs_sweep(self) -> bool:
        return bool(self._forgotten)

    def new_number(self) -> int:
        self._numbers += 1
        self._counts[self._numbers] = 0
        return self._numbers

    def count(self, number: int) -> int:
        return self._counts[number]

    def add(self, number: int, keys: Iterable[int]) -> int:
        """How many of the keys are new to ``number``. Beyond the limit they are left out: see `is_full`."""
        shards, added = self._shards, 0
        room = self._max_entries - self._living - self._dead
        for key in keys:
            if added >= room:
                break
            held = shards[key & (_SHARDS - 1)]
            now = held.get(key)
            if now is None:
                held[key] = number
            elif isinstance(now, int):
                if now == number:
                    continue
                held[key] = (now, number)
            elif number in now:
                continue
            elif isinstance(now, set):
                now.add(number)
            else:
                held[key] = (*now, number) if len(now) < _MOST_IN_TUPLE else {*now, number}
            added += 1
        self._counts[number] += added
        self._living += added
        return added

    @property
    def is_full(self) -> bool:
        return self._living + self._dead >= self._max_entries

    def discard(self, number: int, keys: Iterable[int]) -> int:
        """How many of the keys ``number`` had."""
        gone = sum(self._take_out(key, (number,)) for key in keys)
        self._counts[number] -= gone
        self._living -= gone
        return gone

    def has(self, number: int, key: int) -> bool:
        return number in self.holders(key)

    def holders(self, key: int) -> Iterable[int]:
        """Numbers that hold the chunk, among them forgotten ones."""
        now = self._shards[key & (_SHARDS - 1)].get(key)
        if now is None:
            return ()
        return (now,) if isinstance(now, int) else now

    def forget(self, number: int) -> None:
        count = self._counts.pop(number)
        self._living -= count
        if count:
            self._forgotten[number] = count
            self._dead += count

    def sweep(self) -> Iterator[None]:
        """Take out the entries of forgotten numbers; yields after each slice, so that others can run between."""
        gone = tuple(self._forgotten)
        among = frozenset(gone)
        for shard in self._shards:
            keys = list(shard)
            for at in range(0, len(keys), _SLICE_KEYS):
                for key in keys[at : at + _SLICE_KEYS]:
                    self._take_out(key, among)
                yield
        for number in gone:
            self._dead -= self._forgotten.pop(number)

    def _take_out(self, key: int, numbers: tuple[int, ...] | frozenset[int]) -> int:
        held = self._shards[key & (_SHARDS - 1)]
        now = held.get(key)
        if now is None:
            return 0
        if isinstance(now, int):
            if now not in numbers:
                return 0
            del held[key]
            return 1
        if isinstance(now, set):
            before = len(now)
            now.difference_update(numbers)
            if len(now) <= _MOST_IN_TUPLE // 2:
                _put(held, key, tuple(now))
            return before - len(now)
        left = tuple(number for number in now if number not in numbers)
        if len(left) < len(now):
            _put(held, key, left)
        return len(now) - len(left)


def _put(held: dict[int, Holders], key: int, holders: tuple[int, ...]) -> None:
    if len(holders) > 1:
        held[key] = holders
    elif holders:
        held[key] = holders[0]
    else:
        del held[key]
