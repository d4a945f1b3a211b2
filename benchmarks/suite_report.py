"""The results of a suite for programs (JSON, CSV) and for the documentation (Markdown)."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from machine import Machine
from results import COLUMNS, Row
from suite_run import Run

_MOST_CASES = 12  # that fit beside each other


def write_json(path: Path, machine: Machine, runs: Sequence[Run], *, is_quick: bool) -> None:
    document = {
        "is_quick": is_quick,
        "machine": machine.as_dict(),
        "runs": [_run(run) for run in runs],
        "rows": [row.as_dict() for row in all_rows(runs)],
    }
    path.write_text(json.dumps(document, indent=1, allow_nan=False) + "\n")


def write_csv(path: Path, runs: Sequence[Run]) -> None:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        writer.writerows(row.cells() for row in all_rows(runs))


def write_markdown(path: Path, machine: Machine, runs: Sequence[Run], *, is_quick: bool) -> None:
    lines = ["# Benchmarks", "", *_facts(machine), ""]
    if is_quick:
        lines += ["Sizes of a quick run: it shows that everything runs; its figures mean little.", ""]
    for run in runs:
        lines += _section(run)
    path.write_text("\n".join(lines).rstrip() + "\n")


def all_rows(runs: Iterable[Run]) -> list[Row]:
    return [row for run in runs for row in run.rows]


def number(value: float) -> str:
    """Four digits that count, and all digits of whole numbers."""
    if float(value).is_integer() and abs(value) < 1e15:
        return f"{int(value):,}"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.2e}" if abs(value) < 1e-3 else f"{float(f'{value:.4g}'):g}"


def _run(run: Run) -> dict[str, Any]:
    return {
        "benchmark": run.benchmark.name,
        "command": run.benchmark.shown,
        "status": run.status,
        "why": run.why,
        "seconds": round(run.seconds, 1),
        "expected_s": run.benchmark.expected_s,
        "rows": len(run.rows),
    }


def _facts(machine: Machine) -> list[str]:
    versions = ", ".join(f"{name} {version}" for name, version in machine.versions.items())
    commit = f", commit {machine.commit}" if machine.commit else ""
    return [
        f"{machine.started}; {machine.cores} cores ({machine.processor}), {machine.memory_gib:g} GiB of memory, "
        f"load average {machine.load:g} at start; Python {machine.python}, {versions}{commit}.",
    ]


def _section(run: Run) -> list[str]:
    lines = [f"## {run.benchmark.name}", "", f"`{run.benchmark.shown}`, {_outcome(run)}", ""]
    measured = [row for row in run.rows if row.value is not None]
    for x_name, rows in _by_axis(measured):
        lines += [*(_table(x_name, rows) if x_name else _without_axis(rows)), ""]
    for row in run.rows:
        if row.value is None:
            name = ", ".join(filter(None, (row.case, row.metric)))
            lines += [f"* {name}: {row.note}" if name else f"* {row.note}"]
    return lines if not lines[-1] else [*lines, ""]


def _outcome(run: Run) -> str:
    if run.status == "not run":
        return f"not run: {run.why}"
    return (
        f"{run.seconds:.0f} s" if run.status == "done" else f"**failed** after {run.seconds:.0f} s: {run.why}"
    )


def _by_axis(rows: Sequence[Row]) -> list[tuple[str, list[Row]]]:
    """Rows with the same x axis and the same points on it together, in the order in which they came."""
    points: dict[tuple[str, str, str], list[float | None]] = {}
    for row in rows:
        points.setdefault((row.case, row.metric, row.x_name), []).append(row.x if row.x_name else None)
    found: dict[tuple[str, frozenset[float | None]], list[Row]] = {}
    for row in rows:
        of_curve = frozenset(points[row.case, row.metric, row.x_name])
        found.setdefault((row.x_name, of_curve), []).append(row)
    return [(x_name, same) for (x_name, _), same in found.items()]


def _table(x_name: str, rows: list[Row]) -> list[str]:
    """A line for each case and metric, a column for each x."""
    columns = sorted({row.x for row in rows if row.x is not None})
    head = ["", f"by {x_name}:", *(number(x) for x in columns), "target"]
    lines = [_line(head), _line(["---"] * len(head))]
    ordered = sorted(rows, key=_first_seen(rows))
    for _, group in groupby(ordered, key=lambda row: (row.case, row.metric, row.unit)):
        same = list(group)
        cells = {row.x: _cell(row) for row in same}
        targets = dict.fromkeys(str(row.target) for row in same if row.target is not None)
        values = [cells.get(x, "") for x in columns]
        lines.append(_line([same[0].case, _named(same[0]), *values, ", ".join(targets)]))
    return lines


def _first_seen(rows: list[Row]) -> Any:
    order: dict[tuple[str, str, str], int] = {}
    for row in rows:
        order.setdefault((row.case, row.metric, row.unit), len(order))
    return lambda row: order[row.case, row.metric, row.unit]


def _without_axis(rows: Sequence[Row]) -> list[str]:
    """Cases of which the same was measured stand side by side; what is left is a list."""
    metrics: dict[str, list[str]] = {}
    for row in rows:
        metrics.setdefault(row.case, []).append(row.metric)
    alike: dict[frozenset[str], list[str]] = {}
    for case, measured in metrics.items():
        alike.setdefault(frozenset(measured), []).append(case)
    lines: list[str] = []
    left: list[Row] = []
    for measured, cases in alike.items():
        same = [row for row in rows if row.case in cases]
        if len(measured) > 1 and 1 < len(cases) <= _MOST_CASES and len(same) == len(measured) * len(cases):
            lines += [*_side_by_side(cases, same), ""]
        else:
            left += same
    return [*lines, *_list(left)] if left else lines[:-1]


def _side_by_side(cases: Sequence[str], rows: Sequence[Row]) -> list[str]:
    """A line for each metric, a column for each case. A limit that is not everybody's stands in the cell."""
    head = ["", *cases, "target"]
    lines = [_line(head), _line(["---"] * len(head))]
    by_metric: dict[str, dict[str, Row]] = {}
    for row in rows:
        by_metric.setdefault(_named(row), {})[row.case] = row
    for name, of_case in by_metric.items():
        targets = {row.target for row in of_case.values()}
        common = targets.pop() if len(targets) == 1 else None
        cells = [
            _cell(row) if common or row.target is None else f"{_cell(row)}, {row.target}"
            for row in (of_case[case] for case in cases)
        ]
        lines.append(_line([name, *cells, "" if common is None else str(common)]))
    return lines


def _list(rows: Sequence[Row]) -> list[str]:
    lines = [_line(["", "", "", "target"]), _line(["---"] * 4)]
    for row in rows:
        target = "" if row.target is None else str(row.target)
        lines.append(_line([row.case, _named(row), _cell(row), target]))
    return lines


def _named(row: Row) -> str:
    is_said = row.unit in ("", "ratio", "exponent", *row.metric.split())
    return row.metric if is_said else f"{row.metric}, {row.unit}"


def _cell(row: Row) -> str:
    text = number(row.value) if row.value is not None else ""
    text = f"**{text}** (missed)" if row.is_met is False else text
    return f"{text} ({row.note})" if row.note else text


def _line(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"
