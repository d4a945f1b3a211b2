"""Copies between the device pools and the arena, one transfer layer at a time.

``DirectCopier`` is for pools in host memory. ``StagedCopier`` is for any other device: it gathers on the device
and goes through a pinned buffer, so that the copy over the bus is one contiguous, asynchronous one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch

from psrl_sglang.engine.geometry import Part, PoolGeometry
from psrl_sglang.store.arena import Arena
from psrl_sglang.store.copies import PageCopier, copy_rows

_STAGING_BYTES = 64 << 20


class Copier(Protocol):
    """``rows`` are pages of the pool (int64, host), ``offsets`` where each page's image begins in the arena, in
    bytes. One thread at a time; both calls return when the bytes have landed."""

    def to_arena(self, pool: PoolGeometry, rows: torch.Tensor, offsets: np.ndarray) -> None: ...

    def to_device(self, pool: PoolGeometry, layer: int, rows: torch.Tensor, offsets: np.ndarray) -> None: ...


def make_copier(arena: Arena, pools: Sequence[PoolGeometry], device: torch.device) -> Copier:
    return DirectCopier(arena, pools) if device.type == "cpu" else StagedCopier(arena, device)


class DirectCopier:
    def __init__(self, arena: Arena, pools: Sequence[PoolGeometry]) -> None:
        def copier(parts: Sequence[Part]) -> PageCopier | None:
            named = [(part.buffer.numpy(), part.offset_bytes) for part in parts]
            return PageCopier(arena.memory, named) if named else None

        self._whole = {pool.name: copier([part for parts in pool.layers for part in parts]) for pool in pools}
        self._layers = {pool.name: [copier(parts) for parts in pool.layers] for pool in pools}

    def to_arena(self, pool: PoolGeometry, rows: torch.Tensor, offsets: np.ndarray) -> None:
        if (copier := self._whole[pool.name]) is not None:
            copier.store(rows.numpy(), offsets)

    def to_device(self, pool: PoolGeometry, layer: int, rows: torch.Tensor, offsets: np.ndarray) -> None:
        if (copier := self._layers[pool.name][layer]) is not None:
            copier.load(rows.numpy(), offsets)


class StagedCopier:
    """Not run on a GPU so far; the tests run it with host tensors in the place of the device's."""

    def __init__(self, arena: Arena, device: torch.device) -> None:
        self._arena = arena
        self._device = device
        module = torch.get_device_module(device)
        self._stream = module.Stream() if device.type != "cpu" else None
        self._module = module
        pinned = device.type != "cpu"
        self._staging = torch.empty(_STAGING_BYTES, dtype=torch.uint8, pin_memory=pinned)

    def to_arena(self, pool: PoolGeometry, rows: torch.Tensor, offsets: np.ndarray) -> None:
        for parts in pool.layers:
            for part in parts:
                for begin, end in self._steps(len(rows), part.row_bytes):
                    staged = self._staged(end - begin, part.row_bytes)
                    with self._on_stream():
                        gathered = part.buffer.index_select(0, rows[begin:end].to(self._device))
                        staged.copy_(gathered, non_blocking=True)
                    self._wait()
                    self._between(
                        staged, part.row_bytes, offsets[begin:end] + part.offset_bytes, into_arena=True
                    )

    def to_device(self, pool: PoolGeometry, layer: int, rows: torch.Tensor, offsets: np.ndarray) -> None:
        for part in pool.layers[layer]:
            for begin, end in self._steps(len(rows), part.row_bytes):
                staged = self._staged(end - begin, part.row_bytes)
                self._between(staged, part.row_bytes, offsets[begin:end] + part.offset_bytes, into_arena=False)
                with self._on_stream():
                    landed = staged.to(self._device, non_blocking=True)
                    part.buffer.index_copy_(0, rows[begin:end].to(self._device), landed)
                self._wait()

    def _steps(self, pages: int, row_bytes: int) -> list[tuple[int, int]]:
        step = max(1, _STAGING_BYTES // row_bytes)
        return [(begin, min(begin + step, pages)) for begin in range(0, pages, step)]

    def _staged(self, pages: int, row_bytes: int) -> torch.Tensor:
        if row_bytes > len(self._staging):
            self._staging = torch.empty(row_bytes, dtype=torch.uint8, pin_memory=self._staging.is_pinned())
        return self._staging[: pages * row_bytes].view(pages, row_bytes)

    def _between(self, staged: torch.Tensor, row_bytes: int, offsets: np.ndarray, *, into_arena: bool) -> None:
        flat = staged.numpy().reshape(-1)
        at = np.arange(len(staged), dtype=np.int64) * row_bytes
        if into_arena:
            copy_rows(self._arena.memory, offsets, flat, at, row_bytes)
        else:
            copy_rows(flat, at, self._arena.memory, offsets, row_bytes)

    def _on_stream(self) -> Any:
        return self._module.stream(self._stream)

    def _wait(self) -> None:
        if self._stream is not None:
            self._stream.synchronize()
