"""Runs the checks, at a time or one after the other, each with a deadline of its own."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from psrl_sglang.doctor.result import CheckResult, fail

logger = logging.getLogger(__name__)

Checking = Callable[[], Sequence[CheckResult]]


@dataclass(frozen=True, slots=True)
class Check:
    """``run`` has its own deadlines; ``limit_s`` is for what they do not cover."""

    name: str
    run: Checking
    limit_s: float = 10.0


def run_all(checks: Sequence[Check]) -> list[CheckResult]:
    """All results, in the order of the checks, at least one of each; at the longest deadline at the latest. None
    can hold the others up."""
    began_s = time.monotonic()
    running = [_Running(check) for check in checks]
    results: list[CheckResult] = []
    for one in running:
        results += one.results(began_s + one.check.limit_s)
    return results


def run_in_order(checks: Sequence[Check]) -> list[CheckResult]:
    """As ``run_all``, but one after the other; behind one that has no answer in time none is run."""
    results: list[CheckResult] = []
    for index, check in enumerate(checks):
        one = _Running(check)
        results += one.results(time.monotonic() + check.limit_s)
        if one.is_alive:
            results += [fail(left.name, f"not run, because {check.name} hangs") for left in checks[index + 1 :]]
            break
    return results


class _Running:
    """A check on a thread of its own."""

    def __init__(self, check: Check) -> None:
        self.check = check
        self._found: list[CheckResult] | None = None
        # A daemon: a thread that waits in the kernel is left behind, and the process ends without it.
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def results(self, until_s: float) -> list[CheckResult]:
        self._thread.join(max(0.0, until_s - time.monotonic()))
        return self._found or [fail(self.check.name, f"no answer in {self.check.limit_s:.0f} s")]

    def _run(self) -> None:
        try:
            self._found = list(self.check.run())
        except Exception as error:
            # A check that fails must not hide what the others found.
            logger.exception("psrl: check %s", self.check.name)
            self._found = [fail(self.check.name, f"the check itself failed: {type(error).__name__}: {error}")]
