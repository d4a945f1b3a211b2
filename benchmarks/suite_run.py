"""One benchmark of the suite as a process: started, watched, its log kept, its rows read."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from results import ResultsError, Row, not_run, read_rows

_POLL_S = 0.2
_LEAST_LIMIT_S = 900.0
_LIMIT_FACTOR = 6.0  # of what it is expected to take
_GOODBYE_S = 30.0  # for servers that it started
_WARNINGS = "ignore:builtin type:DeprecationWarning"  # a C++ extension of SGLang's warns at interpreter exit


@dataclass(frozen=True, slots=True)
class Place:
    """A path among the arguments, which a reader sees as ``shown``."""

    path: Path
    shown: str


@dataclass(frozen=True, slots=True)
class Benchmark:
    """A script that takes ``--json FILE``, with its arguments.

    ``expected_s``: how long it takes on a machine of two cores; it is stopped after several times that.
    ``absent``: cases that cannot be run here, and why. ``skipped``: why it cannot be run at all, if so.
    """

    name: str
    script: Path
    arguments: tuple[str | Place, ...] = ()
    expected_s: float = 60.0
    absent: tuple[tuple[str, str], ...] = ()
    skipped: str = ""
    limit_s: float | None = None

    @property
    def command(self) -> list[str]:
        given = (str(one.path) if isinstance(one, Place) else one for one in self.arguments)
        return [sys.executable, str(self.script), *given]

    @property
    def shown(self) -> str:
        """The command as a reader would type it in the root of the repository."""
        given = (one.shown if isinstance(one, Place) else one for one in self.arguments)
        return " ".join(["python", f"{self.script.parent.name}/{self.script.name}", *given])


@dataclass(frozen=True, slots=True)
class Run:
    """What came of it. ``rows`` are never empty: what failed or was not run has a row that says why."""

    benchmark: Benchmark
    status: Literal["done", "failed", "not run"]
    seconds: float
    why: str
    rows: tuple[Row, ...]


def run_one(benchmark: Benchmark, directory: Path, on_time: Callable[[float], None]) -> Run:
    """Run it to its end, with its log and its rows in ``directory``; ``on_time`` is told the seconds so far.
    ``KeyboardInterrupt`` goes through, after the process was stopped."""
    if benchmark.skipped:
        return left_out(benchmark, benchmark.skipped)
    rows_path = directory / f"{benchmark.name}.json"
    log_path = directory / f"{benchmark.name}.log"
    rows_path.unlink(missing_ok=True)
    began_s = time.monotonic()
    problem = _run(benchmark, [*benchmark.command, "--json", str(rows_path)], log_path, on_time)
    seconds = time.monotonic() - began_s
    rows: list[Row] = []
    try:
        rows = read_rows(rows_path)
    except ResultsError as error:
        problem = problem or str(error)
    problem = problem or ("" if rows else "it wrote no rows")
    rows += [not_run(benchmark.name, case, why) for case, why in benchmark.absent]
    if problem:
        rows.append(_row(benchmark, f"failed: {problem}"))
    return Run(benchmark, "failed" if problem else "done", seconds, problem, tuple(rows))


def left_out(benchmark: Benchmark, why: str) -> Run:
    return Run(benchmark, "not run", 0.0, why, (not_run(benchmark.name, "", why),))


def _run(benchmark: Benchmark, command: list[str], log_path: Path, on_time: Callable[[float], None]) -> str:
    """What went wrong, or nothing."""
    environment = {"PYTHONWARNINGS": _WARNINGS, **os.environ, "PYTHONUNBUFFERED": "1"}
    limit_s = benchmark.limit_s or max(_LEAST_LIMIT_S, _LIMIT_FACTOR * benchmark.expected_s)
    began_s = time.monotonic()
    with log_path.open("wb") as log:
        log.write(f"$ {benchmark.shown}\n".encode())
        log.flush()
        process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            while process.poll() is None:
                seconds = time.monotonic() - began_s
                if seconds > limit_s:
                    return f"it was stopped after {limit_s:.0f} s"
                on_time(seconds)
                time.sleep(_POLL_S)
        finally:
            _stop(process)
    if process.returncode:
        return f"exit status {process.returncode}: {_last_line(log_path)}"
    return ""


def _stop(process: subprocess.Popen[bytes]) -> None:
    """It and what it started, the gentle way first: servers that it started end with it."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGINT)
        try:
            process.wait(_GOODBYE_S)
        except subprocess.TimeoutExpired:
            pass
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass  # nothing of it is left
    process.wait()


def _last_line(log_path: Path) -> str:
    """The last one that says something; a traceback of a group ends with its frame."""
    lines = (line.strip(" |+-") for line in reversed(log_path.read_text(errors="replace").splitlines()[1:]))
    return next((line[:300] for line in lines if line), "it printed nothing")


def _row(benchmark: Benchmark, note: str) -> Row:
    return Row(benchmark=benchmark.name, case="", metric="", value=None, unit="", note=note)
