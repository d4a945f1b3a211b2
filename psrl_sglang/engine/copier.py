"""Copies between the device pools and the arena, one transfer layer at a time.

``DirectCopier`` is for pools in host memory, ``PinnedCopier`` for a CUDA device and an arena that is page-locked,
and ``StagedCopier`` for any other case.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from functools import partial
from typing import Protocol

import numpy as np
import torch

from psrl_sglang.engine.device_copiers import PinnedCopier, StagedCopier
from psrl_sglang.engine.geometry import Part, PoolGeometry
from psrl_sglang.platforms.device import CopyQueue, CudaQueue, Fence, PageLockError, lock_pages
from psrl_sglang.store.arena import Arena
from psrl_sglang.store.copies import PageCopier

logger = logging.getLogger(__name__)


class Copier(Protocol):
    """``rows`` are pages of the pool (int64, host), ``offsets`` where each page's image begins in the arena, in
    bytes (int64). One thread at a time.

    Raises ``IndexError`` for a place outside, before a byte is copied.
    """

    def to_arena(self, pool: PoolGeometry, rows: torch.Tensor, offsets: np.ndarray) -> None:
        """Returns when the bytes have landed. When it raises, nothing is written to the arena any more."""

    def to_device(self, pool: PoolGeometry, layer: int, rows: torch.Tensor, offsets: np.ndarray) -> None:
        """Starts the copy. The arena's pages must stay, and the device's be nobody else's, until ``settle`` or
        the next ``fence`` is behind it: after an error too."""

    def fence(self) -> Fence | None:
        """Reached when all that was started has landed; None where it has."""

    def settle(self) -> None:
        """Wait until all that was started has landed."""


def page_lock(arena: Arena, device: torch.device) -> None:
    """Page-lock the arena where a CUDA device copies; log why not where that fails, since all goes on without."""
    if device.type != "cuda":
        return
    began_s = time.perf_counter()
    try:
        arena.page_lock(partial(lock_pages, device=device))
    except PageLockError as error:
        logger.warning(
            "psrl: DRAM is not page-locked, so each copy goes through a buffer and is slower: %s. "
            "psrl.sglang.pin_arena: false leaves it so",
            error,
        )
    else:
        logger.info("psrl: DRAM is page-locked, in %.1f s", time.perf_counter() - began_s)


def make_copier(arena: Arena, pools: Sequence[PoolGeometry], queue: CopyQueue) -> Copier:
    """The best one for what there is. The queue is the copier's from now on."""
    if queue.device.type == "cpu":
        return DirectCopier(arena, pools)
    if arena.is_page_locked and isinstance(queue, CudaQueue):
        return PinnedCopier(arena, pools, queue)
    return StagedCopier(arena, queue)


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

    def fence(self) -> Fence | None:
        return None

    def settle(self) -> None:
        pass
