"""What the tree adds to SGLang's linker: where a transfer belongs, what leaves the device, and the gate."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams, MatchResult
from sglang.srt.mem_cache.hicache_storage import PoolTransfer
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_cache.components import LinkerTransferPhase
from sglang.srt.mem_cache.unified_cache.unified_cache_linker import UnifiedCacheLinkerWrapper
from sglang.srt.mem_cache.utils import get_storage_hash_str

from psrl_sglang.engine.gate import Gate
from psrl_sglang.engine.linker import Place, PsrlLinker
from psrl_sglang.engine.tier_metrics import count_hits
from psrl_sglang.keys import KEY_BYTES, count
from psrl_sglang.namespace import split_salt
from psrl_sglang.store.chunk import Wanted

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req

    from psrl_sglang.engine.tree import VersionedTree

logger = logging.getLogger(__name__)

_ALL = 1 << 60
_SETTLE_S = 0.2


class Tiers(UnifiedCacheLinkerWrapper):
    """SGLang's wrapper around a linker, for our linker and tree. Scheduler thread only."""

    def __init__(
        self, tree: VersionedTree, linker: PsrlLinker, *, gate: Gate | None, decode_tokens: int
    ) -> None:
        super().__init__(tree, linker)
        self.tree = tree
        self.linker = linker
        self.gate = gate
        linker.agree = self._on_all_ranks
        self._decode_tokens = decode_tokens
        self._most_tokens = _ALL

    def match(self, key: RadixKey, req: Req, result: MatchResult) -> MatchResult:
        self.hit_markers.pop(
            req.rid, None
        )  # SGLang keeps what an earlier look-up found if this one finds nothing
        tag, _ = split_salt(key.cache_salt)
        if tag is None:
            return result
        self.linker.place = Place(tag, result.device_prefix_len // self.tree.page_size, None, 0)
        return super().match(key, req, result)

    def probe(self, key: RadixKey, resident_tokens: int) -> int:
        """Tokens of ``key`` that the device, and behind what is resident there DRAM and disk, could serve; the same
        on every rank. Loads, protects and counts nothing."""
        tag, _ = split_salt(key.cache_salt)
        page, store = self.tree.page_size, self.linker.store
        key, _ = key.maybe_to_bigram_view(self.tree.tree_core.is_eagle)
        key = key.page_aligned(page)
        begin = resident_tokens // page
        served = begin
        if tag is not None and len(key) > resident_tokens:
            keys = self.linker.keys("kv", list(get_storage_hash_str(key, page_size=page)), tag)
            served += sum(piece.pages for piece in store.dram.match(keys[begin * KEY_BYTES :]))
            if store.disk is not None:
                rest = Wanted("kv", tag, keys[served * KEY_BYTES :], served)
                served += sum(found.pages for found in store.disk.find(rest))
            if not self.linker.choice.should_load((served - begin) * page):
                served = begin
        agreed = torch.tensor([served], dtype=torch.int64)
        self.tree._all_reduce_attn_groups(agreed, torch.distributed.ReduceOp.MIN)
        return int(agreed.item()) * page

    def _offload_node(self, node_id: Any, transfers: list[PoolTransfer]) -> None:
        node: Any = self.tree.tree_core.node_by_id(node_id)
        tag, _ = split_salt(node.key.cache_salt)
        ledger = self.tree.versions.ledger
        if tag is None or ledger.is_suspended or tag not in ledger.window():
            return  # dead already: nothing would ever look for it
        start_tokens = 0
        above = node.parent
        before = above.hash_value[-1] if above.hash_value else None
        while above.parent is not None:
            start_tokens += len(above.key)
            above = above.parent
        page = self.tree.page_size
        most_pages = self._most_tokens // page - start_tokens // page
        if most_pages > 0:
            self.linker.place = Place(tag, start_tokens // page, before, most_pages)
            super()._offload_node(node_id, transfers)

    def prompt_only(self, req: Req, checkpoint: Any) -> None:
        """Run ``checkpoint`` so that it offloads nothing that ``req`` generated."""
        self._most_tokens = len(req.origin_input_ids)
        try:
            checkpoint()
        finally:
            self._most_tokens = _ALL

    def count_hits(self, req: Req) -> None:
        """Once per admission, before ``on_admitted``."""
        self.linker.choice.recomputed += req.rid in self.linker.declined
        count_hits(
            self.linker.store.stats,
            prefix_tokens=req.prefix_len,
            loaded_tokens=req.materialized_host_hit_len(),
            read=self.gate.read_for(req.rid) if self.gate is not None else (),
            page_tokens=self.tree.page_size,
        )

    def on_admitted(self, req: Req) -> None:
        """What the device has of a request's prefix counts as used in DRAM too. What DRAM has lost of it
        meanwhile will be offloaded again, because the tree offers a node only once."""
        if self.gate is not None:
            self.gate.drop(req.rid)
        tag, _ = split_salt(req.cache_salt)
        core: Any = self.tree.tree_core
        if tag is None or core.is_root(req.last_node):
            return
        self._mark_lost(core.node_by_id(req.last_node), tag)

    def export(self, key: RadixKey) -> None:
        """Offload what of ``key`` the device has and DRAM has not."""
        tag, _ = split_salt(key.cache_salt)
        core: Any = self.tree.tree_core
        # Without a request this splits the node where ``key`` ends: no more than it is offloaded.
        match = self.tree.match_prefix(MatchPrefixParams(key=key))
        if tag is None or core.is_root(match.last_device_node):
            return
        path = self._mark_lost(core.node_by_id(match.last_device_node), tag)
        self.offload_nodes([node.id for node in reversed(path)])

    def _mark_lost(self, node: Any, tag: str) -> list[Any]:
        """Let what DRAM has not got of a node and those above be offloaded again. Returns them, the last first."""
        hashes = node.get_prefix_hash_values(node)
        with self.linker.store.dram.lease(self.linker.keys("kv", hashes, tag)) as lease:
            held = lease.pages
        path, whole, end = [], [], len(hashes)
        while node.parent is not None:
            path.append(node)
            whole.append(int(end <= held and self._has_windows_of(node, tag)))
            end -= len(node.hash_value)
            node = node.parent
        agreed = torch.tensor(whole, dtype=torch.int)
        self.tree._all_reduce_attn_groups(agreed, torch.distributed.ReduceOp.MIN)
        for node, is_whole in zip(path, agreed.tolist(), strict=True):
            if not is_whole and node.write_through_pending_id is None:
                node.external_cache_stored = False
        return path

    def _has_windows_of(self, node: Any, tag: str) -> bool:
        """Whether DRAM has what the device has of a node in pools that keep windows. Counts as a use too."""
        transfers = [
            transfer
            for component in self._components[1:]  # the first one is the KV of all tokens
            if (transfer := component.build_external_linker_transfer(LinkerTransferPhase.OFFLOAD, node, None))
        ]
        for transfer in self.linker.group.resolve_transfers(
            transfers, allow_partial=True, allow_missing_kv=True
        ):
            keys = self.linker.keys(str(transfer.name), list(transfer.keys or ()), tag)
            with self.linker.store.dram.lease(keys) as lease:
                if lease.pages < count(keys):
                    return False
        return True

    def checkpoint_decodes(self, reqs: list[Req]) -> None:
        """Publish, and so offload, what running requests have decoded, every so many tokens of each."""
        # Not the linker's own count, which differs between the ranks.
        if not self._decode_tokens or len(self.pending_offloads) > len(reqs):
            return
        for req in reqs:
            if not req.finished() and req.owned_kv_len() - req.kv.cache_protected_len >= self._decode_tokens:
                self.tree.publish_tail(req)

    def release_request(self, rid: str) -> None:
        super().release_request(rid)
        self.linker.forget(rid)

    def settle(self) -> None:
        """Let the offloads under way end and unlock their nodes, so that the memory can be taken."""
        self.linker.settle_offloads(_SETTLE_S)
        self.tree.check_hicache_events()

    def drop_all(self) -> None:
        """Empty the store; what was on its way to it is dropped too."""
        if self.gate is not None:
            self.gate.clear()
        self.linker.give_up_offloads()
        self.linker.settle_offloads(_SETTLE_S)
        self.linker.store.clear()

    def _on_all_ranks(self, holds: bool) -> bool:
        agreed = torch.tensor([int(holds)], dtype=torch.int)
        self.tree._all_reduce_attn_groups(agreed, torch.distributed.ReduceOp.MIN)
        return bool(agreed.item())

    def queues(self) -> dict[str, int]:
        """How many offloads and requests wait. On any thread."""
        return {"offload": self.linker.waiting_offloads, "gate": len(self.gate or ())}

    def status(self) -> dict[str, Any]:
        status = self.linker.store.status()
        status["queues"] |= self.queues()
        status["load_or_recompute"] = self.linker.choice.status()
        status["layout"] = self.linker.store.layout.text
        return status
