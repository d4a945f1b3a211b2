"""Pages that stay in DRAM for a move to come: each pin has a time limit, all together a budget."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from psrl_sglang.keys import KEY_BYTES
from psrl_sglang.store.dram import DramTier, Lease
from psrl_sglang.transfer.link import TransferError


@dataclass(slots=True)
class _Pin:
    leases: list[Lease]
    pages: int
    slots: int
    expires_s: float


class Pins:
    """Thread-safe. Half of the arena may be pinned: the rest must do for what runs."""

    def __init__(self, dram: DramTier, seconds: float) -> None:
        self._seconds = seconds
        self._budget_slots = max(1, dram.arena.slots // 2)
        self._pins: dict[bytes, _Pin] = {}
        self._lock = threading.Lock()

    def pin(self, digests: bytes, leases: Sequence[Lease], pages: int) -> int:
        """Keep ``leases`` under the name of the prefix; takes them. A second pin of a prefix renews the first.
        Returns ``pages``. Raises `TransferError` where the budget is used up, having released them; an earlier pin
        of that prefix stays as it is."""
        slots = len({id(piece.chunk) for lease in leases for piece in lease.pieces})
        with self._lock:
            name = digests[-KEY_BYTES:]
            old = self._pins.get(name)
            held = sum(pin.slots for pin in self._pins.values() if pin is not old)
            is_taken = bool(slots) and held + slots <= self._budget_slots
            if is_taken:
                self._pins[name] = _Pin(list(leases), pages, slots, time.monotonic() + self._seconds)
        for lease in (old.leases if old else ()) if is_taken else leases:
            lease.release()
        if slots and not is_taken:
            raise TransferError(
                f"{held} of at most {self._budget_slots} chunks are pinned; {slots} more do not fit"
            )
        return pages

    def unpin(self, digests: bytes) -> int:
        """End a pin; returns its pages, 0 if there is none."""
        with self._lock:
            pin = self._pins.pop(digests[-KEY_BYTES:], None)
        return self._release([pin] if pin else [])

    def expire(self) -> None:
        now_s = time.monotonic()
        with self._lock:
            over = [name for name, pin in self._pins.items() if pin.expires_s <= now_s]
            pins = [self._pins.pop(name) for name in over]
        self._release(pins)

    def close(self) -> None:
        with self._lock:
            pins = list(self._pins.values())
            self._pins.clear()
        self._release(pins)

    def status(self) -> dict[str, Any]:
        with self._lock:
            return {
                "held": len(self._pins),
                "chunks": sum(pin.slots for pin in self._pins.values()),
                "budget_chunks": self._budget_slots,
            }

    @staticmethod
    def _release(pins: Sequence[_Pin]) -> int:
        for pin in pins:
            for lease in pin.leases:
                lease.release()
        return sum(pin.pages for pin in pins)
