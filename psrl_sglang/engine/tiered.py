"""The tree's side of the tiers: what SGLang asks a tree about storage is answered by our linker and gate."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.mem_cache.unified_cache.unified_cache_linker import UnifiedCacheLinker
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

from psrl_sglang.engine.estimates import LoadOrRecompute
from psrl_sglang.engine.gate import Gate
from psrl_sglang.engine.geometry import kv_layout
from psrl_sglang.engine.linker import PsrlLinker
from psrl_sglang.engine.tier_start import open_store
from psrl_sglang.engine.tiers import Tiers

if TYPE_CHECKING:
    from psrl_sglang.engine.worker import TreeSettings


class TieredTree(UnifiedRadixCache):
    """A tree that may have our tiers behind it; without them it is SGLang's own."""

    psrl_settings: TreeSettings
    tiers: Tiers | None = None

    def init_cache_linker(self, cache_linker: UnifiedCacheLinker) -> None:
        if not isinstance(cache_linker, PsrlLinker):
            super().init_cache_linker(cache_linker)
            return
        settings = self.psrl_settings
        config = settings.config
        rank, ranks = self._rank_of_tier_group()
        layout = kv_layout(
            cache_linker.group,
            cache_linker.geometry,
            model_config=settings.model_config,
            rank=rank,
            ranks=ranks,
        )
        store = open_store(config, layout, ledger=settings.ledger, rank=rank, ranks=ranks)
        bytes_per_token = sum(pool.page_bytes for pool in layout.pools) // layout.page_tokens
        choice = LoadOrRecompute(config.sglang.load_policy, bytes_per_token)
        cache_linker.open(store, settings.identity.of, choice, is_async=config.lmcache.enable_async_loading)
        gate = None
        if store.has_lower_tiers:
            gate = Gate(self, cache_linker, wait_s=config.sglang.read_ahead_timeout_s, ranks=ranks)  # type: ignore[arg-type]
        self.tiers = self.linker = Tiers(
            self,  # type: ignore[arg-type]
            cache_linker,
            gate=gate,
            decode_tokens=config.sglang.decode_checkpoint_tokens,
        )

    def _rank_of_tier_group(self) -> tuple[int, int]:
        if self.tp_group is None or not torch.distributed.is_initialized():
            return 0, 1
        return torch.distributed.get_rank(group=self.tp_group), torch.distributed.get_world_size(
            group=self.tp_group
        )

    @property
    def gate(self) -> Gate | None:
        return None if self.tiers is None else self.tiers.gate

    def prefetch_from_storage(self, request: Any, *args: Any, **kwargs: Any) -> bool | None:
        if self.gate is None:
            return super().prefetch_from_storage(request, *args, **kwargs)
        self.gate.on_arrival(request.rid)
        return None

    def check_prefetch_progress(self, request: Any) -> bool:
        return super().check_prefetch_progress(request) if self.gate is None else self.gate.is_open(request.rid)

    def pop_prefetch_loaded_span(self, request: Any) -> tuple[int, int | None]:
        return (
            super().pop_prefetch_loaded_span(request) if self.gate is None else self.gate.read_span(request.rid)
        )

    def release_aborted_request(self, request: Any) -> None:
        super().release_aborted_request(request)
        if self.gate is not None:
            self.gate.drop(request.rid)

    def is_backuped(self, node_id: Any) -> bool:
        # Else SGLang would not ask for a read-ahead behind a prefix that is on the device.
        return self.gate is not None or super().is_backuped(node_id)

    def has_pending_cache_operations(self) -> bool:
        """Asked by the scheduler where it takes the tree for LMCache's, which it does of one with a gate."""
        return self.tiers is not None and self.tiers.linker.waiting_offloads > 0

    def clear_storage_backend(self) -> bool:
        if self.tiers is None:
            return super().clear_storage_backend()
        self.tiers.drop_all()
        return True

    def open_gate_in(self, scheduler: Any) -> None:
        """Make the scheduler ask at arrival and before admission, as it does for LMCache."""
        if self.gate is not None:
            scheduler.enable_lmcache = True
