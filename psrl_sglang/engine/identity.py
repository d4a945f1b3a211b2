"""Whose weights a version's name names: what keeps the KV of one run from being found by another."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from psrl_sglang.namespace import is_lagging


@dataclass(frozen=True, slots=True)
class RunIdentity:
    """Two runs from the same checkpoint both have a version "1", with different weights. With
    ``psrl.sglang.namespace`` set, a run says which run it is, and its names are trusted in every store. Without,
    only the weights it started with are known by name to others (``fingerprint``, empty where they cannot be told);
    a version that was installed by an update is its own (``instance``), and no other run, restart or engine finds
    its KV in a store.

    What an engine with a lag caches under a version may be computed in part by later ones, in the order of this
    engine, so it is always its own.
    """

    namespace: str
    start_tag: str
    fingerprint: str
    instance: str

    def of(self, tag: str) -> str:
        """What the keys of a store have of it."""
        if is_lagging(tag):
            return f"{tag}\0{self.instance}"
        if self.namespace:
            return tag  # which begins with the namespace
        return f"{tag}\0{self._start if tag == self.start_tag else self.instance}"

    def origin(self, tag: str, window: Sequence[str]) -> str:
        """What must be the same at both ends of a move for ``tag`` to be the same KV. Without a namespace, engines
        that started from one checkpoint are taken to be of one run; with a lag both must have had the same
        versions, in the same order, for as long as KV of ``tag`` is used."""
        run = "" if self.namespace else self._start if tag == self.start_tag else self.fingerprint
        return " ".join((run, *window)) if is_lagging(tag) else run

    @property
    def _start(self) -> str:
        return self.fingerprint or self.instance
