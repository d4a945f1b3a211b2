"""One mapping of DRAM, cut into slots of equal size."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

_MADV_POPULATE_WRITE = 23  # Linux 5.14; not in the mmap module yet
_POPULATE_STEP_BYTES = 1 << 26


class PageLock(Protocol):
    """What keeps memory page-locked until it is closed."""

    def close(self) -> None: ...


class Arena:
    """``slots`` slots of ``slot_bytes`` bytes, touched at once so that no later write waits for the kernel.

    Huge pages are asked for: copies in and out run several times faster with them. With ``shared`` the memory
    is a file without a name (``fd``), which another process can map. The mapping lives as long as anything
    refers to ``memory`` or a view of it; ``close`` gives up this reference.

    Raises ``MemoryError`` with the sizes if the kernel refuses the mapping.
    """

    def __init__(self, slots: int, slot_bytes: int, *, shared: bool = False) -> None:
        if slots <= 0 or slot_bytes <= 0:
            raise ValueError(f"an arena of {slots} slots of {slot_bytes} bytes")
        self.slots = slots
        self.slot_bytes = slot_bytes
        self.fd = -1
        self._lock: PageLock | None = None
        size_bytes = slots * slot_bytes
        flags = mmap.MAP_SHARED if shared else mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        try:
            if shared:
                self.fd = os.memfd_create("psrl-arena", os.MFD_CLOEXEC)
                os.ftruncate(self.fd, size_bytes)
            self._map = mmap.mmap(self.fd, size_bytes, flags=flags)
        except (OSError, ValueError, OverflowError) as error:
            self.close()
            raise MemoryError(f"no mapping of {size_bytes} bytes for offloaded KV: {error}") from error
        self.has_huge_pages = _advise(self._map, mmap.MADV_HUGEPAGE)
        _advise(self._map, mmap.MADV_DONTFORK)  # a child would copy it page by page on write
        self.memory = np.frombuffer(self._map, dtype=np.uint8)
        _populate(self._map, self.memory)
        self._free = list(range(slots - 1, -1, -1))

    @property
    def size_bytes(self) -> int:
        return self.slots * self.slot_bytes

    @property
    def address(self) -> int:
        return self.memory.ctypes.data

    @property
    def used_slots(self) -> int:
        return self.slots - len(self._free)

    def take(self) -> int | None:
        """A free slot, now the caller's; None when there is none. Not thread-safe, like ``give``."""
        return self._free.pop() if self._free else None

    def give(self, slot: int) -> None:
        self._free.append(slot)

    @property
    def is_page_locked(self) -> bool:
        return self._lock is not None

    def page_lock(self, lock: Callable[[np.ndarray, int], PageLock]) -> None:
        """Have ``lock(memory, slot_bytes)`` page-lock the memory, so that a device can copy to and from it by
        itself. The arena owns what comes back, and closes it before it gives up the mapping. What ``lock`` raises
        goes through, and the arena is as before."""
        if self._lock is not None:
            raise RuntimeError("an arena is page-locked once")
        self._lock = lock(self.memory, self.slot_bytes)

    def view(self, slot: int, first_byte: int, size_bytes: int) -> memoryview:
        """Bytes of a slot. Valid while the caller keeps the slot from being given back."""
        begin = slot * self.slot_bytes + first_byte
        return memoryview(self.memory)[begin : begin + size_bytes]

    def close(self) -> None:
        """No device may be copying. May be called more than once."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None
        self.memory: Any = np.empty(0, dtype=np.uint8)
        self._map: Any = None
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def _advise(mapping: mmap.mmap, advice: int) -> bool:
    try:
        mapping.madvise(advice)
    except OSError:
        return False  # an older kernel, or one built without it: slower, not wrong
    return True


def _populate(mapping: mmap.mmap, memory: np.ndarray) -> None:
    if not _advise(mapping, _MADV_POPULATE_WRITE):
        for at in range(0, len(memory), _POPULATE_STEP_BYTES):
            memory[at : at + _POPULATE_STEP_BYTES] = 0
