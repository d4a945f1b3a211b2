"""Where the weights change: every way SGLang has to replace them ends in one new tag, and none in a flush.

A single-call update (disk, IPC) is named by ``record_weight_version_change`` when it succeeds and the caller
gave a version; otherwise it gets an epoch of its own, also when it failed, because SGLang's roll-back re-reads
the *new* path. A begin/end session writes the weights piece by piece, or by RDMA; from its begin on the ledger is
suspended, after each piece anew, so KV computed in between is never matched later, and ``end`` names the result.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from psrl_sglang.engine.tree import VersionedTree
from psrl_sglang.namespace import Tag

if TYPE_CHECKING:
    from sglang.srt.managers.scheduler import Scheduler

logger = logging.getLogger(__name__)

_READ_ONLY_CHECKS = ("snapshot", "compare", "checksum")


def tree_of(scheduler: Scheduler) -> VersionedTree:
    tree = scheduler.tree_cache
    if not isinstance(tree, VersionedTree):  # verified at start; a swap later must not serve unversioned KV
        raise RuntimeError(f"psrl: the scheduler's tree is {type(tree).__name__}, not a versioned one")
    return tree


def on_version_named(original: Callable[..., None], self: Any, new_version: str | None) -> None:
    """Around ``Scheduler.record_weight_version_change``, the one place that learns a version's name."""
    if new_version is not None:
        tree = tree_of(self)
        if tree.versions.ledger.is_suspended and not tree.updates.in_single:
            tree.updates.session_version = new_version  # inside a session; its end installs the name
        else:
            tree.updates.named = True
            _change(tree, lambda: tree.versions.ledger.install(new_version))
    original(self, new_version=new_version)


def around_single_update(original: Callable[..., Any], self: Any, recv_req: Any) -> Any:
    """Around ``update_weights_from_disk`` and ``update_weights_from_ipc``."""
    tree = tree_of(self.scheduler)
    _synchronize_device(tree)
    tree.updates.named, tree.updates.in_single = False, True
    try:
        output = original(self, recv_req)
    finally:
        tree.updates.in_single = False
    if not _on_all_ranks(self, output.success and tree.updates.named):
        _change(tree, tree.versions.ledger.install_unnamed)
    _reopen_session(self, tree)
    return output


def around_check_weights(original: Callable[..., Any], self: Any, recv_req: Any) -> Any:
    """``/weights_checker``: its ``reset_tensors`` writes over every weight."""
    tree = tree_of(self.scheduler)
    if recv_req.action in _READ_ONLY_CHECKS:
        return original(self, recv_req)
    _synchronize_device(tree)
    output = original(self, recv_req)
    _change(tree, tree.versions.ledger.install_unnamed)
    _reopen_session(self, tree)
    return output


def around_session_piece(original: Callable[..., Any], self: Any, recv_req: Any) -> Any:
    """Around ``update_weights_from_tensor`` and ``update_weights_from_distributed``."""
    if self._session is None:
        return original(self, recv_req)  # SGLang refuses it before it touches a weight
    tree = tree_of(self.scheduler)
    _synchronize_device(tree)
    output = original(self, recv_req)
    tree.updates.session_failed |= not _on_all_ranks(self, output.success)
    tree.versions.ledger.suspend()
    tree.versions.settle_crossing()
    return output


def around_session_begin(original: Callable[..., Any], self: Any, recv_req: Any) -> Any:
    tree = tree_of(self.scheduler)
    _synchronize_device(tree)
    output = original(self, recv_req)
    if output.success:
        tree.updates.session_version = None
        tree.updates.session_failed = False
        # From here on the weights may be written at any time (RDMA), and packed ones are unpacked already.
        tree.versions.ledger.suspend()
        tree.versions.settle_crossing()
    return output


def around_session_end(original: Callable[..., Any], self: Any, recv_req: Any) -> Any:
    """A session in which nothing was loaded was written by RDMA: SGLang cannot know what the weights are now,
    and the caller names them afterwards through ``/update_weight_version``, if at all."""
    was_open = self._session is not None
    tree = tree_of(self.scheduler)
    output = original(self, recv_req)
    if was_open:
        version, ledger = tree.updates.session_version, tree.versions.ledger
        if version is None or tree.updates.session_failed or not output.success:
            _change(tree, ledger.install_unnamed)
        else:
            _change(tree, lambda: ledger.install(version))
    return output


def around_flush_after_update(
    original: Callable[..., tuple[bool, str]], self: Any, recv_req: Any, success: bool, message: str
) -> tuple[bool, str]:
    """Versions leave nothing to flush; SGLang's own flush fails the update while a request runs."""
    tree_of(self.scheduler)
    if recv_req.torch_empty_cache:
        from sglang.srt.platforms import current_platform

        current_platform.empty_cache()
    return success, message


def after_resume_memory(result: Any, self: Any, recv_req: Any) -> None:
    """Weights whose memory was given back hold no known values until they are written again."""
    from sglang.srt.constants import GPU_MEMORY_TYPE_WEIGHTS
    from sglang.srt.runtime_context import get_exec

    tags = recv_req.tags
    lost = get_exec().enable_memory_saver and not get_exec().enable_weights_cpu_backup
    if lost and (not tags or GPU_MEMORY_TYPE_WEIGHTS in tags):
        tree = tree_of(self.scheduler)
        _change(tree, tree.versions.ledger.install_unnamed)


def before_release(*args: Any, req: Any, tree_cache: Any, **kwargs: Any) -> None:
    """A running request gives back its KV, for want of memory or for ``pause(retract)``; SGLang would drop what
    it decoded."""
    if isinstance(tree_cache, VersionedTree):
        tree_cache.versions.metrics.retract_saved_tokens += tree_cache.publish_tail(req)
        if tree_cache.tiers is not None:
            tree_cache.tiers.settle()


def _change(tree: VersionedTree, install: Callable[[], object]) -> None:
    """Move the ledger and settle what the move means for requests and, in clear mode, for every tier."""
    began_s = time.perf_counter()
    before = tree.versions.ledger.current
    if install() is False:
        logger.warning(
            "psrl: weights were loaded again as %s, which is installed: its KV is kept. Other weights need another "
            "weight_version",
            before,
        )
        return
    crossing = tree.versions.settle_crossing()
    if tree.psrl_settings.clear_on_weight_update:
        tree.drop_all_but_current()
    seconds = time.perf_counter() - began_s
    tree.versions.metrics.observe_change(crossing, seconds)
    _log_change(before, tree.versions.ledger.current, crossing, seconds)


def _log_change(before: Tag, after: Tag, crossing: int, seconds: float) -> None:
    logger.info(
        "psrl: weights %s -> %s, %d request(s) crossing, %.2f ms", before, after, crossing, seconds * 1e3
    )


def _reopen_session(updater: Any, tree: VersionedTree) -> None:
    """Weights were written as a whole while a session was open: what its end will leave has no name."""
    if updater._session is not None:
        tree.updates.session_version, tree.updates.session_failed = None, True
        tree.versions.ledger.suspend()
        tree.versions.settle_crossing()


def _on_all_ranks(updater: Any, success: bool) -> bool:
    """Whether it holds on every tensor-parallel rank. A tag that differed between ranks would end in different
    prefix lengths, and those in a hang."""
    dist = torch.distributed
    if not dist.is_initialized() or dist.get_world_size(group=updater.tp_cpu_group) == 1:
        return success
    agreed = torch.tensor([int(success)])
    dist.all_reduce(agreed, op=dist.ReduceOp.MIN, group=updater.tp_cpu_group)
    return bool(agreed.item())


def _synchronize_device(tree: VersionedTree) -> None:
    # Under overlap scheduling a forward may still read the weights; SGLang's updaters do not wait for it.
    torch.get_device_module(tree.token_to_kv_pool_allocator.device).synchronize()
