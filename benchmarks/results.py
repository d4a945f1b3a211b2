"""Rows of figures: what every benchmark writes with ``--json FILE`` and what the suite reads.

One row is one figure: of which benchmark, in which case (one curve of a plot), at which x (if the case has an
axis), what was measured, and the limit it was asked to keep, if there is one. A figure that was not measured is a
row too: without a value, and with a note that says why.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec

COLUMNS: tuple[str, ...] = (
    "benchmark",
    "case",
    "x_name",
    "x",
    "metric",
    "value",
    "unit",
    "target",
    "is_met",
    "note",
)


class ResultsError(Exception):
    """A file does not hold rows; the message says what is wrong with it."""


@dataclass(frozen=True, slots=True)
class Target:
    """The asked-for limit of a figure, in the figure's unit."""

    direction: Literal["at most", "at least"]
    limit: float

    def is_met(self, value: float) -> bool:
        return value <= self.limit if self.direction == "at most" else value >= self.limit

    def __str__(self) -> str:
        return f"{self.direction} {self.limit:g}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One figure. ``value`` is None exactly if it was not measured; ``note`` then says why. ``x`` and ``x_name``
    go together. Values and x are finite."""

    benchmark: str
    case: str
    metric: str
    value: float | None
    unit: str
    x_name: str = ""
    x: float | None = None
    target: Target | None = None
    note: str = ""

    def __post_init__(self) -> None:
        if self.value is None and not self.note:
            raise ValueError(
                f"{self.benchmark}, {self.case}, {self.metric}: no value, and no note that says why"
            )
        if (self.x is None) != (not self.x_name):
            raise ValueError(f"{self.benchmark}, {self.case}: x and x_name go together")
        for name, number in (("value", self.value), ("x", self.x)):
            if number is not None and not math.isfinite(number):
                raise ValueError(f"{self.benchmark}, {self.case}, {self.metric}: {name} is {number}")

    @property
    def is_met(self) -> bool | None:
        """None where there is no target, or no value."""
        return None if self.target is None or self.value is None else self.target.is_met(self.value)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def cells(self) -> dict[str, str]:
        """The row as text, by the names of ``COLUMNS``: what the CSV file has."""
        met = self.is_met
        return {
            "benchmark": self.benchmark,
            "case": self.case,
            "x_name": self.x_name,
            "x": "" if self.x is None else repr(self.x),
            "metric": self.metric,
            "value": "" if self.value is None else repr(self.value),
            "unit": self.unit,
            "target": "" if self.target is None else str(self.target),
            "is_met": "" if met is None else str(met).lower(),
            "note": self.note,
        }


def at_most(limit: float) -> Target:
    return Target("at most", limit)


def at_least(limit: float) -> Target:
    return Target("at least", limit)


def not_run(benchmark: str, case: str, why: str) -> Row:
    """The row of a case that could not be measured here."""
    return Row(benchmark=benchmark, case=case, metric="", value=None, unit="", note=f"not run: {why}")


def write_rows(path: Path, rows: Iterable[Row]) -> None:
    """A JSON list, one object a row. The file is there whole or not at all."""
    lines = ",\n".join(msgspec.json.encode(row.as_dict()).decode() for row in rows)
    partial = path.with_name(f"{path.name}.partial")
    partial.write_text(f"[\n{lines}\n]\n")
    partial.replace(path)


def read_rows(path: Path) -> list[Row]:
    """What ``write_rows`` wrote; ``ResultsError`` for anything else, a missing file included."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=list[Row])
    except OSError as error:
        raise ResultsError(f"{path.name}: {error.strerror}") from error
    except (msgspec.DecodeError, ValueError) as error:
        raise ResultsError(f"{path.name} does not hold rows: {error}") from error
