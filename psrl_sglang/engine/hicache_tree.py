"""The tree's side of HiCache with our store behind it: opening the store, and telling it whose pages are meant.

What SGLang hands to a storage are hashes, without a tag. The tree knows the tag where it queues an operation, and
notes it first.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
from sglang.srt.mem_cache.utils import get_storage_hash_str

from psrl_sglang.config_problem import LMCACHE
from psrl_sglang.engine.activation import refuse
from psrl_sglang.engine.hicache_pages import host_layout, host_pools
from psrl_sglang.engine.hicache_storage import PsrlHiCacheStorage
from psrl_sglang.engine.tier_metrics import TierMirror
from psrl_sglang.engine.tier_start import open_store
from psrl_sglang.namespace import split_salt

if TYPE_CHECKING:
    from psrl_sglang.engine.worker import TreeSettings

logger = logging.getLogger(__name__)


class HiCacheTree(UnifiedRadixCache):
    """A tree that may have our storage behind its host pools; without it it is SGLang's own."""

    psrl_settings: TreeSettings
    tier_mirror: TierMirror | None = None

    @property
    def storage(self) -> PsrlHiCacheStorage | None:
        """Ours, once it is open."""
        backend = None if self.cache_controller is None else self.cache_controller.storage_backend
        return backend if isinstance(backend, PsrlHiCacheStorage) and backend.store is not None else None

    def open_storage(self) -> None:
        """Open the store behind HiCache if it is chosen. Called once every host pool is registered; ends the
        process if it cannot be done."""
        if self.cache_controller is None or not self.psrl_settings.config.lmcache.enable:
            return
        problem = self._open_storage()
        if problem is not None:
            refuse(f"{LMCACHE}.enable with --enable-hierarchical-cache: {problem}")

    def _open_storage(self) -> str | None:
        """Returns what is wrong, if anything is."""
        settings = self.psrl_settings
        controller: Any = self.cache_controller
        backend = controller.storage_backend
        if not isinstance(backend, PsrlHiCacheStorage):
            return f"SGLang made {type(backend).__name__} its storage, not PsrlHiCacheStorage"
        if not self.hicache_storage_pass_prefix_keys:
            return 'the extra settings of the storage lack "hicache_storage_pass_prefix_keys": true'
        entries = controller.mem_pool_host.entries
        try:
            pools = host_pools(entries)
        except ValueError as error:
            return str(error)
        layout = host_layout(
            pools, entries, backend.config, replicated=backend.is_replicated, model=settings.model_config
        )
        rank, ranks = self._rank_of_tier_group()
        store = open_store(
            settings.config,
            layout,
            ledger=settings.ledger,
            rank=rank,
            ranks=ranks,
            wait_for_ranks=self.wait_for_ranks,
        )
        wait_s = settings.config.sglang.read_ahead_timeout_s
        backend.open(store, pools, settings.identity.of, wait_s=wait_s)
        mirror = settings.metrics.mirror
        if self.tier_mirror is not None:
            self.tier_mirror.follow(store)
        elif mirror is not None:
            self.tier_mirror = TierMirror(mirror.labels, store, queues=self.storage_queues)
        if not settings.config.lmcache.save_decode_cache:
            logger.warning(
                "psrl: HiCache writes what was generated too: %s.save_decode_cache has no effect", LMCACHE
            )
        return None

    def wait_for_ranks(self) -> None:
        """Return once every rank of this tree has come here."""
        self._all_reduce_attn_groups(torch.zeros(1), torch.distributed.ReduceOp.MIN)

    def _rank_of_tier_group(self) -> tuple[int, int]:
        if self.tp_group is None or not torch.distributed.is_initialized():
            return 0, 1
        return torch.distributed.get_rank(group=self.tp_group), torch.distributed.get_world_size(
            group=self.tp_group
        )

    def attach_storage_backend(self, *args: Any, **kwargs: Any) -> tuple[bool, str]:
        was_open = self.storage is not None
        done, message = super().attach_storage_backend(*args, **kwargs)
        ours = self.cache_controller is not None and isinstance(
            self.cache_controller.storage_backend, PsrlHiCacheStorage
        )
        if done and ours and not was_open:
            problem = self._open_storage()
            if problem is not None:
                self.detach_storage_backend()
                return False, f"psrl: {problem}"
        return done, message

    def storage_status(self) -> dict[str, Any] | None:
        """As the linker's tiers show it."""
        storage = self.storage
        if storage is None or storage.store is None:
            return None
        status = storage.store.status()
        status["queues"] |= self.storage_queues()
        status["load_or_recompute"] = None
        status["layout"] = storage.store.layout.text
        return status

    def storage_queues(self) -> dict[str, int]:
        """Operations that SGLang has queued for the storage. On any thread."""
        writes = self.ongoing_backup if self.buffer_pipeline is None else self.buffer_pipeline.ongoing_backup
        return {"offload": len(self.ongoing_write_through) + len(writes), "gate": len(self.ongoing_prefetch)}

    # ---- whose pages are meant ----

    def prefetch_from_storage(
        self,
        request: Any,
        last_host_node_id: Any,
        new_input_tokens: Any,
        last_hash: str | None = None,
        prefix_keys: list[str] | None = None,
        *args: Any,
        extra_key: str | None = None,
        cache_salt: str | None = None,
        **kwargs: Any,
    ) -> bool | None:
        if self.storage is not None and len(new_input_tokens) >= self.prefetch_threshold:
            prefix_keys = self._hashes_until(last_host_node_id)
            if prefix_keys:
                self._note(prefix_keys[0], cache_salt)
            elif last_hash is None:
                self._note(self._first_hash(new_input_tokens, extra_key, cache_salt), cache_salt)
        return super().prefetch_from_storage(
            request,
            last_host_node_id,
            new_input_tokens,
            last_hash,
            prefix_keys,
            *args,
            extra_key=extra_key,
            cache_salt=cache_salt,
            **kwargs,
        )

    def write_backup_storage(self, node_id: Any) -> None:
        if self.storage is not None:
            salt = self.tree_core.prefetch_anchor_info(node_id)[1]
            hashes = self._hashes_until(node_id)
            if not hashes or not self._is_live(salt):
                return  # dead already: nothing would ever look for it
            self._note(hashes[0], salt)
        super().write_backup_storage(node_id)

    def _finish_write_through_ack(self, ack_id: int) -> None:
        if self.storage is not None and self.buffer_pipeline is not None:
            snapshot = self.buffer_pipeline.ongoing_write_through[ack_id].intent.snapshot
            if self._is_live(snapshot.key.cache_salt):
                first_hash = (snapshot.prefix_keys or snapshot.hash_values)[0]
                self._note(first_hash, snapshot.key.cache_salt)
        super()._finish_write_through_ack(ack_id)

    def _trim_buffer_prefetch_full_head(
        self, request: Any, info: Any, operation: Any, full_match_len: int, hit_tokens: int
    ) -> Any:
        # SGLang cuts what has come to the device meanwhile off the hashes, and does not add it to the prefix.
        before = list(operation.hash_value)
        result = super()._trim_buffer_prefetch_full_head(request, info, operation, full_match_len, hit_tokens)
        cut = before[: len(before) - len(operation.hash_value)]
        if cut and operation.prefix_keys is not None:
            operation.prefix_keys = [*operation.prefix_keys, *cut]
        return result

    def _is_live(self, cache_salt: str | None) -> bool:
        tag, _ = split_salt(cache_salt)
        ledger = self.psrl_settings.ledger
        return tag is not None and not ledger.is_suspended and tag in ledger.window()

    def _note(self, first_hash: str, cache_salt: str | None) -> None:
        tag, _ = split_salt(cache_salt)
        if tag is not None and self.storage is not None:
            self.storage.tags.note(first_hash, tag)

    def _hashes_until(self, node_id: Any) -> list[str]:
        """Of every page from the start of the sequence to the end of the node. SGLang's
        ``get_prefix_hash_values``, which the scheduler passes on as the prefix, leaves the node's own ones out."""
        core = self.tree_core
        if core.is_root(node_id):
            return []
        before, own = core.get_prefix_hash_values(node_id), core.get_hash_values(node_id)
        return before if before[-1:] == own[-1:] else [*before, *own]

    def _first_hash(self, tokens: Any, extra_key: str | None, cache_salt: str | None) -> str:
        page = self.page_size
        key = RadixKey(
            tokens[: page + 1], extra_key, is_bigram=self.tree_core.is_eagle, cache_salt=cache_salt
        ).page_aligned(page)
        return get_storage_hash_str(key, None, page_size=page)[0]
