"""``POST /flush_cache`` on a versioned tree: it answers at once, whether requests run or not.

Trainers call it in a loop until it succeeds, usually around a weight update. With versions there is nothing
that must be flushed for correctness, so it drops what nobody holds and says what stayed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from sglang.srt.managers.io_struct import FlushCacheReqInput, FlushCacheReqOutput
from sglang.srt.mem_cache.base_prefix_cache import EvictParams

from psrl_sglang.engine.updates import tree_of

if TYPE_CHECKING:
    from sglang.srt.managers.scheduler import Scheduler

    from psrl_sglang.engine.tree import VersionedTree

SCHEDULER_ATTRIBUTE = "psrl_scheduler"


def around_flush(
    original: Callable[..., FlushCacheReqOutput | None], self: Any, recv_req: FlushCacheReqInput
) -> FlushCacheReqOutput:
    """Around ``SchedulerFlushWrapper.handle``. ``release_memory_occupation`` does not come through here: it
    loses the pool's memory and keeps SGLang's real flush."""
    scheduler: Scheduler = getattr(self, SCHEDULER_ATTRIBUTE)
    tree = tree_of(scheduler)
    ledger = tree.versions.ledger
    held = len(tree.pins) or tree.session.any_holding_kv()
    if ledger.is_strict and not held and scheduler.is_fully_idle(ignore_waiting=scheduler._engine_paused):
        return FlushCacheReqOutput(
            success=self._flush_cache(), message=f"Cache flushed. Nothing stayed.{_tiers_stay(tree)}"
        )
    before = tree.evictable_size()
    retired = tree.retire_dead()
    if ledger.is_strict:
        tree.evict(EvictParams(num_tokens=tree.evictable_size()))
        kept = ""
    else:
        # Trainers flush around every update; that must not take what the lag is there to reuse.
        kept = f" {tree.evictable_size()} tokens of the lag window are kept; /psrl/v1/retire drops them."
    running, waiting = len(scheduler.running_batch.reqs), len(scheduler.waiting_queue)
    return FlushCacheReqOutput(
        success=True,
        message=(
            f"Cache flushed. {before - tree.evictable_size()} unlocked tokens dropped, {len(retired)} dead "
            f"version(s) retired.{kept} Stayed: {tree.protected_size()} tokens of {running} running and {waiting} "
            f"waiting request(s), {tree.pins.tokens} of them in {len(tree.pins)} pin(s)."
            f"{_tiers_stay(tree)}"
        ),
    )


def _tiers_stay(tree: VersionedTree) -> str:
    if tree.tier_store is None:
        return ""
    return " DRAM, disk and remote keep theirs, under its versions; /psrl/v1/retire drops one."
