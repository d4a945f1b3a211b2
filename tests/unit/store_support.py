"""Pages for the tests of the store: their bytes follow from their key, so that a wrong one shows."""

import hashlib
import random
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from psrl_sglang.keys import KEY_BYTES, KVLayout, PoolLayout, count, key_at, page_keys, pool_salt
from psrl_sglang.store.arena import Arena
from psrl_sglang.store.chunk import ChunkImage, Found, Wanted
from psrl_sglang.store.directory import disk_bytes
from psrl_sglang.store.disk import DiskTier
from psrl_sglang.store.dram import DramTier, Reservation
from psrl_sglang.store.fetch import Fetch, FetchPool
from psrl_sglang.store.index import Piece
from psrl_sglang.store.stats import StoreStats

SLOT_BYTES = 4 * 4096
CHUNK_PAGES = 4  # of "kv"; a slot holds 8 of "swa"
LAYOUT = KVLayout(
    model="tiny",
    dtype="bfloat16",
    page_tokens=16,
    layers="0-3",
    rank="tp0/1",
    pools=(PoolLayout("kv", 4096), PoolLayout("swa", 2048)),
)
PAGE_BYTES = {pool.name: pool.page_bytes for pool in LAYOUT.pools}
FILE_BYTES = 4096 + SLOT_BYTES  # of a full chunk of "kv"
DEADLINE_S = 60.0


def hashes(tokens: int | Iterable[Any], *, tag: str = "1") -> list[str]:
    """Chained like SGLang's: one per page, over the tag, the page's token and all before it. For so many pages, or
    these tokens."""
    tokens = range(tokens) if isinstance(tokens, int) else tokens
    chain: list[str] = []
    for token in tokens:
        before = chain[-1] if chain else tag
        chain.append(hashlib.sha256(f"{before}/{token}".encode()).hexdigest())
    return chain


def keys_of(
    tokens: int | Iterable[Any], *, tag: str = "1", pool: str = "kv", layout: KVLayout = LAYOUT
) -> bytes:
    """The keys of a sequence of so many pages, or with these tokens, one a page."""
    return page_keys(hashes(tokens, tag=tag), pool_salt(layout, pool, "run"))


def cut(keys: bytes, first: int, end: int | None = None) -> bytes:
    return keys[first * KEY_BYTES : None if end is None else end * KEY_BYTES]


@lru_cache(4096)
def page_of(key: bytes, page_bytes: int) -> bytes:
    return random.Random(key).randbytes(page_bytes)


def payload_of(keys: bytes, page_bytes: int = PAGE_BYTES["kv"]) -> bytes:
    return b"".join(page_of(key_at(keys, page), page_bytes) for page in range(count(keys)))


def never_dead(_tag: str) -> int | None:
    return None


# ---- DRAM ----


def make_dram(slots: int, *, policy: str = "LRU", dead_rank: Any = never_dead, **options: Any) -> DramTier:
    options = {"slot_bytes": SLOT_BYTES, "pools": LAYOUT.pools, "stats": StoreStats(), **options}
    arena = Arena(slots, options["slot_bytes"])
    return DramTier(arena, options["pools"], policy=policy, dead_rank=dead_rank, stats=options["stats"])


def fill(dram: DramTier, room: Reservation) -> None:
    for write in room.writes:
        keys = cut(room.keys, write.source, write.source + write.pages)
        dram.payload(write)[:] = payload_of(keys, dram.page_bytes[write.chunk.pool])


def reserve(dram: DramTier, keys: bytes, *, start: int = 0, tag: str = "1", pool: str = "kv") -> Reservation:
    """Room for the pages of a whole sequence from ``start`` on."""
    parent = key_at(keys, start - 1) if start else b""
    return dram.reserve(pool, tag, cut(keys, start), start, parent)


def put(dram: DramTier, keys: bytes, **options: Any) -> Reservation:
    room = reserve(dram, keys, **options)
    fill(dram, room)
    room.commit()
    return room


def check_content(dram: DramTier, pieces: Iterable[Piece]) -> int:
    """How many pages; each must hold what its key says."""
    pages = 0
    for piece in pieces:
        assert bytes(dram.payload(piece)) == payload_of(piece.keys, dram.page_bytes[piece.chunk.pool])
        pages += piece.pages
    return pages


def pages_in(dram: DramTier, keys: bytes) -> int:
    """How far the sequence is here; every page of it must be right."""
    with dram.lease(keys) as lease:
        return check_content(dram, lease.pieces)


def is_empty(dram: DramTier) -> bool:
    return not len(dram.index) and not dram.arena.used_slots and not dram.check_integrity()


# ---- disk ----


def make_disk(path: Path, *, load: bool = True, layout: KVLayout = LAYOUT, **options: Any) -> DiskTier:
    options = {
        "budget_bytes": 1 << 30,
        "policy": "LRU",
        "dead_rank": never_dead,
        "stats": StoreStats(),
        **options,
    }
    tier = DiskTier(path, layout, **options)
    if load:
        tier.load_index()
    return tier


def image(
    keys: bytes,
    first: int = 0,
    end: int | None = None,
    *,
    tag: str = "1",
    layout: KVLayout = LAYOUT,
    pool_number: int = 0,
) -> ChunkImage:
    """Pages of a sequence as one chunk."""
    pool = layout.pools[pool_number]
    own = cut(keys, first, end)
    return ChunkImage(
        layout=layout.digest,
        pool=pool.name,
        tag=tag,
        start=first,
        parent=key_at(keys, first - 1) if first else b"",
        page_bytes=pool.page_bytes,
        keys=own,
        payload=memoryview(payload_of(own, pool.page_bytes)),
    )


def write_all(disk: DiskTier, keys: bytes, **options: Any) -> list[bool]:
    """A sequence, chunk by chunk."""
    pages = count(keys)
    return [
        disk.write(image(keys, first, min(first + CHUNK_PAGES, pages), **options))
        for first in range(0, pages, CHUNK_PAGES)
    ]


def wanted(keys: bytes, *, tag: str = "1", pool: str = "kv", start: int = 0) -> Wanted:
    return Wanted(pool, tag, cut(keys, start), start)


def read_one(tier: Any, found: Found, want: Wanted, page_bytes: int = PAGE_BYTES["kv"]) -> bool:
    """Whether the tier says it has read the pages; then they must be right."""
    slot = memoryview(bytearray(found.pages * page_bytes))
    into = [slot[at : at + page_bytes] for at in range(0, len(slot), page_bytes)]
    is_read = tier.read(found, want, into)
    if is_read:
        assert bytes(slot) == payload_of(found.keys, page_bytes)
    return is_read


def pages_on(tier: Any, keys: bytes, *, tag: str = "1", page_bytes: int = PAGE_BYTES["kv"]) -> int:
    """How far a sequence can be read from a lower tier."""
    want = wanted(keys, tag=tag)
    found = tier.find(want)
    assert want.keys.startswith(b"".join(one.keys for one in found))
    pages = 0
    for one in found:
        if not read_one(tier, one, want, page_bytes):
            break
        pages += one.pages
    return pages


def check_disk(disk: DiskTier, path: Path) -> None:
    """The books hold, and so does the budget."""
    assert disk.check_integrity() == []
    assert disk_bytes(path) <= disk.used_bytes <= disk.budget_bytes


def kv_files(path: Path) -> list[Path]:
    return sorted(path.rglob("*.kv"))


# ---- reading ahead ----


@dataclass
class MemoryTier:
    """A lower tier in memory. ``before_read`` may wait, raise, or say False for a chunk that cannot be read."""

    pages: dict[bytes, bytes] = field(default_factory=dict)
    chunk_pages: int = CHUNK_PAGES
    reads: list[bytes] = field(default_factory=list)
    before_read: Callable[[Found], bool | None] | None = None

    def put(self, keys: bytes, page_bytes: int = PAGE_BYTES["kv"]) -> None:
        for page in range(count(keys)):
            key = key_at(keys, page)
            self.pages[key] = page_of(key, page_bytes)

    def find(self, wanted: Wanted) -> list[Found]:
        found: list[Found] = []
        at = 0
        while at < count(wanted.keys):
            end = at + self.chunk_pages - (wanted.start + at) % self.chunk_pages
            run = cut(wanted.keys, at, end)
            have = 0
            while have < count(run) and key_at(run, have) in self.pages:
                have += 1
            if have:
                found.append(Found(key_at(run, have - 1), 0, cut(run, 0, have)))
            if have < count(run):
                break
            at += have
        return found

    def read(self, found: Found, wanted: Wanted, into: Sequence[memoryview]) -> bool:
        self.reads.append(found.keys)
        if self.before_read is not None and self.before_read(found) is False:
            return False
        for page, view in enumerate(into):
            view[:] = self.pages[key_at(found.keys, page)]
        return True


def wait_until(condition: Callable[[], Any]) -> None:
    deadline_s = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline_s, "it does not come"
        time.sleep(0.001)


def fetch(pool: FetchPool, *sequences: bytes, seconds: float = DEADLINE_S) -> Fetch:
    """Read ahead what is missing of these sequences, and wait until nothing more comes."""
    one = pool.start([wanted(keys) for keys in sequences], seconds=seconds)
    wait_until(lambda: one.is_complete)
    return one
