"""Which pages a tier holds, where, and which go next. Not thread-safe: the tier that owns an index locks.

The index is per page, so a prefix matches exactly to the page; what is allocated, evicted and transferred is a
chunk of consecutive pages. A look-up compares whole runs of keys, so it costs one dictionary access a chunk.

Order of eviction: chunks of dead tags before all others, the longest dead first; then by last use (LRU) or by
age (FIFO). A chunk that others in the tier continue is not a candidate, so tails go before heads and what is
left of a sequence is always a prefix.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from psrl_sglang.keys import KEY_BYTES, common_pages, count, key_at

DeadRank = Callable[[str], int | None]
"""For a tag: None while it is live, else a number that is smaller the longer it has been dead."""


class Chunk:
    """Consecutive pages of one sequence, in one place. The tier decides what ``place`` is.

    ``before`` is the key of the page before its first one, empty at the start of a sequence; ``parent`` is the
    chunk with that page, if the tier has it. ``busy`` counts who reads or writes it now; a busy chunk is not
    evicted. ``queued``: it has an entry in the index's queue of candidates. ``stored``: how many of its pages
    each lower tier was given, as far as is known. ``sums``: of the pieces of a full chunk, once they were needed.
    """

    __slots__ = (
        "before",
        "busy",
        "children",
        "keys",
        "parent",
        "place",
        "pool",
        "queued",
        "stamp",
        "start",
        "stored",
        "sums",
        "tag",
    )

    def __init__(self, pool: str, tag: str, start: int, before: bytes, place: Any) -> None:
        self.pool = pool
        self.tag = tag
        self.start = start
        self.before = before
        self.parent: Chunk | None = None
        self.place = place
        self.keys = b""
        self.children = 0
        self.busy = 0
        self.stamp = 0
        self.queued = False
        self.stored: dict[str, int] = {}
        self.sums = b""

    @property
    def pages(self) -> int:
        return count(self.keys)


@dataclass(frozen=True, slots=True)
class Piece:
    """``pages`` consecutive pages of ``chunk``, from its page ``first`` on."""

    chunk: Chunk
    first: int
    pages: int

    @property
    def keys(self) -> bytes:
        return self.chunk.keys[self.first * KEY_BYTES : (self.first + self.pages) * KEY_BYTES]


class PageIndex:
    def __init__(self, policy: str, dead_rank: DeadRank) -> None:
        self._pages: dict[bytes, Chunk] = {}
        self._tags: dict[str, set[Chunk]] = {}
        self._heaps: dict[str, list[tuple[int, int, Chunk]]] = {}
        self._orphans: dict[bytes, set[Chunk]] = {}  # by the page they continue, which is not here
        self._clock = 0
        self._ticket = 0
        self._is_lru = policy == "LRU"
        self._dead_rank = dead_rank

    def __len__(self) -> int:
        """Pages."""
        return len(self._pages)

    def __contains__(self, key: bytes) -> bool:
        return key in self._pages

    def chunk_of(self, key: bytes) -> Chunk | None:
        return self._pages.get(key)

    def holds(self, chunk: Chunk) -> bool:
        return chunk in self._tags.get(chunk.tag, ())

    def chunks(self) -> Iterable[Chunk]:
        for chunks in self._tags.values():
            yield from chunks

    def pages_by_tag(self) -> dict[str, int]:
        return {tag: sum(chunk.pages for chunk in chunks) for tag, chunks in self._tags.items()}

    def match(self, keys: bytes) -> list[Piece]:
        """The longest prefix of ``keys`` that is here. Changes nothing: a probe does not count as a use."""
        found: list[Piece] = []
        at, total = 0, len(keys)
        while at < total:
            chunk = self._pages.get(keys[at : at + KEY_BYTES])
            if chunk is None:
                break
            first = _position(chunk.keys, keys[at : at + KEY_BYTES])
            end = at + len(chunk.keys) - first * KEY_BYTES
            pages = common_pages(keys[at:end], chunk.keys[first * KEY_BYTES :])
            found.append(Piece(chunk, first, pages))
            at += pages * KEY_BYTES
        return found

    def touch(self, pieces: Iterable[Piece]) -> None:
        """These were used now."""
        self._clock += 1
        if self._is_lru:
            for piece in pieces:
                piece.chunk.stamp = self._clock

    def add(self, chunk: Chunk, parent: Chunk | None, *, stamp: int | None = None) -> None:
        """A new chunk that has no pages yet; ``extend`` gives it some. ``stamp``: when it was last used, if that
        was before this index was made, as a negative number. Chunks continue earlier parts of their sequence only,
        whatever keys say: so nothing continues itself, by however many others."""
        chunk.parent = parent if parent is not None and parent.start < chunk.start else None
        self._clock += 1
        chunk.stamp = self._clock if stamp is None else stamp
        self._tags.setdefault(chunk.tag, set()).add(chunk)
        if chunk.parent is not None:
            chunk.parent.children += 1
        elif chunk.before:
            self._orphans.setdefault(chunk.before, set()).add(chunk)
        self._candidate(chunk)

    def extend(self, chunk: Chunk, keys: bytes) -> None:
        """The pages behind those that ``chunk`` has; none of them may be here already."""
        chunk.keys += keys
        for at in range(0, len(keys), KEY_BYTES):
            self._pages[keys[at : at + KEY_BYTES]] = chunk
        if self._orphans:
            for at in range(0, len(keys), KEY_BYTES):
                for orphan in self._orphans.pop(keys[at : at + KEY_BYTES], ()):
                    if chunk.start < orphan.start:
                        orphan.parent = chunk
                        chunk.children += 1

    def remove(self, chunk: Chunk) -> None:
        for at in range(0, len(chunk.keys), KEY_BYTES):
            del self._pages[chunk.keys[at : at + KEY_BYTES]]
        tagged = self._tags[chunk.tag]
        tagged.remove(chunk)
        if not tagged:
            del self._tags[chunk.tag]
            self._heaps.pop(chunk.tag, None)
        parent, chunk.parent = chunk.parent, None
        if parent is not None:
            parent.children -= 1
            if not parent.children:
                self._candidate(parent)
        elif chunk.before in self._orphans:
            siblings = self._orphans[chunk.before]
            siblings.discard(chunk)
            if not siblings:
                del self._orphans[chunk.before]
        if chunk.children:  # removed out of turn: what continued it waits for these pages to come back
            for orphan in tagged:
                if orphan.parent is chunk:
                    orphan.parent = None
                    self._orphans.setdefault(orphan.before, set()).add(orphan)
            chunk.children = 0

    def victim(self) -> Chunk | None:
        """The chunk to evict next; None if every one is busy or continued by a busy one. It stays here."""
        ranked = [(rank, tag) for tag in self._heaps if (rank := self._dead_rank(tag)) is not None]
        for _, tag in sorted(ranked):
            if (chunk := self._oldest(tag)) is not None:
                return chunk
        dead = {tag for _, tag in ranked}
        live = [chunk for tag in self._heaps if tag not in dead and (chunk := self._oldest(tag)) is not None]
        return min(live, key=lambda chunk: chunk.stamp, default=None)

    def of_tag(self, tag: str) -> list[Chunk]:
        """Every chunk of a tag, tails before heads."""
        return sorted(self._tags.get(tag, ()), key=lambda chunk: -chunk.start)

    def tags(self) -> list[str]:
        return list(self._tags)

    def wrong(self) -> list[str]:
        """What is wrong with the books; empty when nothing is."""
        problems: list[str] = []
        chunks = set(self.chunks())
        if sum(chunk.pages for chunk in chunks) != len(self._pages):
            problems.append(f"chunks hold {sum(c.pages for c in chunks)} pages, the index {len(self._pages)}")
        children: dict[int, int] = {}
        for chunk in chunks:
            if any(self._pages.get(key_at(chunk.keys, page)) is not chunk for page in range(chunk.pages)):
                problems.append(f"a chunk of tag {chunk.tag} holds pages the index finds elsewhere or nowhere")
            if chunk.parent is not None:
                if chunk.parent not in chunks:
                    problems.append(f"a chunk of tag {chunk.tag} continues one that is gone")
                children[id(chunk.parent)] = children.get(id(chunk.parent), 0) + 1
        for chunk in chunks:
            if chunk.children != children.get(id(chunk), 0):
                problems.append(f"a chunk of tag {chunk.tag} counts {chunk.children} children")
            if chunk.busy < 0:
                problems.append(f"a chunk of tag {chunk.tag} has {chunk.busy} users")
            if not chunk.children and not chunk.queued:
                problems.append(f"a chunk of tag {chunk.tag} can never be evicted")
        for orphan in set().union(*self._orphans.values()) - chunks:
            problems.append(f"a chunk of tag {orphan.tag} is gone and still waits for what it continued")
        return problems

    def _candidate(self, chunk: Chunk) -> None:
        if chunk.queued:
            return
        chunk.queued = True
        self._ticket += 1
        heapq.heappush(self._heaps.setdefault(chunk.tag, []), (chunk.stamp, self._ticket, chunk))

    def _oldest(self, tag: str) -> Chunk | None:
        """The least recently used chunk of a tag that nobody uses or continues. An entry whose chunk was used
        since is put back with its new time when it comes up, so a use costs nothing but a stamp."""
        heap, present = self._heaps[tag], self._tags.get(tag, ())
        busy: list[tuple[int, int, Chunk]] = []
        found: Chunk | None = None
        while heap:
            entry = heapq.heappop(heap)
            chunk = entry[2]
            if chunk not in present or chunk.children:
                chunk.queued = False
                continue  # gone, or an inner one: it becomes a candidate again with its last child's end
            if entry[0] != chunk.stamp:
                heapq.heappush(heap, (chunk.stamp, entry[1], chunk))
                continue
            busy.append(entry)
            if not chunk.busy:
                found = chunk
                break
        for entry in busy:
            heapq.heappush(heap, entry)
        return found


def _position(keys: bytes, key: bytes) -> int:
    at = keys.find(key)
    while at % KEY_BYTES:
        at = keys.find(key, at + 1)
    return at // KEY_BYTES
