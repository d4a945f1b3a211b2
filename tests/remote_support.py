"""Pages for the tests of the remote tier: their bytes follow from their key, so that a wrong one shows."""

import hashlib
from collections.abc import Iterable, Sequence
from typing import Any

from psrl_sglang.keys import KEY_BYTES, KVLayout, PoolLayout, count, key_at, page_keys, pool_salt
from psrl_sglang.store.breaker import CircuitBreaker
from psrl_sglang.store.chunk import ChunkImage, Found, Wanted
from psrl_sglang.store.remote import RemoteTier
from psrl_sglang.store.remote_client import connect
from psrl_sglang.store.stats import StoreStats

CHUNK_PAGES = 4
TIMEOUT_S = 5.0
LAYOUT = KVLayout(
    model="tiny",
    dtype="bfloat16",
    page_tokens=16,
    layers="0-3",
    rank="tp0/1",
    pools=(PoolLayout("kv", 192), PoolLayout("swa", 64)),
)
PAGE_BYTES = {pool.name: pool.page_bytes for pool in LAYOUT.pools}


def hashes(tokens: Iterable[Any]) -> list[str]:
    """Chained like SGLang's: one per page, over the page's token and all before it."""
    chain: list[str] = []
    for token in tokens:
        before = chain[-1] if chain else ""
        chain.append(hashlib.sha256(f"{before}/{token}".encode()).hexdigest())
    return chain


def sequence(
    pages: int | Iterable[Any], *, layout: KVLayout = LAYOUT, pool: str = "kv", run: str = "run"
) -> bytes:
    """The keys of a sequence of so many pages, or with these tokens, one a page."""
    tokens = range(pages) if isinstance(pages, int) else pages
    return page_keys(hashes(tokens), pool_salt(layout, pool, run))


def page_of(key: bytes, page_bytes: int) -> bytes:
    return hashlib.shake_128(key).digest(page_bytes)


def payload_of(keys: bytes, page_bytes: int) -> bytes:
    return b"".join(page_of(key_at(keys, page), page_bytes) for page in range(count(keys)))


def image(
    keys: bytes, start: int, end: int, *, tag: str = "1", pool: str = "kv", layout: KVLayout = LAYOUT
) -> ChunkImage:
    """Pages from start to end of the sequence as one chunk."""
    own = keys[start * KEY_BYTES : end * KEY_BYTES]
    page_bytes = PAGE_BYTES[pool]
    return ChunkImage(
        layout=layout.digest,
        pool=pool,
        tag=tag,
        start=start,
        parent=key_at(keys, start - 1) if start else b"",
        page_bytes=page_bytes,
        keys=own,
        payload=memoryview(payload_of(own, page_bytes)),
    )


def images(keys: bytes, *, chunk_pages: int = CHUNK_PAGES, **options: Any) -> list[ChunkImage]:
    """The whole sequence, the last chunk perhaps unfull."""
    pages = count(keys)
    return [
        image(keys, start, min(start + chunk_pages, pages), **options) for start in range(0, pages, chunk_pages)
    ]


def wanted(keys: bytes, start: int = 0, end: int | None = None, *, tag: str = "1", pool: str = "kv") -> Wanted:
    end = count(keys) if end is None else end
    return Wanted(pool=pool, tag=tag, keys=keys[start * KEY_BYTES : end * KEY_BYTES], start=start)


def tier(url: str, *, timeout_s: float = TIMEOUT_S, ttl_s: float = 0.0, **options: Any) -> RemoteTier:
    """A tier with a client of its own; its counters are `tier.stats`."""
    options = {"layout": LAYOUT, "chunk_pages": CHUNK_PAGES, "stats": StoreStats(), **options}
    return RemoteTier(connect(url, timeout_s=timeout_s, ttl_s=ttl_s), **options)


def quick_breaker() -> CircuitBreaker:
    """Opens at the third failure and tries again after what a test can wait."""
    return CircuitBreaker(failures=3, open_s=0.05, max_open_s=0.2)


def read_one(remote: RemoteTier, found: Found, want: Wanted) -> bytes | None:
    """Into adjacent pages of one buffer, as in the arena; None if the tier says False."""
    page_bytes = PAGE_BYTES[want.pool]
    slot = memoryview(bytearray(found.pages * page_bytes))
    into = [slot[at : at + page_bytes] for at in range(0, slot.nbytes, page_bytes)]
    return bytes(slot) if remote.read(found, want, into) else None


def read_all(remote: RemoteTier, want: Wanted) -> int:
    """How many pages of `want` the tier has; each must read back as it was written."""
    found = remote.find(want)
    check_contiguous(found, want)
    for one in found:
        assert read_one(remote, one, want) == payload_of(one.keys, PAGE_BYTES[want.pool])
    return sum(one.pages for one in found)


def check_contiguous(found: Sequence[Found], want: Wanted) -> None:
    assert want.keys.startswith(b"".join(one.keys for one in found))
