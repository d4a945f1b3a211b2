"""How fast each tier is, beside the plainest way to move the same bytes on the same machine in the same minute.

Figures of two machines say little about this code; a ratio to what the machine can do does. Ours and the plain
way take turns, and each figure is the median of its turns.
"""

from __future__ import annotations

import mmap
import os
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from psrl_sglang.keys import KEY_BYTES, key_at, page_keys
from psrl_sglang.store.arena import Arena
from psrl_sglang.store.copies import PageCopier
from psrl_sglang.store.index import Chunk, PageIndex
from psrl_sglang.store.limits import disk_room, memory_room, unwritable
from psrl_sglang.store.remote_client import masked

GB = 1_000_000_000
MIB = 1 << 20
GIB = 1 << 30
ROW_BYTES = 1 << 14  # 16 tokens of 4 heads of 128 at 2 bytes
LAYERS = 8
PAGE_BYTES = 2 * LAYERS * ROW_BYTES
_TURNS = 5
_SPARE_BYTES = 512 * MIB
_INDEX_PAGES = 1_000_000
_LOOKUP_PAGES = 4096  # 64k tokens
_CHUNK_PAGES = 16
_LOOKUPS = 64


class BenchError(Exception):
    """The measurement cannot be made; the message says why and what to change."""


@dataclass(frozen=True, slots=True)
class BenchOptions:
    path: Path
    size_bytes: int
    chunk_bytes: int
    threads: int
    remote_url: str | None = None

    @property
    def chunks(self) -> int:
        return self.size_bytes // self.chunk_bytes

    def check(self) -> None:
        """Raise ``BenchError`` for what this machine or this code cannot do."""
        if self.chunk_bytes < PAGE_BYTES or self.chunk_bytes % PAGE_BYTES:
            raise BenchError(
                f"--chunk-mb: {self.chunk_bytes / MIB:g} MiB are no multiple of a page, {PAGE_BYTES / MIB:g} MiB"
            )
        if self.chunks < 2 * self.threads:
            raise BenchError(
                f"--size-gb: {self.size_bytes / GIB:g} GiB are {self.chunks} chunks, too few for {self.threads} "
                "threads; take more, or a smaller --chunk-mb"
            )
        needed = 2 * self.size_bytes + _SPARE_BYTES
        if (memory := memory_room()).free_bytes < needed:
            raise BenchError(
                f"--size-gb: {self.size_bytes / GIB:g} GiB take {needed / GIB:.2f} GiB of memory; {memory}. "
                "Take less"
            )
        if not self.path.is_dir():
            raise BenchError(f"--path: {self.path} is not a directory")
        if (why := unwritable(self.path)) is not None:
            raise BenchError(f"--path: {self.path}: {why}. Name a directory for files of the disk tier")
        if (disk := disk_room(self.path)).free_bytes < needed:
            raise BenchError(
                f"--path: twice --size-gb are written, {needed / GIB:.2f} GiB with some to spare; {disk}. "
                "Take less, or another directory"
            )

    def as_dict(self) -> dict[str, Any]:
        return {
            "path": str(self.path),
            "size_bytes": self.size_bytes,
            "chunk_bytes": self.chunk_bytes,
            "threads": self.threads,
            "remote_url": None if self.remote_url is None else masked(self.remote_url),
        }


@dataclass(frozen=True, slots=True)
class Figure:
    """One result. With a ``baseline`` the target is for the ratio, at least; else for the value, at most."""

    name: str
    value: float
    unit: str
    target: float
    baseline: float | None = None
    baseline_name: str = ""

    @property
    def ratio(self) -> float | None:
        return None if self.baseline is None else self.value / self.baseline

    @property
    def is_met(self) -> bool:
        return self.value <= self.target if self.ratio is None else self.ratio >= self.target

    def as_dict(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "value": self.value,
            "unit": self.unit,
            "baseline": self.baseline,
            "baseline_name": self.baseline_name,
            "ratio": self.ratio,
            "target": self.target,
            "is_met": self.is_met,
        }


def run_bench(options: BenchOptions) -> Iterator[Figure]:
    """The figures as they come. Raises ``BenchError``. What it writes below ``path`` and to the remote store is
    gone afterwards."""
    from psrl_sglang.store.bench_io import disk_figures, remote_figures

    options.check()
    yield from index_figures()  # first, as it looks at the memory of the process
    arena = Arena(options.chunks, options.chunk_bytes)
    try:
        yield from arena_figures(arena)
        yield from disk_figures(options, arena)
        if options.remote_url is not None:
            yield from remote_figures(options, arena)
    finally:
        arena.close()


def index_figures(pages: int = _INDEX_PAGES) -> Iterator[Figure]:
    """Memory for a page in the index, and the time that a look-up of 64k tokens takes when all of it is there."""
    before_bytes = _resident_bytes()
    index = PageIndex("LRU", lambda _tag: None)
    for _ in range(-(-pages // _LOOKUP_PAGES)):
        _add_sequence(index, os.urandom(_LOOKUP_PAGES * KEY_BYTES))
    taken_bytes = _resident_bytes() - before_bytes
    salt = os.urandom(KEY_BYTES)
    seconds: list[float] = []
    for _ in range(_LOOKUPS):
        hashes = [os.urandom(32).hex() for _ in range(_LOOKUP_PAGES)]
        _add_sequence(index, page_keys(hashes, salt))
        began_s = time.perf_counter()
        found = index.match(page_keys(hashes, salt))
        seconds.append(time.perf_counter() - began_s)
        assert sum(piece.pages for piece in found) == _LOOKUP_PAGES
    yield Figure("index, a page", taken_bytes / len(index), "bytes", target=200)
    yield Figure("look-up of 64k tokens", statistics.median(seconds) * 1e3, "ms", target=2)


def _add_sequence(index: PageIndex, keys: bytes) -> None:
    step = _CHUNK_PAGES * KEY_BYTES
    parent: Chunk | None = None
    for at in range(0, len(keys), step):
        before = key_at(keys, at // KEY_BYTES - 1) if at else b""
        chunk = Chunk("kv", "1", at // KEY_BYTES, before, at)
        index.add(chunk, parent)
        index.extend(chunk, keys[at : at + step])
        parent = chunk


def arena_figures(arena: Arena) -> Iterator[Figure]:
    """Pages between a paged pool and the arena, all of them and in random order, on one thread. The plain way
    gathers a buffer's rows into scratch memory and copies that, in one piece; the same bytes, twice."""
    pages = arena.size_bytes // PAGE_BYTES
    size_bytes = pages * PAGE_BYTES
    random = np.random.default_rng(0)
    buffers = [_random_rows(random, pages) for _ in range(2 * LAYERS)]
    copier = PageCopier(arena.memory, [(buffer, part * ROW_BYTES) for part, buffer in enumerate(buffers)])
    scratch = np.zeros((pages, ROW_BYTES), dtype=np.uint8)
    pieces = arena.memory[:size_bytes].reshape(2 * LAYERS, pages, ROW_BYTES)
    rows = random.permutation(pages)
    offsets = random.permutation(pages) * PAGE_BYTES

    def gather_and_copy() -> None:
        for buffer, piece in zip(buffers, pieces, strict=True):
            np.take(buffer, rows, axis=0, out=scratch, mode="clip")
            piece[:] = scratch

    def copy_and_scatter() -> None:
        for buffer, piece in zip(buffers, pieces, strict=True):
            scratch[:] = piece
            buffer[rows] = scratch

    store = (lambda: copier.store(rows, offsets), gather_and_copy, "gather + memcpy")
    load = (lambda: copier.load(rows, offsets), copy_and_scatter, "memcpy + scatter")
    yield rate("pool to arena, 1 thread", size_bytes, *store)
    yield rate("arena to pool, 1 thread", size_bytes, *load)


def _random_rows(random: np.random.Generator, pages: int) -> np.ndarray:
    """In pages of 4 KiB, as a pool of SGLang's on a CPU is; numpy would ask for huge ones."""
    memory = np.frombuffer(mmap.mmap(-1, pages * ROW_BYTES), dtype=np.int64)
    memory[:] = random.integers(0, 1 << 63, size=memory.size, dtype=np.int64)
    return memory.view(np.uint8).reshape(pages, ROW_BYTES)


def rate(
    name: str,
    size_bytes: int,
    ours: Callable[[], object],
    plain: Callable[[], object],
    plain_name: str,
    *,
    prepare: Callable[[], object] = lambda: None,
) -> Figure:
    """How fast two ways to move so many bytes are, in turns, after one of each that does not count. ``prepare``
    runs before each, and does not count either."""

    def seconds(action: Callable[[], object]) -> float:
        prepare()
        began_s = time.perf_counter()
        action()
        return time.perf_counter() - began_s

    pairs = in_turns(_TURNS + 1, lambda: seconds(ours), lambda: seconds(plain))[1:]
    mine, theirs = (size_bytes / statistics.median(column) / GB for column in zip(*pairs, strict=True))
    return Figure(name, mine, "GB/s", target=0.8, baseline=theirs, baseline_name=plain_name)


def in_turns(turns: int, ours: Callable[[], float], plain: Callable[[], float]) -> list[tuple[float, float]]:
    """What both return, ours first in every other turn: the second may find the machine as the first left it."""
    pairs: list[tuple[float, float]] = []
    for turn in range(turns):
        if turn % 2:
            theirs = plain()
            pairs.append((ours(), theirs))
        else:
            pairs.append((ours(), plain()))
    return pairs


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
