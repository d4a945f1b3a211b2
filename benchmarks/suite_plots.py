"""One picture for each benchmark: a panel for each metric, a curve or a bar for each case.

More bars than fit into a panel are left to the table.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from results import Row

_MOST_BARS = 16
_COLUMNS = 3
_PANEL_INCHES = (4.6, 3.3)
_DPI = 110


def plot(path: Path, title: str, rows: Sequence[Row]) -> bool:
    """False, and no file, if there is nothing to show."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib.figure import Figure

    panels = _panels(row for row in rows if row.value is not None)
    if not panels:
        path.unlink(missing_ok=True)
        return False
    columns = min(_COLUMNS, len(panels))
    lines = -(-len(panels) // columns)
    width, height = _PANEL_INCHES
    figure = Figure(figsize=(width * columns, height * lines + 0.5), dpi=_DPI, layout="constrained")
    figure.suptitle(title)
    axes = figure.subplots(lines, columns, squeeze=False).ravel()
    for number, panel in enumerate(panels):
        _draw(axes[number], panel)
    for spare in axes[len(panels) :]:
        spare.set_visible(False)
    figure.savefig(path)
    return True


def spans_decades(values: Iterable[float]) -> bool:
    """Whether a logarithmic axis shows them better: all positive, and the largest ten times the smallest."""
    known = list(values)
    return bool(known) and min(known) > 0 and max(known) / min(known) >= 10


def _panels(rows: Iterable[Row]) -> list[list[Row]]:
    """Rows of one metric, unit and axis together, in the order in which they came."""
    found: dict[tuple[str, str, str], list[Row]] = {}
    for row in rows:
        found.setdefault((row.metric, row.unit, row.x_name), []).append(row)
    return [panel for panel in found.values() if panel[0].x_name or len(panel) <= _MOST_BARS]


def _draw(axis: Any, rows: list[Row]) -> None:
    first = rows[0]
    axis.set_title(first.metric, fontsize=9)
    axis.tick_params(which="both", labelsize=7)
    axis.grid(visible=True, alpha=0.3, linewidth=0.5)
    if first.x_name:
        _draw_curves(axis, rows)
    else:
        _draw_bars(axis, rows)


def _draw_curves(axis: Any, rows: list[Row]) -> None:
    cases = sorted(dict.fromkeys(row.case for row in rows))
    for case, group in groupby(sorted(rows, key=lambda row: (row.case, row.x)), key=lambda row: row.case):
        points = list(group)
        style = ("o-", "s-", "^-", "d-", "v-", "x-")[cases.index(case) % 6]
        xs, ys = [row.x for row in points], [row.value for row in points]
        axis.plot(xs, ys, style, label=case, markersize=3, linewidth=1)
    limits = {row.target.limit for row in rows if row.target is not None}
    for limit in limits:
        axis.axhline(limit, color="grey", linestyle="--", linewidth=0.8)
    if spans_decades(row.x for row in rows if row.x is not None):
        axis.set_xscale("log")
    values = [row.value for row in rows if row.value is not None]
    if spans_decades(values):
        axis.set_yscale("log")
    elif min(values) >= 0:
        axis.set_ylim(0, 1.1 * max(*values, *limits, 1e-9))
    axis.set_xlabel(rows[0].x_name, fontsize=8)
    axis.set_ylabel(rows[0].unit, fontsize=8)
    if any(cases):
        axis.legend(fontsize=6)


def _draw_bars(axis: Any, rows: list[Row]) -> None:
    names = [row.case or row.metric for row in rows]
    values = [row.value for row in rows if row.value is not None]
    places = range(len(rows))
    colours = ["tab:red" if row.is_met is False else "tab:blue" for row in rows]
    axis.barh(places, values, color=colours, height=0.6)
    axis.set_yticks(places, names)
    axis.set_ylim(max(len(rows), 3) - 0.5, -0.5)
    if spans_decades(values):
        axis.set_xscale("log")
        axis.set_xlim(left=10 ** math.floor(math.log10(min(values)) - 0.3))
    axis.set_xlabel(rows[0].unit, fontsize=8)
    for place, row in enumerate(rows):
        if row.target is not None:
            axis.plot([row.target.limit] * 2, [place - 0.4, place + 0.4], color="black", linewidth=1.2)
