"""A circuit breaker: a store that does not answer is left alone for a while, and then tried by one call."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from psrl_sglang.store.remote_client import RemoteError


class CircuitOpen(RemoteError):
    """The call was not made."""

    def __init__(self, message: str) -> None:
        super().__init__(message, reason="breaker")


class CircuitBreaker:
    """Opens after `failures` calls in a row without an answer, for `open_s`. Then one call may try: if it fails
    too, the breaker stays open twice as long as before, up to `max_open_s`; else it closes. Thread-safe."""

    def __init__(
        self,
        *,
        failures: int = 3,
        open_s: float = 0.5,
        max_open_s: float = 30.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._limit = failures
        self._first_open_s = open_s
        self._max_open_s = max_open_s
        self._clock = clock
        self._lock = threading.Lock()
        self._failures = 0
        self._open_s = 0.0  # 0: closed
        self._open_until_s = 0.0
        self._probing = False

    @property
    def is_open(self) -> bool:
        """True from the opening until a call has succeeded."""
        return self._open_s > 0

    @contextmanager
    def attempt(self) -> Iterator[None]:
        """Around one call. Raises `CircuitOpen` instead of running it while open.

        A `RemoteError` counts as a failure unless the store refused; whatever else happens, it has answered.
        """
        probe = self._enter()
        try:
            yield
        except RemoteError as error:
            if error.reason == "refused":
                self._answered(probe)
            else:
                self._failed(probe)
            raise
        except BaseException:
            self._answered(probe)
            raise
        self._answered(probe)

    def _enter(self) -> bool:
        with self._lock:
            if not self.is_open:
                return False
            left_s = self._open_until_s - self._clock()
            if left_s > 0 or self._probing:
                raise CircuitOpen(f"not tried: the store did not answer; next try in {max(left_s, 0.0):.1f} s")
            self._probing = True
            return True

    # What becomes of calls that began before the breaker opened says nothing new while it is open.

    def _answered(self, probe: bool) -> None:
        with self._lock:
            if probe:
                self._probing = False
                self._open_s = 0.0
            self._failures = 0

    def _failed(self, probe: bool) -> None:
        with self._lock:
            if probe:
                self._probing = False
                self._open_s = min(2 * self._open_s, self._max_open_s)
            elif not self.is_open:
                self._failures += 1
                if self._failures < self._limit:
                    return
                self._open_s = self._first_open_s
            else:
                return
            self._open_until_s = self._clock() + self._open_s
