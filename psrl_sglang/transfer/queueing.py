"""Moves that wait for their turn: so many at once, and no destination keeps the others waiting."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Hashable

logger = logging.getLogger(__name__)

_CLOSE_S = 10.0


class FairQueue:
    """Runs tasks on ``threads`` threads of its own: the keys take turns, and within one key it is first come, first
    served. Tasks must not raise. ``close`` runs what still waits with ``is_closed`` true."""

    def __init__(self, threads: int, name: str) -> None:
        self._waiting: dict[Hashable, deque[Callable[[], None]]] = {}
        self._running = 0
        self._changed = threading.Condition()
        self.is_closed = False
        self._threads = [
            threading.Thread(target=self._run, name=f"{name}-{number}", daemon=True)
            for number in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def waiting(self) -> int:
        with self._changed:
            return sum(map(len, self._waiting.values()))

    @property
    def running(self) -> int:
        return self._running

    def put(self, key: Hashable, task: Callable[[], None]) -> None:
        with self._changed:
            self._waiting.setdefault(key, deque()).append(task)
            self._changed.notify()

    def close(self) -> None:
        with self._changed:
            self.is_closed = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join(_CLOSE_S)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self.is_closed)
                if not self._waiting:
                    return
                key = next(iter(self._waiting))
                tasks = self._waiting.pop(key)
                task = tasks.popleft()
                if tasks:
                    self._waiting[key] = tasks  # behind all others
                self._running += 1
            try:
                task()
            except Exception:
                logger.exception("psrl: a move failed")
            finally:
                with self._changed:
                    self._running -= 1
