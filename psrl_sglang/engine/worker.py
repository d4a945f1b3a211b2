"""The scheduler side: puts the versioned tree and its hooks into a scheduler process of an enabled engine."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from psrl_sglang.config import PsrlConfig
from psrl_sglang.engine import batches, eviction, flush, reporting, seams, updates
from psrl_sglang.engine.activation import exported_fingerprint, exported_instance, refuse
from psrl_sglang.engine.checkpoint import checkpoint_fingerprint
from psrl_sglang.engine.command_types import PsrlCommand
from psrl_sglang.engine.commands import CommandHandler
from psrl_sglang.engine.identity import RunIdentity
from psrl_sglang.engine.metrics import PrometheusMirror, VersionMetrics
from psrl_sglang.engine.resolved import Resolved
from psrl_sglang.engine.tree import VersionedTree, versioned
from psrl_sglang.namespace import VersionLedger

if TYPE_CHECKING:
    from sglang.srt.managers.scheduler import Scheduler

logger = logging.getLogger(__name__)

INIT_INFO_KEY = "psrl"
_SGLANG_DEFAULT_VERSION = "default"
_SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"
_UPDATER = "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"
_STREAMER = "sglang.srt.managers.scheduler_components.output_streamer.SchedulerOutputStreamer"
_REGISTRY = "sglang.srt.mem_cache.registry"
# Not a seam: SGLang imports LMCache there, which most installations do not have.
_LMCACHE_TREE_MODULE = "sglang.srt.mem_cache.storage.lmcache.lmcache_unified_radix_cache"


@dataclass(frozen=True)
class TreeSettings:
    """What a versioned tree is built with. One per scheduler process."""

    config: PsrlConfig
    model_config: Any
    identity: RunIdentity
    ledger: VersionLedger
    metrics: VersionMetrics
    priority_step: int

    @property
    def clear_on_weight_update(self) -> bool:
        return self.config.lmcache.clear_on_weight_update

    def pin_budget_tokens(self, tree: VersionedTree) -> int:
        """The smallest of: half of the pool, ``pin_budget_tokens``, ``gpu_pin_block_budget`` pages; 0 is no
        limit of its own. Half, because what is pinned cannot be scheduled."""
        limits = [tree.token_to_kv_pool_allocator.size // 2]
        if self.config.sglang.pin_budget_tokens:
            limits.append(self.config.sglang.pin_budget_tokens)
        if self.config.lmcache.gpu_pin_block_budget:
            limits.append(self.config.lmcache.gpu_pin_block_budget * tree.page_size)
        return min(limits)


def install(config: PsrlConfig) -> None:
    """Hook this scheduler process, and end it if a seam is missing or different."""
    from sglang.srt.managers.scheduler_components.output_streamer import SchedulerOutputStreamer

    all_seams = seams.load_seams()
    seams.verify(all_seams)
    hooks: list[tuple[str, Callable[..., Any], HookType]] = [
        (f"{_REGISTRY}.create_tree_cache", _around_create_tree(config), HookType.AROUND),
        (f"{_REGISTRY}.create_unified_radix_cache", _around_create_unified, HookType.AROUND),
        (f"{_SCHEDULER}.init_request_dispatcher", _after_init_dispatcher, HookType.AFTER),
        (f"{_SCHEDULER}.get_init_info", _after_init_info, HookType.AFTER),
        (f"{_SCHEDULER}.record_weight_version_change", updates.on_version_named, HookType.AROUND),
        (f"{_UPDATER}.update_weights_from_disk", updates.around_single_update, HookType.AROUND),
        (f"{_UPDATER}.update_weights_from_ipc", updates.around_single_update, HookType.AROUND),
        (f"{_UPDATER}.update_weights_from_tensor", updates.around_session_piece, HookType.AROUND),
        (f"{_UPDATER}.update_weights_from_distributed", updates.around_session_piece, HookType.AROUND),
        (f"{_UPDATER}.check_weights", updates.around_check_weights, HookType.AROUND),
        (f"{_UPDATER}.begin_weight_update", updates.around_session_begin, HookType.AROUND),
        (f"{_UPDATER}.end_weight_update", updates.around_session_end, HookType.AROUND),
        (f"{_UPDATER}.flush_cache_after_weight_update", updates.around_flush_after_update, HookType.AROUND),
        (f"{_UPDATER}.resume_memory_occupation", updates.after_resume_memory, HookType.AFTER),
        ("sglang.srt.managers.schedule_batch.release_req", updates.before_release, HookType.BEFORE),
        (f"{_SCHEDULER}.run_batch", batches.around_run, HookType.AROUND),
        (f"{_SCHEDULER}.process_batch_result", batches.after_result, HookType.AFTER),
        (
            "sglang.srt.managers.scheduler_components.flush_wrapper.SchedulerFlushWrapper.handle",
            flush.around_flush,
            HookType.AROUND,
        ),
        (f"{_STREAMER}.build_additional_customized_info", reporting.after_build_info, HookType.AFTER),
    ]
    for target, hook, kind in hooks:
        HookRegistry.register(target, hook, kind)
    SchedulerOutputStreamer.has_additional_customized_info = True
    HookRegistry.apply_hooks()
    mine = [seam for seam in all_seams if seam.side == "scheduler"]
    seams.verify(mine, patched=frozenset(HookRegistry._patched))


_tree_settings: TreeSettings | None = None  # between the two creation hooks of this process


def _around_create_tree(config: PsrlConfig) -> Callable[..., Any]:
    def around(original: Callable[..., Any], ctx: Any) -> Any:
        global _tree_settings
        _tree_settings = _make_settings(config, ctx)
        with _lmcache_tree_versioned(_tree_settings):
            tree = original(ctx)
        if not isinstance(tree, VersionedTree):
            refuse(
                f"SGLang built a {type(tree).__name__}, which has no versions; drop the option that selected it "
                "or drop --psrl-config"
            )
        logger.info(
            "psrl: %s on %s, weights %s",
            type(tree).__name__,
            type(tree.tree_core).__name__,
            tree.versions.ledger.current,
        )
        return tree

    return around


def _around_create_unified(original: Callable[..., Any], ctx: Any, *, cache_class: Any = None) -> Any:
    if _tree_settings is None:
        refuse("the tree is built outside create_tree_cache; this SGLang is not supported")
    return original(ctx, cache_class=versioned(cache_class or UnifiedRadixCache, _tree_settings))


@contextmanager
def _lmcache_tree_versioned(settings: TreeSettings) -> Iterator[None]:
    """SGLang's LMCache tree is not built through ``create_unified_radix_cache``: swap its class meanwhile."""
    from sglang.srt.runtime_context import get_memory

    if not get_memory().enable_lmcache:
        yield
        return
    owner = import_module(_LMCACHE_TREE_MODULE)
    base = owner.LMCacheUnifiedRadixCache
    owner.LMCacheUnifiedRadixCache = versioned(base, settings)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        owner.LMCacheUnifiedRadixCache = base  # type: ignore[attr-defined]


def _make_settings(config: PsrlConfig, ctx: Any) -> TreeSettings:
    from sglang.srt.runtime_context import get_observability, get_serving

    instance = _agreed_instance()
    version = get_serving().weight_version
    fingerprint = _agreed_fingerprint(ctx.server_args)
    if version == _SGLANG_DEFAULT_VERSION:
        # Two engines, or two starts, from different checkpoints must not share a name in a shared tier.
        version = f"{version}@{fingerprint or instance}"
    ledger = VersionLedger(
        version,
        instance=instance,
        namespace=config.sglang.namespace,
        max_version_lag=config.sglang.max_version_lag,
    )
    identity = RunIdentity(config.sglang.namespace, str(ledger.current), fingerprint, instance)
    mirror = None
    if get_observability().enable_metrics:
        labels = {
            "model_name": str(get_serving().served_model_name or ctx.model_config.model_path),
            "tp_rank": str(ctx.tp_rank),
        }
        mirror = PrometheusMirror(labels)
    params = ctx.params
    if params.eviction_policy == eviction.POLICY:
        params.tree_core_backend = "python"  # the Rust core's policies are a closed set
        eviction.register_policy(ledger, fifo=config.lmcache.cache_policy == "FIFO")
    priority_step = 0
    if config.sglang.tree_core == "rust":
        params.tree_core_backend = "rust"
        if params.eviction_policy == "priority":
            priority_step = eviction.RUST_PRIORITY_STEP
    return TreeSettings(
        config, ctx.model_config, identity, ledger, VersionMetrics(mirror=mirror), priority_step
    )


def _agreed_instance() -> str:
    """The engine's id, the same on every rank, also when each node made its own."""
    from sglang.srt.runtime_context import get_parallel

    box = [exported_instance()]
    group = get_parallel().world_group
    if group.world_size > 1:
        torch.distributed.broadcast_object_list(box, src=group.ranks[0], group=group.cpu_group)
    return box[0]


def _agreed_fingerprint(server_args: Any) -> str:
    """Of the weights that were read, the same on every rank; empty if they cannot be told."""
    from sglang.srt.runtime_context import get_parallel

    now = checkpoint_fingerprint(Resolved(server_args))
    mine = now if now == exported_fingerprint() else ""  # else they changed while they were read
    group = get_parallel().world_group
    every: list[Any] = [mine] * group.world_size
    if group.world_size > 1:
        torch.distributed.all_gather_object(every, mine, group=group.cpu_group)
    if mine and set(every) == {mine}:
        return mine
    logger.warning(
        "psrl: the model's files do not say what the weights of this start are (a loader such as dummy, files that "
        "changed meanwhile, or differ between nodes): their KV is this engine's own, unless psrl.sglang.namespace "
        "says whose it is"
    )
    return ""


def _after_init_dispatcher(result: None, self: Scheduler) -> None:
    from sglang.utils import TypeBasedDispatcher

    self._request_dispatcher += TypeBasedDispatcher([(PsrlCommand, CommandHandler(self))])
    setattr(self.flush_wrapper, flush.SCHEDULER_ATTRIBUTE, self)


def _after_init_info(result: dict[str, Any], self: Scheduler) -> dict[str, Any]:
    """The launcher refuses to serve an engine whose scheduler does not say this."""
    tree = updates.tree_of(self)
    tree.open_gate_in(self)
    tree.open_storage()
    tree.open_moves(self)
    return {**result, INIT_INFO_KEY: {"tree": type(tree).__name__, "tag": str(tree.versions.ledger.current)}}
