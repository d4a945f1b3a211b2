"""What happens, told to whoever watches: each watcher has a queue of its own, and a slow one misses the oldest."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

_MOST_WATCHERS = 64
_QUEUE_EVENTS = 512


class Watcher:
    """``missed``: events that did not fit since the last `take`."""

    def __init__(self) -> None:
        self._events: deque[tuple[str, bytes]] = deque()
        self._arrived = asyncio.Event()
        self.missed = 0

    def put(self, kind: str, data: bytes) -> None:
        if len(self._events) >= _QUEUE_EVENTS:
            self._events.popleft()
            self.missed += 1
        self._events.append((kind, data))
        self._arrived.set()

    async def take(self, timeout_s: float) -> list[tuple[str, bytes]]:
        """All events since the last call; empty if there was none in ``timeout_s``."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._arrived.wait()
        except TimeoutError:
            return []
        self._arrived.clear()
        events = list(self._events)
        self._events.clear()
        return events


class Feed:
    """Publishes to watchers on one event loop."""

    def __init__(self) -> None:
        self._watchers: dict[int, Watcher] = {}

    @property
    def watchers(self) -> int:
        return len(self._watchers)

    @property
    def is_full(self) -> bool:
        """Another watcher should be turned away."""
        return len(self._watchers) >= _MOST_WATCHERS

    @contextmanager
    def watch(self) -> Iterator[Watcher]:
        watcher = Watcher()
        self._watchers[id(watcher)] = watcher
        try:
            yield watcher
        finally:
            del self._watchers[id(watcher)]

    def publish(self, kind: str, data: bytes) -> None:
        for watcher in self._watchers.values():
            watcher.put(kind, data)
