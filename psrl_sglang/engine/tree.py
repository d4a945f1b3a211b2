"""SGLang's unified radix tree with the version policy in front of its look-ups and publications.

``versioned(base)`` puts the mixin over ``UnifiedRadixCache`` or over a subclass of it, such as the LMCache
one. The tree cores are not touched: a version is a namespace of the tree's own keys.
"""

from __future__ import annotations

import hashlib
import logging
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from sglang.srt.mem_cache.base_prefix_cache import InsertParams, InsertResult, MatchPrefixParams, MatchResult
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
from sglang.srt.session.streaming_session import is_virtual_node

from psrl_sglang.engine.control import VersionControl
from psrl_sglang.engine.pins import PinTable
from psrl_sglang.engine.tagindex import TagIndex, make_tag_index
from psrl_sglang.engine.tiered import TieredTree
from psrl_sglang.engine.watch import UpdateWatch
from psrl_sglang.namespace import split_salt

if TYPE_CHECKING:
    from psrl_sglang.engine.worker import TreeSettings

logger = logging.getLogger(__name__)

_SETTLE_S = 5.0
_LMCACHE_REFUSES = frozenset("@/\\\0")
_LMCACHE_SALT_CHARACTERS = 128


class VersionedTree(TieredTree):
    """A radix tree whose entries carry the weight version that computed them.

    ``versions`` decides namespaces, ``pins`` holds leases on device KV, ``tags`` knows what each version
    occupies. All belong to the scheduler thread.
    """

    psrl_settings: TreeSettings
    _is_built = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        settings = self.psrl_settings
        self.versions = VersionControl(self, settings.ledger, settings.metrics)
        self.tags: TagIndex = make_tag_index(self)
        self.pins = PinTable(self, budget_tokens=settings.pin_budget_tokens(self))
        self.updates = UpdateWatch()
        connector = getattr(self, "lmcache_connector", None)
        if connector is not None:
            connector.build_cache_salt = lmcache_salt
        self._is_built = True

    @property
    def has_host_tier(self) -> bool:
        return self.cache_controller is not None

    @property
    def has_external_tier(self) -> bool:
        """A tier that is read ahead per request: HiCache storage, a linker or LMCache."""
        return self.linker is not None or self.enable_storage or hasattr(self, "lmcache_connector")

    def match_prefix(self, params: MatchPrefixParams) -> MatchResult:
        if params.req is not None:
            self.versions.assign(params.key, params.req)
        result = super().match_prefix(params)
        tag, _ = split_salt(params.key.cache_salt)
        if tag is not None and not is_virtual_node(result.last_device_node):
            self.tags.note(tag, result.last_device_node)  # the look-up may have split a node
        return result

    def maybe_hand_to_session(self, req: Any) -> None:
        super().maybe_hand_to_session(req)
        if self.versions.on_admitted(req):
            self.count_hits(req)
        if self.tiers is not None:
            self.tiers.on_admitted(req)

    def checkpoint(self, req: Any, *, up_to: int, **kwargs: Any) -> None:
        # Capped here and not further in, so that an external store behind checkpoint() sees the cap too.
        limit = self.versions.publish_limit(req, up_to)
        if self.tiers is None or self.psrl_settings.config.lmcache.save_decode_cache:
            super().checkpoint(req, up_to=limit, **kwargs)
        else:
            self.tiers.prompt_only(
                req, lambda: super(VersionedTree, self).checkpoint(req, up_to=limit, **kwargs)
            )

    def insert(self, params: InsertParams) -> InsertResult:
        tag, _ = split_salt(params.key.cache_salt) if params.key is not None else (None, None)
        if tag is not None and self.psrl_settings.priority_step:
            step = self.psrl_settings.priority_step
            order = self.versions.ledger.order_of(tag)
            params = replace(params, priority=order * step + min(max(params.priority, 0), step - 1))
        result = super().insert(params)
        if tag is not None and result.last_device_node is not None:
            self.tags.note(tag, result.last_device_node)
        return result

    def reset(self) -> None:
        super().reset()
        if self._is_built:  # the base constructor calls this too
            self.pins.forget()
            self.tags.clear()

    def publish_tail(self, req: Any) -> int:
        """Publish what a request that is about to lose its KV has computed, up to its cap.
        Returns the number of tokens saved."""
        skip = req.skip_radix_cache_insert or self.supports_mamba() or self.disable
        if skip or not req.kv.holds_kv or req.finished() or self.session.borrowed_slot(req) is not None:
            return 0
        req.refresh_fill_ids()
        before = req.kv.cache_protected_len
        self.checkpoint(req, up_to=min(req.owned_kv_len(), len(req.full_untruncated_fill_ids)))
        return req.kv.cache_protected_len - before

    def retire(self, tag: str) -> tuple[int, int]:
        """Evict all of a tag that no request and no pin holds, from every tier. Returns (device, host) tokens
        freed."""
        device, host = self._retire_here(tag)
        return device, host + self.drop_from_tiers(tag) * self.page_size

    def retire_dead(self) -> list[str]:
        """Evict every tag outside the window from SGLang's tiers; returns those that had something to free. Our
        own give theirs up when they need the room: trainers flush around every update, and may go back."""
        live = self.versions.ledger.window()
        return [tag for tag in self.tags.usage() if tag not in live and any(self._retire_here(tag))]

    def _retire_here(self, tag: str) -> tuple[int, int]:
        freed = self.tags.evict(tag)
        if any(freed):
            self.versions.metrics.observe_retired()
        return freed

    def drop_all_but_current(self) -> None:
        """Clear every tier of KV of other weights, whatever runs. KV that a running request holds stays until
        the request ends; its tag is not matched again, and the next clear takes it."""
        self.retire_dead()
        if self.has_external_tier:
            self._settle_backups()
            self.clear_storage_backend()

    def write_backup_storage(self, node_id: Any) -> None:
        # A copy to the host that was under way at the change would carry old KV into the store just cleared.
        tag = self.tags.tag_of(node_id) if self.psrl_settings.clear_on_weight_update else None
        if tag is None or tag in self.versions.ledger.window():
            super().write_backup_storage(node_id)

    def _settle_backups(self) -> None:
        """Acknowledge the writes to HiCache storage that wait, unwritten, once the one under way is done: what
        comes after this call finds no write of older KV behind it."""
        controller = self.cache_controller
        if controller is None or not self.enable_storage:
            return
        pipeline = self.buffer_pipeline
        ongoing = len(self.ongoing_backup if pipeline is None else pipeline.ongoing_backup)
        written = controller.ack_backup_queue
        assert written is not None  # made together with the storage threads
        waiting = []
        while not controller.backup_queue.empty():
            waiting.append(controller.backup_queue.get_nowait())
        deadline_s = time.monotonic() + _SETTLE_S
        while written.qsize() + len(waiting) < ongoing:
            if time.monotonic() > deadline_s:
                logger.warning(
                    "psrl: a write to HiCache storage takes over %.0f s, its file will stay", _SETTLE_S
                )
                break
            time.sleep(0.001)
        for operation in waiting:  # in their order: the ranks release them by count
            written.put(operation)

    def check_integrity(self) -> list[str]:
        """What is wrong with the books of this tree; empty when nothing is. Safe while requests run."""
        usage = self.tags.usage()
        counted = sum(entry.device_tokens for entry in usage.values())
        total = self.evictable_size() + self.protected_size()
        wrong = []
        if counted != total:
            wrong.append(f"versions hold {counted} tokens on the device, the tree counts {total}")
        if usage.get("") is not None:
            wrong.append(f"{usage[''].device_tokens} tokens on the device carry no version")
        locked = self.protected_size()
        pinned = {pin["tag"]: pin["tokens"] for pin in self.pins.list()}
        if pinned and max(pinned.values()) > locked:
            wrong.append(f"a pin holds {max(pinned.values())} tokens, only {locked} are locked")
        if self.tier_store is not None:
            wrong += self.tier_store.check_integrity()
        return wrong


def lmcache_salt(cache_salt: str | None, extra_key: str | None) -> str:
    """In place of the LMCache connector's ``build_cache_salt``: LMCache stores nothing under a salt it refuses,
    and a tag with a user's salt behind it can be one."""
    salt = cache_salt or ""
    if not extra_key and len(salt) <= _LMCACHE_SALT_CHARACTERS and not _LMCACHE_REFUSES & set(salt):
        return salt
    # The length first: neither part can be read as the end of the other.
    return hashlib.sha256(f"{len(salt)}\0{salt}{extra_key or ''}".encode()).hexdigest()


def versioned(base: type[UnifiedRadixCache], settings: TreeSettings) -> type[UnifiedRadixCache]:
    """``base`` with the version policy; instances are made by SGLang with base's own arguments."""
    bases = (VersionedTree,) if base is UnifiedRadixCache else (VersionedTree, base)
    return type(f"Versioned{base.__name__}", bases, {"psrl_settings": settings})
