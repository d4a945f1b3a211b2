"""Growth of the store's index: pages and versions in it, against what each figure takes.

The DRAM tier as it is, over an arena whose pages are a few bytes: what is measured is the books, not the copying of
KV, which does not depend on how much else there is.
"""

from __future__ import annotations

import gc
import random
import statistics
import time
from collections.abc import Callable
from typing import Literal

from controller_scale import resident_bytes
from results import Row, Target, at_most

from psrl_sglang.keys import KEY_BYTES, PoolLayout
from psrl_sglang.store.arena import Arena
from psrl_sglang.store.dram import DramTier
from psrl_sglang.store.stats import StoreStats

PREFIX_PAGES = 4096  # 64k tokens of 16 a page
CHUNK_PAGES = 16
_PAGE_BYTES = 8
_ROUNDS = 5
_TIMES = 40  # a round
_TAG_PAGES = 1024  # of the version that is retired
_PAGE_TARGET, _LOOKUP_TARGET = at_most(200), at_most(2)  # bytes, ms: as of psrl_sglang.store.bench

Life = Literal["dead", "live"]


def by_pages(pages: int) -> list[Row]:
    """One live version."""
    return _measure(pages, versions=1, life="live", case="index, one version", x_name="pages", x=pages)


def by_versions(versions: int, pages: int, life: Life) -> list[Row]:
    """So many versions share ``pages``; the engine's own is one more, as live as it always is."""
    return _measure(pages, versions, life, f"index, {life} versions", "versions", versions)


def keys_of(number: int, pages: int) -> bytes:
    """Of one sequence; the same for the same number."""
    return random.Random(number).randbytes(pages * KEY_BYTES)


def _measure(pages: int, versions: int, life: Life, case: str, x_name: str, x: int) -> list[Row]:
    names = [f"v{number}" for number in range(versions)]
    ranks = {name: rank for rank, name in enumerate(names)} if life == "dead" else {}
    spare = 2 * _ROUNDS * _TIMES + (_ROUNDS + 2) * _TAG_PAGES // CHUNK_PAGES + PREFIX_PAGES // CHUNK_PAGES
    arena = Arena(pages // CHUNK_PAGES + versions + spare, CHUNK_PAGES * _PAGE_BYTES)
    pool = PoolLayout("kv", _PAGE_BYTES)
    tier = DramTier(arena, [pool], policy="LRU", dead_rank=ranks.get, stats=StoreStats())

    def put(tag: str, number: int, size: int) -> None:
        tier.reserve("kv", tag, keys_of(number, size), 0, b"").commit()

    gc.collect()
    before_bytes = resident_bytes()
    share = -(-pages // versions // CHUNK_PAGES) * CHUNK_PAGES
    for number, name in enumerate(names):
        for at in range(0, share, PREFIX_PAGES):
            put(name, number * share + at, min(PREFIX_PAGES, share - at))
    gc.collect()
    page_bytes = (resident_bytes() - before_bytes) / len(tier.index)

    def row(metric: str, value: float, unit: str, target: Target | None = None) -> Row:
        return Row(
            benchmark="growth",
            case=case,
            x_name=x_name,
            x=x,
            metric=metric,
            value=value,
            unit=unit,
            target=target,
        )

    prefix = keys_of(-1, PREFIX_PAGES)
    tier.reserve("kv", "now", prefix, 0, b"").commit()
    fresh = iter(range(1 << 40, 1 << 41))
    chunks = [keys_of(next(fresh), CHUNK_PAGES) for _ in range(_ROUNDS * _TIMES)]

    def look_up() -> None:
        with tier.lease(prefix) as lease:
            assert lease.pages == PREFIX_PAGES

    def store() -> None:
        tier.reserve("kv", "now", chunks.pop(), 0, b"").commit()

    def evict() -> None:
        victim = tier.index.victim()
        assert victim is not None
        assert tier.drop([victim], "full") == CHUNK_PAGES

    def retire() -> float:
        put("leaving", next(fresh), _TAG_PAGES)
        began_s = time.thread_time()
        assert tier.drop_tag("leaving") == _TAG_PAGES
        return time.thread_time() - began_s

    rows = [
        row("look-up of 64k tokens", _seconds(look_up) * 1e3, "ms", _LOOKUP_TARGET),
        row("store of one chunk", _seconds(store) * 1e6, "us"),
        row("eviction of one chunk", _seconds(evict) * 1e6, "us"),
        row(f"retiring a version of {_TAG_PAGES:,} pages", _median(retire) * 1e3, "ms"),
    ]
    if x_name == "pages":
        rows.append(row("memory of a page", page_bytes, "bytes", _PAGE_TARGET))
    assert tier.check_integrity() == []
    return rows


def retired_pages(pages: int) -> list[Row]:
    """One version of so many pages is all there is, and goes."""
    arena = Arena(pages // CHUNK_PAGES + 1, CHUNK_PAGES * _PAGE_BYTES)
    tier = DramTier(
        arena, [PoolLayout("kv", _PAGE_BYTES)], policy="LRU", dead_rank=lambda _tag: None, stats=StoreStats()
    )
    for at in range(0, pages, PREFIX_PAGES):
        tier.reserve("kv", "1", keys_of(at, min(PREFIX_PAGES, pages - at)), 0, b"").commit()
    began_s = time.thread_time()
    dropped = tier.drop_tag("1")
    took_s = time.thread_time() - began_s
    assert dropped == pages
    return [
        Row(
            benchmark="growth",
            case="index, the version is all there is",
            x_name="pages",
            x=pages,
            metric="retiring it",
            value=took_s * 1e3,
            unit="ms",
        )
    ]


def _seconds(action: Callable[[], None]) -> float:
    """Of one call: the median round's mean, so that what is put off to a later call counts."""
    rounds = []
    for _ in range(_ROUNDS):
        began_s = time.thread_time()
        for _ in range(_TIMES):
            action()
        rounds.append((time.thread_time() - began_s) / _TIMES)
    return statistics.median(rounds)


def _median(action: Callable[[], float]) -> float:
    return statistics.median(action() for _ in range(_ROUNDS))
