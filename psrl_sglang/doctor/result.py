"""What a check found."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum


class State(StrEnum):
    OK = "ok"
    WARN = "warn"  # works, but not as well as it could, or not with every peer
    FAIL = "fail"
    SKIP = "skip"  # not asked for, or of no use here
    SLOW = "slow"  # right, and far from what the device can do
    WRONG = "wrong"  # other bytes than there should be


@dataclass(frozen=True, slots=True)
class CheckResult:
    """``found`` says what was seen, ``remedy`` what to do about it, where there is something to do."""

    name: str
    state: State
    found: str
    remedy: str = ""


def ok(name: str, found: str) -> CheckResult:
    return CheckResult(name, State.OK, found)


def warn(name: str, found: str, remedy: str = "") -> CheckResult:
    return CheckResult(name, State.WARN, found, remedy)


def fail(name: str, found: str, remedy: str = "") -> CheckResult:
    return CheckResult(name, State.FAIL, found, remedy)


def skip(name: str, found: str) -> CheckResult:
    return CheckResult(name, State.SKIP, found)


def slow(name: str, found: str, remedy: str) -> CheckResult:
    return CheckResult(name, State.SLOW, found, remedy)


def wrong(name: str, found: str, remedy: str) -> CheckResult:
    return CheckResult(name, State.WRONG, found, remedy)


def any_failed(results: Sequence[CheckResult]) -> bool:
    return any(result.state in (State.FAIL, State.WRONG) for result in results)
