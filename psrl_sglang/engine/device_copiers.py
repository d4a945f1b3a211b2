"""Copies between a device's pools and the arena: through a buffer on the device, or one in host memory.

A pool has a page's bytes in many places, the arena in one. They are gathered and scattered on the device, so that
what crosses the bus is long: the whole images of a run of pages on the way out, one layer of them on the way in.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch

from psrl_sglang.engine.geometry import Part, PoolGeometry
from psrl_sglang.platforms.device import CopyQueue, Fence
from psrl_sglang.store.arena import Arena
from psrl_sglang.store.copies import copy_rows

_DEVICE_BUFFER_BYTES = 32 << 20
_STAGING_BYTES = 64 << 20


class _Piece(NamedTuple):
    """A part as elements of the widest type that its addresses allow: ``begin`` to ``end`` of a page's image."""

    buffer: torch.Tensor
    begin: int
    end: int


class PinnedCopier:
    """For an arena that the device copies to and from by itself. Owns a buffer on the device, of 32 MiB or a
    page."""

    def __init__(self, arena: Arena, pools: Sequence[PoolGeometry], queue: CopyQueue) -> None:
        self._memory = torch.from_numpy(arena.memory)
        self._slot_bytes = arena.slot_bytes
        self._queue = queue
        self._words = {pool.name: _word(pool) for pool in pools}
        self._pieces = {
            pool.name: [[_piece(part, self._words[pool.name]) for part in parts] for parts in pool.layers]
            for pool in pools
        }
        size_bytes = max(_DEVICE_BUFFER_BYTES, *(pool.page_bytes for pool in pools))
        with queue.running():
            self._buffer = torch.empty(size_bytes, dtype=torch.uint8, device=queue.device)

    def to_arena(self, pool: PoolGeometry, rows: torch.Tensor, offsets: np.ndarray) -> None:
        _check(pool, rows, offsets, len(self._memory))
        pieces = [piece for pieces in self._pieces[pool.name] for piece in pieces]
        try:
            with self._queue.running():
                for begin, end in _steps(len(rows), pool.page_bytes, len(self._buffer)):
                    images = self._rows(end - begin, pool.page_bytes)
                    words = images.view(self._words[pool.name])
                    chosen = self._queue.upload(rows[begin:end])
                    for piece in pieces:
                        torch.index_select(piece.buffer, 0, chosen, out=words[:, piece.begin : piece.end])
                    for first, last in self._runs(offsets[begin:end], pool.page_bytes):
                        at = int(offsets[begin + first])
                        run = images[first:last].view(-1)
                        self._queue.to_host(self._memory[at : at + len(run)], run)
        finally:
            # After an error too: the caller gives the room away, and what is under way would land in another's.
            self._queue.settle()

    def to_device(self, pool: PoolGeometry, layer: int, rows: torch.Tensor, offsets: np.ndarray) -> None:
        parts = pool.layers[layer]
        if not parts:
            return
        _check(pool, rows, offsets, len(self._memory))
        first_byte = parts[0].offset_bytes
        layer_bytes = parts[-1].offset_bytes + parts[-1].row_bytes - first_byte
        word = self._words[pool.name]
        base = first_byte // word.itemsize
        with self._queue.running():
            for begin, end in _steps(len(rows), layer_bytes, len(self._buffer)):
                landed = self._rows(end - begin, layer_bytes)
                for first, last in self._runs(offsets[begin:end], pool.page_bytes):
                    at = int(offsets[begin + first]) + first_byte
                    source = self._memory.as_strided((last - first, layer_bytes), (pool.page_bytes, 1), at)
                    self._queue.from_host(landed[first:last], source)
                chosen = self._queue.upload(rows[begin:end])
                words = landed.view(word)
                for piece in self._pieces[pool.name][layer]:
                    piece.buffer.index_copy_(0, chosen, words[:, piece.begin - base : piece.end - base])

    def fence(self) -> Fence | None:
        return self._queue.fence()

    def settle(self) -> None:
        self._queue.settle()

    def _rows(self, pages: int, row_bytes: int) -> torch.Tensor:
        # Used again by the next step without a wait: all of it is in the order of the queue.
        return self._buffer[: pages * row_bytes].view(pages, row_bytes)

    def _runs(self, offsets: np.ndarray, page_bytes: int) -> Iterator[tuple[int, int]]:
        """Pages that lie behind each other in one slot: a copy may not span two slots, see `lock_pages`."""
        slots = offsets // self._slot_bytes
        breaks = np.flatnonzero((np.diff(offsets) != page_bytes) | (np.diff(slots) != 0)) + 1
        yield from pairwise([0, *breaks.tolist(), len(offsets)])


class StagedCopier:
    """For an arena that is not page-locked, or a device that is not CUDA's: what crosses the bus lies in a pinned
    buffer of 64 MiB, or of a row of a pool, and the host copies between that and the arena."""

    def __init__(self, arena: Arena, queue: CopyQueue) -> None:
        self._arena = arena
        self._queue = queue
        self._staging = queue.staging(_STAGING_BYTES)

    def to_arena(self, pool: PoolGeometry, rows: torch.Tensor, offsets: np.ndarray) -> None:
        _check(pool, rows, offsets, self._arena.memory.size)
        for parts in pool.layers:
            for part in parts:
                for begin, end in _steps(len(rows), part.row_bytes, len(self._staging)):
                    staged = self._staged(end - begin, part.row_bytes)
                    with self._queue.running():
                        chosen = self._queue.upload(rows[begin:end])
                        self._queue.to_host(staged, part.buffer.index_select(0, chosen))
                    self._queue.settle()
                    self._between(staged, offsets[begin:end] + part.offset_bytes, into_arena=True)

    def to_device(self, pool: PoolGeometry, layer: int, rows: torch.Tensor, offsets: np.ndarray) -> None:
        _check(pool, rows, offsets, self._arena.memory.size)
        for part in pool.layers[layer]:
            for begin, end in _steps(len(rows), part.row_bytes, len(self._staging)):
                staged = self._staged(end - begin, part.row_bytes)
                self._between(staged, offsets[begin:end] + part.offset_bytes, into_arena=False)
                with self._queue.running():
                    landed = torch.empty_like(staged, device=self._queue.device)
                    self._queue.from_host(landed, staged)
                    part.buffer.index_copy_(0, self._queue.upload(rows[begin:end]), landed)
                self._queue.settle()  # the staging buffer is filled again

    def fence(self) -> Fence | None:
        return None

    def settle(self) -> None:
        self._queue.settle()

    def _staged(self, pages: int, row_bytes: int) -> torch.Tensor:
        if row_bytes > len(self._staging):
            self._staging = self._queue.staging(row_bytes)
        return self._staging[: pages * row_bytes].view(pages, row_bytes)

    def _between(self, staged: torch.Tensor, offsets: np.ndarray, *, into_arena: bool) -> None:
        flat, row_bytes = staged.numpy().reshape(-1), staged.shape[1]
        at = np.arange(len(staged), dtype=np.int64) * row_bytes
        if into_arena:
            copy_rows(self._arena.memory, offsets, flat, at, row_bytes)
        else:
            copy_rows(flat, at, self._arena.memory, offsets, row_bytes)


def _steps(pages: int, row_bytes: int, buffer_bytes: int) -> Iterator[tuple[int, int]]:
    step = max(1, buffer_bytes // row_bytes)
    for begin in range(0, pages, step):
        yield begin, min(begin + step, pages)


def _check(pool: PoolGeometry, rows: torch.Tensor, offsets: np.ndarray, memory_bytes: int) -> None:
    # A device that is given a row outside ends the whole process's use of it.
    if len(rows) != len(offsets):
        raise ValueError(f"{len(rows)} rows, but {len(offsets)} offsets")
    if not len(rows):
        return
    most = min(len(part.buffer) for parts in pool.layers for part in parts)
    if int(rows.min()) < 0 or int(rows.max()) >= most:
        raise IndexError(f"pages {int(rows.min())} to {int(rows.max())} of a pool of {most}")
    if int(offsets.min()) < 0 or int(offsets.max()) > memory_bytes - pool.page_bytes:
        raise IndexError(f"images from {offsets.min()} to {offsets.max()} in an arena of {memory_bytes} bytes")


def _word(pool: PoolGeometry) -> torch.dtype:
    """A device gathers words of 8 bytes several times faster than bytes."""
    parts = [part for parts in pool.layers for part in parts]
    sizes = [pool.page_bytes, *(number for part in parts for number in _numbers(part))]
    return torch.int64 if all(size % torch.int64.itemsize == 0 for size in sizes) else torch.uint8


def _numbers(part: Part) -> tuple[int, ...]:
    return part.row_bytes, part.offset_bytes, part.buffer.stride(0), int(part.buffer.storage_offset())


def _piece(part: Part, word: torch.dtype) -> _Piece:
    end_bytes = part.offset_bytes + part.row_bytes
    return _Piece(part.buffer.view(word), part.offset_bytes // word.itemsize, end_bytes // word.itemsize)
