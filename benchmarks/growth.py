"""What each figure does as pages, sessions, engines and versions grow by 10 and 100, with its slope.

    python benchmarks/growth.py [--quick] [--only store|controller|gateway …] [--json FILE]

The slope is the exponent s of ``figure ~ n^s``, fitted by least squares to the logarithms: 0 is flat, 1 is linear,
0.5 is tripled by ten times as much. A fixed cost hides growth at the small end, so what the last factor of ten does
stands beside it. A fit over few points tells flat from linear, and not 0.9 from 1. Times are of the CPU, as nothing
here waits. Engines and sessions are simulated; every point is measured in a process of its own.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import growth_controller
import growth_gateway
import growth_store
from results import Row, write_rows
from suite_report import number

_FLAT, _LINEAR = 0.15, (0.75, 1.25)


@dataclass(frozen=True, slots=True)
class Point:
    part: str
    measure: Callable[[], list[Row]]


@dataclass(frozen=True, slots=True)
class Curve:
    """One figure over its axis, the smallest x first."""

    rows: tuple[Row, ...]

    @property
    def slope(self) -> float | None:
        """None where it has no sense: fewer than two points, or a figure of 0."""
        points = [(row.x, row.value) for row in self.rows if row.x and row.value and row.value > 0]
        if len(points) < 2 or len(points) < len(self.rows):
            return None
        return log_slope(points)

    @property
    def last_tenfold(self) -> float | None:
        """By what factor the figure grew from the last point but one to the last, for a factor of ten between."""
        if self.slope is None:
            return None
        before, last = self.rows[-2:]
        return 10 ** log_slope([(before.x or 0, before.value or 0), (last.x or 0, last.value or 0)])


def log_slope(points: Sequence[tuple[float, float]]) -> float:
    """The s of the ``y ~ x^s`` that fits best; at least two different x, all positive."""
    xs, ys = ([math.log(value) for value in column] for column in zip(*points, strict=True))
    x_mean, y_mean = sum(xs) / len(xs), sum(ys) / len(ys)
    across = sum((x - x_mean) * (y - y_mean) for x, y in zip(xs, ys, strict=True))
    return across / sum((x - x_mean) ** 2 for x in xs)


def meaning(slope: float) -> str:
    if slope < -_FLAT:
        return "falls"
    if slope <= _FLAT:
        return "flat"
    if slope < _LINEAR[0]:
        return "less than linear"
    return "linear" if slope <= _LINEAR[1] else "more than linear"


def points(*, is_quick: bool) -> list[Point]:
    def tens(first: int, last: int) -> list[int]:
        exponents = range(round(math.log10(first)), round(math.log10(last)) + 1)
        return [10**exponent for exponent in exponents]

    store, controller, gateway = growth_store, growth_controller, growth_gateway
    pages = tens(10_000, 100_000 if is_quick else 1_000_000)
    versions = tens(1, 10 if is_quick else 100)
    engines = tens(10, 100 if is_quick else 1000)
    sessions = tens(100, 10_000 if is_quick else 100_000)
    most_engines, version_pages = engines[-1], 100_000
    return [
        *(Point("store", partial(store.by_pages, n)) for n in pages),
        *(Point("store", partial(store.retired_pages, n)) for n in pages),
        *(
            Point("store", partial(store.by_versions, n, version_pages, life))
            for life in ("live", "dead")
            for n in versions
        ),
        *(Point("controller", partial(controller.by_engines, n)) for n in engines),
        *(Point("controller", partial(controller.by_sessions, n)) for n in sessions),
        *(Point("controller", partial(controller.by_versions, n)) for n in versions),
        *(Point("gateway", partial(gateway.by_engines, n)) for n in engines),
        *(Point("gateway", partial(gateway.by_sessions, n, most_engines)) for n in sessions),
        *(Point("gateway", partial(gateway.by_versions, n, most_engines)) for n in versions),
    ]


def measure(chosen: Iterable[Point]) -> list[Row]:
    rows: list[Row] = []
    with ProcessPoolExecutor(1, mp_context=get_context("spawn"), max_tasks_per_child=1) as processes:
        for point in chosen:
            rows += processes.submit(point.measure).result()
    return rows


def curves(rows: Iterable[Row]) -> list[Curve]:
    found: dict[tuple[str, str, str], list[Row]] = {}
    for row in rows:
        found.setdefault((row.case, row.x_name, row.metric), []).append(row)
    return [Curve(tuple(sorted(one, key=lambda row: row.x or 0))) for one in found.values()]


def slopes(found: Iterable[Curve]) -> list[Row]:
    rows = []
    for curve in found:
        first, slope = curve.rows[0], curve.slope
        if slope is not None:
            rows.append(
                Row(
                    benchmark="growth",
                    case=f"{first.case}: {first.metric}, by {first.x_name}",
                    metric="slope",
                    value=round(slope, 3),
                    unit="exponent",
                    note=f"{meaning(slope)}; the last tenfold takes {curve.last_tenfold:.2g} times as much",
                )
            )
    return rows


def show(found: Sequence[Curve]) -> None:
    headings: list[tuple[str, str]] = list(
        dict.fromkeys((curve.rows[0].case, curve.rows[0].x_name) for curve in found)
    )
    for case, x_name in headings:
        lines = [curve for curve in found if (curve.rows[0].case, curve.rows[0].x_name) == (case, x_name)]
        xs = "".join(f"{row.x:>12,.0f}" for row in lines[0].rows)
        print(f"\n{case}, by {x_name}\n{'':50}{xs}   slope  last x10")
        for curve in lines:
            name = f"{curve.rows[0].metric}, {curve.rows[0].unit}"
            values = "".join(f"{number(row.value or 0):>12}" for row in curve.rows)
            slope = curve.slope
            said = "" if slope is None else f"{slope:>8.2f}  x {curve.last_tenfold:<7.2g} {meaning(slope)}"
            print(f"{name:50}{values}{said}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer and smaller points")
    parser.add_argument("--only", nargs="+", choices=("store", "controller", "gateway"))
    parser.add_argument("--json", type=Path, help="also write the rows here")
    options = parser.parse_args()
    chosen = points(is_quick=options.quick)
    rows = measure(point for point in chosen if options.only is None or point.part in options.only)
    found = curves(rows)
    show(found)
    if options.json is not None:
        write_rows(options.json, [*rows, *slopes(found)])


if __name__ == "__main__":
    main()
