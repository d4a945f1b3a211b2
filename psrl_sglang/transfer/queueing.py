"""Moves that wait for their turn: so many at once, and no destination keeps the others waiting."""

from __future__ import annotations

import logging
import threading
from collections import Counter, deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass

from psrl_sglang.transfer.link import Deadline

logger = logging.getLogger(__name__)

_CLOSE_S = 10.0


@dataclass(frozen=True, slots=True, eq=False)
class _Waiting:
    task: Callable[[], None]
    deadline: Deadline


class FairQueue:
    """Runs tasks on ``threads`` threads of its own: the keys take turns, and within one key it is first come, first
    served. One key never has all threads, if there are two or more: a destination that hangs stops no other.

    Each task is called once, and must not raise. One whose deadline passed while it waited is called then, on a
    thread beside the others: it has to find that out and return at once. So it is after ``close``, which calls
    what still waits with ``is_closed`` true.
    """

    def __init__(self, threads: int, name: str) -> None:
        self._waiting: dict[Hashable, deque[_Waiting]] = {}
        self._running: Counter[Hashable] = Counter()
        self._most_of_a_key = max(1, threads - 1)
        self._changed = threading.Condition()
        self.is_closed = False
        self._threads = [
            threading.Thread(target=self._run, name=f"{name}-{number}", daemon=True)
            for number in range(threads)
        ]
        self._threads.append(threading.Thread(target=self._run_late, name=f"{name}-late", daemon=True))
        for thread in self._threads:
            thread.start()

    @property
    def waiting(self) -> int:
        with self._changed:
            return sum(map(len, self._waiting.values()))

    @property
    def running(self) -> int:
        with self._changed:
            return self._running.total()

    def put(self, key: Hashable, task: Callable[[], None], deadline: Deadline) -> bool:
        """False, and the task is not called, if the queue is closed."""
        with self._changed:
            if self.is_closed:
                return False
            self._waiting.setdefault(key, deque()).append(_Waiting(task, deadline))
            self._changed.notify_all()
            return True

    def close(self) -> None:
        with self._changed:
            self.is_closed = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join(_CLOSE_S)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._free_key() is not None or self._is_over())
                key = self._free_key()
                if key is None:
                    return
                tasks = self._waiting.pop(key)
                one = tasks.popleft()
                if tasks:
                    self._waiting[key] = tasks  # behind all others
                self._running[key] += 1
            try:
                _call(one.task)
            finally:
                with self._changed:
                    self._running[key] -= 1
                    if not self._running[key]:
                        del self._running[key]
                    self._changed.notify_all()

    def _run_late(self) -> None:
        while True:
            with self._changed:
                if self._is_over():
                    return
                ends_s = [one.deadline.left_s for tasks in self._waiting.values() for one in tasks]
                if not ends_s or min(ends_s) > 0:
                    self._changed.wait(min(ends_s, default=None))
                    continue
                late = self._pop_late()
            for one in late:
                _call(one.task)

    def _free_key(self) -> Hashable | None:
        """The key whose turn it is. Closed, all may run."""
        for key in self._waiting:
            if self.is_closed or self._running[key] < self._most_of_a_key:
                return key
        return None

    def _is_over(self) -> bool:
        return self.is_closed and not self._waiting

    def _pop_late(self) -> list[_Waiting]:
        late: list[_Waiting] = []
        for key, tasks in list(self._waiting.items()):
            late += (one for one in tasks if one.deadline.left_s <= 0)
            if left := deque(one for one in tasks if one.deadline.left_s > 0):
                self._waiting[key] = left
            else:
                del self._waiting[key]
        return late


def _call(task: Callable[[], None]) -> None:
    try:
        task()
    except Exception:
        logger.exception("psrl: a move failed")
