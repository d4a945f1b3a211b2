"""Pins: device KV that must not be evicted for a while.

A pin has an owner, counts against a budget and carries a time limit. The limit is kept by the HTTP process
that granted it (``routes.py``): every rank must drop a pin at the same step, so no rank looks at its own clock.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams
from sglang.srt.mem_cache.radix_cache import RadixKey

from psrl_sglang.namespace import split_salt

if TYPE_CHECKING:
    from psrl_sglang.engine.tree import VersionedTree


class PinRefused(ValueError):
    """The pin cannot be granted; the message says why and what would help."""


@dataclass(frozen=True, slots=True)
class Pin:
    """One granted pin. It owns a tree lock until ``PinTable.unpin`` or a reset of the tree."""

    pin_id: str
    owner: str
    tag: str
    tokens: int
    grant: str
    lock: Any


class PinTable:
    """Pins of one tree, oldest first. Scheduler thread only; identical on every rank."""

    def __init__(self, tree: VersionedTree, *, budget_tokens: int) -> None:
        self._tree = tree
        self.budget_tokens = budget_tokens
        self._pins: dict[str, Pin] = {}

    def __len__(self) -> int:
        return len(self._pins)

    @property
    def tokens(self) -> int:
        """Sum over pins; a prefix pinned twice counts twice."""
        return sum(pin.tokens for pin in self._pins.values())

    def tokens_by_tag(self) -> dict[str, int]:
        totals: dict[str, int] = defaultdict(int)
        for pin in self._pins.values():
            totals[pin.tag] += pin.tokens
        return dict(totals)

    def is_granted(self, pin_id: str, grant: str) -> bool:
        """Whether the pin of this id is the one granted under ``grant``."""
        pin = self._pins.get(pin_id)
        return pin is not None and pin.grant == grant

    def pin(self, pin_id: str, owner: str, key: RadixKey, *, grant: str = "") -> tuple[Pin | None, list[Pin]]:
        """Pin the longest prefix of ``key`` on the device. Over budget, the oldest pins give way.
        Returns the pin (None when nothing of ``key`` is on the device) and the pins that were dropped.

        Raises ``PinRefused`` for an id in use or a prefix larger than the whole budget.
        """
        if pin_id in self._pins:
            raise PinRefused(f"pin_id {pin_id!r} is in use; unpin it first or choose another")
        resident, _, _ = self._tree.tree_core.match_full_device_prefix(key)
        if resident == 0:
            return None, []
        if resident > self.budget_tokens:
            raise PinRefused(
                f"the prefix holds {resident} tokens on the device, the pin budget is {self.budget_tokens}; "
                "raise psrl.sglang.pin_budget_tokens or psrl.lmcache.gpu_pin_block_budget, or pin less"
            )
        dropped = []
        while self.tokens + resident > self.budget_tokens:
            dropped.append(self.unpin(next(iter(self._pins))))
        # A match without a request splits the node exactly at the prefix's end, so no more than it is locked.
        match = self._tree.match_prefix(MatchPrefixParams(key=key))
        lock = self._tree.lock(match.last_device_node)
        tag, _ = split_salt(key.cache_salt)
        pin = Pin(pin_id, owner, tag or "", match.device_prefix_len, grant, lock)
        self._pins[pin_id] = pin
        return pin, dropped

    def unpin(self, pin_id: str) -> Pin:
        """Release a pin. Raises ``KeyError`` for an id that holds none."""
        pin = self._pins.pop(pin_id)
        self._tree.unlock(pin.lock)
        return pin

    def of_owner(self, owner: str) -> list[str]:
        return [pin.pin_id for pin in self._pins.values() if pin.owner == owner]

    def forget(self) -> None:
        """The tree was reset: the locks are void and must not be released."""
        self._pins.clear()

    def list(self) -> list[dict[str, Any]]:
        return [
            {"pin_id": pin.pin_id, "owner": pin.owner, "tag": pin.tag, "tokens": pin.tokens}
            for pin in self._pins.values()
        ]
