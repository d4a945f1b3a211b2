"""Loads layer by layer: what starts them, and what lets a layer of the forward wait for its own bytes only."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from sglang.srt.mem_cache.unified_cache.unified_cache_linker import LayerWiseLoadCounter

from psrl_sglang.engine.copier import Copier
from psrl_sglang.engine.geometry import PoolGeometry
from psrl_sglang.platforms.device import Fence

# A pool, rows of it (int64, host), and where each one's image begins in the arena, in bytes.
Pages = tuple[PoolGeometry, torch.Tensor, np.ndarray]


class LoadCounter(LayerWiseLoadCounter):
    """SGLang's counter, for copies that may only have been started: a layer is complete with a fence that the
    forward's stream waits for, so that the host never blocks for longer than it takes to start them."""

    def complete(self, index: int, layer: int, fence: Fence | None = None) -> None:
        """``fence`` None: the layer has landed."""
        self.futures[index][layer].set_result(fence)

    def wait_until(self, threshold: int) -> None:
        futures = self.futures.get(self.consumer_index)
        if futures is not None and futures[threshold].exception() is None:
            fence: Fence | None = futures[threshold].result()
            if fence is not None:
                fence.wait()
        super().wait_until(threshold)

    def finish(self, index: int) -> bool:
        futures = self.futures.get(index)
        has_landed = super().finish(index)
        if futures and has_landed:
            fence: Fence | None = futures[-1].result()
            if fence is not None:
                fence.synchronize()  # the slots are freed or published next
        return has_landed


def load_layers(
    copier: Copier,
    counter: LoadCounter,
    index: int,
    pages: Sequence[Pages],
    *,
    before_layer: Callable[[int], None] | None = None,
) -> None:
    """Load what ``counter`` counts as ``index``, and wait until it has landed. ``before_layer`` is called before
    each layer is started.

    After an error nothing is copied any more; the caller tells the counter.
    """
    try:
        for layer in range(counter.num_layers):
            if before_layer is not None:
                before_layer(layer)
            for pool, rows, offsets in pages:
                copier.to_device(pool, layer, rows, offsets)
            counter.complete(index, layer, copier.fence())
    finally:
        copier.settle()
