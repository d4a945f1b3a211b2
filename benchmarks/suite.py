"""All benchmarks with one command: a progress bar, and the results as JSON, CSV, plots and Markdown tables.

    python benchmarks/suite.py [--out DIR] [--only NAME …] [--quick] [--lmcache DIR] [--routers DIR]
                               [--lmbenchmark DIR] [--trace FILE]

Each is a process of its own, one after the other; its log and its rows stay in DIR. One that fails is reported and
does not stop the others; the exit status is then 1. What cannot be run here is in the results, with the reason.
Ratios are of things measured side by side in one run; run it on a machine that does nothing else.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

from machine import ROOT, this_machine
from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn
from rich.text import Text
from suite_list import Peers, benchmarks
from suite_plots import plot
from suite_report import write_csv, write_json, write_markdown
from suite_run import Benchmark, Run, left_out, run_one

DEFAULT_OUT = ROOT / "build" / "benchmarks"
_FAILED = 1
_BAD_INPUT = 2


class _Times(ProgressColumn):
    """Elapsed, of what it is expected to take."""

    def render(self, task: Task) -> Text:
        return Text(f"{_clock(task.completed)} of about {_clock(task.total or 0)}", style="cyan")


def run_suite(chosen: Sequence[Benchmark], directory: Path, console: Console, *, is_quick: bool) -> int:
    """Run them all and write ``results.json``, ``.csv``, ``.md`` and a picture for each; returns the exit status.
    After ``KeyboardInterrupt`` the rest is not run, and the results say so."""
    directory.mkdir(parents=True, exist_ok=True)
    machine = this_machine()
    runs: list[Run] = []
    interrupted = False
    total_s = sum(one.expected_s for one in chosen if not one.skipped)
    columns = (TextColumn("{task.description}"), BarColumn(), _Times())
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        everything = progress.add_task("suite", total=total_s)
        for benchmark in chosen:
            task = progress.add_task(benchmark.name, total=benchmark.expected_s, visible=not benchmark.skipped)
            done_s = sum(run.benchmark.expected_s for run in runs if run.status != "not run")

            def on_time(seconds: float, task=task, done_s=done_s, expected_s=benchmark.expected_s) -> None:
                progress.update(task, completed=seconds)
                progress.update(everything, completed=done_s + min(seconds, expected_s))

            try:
                if interrupted:
                    run = left_out(benchmark, "the suite was interrupted")
                else:
                    _announce(benchmark, console)
                    run = run_one(benchmark, directory, on_time)
            except KeyboardInterrupt:
                interrupted = True
                run = left_out(benchmark, "it was interrupted")
            progress.remove_task(task)
            runs.append(run)
            console.print(_said(run), markup=False, highlight=False, soft_wrap=True)
            # As it stands, every time: what was measured outlives whatever ends this process.
            write_json(directory / "results.json", machine, runs, is_quick=is_quick)
            write_csv(directory / "results.csv", runs)
            write_markdown(directory / "results.md", machine, runs, is_quick=is_quick)
    for run in runs:
        plot(directory / f"{run.benchmark.name}.png", run.benchmark.name, run.rows)
    missed = sum(row.is_met is False for run in runs for row in run.rows)
    failed = [run.benchmark.name for run in runs if run.status == "failed"]
    console.print(
        f"{missed} figures miss their target; {directory / 'results.md'}", markup=False, soft_wrap=True
    )
    if failed:
        console.print(
            f"failed: {', '.join(failed)}; see their logs in {directory}", markup=False, soft_wrap=True
        )
    return _FAILED if failed or interrupted else 0


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=DEFAULT_OUT, help="folder for logs and results")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these benchmarks only")
    parser.add_argument("--quick", action="store_true", help="small sizes, to see that all of it runs")
    parser.add_argument("--lmcache", type=Path, metavar="DIR", help="what tests/lmcache/install.sh filled")
    parser.add_argument("--routers", type=Path, metavar="DIR", help="what tests/routers/install.sh filled")
    parser.add_argument("--lmbenchmark", type=Path, metavar="DIR", help="a checkout of LMCache/LMBenchmark")
    parser.add_argument("--trace", type=Path, metavar="FILE", help="real sessions, for reroute_trace")
    options = parser.parse_args(arguments)
    given: dict[str, Path | None] = {}
    for name in (one.name for one in fields(Peers)):
        path: Path | None = getattr(options, name)
        if path is not None and not path.exists():
            return _refuse(f"--{name}: {path} does not exist")
        given[name] = None if path is None else path.resolve()
    if importlib.util.find_spec("matplotlib") is None:
        return _refuse("the plots need matplotlib: pip install 'psrl-sglang[bench]'")
    known = {one.name: one for one in benchmarks(Peers(**given), is_quick=options.quick)}
    unknown = [name for name in options.only or () if name not in known]
    if unknown:
        return _refuse(f"--only: there is no {', '.join(unknown)}; there are {', '.join(known)}")
    chosen = [one for name, one in known.items() if options.only is None or name in options.only]
    return run_suite(chosen, options.out.resolve(), Console(), is_quick=options.quick)


def _announce(benchmark: Benchmark, console: Console) -> None:
    """Where there is no bar to show it."""
    if not console.is_terminal and not benchmark.skipped:
        console.print(f"{benchmark.name}: about {_clock(benchmark.expected_s)}", highlight=False)


def _said(run: Run) -> str:
    what = f"{run.benchmark.name}: {run.status}"
    if run.status == "not run":
        return f"{what}: {run.why}"
    took = f"{_clock(run.seconds)} (expected {_clock(run.benchmark.expected_s)})"
    if run.status == "failed":
        return f"{what} after {took}: {run.why}"
    missed = sum(row.is_met is False for row in run.rows)
    return f"{what} in {took}, {len(run.rows)} rows" + (f", {missed} miss their target" if missed else "")


def _clock(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    return f"{minutes}:{rest:02}"


def _refuse(problem: str) -> int:
    Console(stderr=True).print(problem, markup=False, soft_wrap=True)
    return _BAD_INPUT


if __name__ == "__main__":
    sys.exit(main())
