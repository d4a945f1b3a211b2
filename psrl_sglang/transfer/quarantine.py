"""Room in the arena that somebody else may still write to.

A source that was lost in the middle of a one-sided write cannot be asked whether it has stopped. Others may bring
its pages at once, to other room; its own is given back after ``QUARANTINE_S``.
"""

from __future__ import annotations

import threading
import time

from psrl_sglang.store.dram import Reservation

QUARANTINE_S = 30.0


class Quarantine:
    """Thread-safe. Owns the reservations it was given."""

    def __init__(self) -> None:
        self._kept: list[tuple[float, Reservation]] = []
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._kept)

    def add(self, reservation: Reservation) -> None:
        reservation.forsake()
        with self._lock:
            self._kept.append((time.monotonic() + QUARANTINE_S, reservation))

    def release(self) -> None:
        """Give back what has been here for long enough. Call now and then."""
        self._release(time.monotonic())

    def close(self) -> None:
        self._release(float("inf"))

    def _release(self, until_s: float) -> None:
        with self._lock:
            over = [kept for end_s, kept in self._kept if end_s <= until_s]
            self._kept = [one for one in self._kept if one[0] > until_s]
        for reservation in over:
            reservation.abort()
