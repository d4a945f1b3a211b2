"""Eviction order: versions outside the window first, oldest installation first, then LRU or FIFO.

SGLang's Python tree core takes a strategy object. Its Rust core has a closed set of policies; there the
reduced form is the ``priority`` policy with the installation order as the priority of every insertion.
"""

from __future__ import annotations

from typing import Any

from sglang.srt.mem_cache import utils
from sglang.srt.mem_cache.evict_policy import EvictionStrategy

from psrl_sglang.namespace import VersionLedger, split_salt

POLICY = "psrl"
# SGLang inserts a prompt one priority above its continuation, so a version needs room for more than one.
RUST_PRIORITY_STEP = 4


class VersionStrategy(EvictionStrategy):
    """Lower sorts first, and is evicted first."""

    def __init__(self, ledger: VersionLedger, *, fifo: bool) -> None:
        self._ledger = ledger
        self._fifo = fifo
        self._ranks: dict[str, tuple[int, int]] = {}
        self._ranked_at = -1

    def get_priority(self, node: Any) -> tuple[int, int, float]:
        if self._ranked_at != self._ledger.changes:
            self._ranks.clear()
            self._ranked_at = self._ledger.changes
        salt = node.key.cache_salt or ""
        rank = self._ranks.get(salt)
        if rank is None:
            rank = self._ranks[salt] = self._rank(salt)
        return (*rank, node.creation_time if self._fifo else node.last_access_time)

    def _rank(self, salt: str) -> tuple[int, int]:
        tag, _ = split_salt(salt)
        if tag is None or self._ledger.lag_of(tag) is not None:
            return 1, 0
        return 0, self._ledger.order_of(tag)


def register_policy(ledger: VersionLedger, *, fifo: bool) -> None:
    """Make the policy known to the Python tree core of this process."""
    utils._EVICTION_POLICY_FACTORIES[POLICY] = lambda: VersionStrategy(ledger, fifo=fifo)
