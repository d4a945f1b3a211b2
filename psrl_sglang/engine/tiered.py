"""The tree's side of the tiers: what SGLang asks a tree about storage is answered by our linker and gate."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sglang.srt.managers.schedule_batch import split_cached_prefix_by_tier
from sglang.srt.mem_cache.unified_cache.unified_cache_linker import UnifiedCacheLinker

from psrl_sglang.engine.estimates import LoadOrRecompute
from psrl_sglang.engine.gate import Gate
from psrl_sglang.engine.geometry import kv_layout
from psrl_sglang.engine.hicache_tree import HiCacheTree
from psrl_sglang.engine.linker import PsrlLinker
from psrl_sglang.engine.moves import EngineMoves
from psrl_sglang.engine.tier_metrics import TierMirror
from psrl_sglang.engine.tier_start import open_store, require_page_hash
from psrl_sglang.engine.tiers import Tiers
from psrl_sglang.store.store import KVStore

if TYPE_CHECKING:
    from psrl_sglang.engine.worker import TreeSettings


class TieredTree(HiCacheTree):
    """A tree that may have our tiers behind it; without them it is SGLang's own."""

    psrl_settings: TreeSettings
    tiers: Tiers | None = None
    moves: EngineMoves | None = None

    def init_cache_linker(self, cache_linker: UnifiedCacheLinker) -> None:
        if not isinstance(cache_linker, PsrlLinker):
            super().init_cache_linker(cache_linker)
            return
        require_page_hash()
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
        store = open_store(
            config,
            layout,
            ledger=settings.ledger,
            rank=rank,
            ranks=ranks,
            wait_for_ranks=self.wait_for_ranks,
        )
        bytes_per_token = sum(pool.page_bytes for pool in layout.pools) // layout.page_tokens
        choice = LoadOrRecompute(config.sglang.load_policy, bytes_per_token)
        cache_linker.open(
            store,
            settings.identity.of,
            choice,
            is_async=config.lmcache.enable_async_loading,
            pin_arena=config.sglang.pin_arena,
        )
        gate = None
        if store.has_late_pages:
            gate = Gate(self, cache_linker, wait_s=config.sglang.read_ahead_timeout_s, ranks=ranks)  # type: ignore[arg-type]
        self.tiers = self.linker = Tiers(
            self,  # type: ignore[arg-type]
            cache_linker,
            gate=gate,
            decode_tokens=config.sglang.decode_checkpoint_tokens,
        )

        if config.lmcache.enable_p2p:
            self.moves = EngineMoves(
                self,  # type: ignore[arg-type]
                cache_linker,
                ledger=settings.ledger,
                identity=settings.identity,
                config=config,
                rank=rank,
                ranks=ranks,
            )
        mirror = settings.metrics.mirror
        if mirror is not None:
            self.tier_mirror = TierMirror(mirror.labels, store, choice=choice, queues=self.tiers.queues)

    def release_host_resources(self) -> None:
        if self.moves is not None:
            self.moves.close()
        if self.tier_mirror is not None:
            self.tier_mirror.close()
        super().release_host_resources()

    def count_hits(self, req: Any) -> None:
        """Where the prefix of a request came from. Once per admission, before ``Tiers.on_admitted``."""
        if self.tiers is not None:
            self.tiers.count_hits(req)
        elif (store := self.tier_store) is not None:
            device, host, storage = split_cached_prefix_by_tier(
                prefix_len=req.prefix_len,
                host_hit_len=req.materialized_host_hit_len(),
                storage_hit_len=req.storage_hit_length,
                storage_hit_start=req.storage_hit_start,
                host_hit_is_storage=req.host_hit_is_storage,
            )
            for tier, tokens in (("device", device), ("host", host), ("storage", storage)):
                store.stats.add("hit_tokens", tokens, tier=tier)

    @property
    def tier_store(self) -> KVStore | None:
        """Our store, whichever way it is connected to SGLang."""
        if self.tiers is not None:
            return self.tiers.linker.store
        return None if self.storage is None else self.storage.store

    def tier_status(self) -> dict[str, Any] | None:
        return self.storage_status() if self.tiers is None else self.tiers.status()

    def move_status(self) -> dict[str, Any] | None:
        """Of this rank's move worker; None where there is none."""
        return None if self.moves is None else self.moves.shown()

    def drop_from_tiers(self, tag: str) -> int:
        """Drop a tag from every tier of our store; returns the pages dropped from DRAM."""
        owner = self.storage or self.tier_store
        return 0 if owner is None else owner.drop_tag(tag)["dram"]

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
        return self.tiers is not None and bool(self.tiers.pending_offloads)  # the same on every rank

    def clear_storage_backend(self) -> bool:
        if self.tiers is None:
            return super().clear_storage_backend()
        self.tiers.drop_all()
        return True

    def open_moves(self, scheduler: Any) -> None:
        """Start to move KV from and to other engines, where that is switched on."""
        if self.moves is not None:
            self.moves.open(scheduler)

    def open_gate_in(self, scheduler: Any) -> None:
        """Make the scheduler ask at arrival and before admission, as it does for LMCache."""
        if self.gate is not None:
            scheduler.enable_lmcache = True
