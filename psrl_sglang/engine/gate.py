"""The admission gate: a request whose KV is on disk or in a remote store waits for it, within a limit.

SGLang asks at arrival (``prefetch_from_storage``) and before each admission (``check_prefetch_progress``); the
tree passes both on to here. Others overtake a request that waits.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from psrl_sglang.keys import count
from psrl_sglang.store.fetch import Fetch, ReadSpan

if TYPE_CHECKING:
    from psrl_sglang.engine.linker import PsrlLinker
    from psrl_sglang.engine.tree import VersionedTree


class Gate:
    """Scheduler thread only. Every rank holds the same requests, so the ranks agree in the same order."""

    def __init__(self, tree: VersionedTree, linker: PsrlLinker, *, wait_s: float, ranks: int) -> None:
        self._tree = tree
        self._linker = linker
        self._wait_s = wait_s
        self._ranks = ranks
        self._waiting: dict[str, Fetch] = {}
        self._landed: dict[str, Fetch] = {}
        self._held_since_s: dict[str, float] = {}
        self.late = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def on_arrival(self, rid: str) -> None:
        """The request was just looked up: begin to read what DRAM does not have."""
        if rid in self._waiting or rid in self._landed or self._linker.choice.policy == "never":
            return
        wanted, found = self._linker.missing(rid)
        if not wanted or (self._ranks == 1 and found == count(wanted[0].keys)):
            return
        missing_tokens = (count(wanted[0].keys) - found) * self._linker.page_tokens
        if self._ranks == 1 and not self._linker.choice.should_load(missing_tokens):
            return
        fetch = self._linker.store.fetch(wanted, seconds=self._wait_s)
        if fetch is not None:
            self._waiting[rid] = fetch

    def is_open(self, rid: str) -> bool:
        """Whether the request may be admitted. Once open it stays so."""
        fetch = self._waiting.get(rid)
        if fetch is None:
            return True
        over = torch.tensor([int(fetch.is_over)], dtype=torch.int)
        self._tree._all_reduce_attn_groups(over, torch.distributed.ReduceOp.MIN)
        if not over.item():
            self._held_since_s.setdefault(rid, time.monotonic())
            return False
        self._count(rid, fetch)
        self._landed[rid] = self._waiting.pop(rid)
        return True

    def _count(self, rid: str, fetch: Fetch) -> None:
        stats = self._linker.store.stats
        is_late = not fetch.is_complete
        self.late += is_late
        stats.add("gate_requests", outcome="late" if is_late else "read" if fetch.spans else "nothing")
        now_s = time.monotonic()
        stats.add("gate_seconds", now_s - self._held_since_s.pop(rid, now_s))

    def read_span(self, rid: str) -> tuple[int, int | None]:
        """Tokens that were read for a request that passed the gate, and where in it they begin."""
        fetch = self._landed.get(rid)
        if fetch is None or not fetch.read_pages:
            return 0, None
        return fetch.read_pages * self._linker.page_tokens, fetch.first_page * self._linker.page_tokens

    def read_for(self, rid: str) -> Sequence[ReadSpan]:
        """What was read for a request that passed the gate and was not admitted yet."""
        fetch = self._landed.get(rid)
        return () if fetch is None else tuple(fetch.spans)

    def drop(self, rid: str) -> None:
        """The request was admitted or is gone: nothing is held for it any more."""
        self._held_since_s.pop(rid, None)
        for fetches in (self._waiting, self._landed):
            fetch = fetches.pop(rid, None)
            if fetch is not None:
                fetch.release()

    def clear(self) -> None:
        for rid in [*self._waiting, *self._landed]:
            self.drop(rid)
