"""Counters of the store: what went where, how fast, and why not."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

Tier = Literal["dram", "disk", "remote"]
Direction = Literal["load", "store"]


class StoreStats:
    """Thread-safe. Everything is a running total since start, by label; a reader takes differences."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._totals: Counter[tuple[str, ...]] = Counter()

    def add(self, name: str, amount: float = 1, **labels: str) -> None:
        """Add to the total of `name` under these labels."""
        key = (name, *(f"{label}={value}" for label, value in sorted(labels.items())))
        with self._lock:
            self._totals[key] += amount  # type: ignore[assignment]

    @contextmanager
    def timed(self, tier: Tier, direction: Direction, size_bytes: int) -> Iterator[None]:
        """Count a transfer that ends without an exception: `bytes`, `seconds` and `transfers`."""
        began_s = time.perf_counter()
        yield
        self.observe(tier, direction, size_bytes, time.perf_counter() - began_s)

    def observe(self, tier: Tier, direction: Direction, size_bytes: int, seconds: float) -> None:
        """Count a transfer."""
        self.add("bytes", size_bytes, tier=tier, direction=direction)
        self.add("seconds", seconds, tier=tier, direction=direction)
        self.add("transfers", 1, tier=tier, direction=direction)

    def total(self, name: str, **labels: str) -> float:
        """The sum over every set of labels that includes these."""
        wanted = {f"{label}={value}" for label, value in labels.items()}
        with self._lock:
            return sum(v for key, v in self._totals.items() if key[0] == name and wanted <= set(key[1:]))

    def snapshot(self) -> list[dict[str, Any]]:
        """Every total: ``{"name": …, "labels": {…}, "total": …}``."""
        with self._lock:
            totals = sorted(self._totals.items())
        return [
            {"name": key[0], "labels": dict(part.split("=", 1) for part in key[1:]), "total": value}
            for key, value in totals
        ]
