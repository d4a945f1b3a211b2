"""What the demo shows: a live table (plain lines when the output is no terminal), then the result."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.table import Table

from psrl_sglang.lab.demo_check import TOLERANCE, Comparison
from psrl_sglang.lab.demo_run import Column, ColumnRun, Outcome, Workload
from psrl_sglang.lab.sessions import quantile

_REFRESH_PER_S = 4


class Progress:
    """A context manager; `column` and `say` may be called at any time inside it."""

    def __init__(self, console: Console, columns: Sequence[Column], workload: Workload) -> None:
        self._console = console
        self._workload = workload
        self._columns = columns
        self._runs: dict[str, ColumnRun] = {}
        self._syncs_said: dict[str, int] = {}
        self._line = ""
        self._live = Live(console=console, refresh_per_second=_REFRESH_PER_S, get_renderable=self._table)

    def __enter__(self) -> "Progress":
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._console.is_terminal:
            self._live.stop()

    @property
    def is_live(self) -> bool:
        """Whether what is said replaces what was said before, rather than adding a line."""
        return self._console.is_terminal

    def column(self, run: ColumnRun) -> None:
        """A column has got on."""
        key = run.outcome.column.key
        self._runs[key] = run
        syncs = run.trainer.syncs.total()
        if not self._console.is_terminal and syncs != self._syncs_said.get(key, 0):
            self._syncs_said[key] = syncs
            self._console.print(
                f"{run.outcome.column.title}: {run.outcome.turns_done}/{self._workload.turns} turns, "
                f"version {run.trainer.version}, hit rate {run.outcome.hit_rate:.1%}",
                highlight=False,
            )

    def say(self, line: str) -> None:
        """What the demo does now, outside the columns."""
        self._line = line
        if not self._console.is_terminal:
            self._console.print(line, highlight=False)

    def _table(self) -> Table:
        table = Table(title=self._line, title_justify="left")
        for heading in ("engine", "sessions", "turns", "version", "syncs", "failed", "hit rate"):
            table.add_column(heading, justify="left" if heading == "engine" else "right")
        for column in self._columns:
            run = self._runs.get(column.key)
            if run is None:
                table.add_row(column.title, *["-"] * 6)
                continue
            trainer, outcome = run.trainer, run.outcome
            table.add_row(
                column.title,
                f"{outcome.sessions_done}/{len(self._workload.sessions)}",
                f"{outcome.turns_done}/{self._workload.turns}",
                f"{trainer.version}",
                f"{trainer.syncs.total()}/{len(self._workload.sync_points(column.scene))}",
                f"{trainer.failed_flushes + trainer.failed_updates}",
                f"{outcome.hit_rate:.1%}",
            )
        return table


def result_table(runs: Sequence[ColumnRun], comparisons: Mapping[str, Comparison]) -> Table:
    """The columns of one scene side by side."""
    scene = runs[0].outcome.column.scene
    table = Table(title=scene.title, title_justify="left")
    table.add_column("", no_wrap=True)
    for run in runs:
        table.add_column(run.outcome.column.title, justify="right")
    for heading, cell in (_tier_rows(runs) if scene.is_of_tiers else _VERSION_ROWS).items():
        table.add_row(heading, *[cell(run, comparisons[run.outcome.column.key]) for run in runs])
    return table


def figures(run: ColumnRun, comparison: Comparison) -> dict[str, Any]:
    """The figures of a column under the names of `--json`; tokens, seconds, counts."""
    outcome, trainer = run.outcome, run.trainer
    ordered = sorted(outcome.ttft_s)
    return {
        "title": outcome.column.title,
        "scene": asdict(outcome.column.scene),
        "turns": outcome.turns_done,
        "sessions": outcome.sessions_done,
        "requests": len(outcome.legs),
        "requests_aborted": sum(leg.is_aborted for leg in outcome.legs),
        "requests_crossing": sum(leg.crossed for leg in outcome.legs),
        "syncs_by_mode": dict(trainer.syncs),
        "update_mean_s": sum(trainer.update_s) / max(len(trainer.update_s), 1),
        "prompt_tokens": outcome.prompt_tokens,
        "device_tokens": outcome.device_tokens,
        "dram_tokens": outcome.dram_tokens,
        "disk_tokens": outcome.disk_tokens,
        "dram_loaded_bytes": outcome.tier_total("bytes", tier="dram", direction="load"),
        "disk_read_bytes": outcome.tier_total("bytes", tier="disk", direction="load"),
        "computed_tokens": outcome.computed_tokens,
        "repeated_tokens": outcome.repeated_tokens,
        "engine_prefill_tokens": outcome.engine_prefill_tokens,
        "ttft_p50_s": quantile(ordered, 0.5),
        "ttft_p99_s": quantile(ordered, 0.99),
        "stale_tokens": outcome.stale_tokens,
        "stale_tokens_by_lag": outcome.stale_by_lag,
        "stale_tokens_by_client_rule": outcome.client_stale_tokens,
        "failed_flushes": trainer.failed_flushes,
        "failed_updates": trainer.failed_updates,
        "requests_compared": comparison.compared,
        "requests_compared_after_sync": comparison.compared_after_sync,
        "requests_beyond_tolerance": comparison.beyond_tolerance,
        "worst_logprob_difference": comparison.worst,
        "engine_counters": outcome.counters,
        "engine_tiers": outcome.tiers,
        "wall_s": outcome.wall_s,
    }


def _share(run: ColumnRun, _: Comparison) -> str:
    return f"{run.outcome.computed_tokens / max(run.outcome.prompt_tokens, 1):.1%}"


def _ttft(share: float) -> Any:
    return lambda run, _: f"{quantile(sorted(run.outcome.ttft_s), share) * 1e3:,.0f} ms"


def _stale(run: ColumnRun, _: Comparison) -> str:
    outcome: Outcome = run.outcome
    by_lag = ", ".join(f"lag {lag}: {tokens:,}" for lag, tokens in sorted(outcome.stale_by_lag.items()))
    return by_lag or f"{outcome.stale_tokens:,}"


def _failed(run: ColumnRun, _: Comparison) -> str:
    trainer = run.trainer
    failed = trainer.failed_flushes + trainer.failed_updates
    return f"{failed} ({trainer.failed_flushes} + {trainer.failed_updates})" if failed else "0"


def _worst(_: ColumnRun, comparison: Comparison) -> str:
    return f"{comparison.worst:.1e}"


def _beyond(_: ColumnRun, comparison: Comparison) -> str:
    return f"{comparison.beyond_tolerance} of {comparison.compared}"


def _loaded(tier: str) -> Any:
    return lambda run, _: f"{run.outcome.tier_total('bytes', tier=tier, direction='load') / 1e6:,.0f} MB"


_COMPUTED = {
    "prompt tokens computed": lambda run, _: f"{run.outcome.computed_tokens:,}",
    "  share of all prompt tokens": _share,
    "  of these computed before": lambda run, _: f"{run.outcome.repeated_tokens:,}",
}
_TTFT = {"time to first token, p50": _ttft(0.5), "time to first token, p99": _ttft(0.99)}
_RIGHT = {
    "stale tokens served": _stale,
    "failed updates (flush + HTTP 400)": _failed,
    "worst logprob difference": _worst,
    f"answers off by more than {TOLERANCE:g}": _beyond,
}
_VERSION_ROWS = {
    **_COMPUTED,
    "tokens prefilled by the engine": lambda run, _: f"{run.outcome.engine_prefill_tokens:,}",
    **_TTFT,
    **_RIGHT,
}


def _tier_rows(runs: Sequence[ColumnRun]) -> dict[str, Any]:
    without = next((run for run in runs if not run.outcome.column.dram_tokens), None)

    def ratios(run: ColumnRun, _: Comparison) -> str:
        if without is None:
            return "-"
        mine, theirs = (sorted(one.outcome.ttft_s) for one in (run, without))
        return " / ".join(f"{quantile(mine, share) / quantile(theirs, share):.2f}" for share in (0.5, 0.99))

    return {
        "prompt tokens from the device": lambda run, _: f"{run.outcome.device_tokens:,}",
        "prompt tokens from DRAM": lambda run, _: f"{run.outcome.dram_tokens:,}",
        "prompt tokens from disk": lambda run, _: f"{run.outcome.disk_tokens:,}",
        **_COMPUTED,
        "loaded from DRAM": _loaded("dram"),
        "read from disk": _loaded("disk"),
        **_TTFT,
        "  of that without tiers, p50 / p99": ratios,
        **_RIGHT,
    }
