"""The demo: multi-turn agent sessions, weight updates while they run, several engines side by side.

Stock SGLang that flushes, stock SGLang that keeps its cache, psrl strict and psrl with a lag of one version run
the same sessions with the same updates, one engine at a time. Then psrl strict runs them on a device pool that is
too small, without tiers, with DRAM, and with little DRAM and a disk. All answers are checked against fresh engines.
All servers are forked from one process that has SGLang imported, so that each is up in seconds.
"""

import asyncio
import json
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx
from rich.console import Console

from psrl_sglang.lab.demo_check import TOLERANCE, Comparison, compare, stopping
from psrl_sglang.lab.demo_run import PAGE_TOKENS, Column, ColumnRun, Scene, Workload
from psrl_sglang.lab.demo_table import Progress, figures, result_table
from psrl_sglang.lab.demo_trainer import Trainer
from psrl_sglang.lab.models import make_model
from psrl_sglang.lab.servers import Server
from psrl_sglang.lab.sessions import (
    CODING_AGENT,
    DEFAULT_SCALE,
    Limits,
    Session,
    generate_sessions,
    replay_trace,
)
from psrl_sglang.lab.zygote import Zygote
from psrl_sglang.sizing import ModelShape, bytes_per_token

# A pool of less than what all sessions compute under one version, so that the cache has to choose what to drop.
VERSIONS = Scene(
    "The same sessions, same weight updates, one engine after the other",
    concurrency=4,
    turns_per_sync=12,
    pool_tokens=8192,
    pause_scale=1 / 100,
)
# A pool of less than what the sessions under way need between two turns.
TIERS = Scene(
    "All sessions at once, on a device pool that is too small for them",
    concurrency=12,
    turns_per_sync=36,
    pool_tokens=3072,
    pause_scale=1 / 20,
    is_of_tiers=True,
)
COLUMNS = {
    column.key: column
    for column in (
        Column("flush", "stock, flush", VERSIONS, flush=True),
        Column("keep", "stock, keep", VERSIONS),
        Column("strict", "psrl, strict", VERSIONS, max_version_lag=0),
        Column("lag1", "psrl, lag 1", VERSIONS, max_version_lag=1),
        Column("bare", "strict, no tiers", TIERS, max_version_lag=0),
        Column("dram", "strict, DRAM", TIERS, max_version_lag=0, dram_tokens=32768),
        Column("disk", "strict, disk", TIERS, max_version_lag=0, dram_tokens=4096, has_disk=True),
    )
}
# Weights of version N are those of seed 1 for odd N and of seed 2 for even N.
_MODEL_SEEDS = (1, 2)
LIMITS = Limits(turns=10, sequence_tokens=1536)
_ENGINE_ARGS = (
    *("--page-size", str(PAGE_TOKENS), "--context-length", "8192"),
    *("--chunked-prefill-size", "512", "--weight-version", "1"),
)
_COLUMN_TIMEOUT_S = 600.0
# Threads of one small forward wait for each other longer than they compute as soon as a core is busy.
_ENGINE_ENV = {"OMP_NUM_THREADS": "1"}


@dataclass(frozen=True)
class DemoOptions:
    """`columns` are keys of COLUMNS; `keep_logs` None throws the logs away; `trace` replays real sessions."""

    sessions: int = 12
    seed: int = 1
    trace: Path | None = None
    scale: float = DEFAULT_SCALE
    preset: str = "tiny"
    columns: Sequence[str] = tuple(COLUMNS)
    keep_logs: Path | None = None
    json_path: Path | None = None


def run_demo(options: DemoOptions, console: Console) -> list[str]:
    """Run everything and print it; returns what is wrong with the strict columns, nothing when all is right."""
    began_s = time.monotonic()
    workload = Workload(_sessions(options))
    columns = [COLUMNS[key] for key in options.columns]
    console.print(_introduction(options, workload), highlight=False)
    with ExitStack() as stack:
        directory = Path(stack.enter_context(TemporaryDirectory(prefix="psrl-demo-")))
        logs = options.keep_logs or directory
        logs.mkdir(parents=True, exist_ok=True)
        progress = stack.enter_context(Progress(console, columns, workload))
        progress.say("making two models and importing SGLang once, for all servers")
        models = [
            make_model(directory / f"model-{seed}", seed=seed, preset=options.preset) for seed in _MODEL_SEEDS
        ]
        zygote = stack.enter_context(Zygote(log_path=logs / "zygote.log"))
        stage = _Stage(models, zygote, logs, directory / "disk", progress)
        runs = [stage.column(column, workload) for column in columns]
        comparisons = stage.check(runs)
    for scene in dict.fromkeys(column.scene for column in columns):
        console.print(result_table([run for run in runs if run.outcome.column.scene == scene], comparisons))
    problems = verdict(runs, comparisons)
    if options.json_path is not None:
        _write_json(options, workload, runs, comparisons, problems, time.monotonic() - began_s)
    return problems


def verdict(runs: Sequence[ColumnRun], comparisons: dict[str, Comparison]) -> list[str]:
    """What the strict columns promise and did not hold."""
    problems: list[str] = []
    for run in runs:
        column = run.outcome.column
        if not column.is_strict:
            continue
        checked = comparisons[column.key]
        stale = max(run.outcome.stale_tokens, run.outcome.client_stale_tokens)
        failed = run.trainer.failed_flushes + run.trainer.failed_updates
        broken = {
            f"{stale} stale tokens served, expected 0": stale,
            f"{failed} failed updates, expected 0": failed,
            f"worst logprob difference {checked.worst:.2e}, expected at most {TOLERANCE:g}": (
                checked.beyond_tolerance
            ),
            "no answer could be compared with a fresh engine": not checked.compared,
        }
        problems += [f"{column.title}: {problem}" for problem, is_broken in broken.items() if is_broken]
    return problems


@dataclass(frozen=True)
class _Stage:
    """Where the servers of a demo come from: one at a time, all forked from one zygote."""

    models: Sequence[Path]
    zygote: Zygote
    logs: Path
    disk: Path
    progress: Progress

    def column(self, column: Column, workload: Workload) -> ColumnRun:
        self.progress.say(f"{column.title}: starting the server")
        log = f"{column.key}.log"
        token_bytes = bytes_per_token(ModelShape.from_config_json(self.models[0]), 1)
        config = column.psrl_config(bytes_per_token=token_bytes, disk_path=self.disk)
        args = ("--max-total-tokens", str(column.scene.pool_tokens), "--enable-metrics")
        server = self._server(self.models[0], log, *args, config=config)
        with stopping(server):
            return asyncio.run(self._play(column, workload, server))

    def check(self, runs: Sequence[ColumnRun]) -> dict[str, Comparison]:
        """Compare the answers of all columns with those of fresh engines."""
        self.progress.say("comparing the answers with fresh engines")
        return compare(
            {run.outcome.column.key: run.outcome.legs for run in runs},
            self._reference,
            weights=len(self.models),
            on_progress=self._on_compared,
        )

    def _on_compared(self, done: int, total: int) -> None:
        if self.progress.is_live or done == total:
            self.progress.say(f"compared {done} of {total} answers with fresh engines")

    async def _play(self, column: Column, workload: Workload, server: Server) -> ColumnRun:
        async with httpx.AsyncClient(base_url=server.url, trust_env=False) as client:
            trainer = Trainer(client, self.models, column.flush)
            run = ColumnRun(column, workload, trainer, client, on_progress=self.progress.column)
            await run.run(timeout_s=_COLUMN_TIMEOUT_S)
            return run

    def _reference(self, number: int) -> Server:
        args = ("--max-total-tokens", str(VERSIONS.pool_tokens), "--disable-radix-cache")
        return self._server(self.models[number], f"reference-{number + 1}.log", *args, config=None)

    def _server(self, model: Path, log: str, *args: str, config: Any) -> Server:
        return Server(
            model,
            args=[*_ENGINE_ARGS, *args],
            psrl_config=config,
            env=_ENGINE_ENV,
            log_path=self.logs / log,
            zygote=self.zygote,
        )


def _sessions(options: DemoOptions) -> tuple[Session, ...]:
    if options.trace is not None:
        return replay_trace(options.trace, options.sessions, options.scale, limits=LIMITS)
    return generate_sessions(
        CODING_AGENT, options.sessions, seed=options.seed, scale=options.scale, limits=LIMITS
    )


def _introduction(options: DemoOptions, workload: Workload) -> str:
    source = f"replayed from {options.trace.name}" if options.trace else f"generated with seed {options.seed}"
    return (
        f"{len(workload.sessions)} agent sessions, {workload.turns} turns, {source}, token counts times "
        f"{options.scale:.4g}"
    )


def _write_json(
    options: DemoOptions,
    workload: Workload,
    runs: Sequence[ColumnRun],
    comparisons: dict[str, Comparison],
    problems: Sequence[str],
    wall_s: float,
) -> None:
    assert options.json_path is not None
    report = {
        "sessions": len(workload.sessions),
        "turns": workload.turns,
        "seed": options.seed,
        "trace": options.trace.name if options.trace else None,
        "scale": options.scale,
        "preset": options.preset,
        "columns": {run.outcome.column.key: figures(run, comparisons[run.outcome.column.key]) for run in runs},
        "problems": list(problems),
        "wall_s": wall_s,
    }
    options.json_path.write_text(json.dumps(report, indent=2) + "\n")
