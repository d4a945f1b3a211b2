"""Runs the checks at a time, each with a deadline of its own; none can hold the others up."""

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
    """All results, in the order of the checks, at least one of each; at the longest deadline at the latest."""
    found: list[list[CheckResult] | None] = [None] * len(checks)

    def run(index: int) -> None:
        try:
            found[index] = list(checks[index].run())
        except Exception as error:
            # A check that fails must not hide what the others found.
            logger.exception("psrl: check %s", checks[index].name)
            found[index] = [
                fail(checks[index].name, f"the check itself failed: {type(error).__name__}: {error}")
            ]

    began_s = time.monotonic()
    # Daemons: a thread that waits in the kernel is left behind, and the process ends without it.
    threads = [threading.Thread(target=run, args=(index,), daemon=True) for index in range(len(checks))]
    for thread in threads:
        thread.start()
    results: list[CheckResult] = []
    for index, (check, thread) in enumerate(zip(checks, threads, strict=True)):
        thread.join(max(0.0, began_s + check.limit_s - time.monotonic()))
        results += found[index] or [fail(check.name, f"no answer in {check.limit_s:.0f} s")]
    return results
