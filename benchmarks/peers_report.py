"""What benchmarks/peers.py found: figures of servers in workloads, as rows and as tables."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from peers_servers import Peer
from results import Row, Target, not_run

STOCK = "flush"  # the key of the server that all ratios are of


@dataclass(frozen=True, slots=True)
class Figure:
    """One measured value of one server."""

    metric: str
    value: float
    unit: str
    target: Target | None = None


@dataclass(frozen=True, slots=True)
class Result:
    """A server in a workload: its figures, or why there are none. ``has_failed``: it started, and failed then."""

    workload: str
    peer: Peer
    figures: tuple[Figure, ...] = ()
    why: str = ""
    has_failed: bool = False

    def rows(self) -> list[Row]:
        case = f"{self.workload}: {self.peer.title}"
        if self.why:
            return [not_run("peers", case, self.why)]
        return [
            Row(
                benchmark="peers",
                case=case,
                metric=one.metric,
                value=one.value,
                unit=one.unit,
                target=one.target,
            )
            for one in self.figures
        ]

    def value(self, metric: str) -> float | None:
        return next((one.value for one in self.figures if one.metric == metric), None)


def against_stock(results: Sequence[Result]) -> list[Result]:
    """The same with every TTFT also as a share of that of stock SGLang, which comes first."""
    stock = next((one for one in results if one.peer.key == STOCK and not one.why), None)
    if stock is None:
        return list(results)

    def with_ratios(result: Result) -> Iterator[Figure]:
        for one in result.figures:
            yield one
            base = stock.value(one.metric)
            if one.metric.startswith("TTFT") and base:
                yield Figure(f"{one.metric} / stock", one.value / base, "ratio")

    return [replace(result, figures=tuple(with_ratios(result))) for result in results]


def table(results: Sequence[Result]) -> str:
    """Markdown: a line for each server, with what was not run below."""
    measured = [result for result in results if not result.why]
    lines: list[str] = []
    if measured:
        metrics = [(one.metric, one.unit) for one in measured[0].figures]
        lines.append("| | " + " | ".join(f"{name}{_in(unit)}" for name, unit in metrics) + " |")
        lines.append("|---|" + "---|" * len(metrics))
        for result in measured:
            cells = (_shown(one.value, one.unit) for one in result.figures)
            lines.append(f"| {result.peer.title} | " + " | ".join(cells) + " |")
    absent = [f"not run: {result.peer.title}: {result.why}" for result in results if result.why]
    return "\n".join([*lines, *([""] if lines and absent else []), *absent])


def _in(unit: str) -> str:
    return "" if unit in ("ratio", "count", "nats") else f", {unit}"


def _shown(value: float, unit: str) -> str:
    if unit == "ratio":
        return f"{value:.2f}"
    if unit == "nats":
        return f"{value:.1e}"
    return f"{value:,.1f}" if unit == "%" else f"{value:,.0f}"
