"""The demo of moves: sessions are re-routed at every turn, weights change, an engine dies and comes back."""

from __future__ import annotations

import asyncio
import json
import statistics
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from rich.console import Console
from rich.table import Table

from psrl_sglang.lab.demo_check import TOLERANCE, Comparison, compare
from psrl_sglang.lab.fleet import Fleet, Way
from psrl_sglang.lab.models import make_model
from psrl_sglang.lab.reroute import Plan, Rerouted, RerouteRun
from psrl_sglang.lab.servers import Server
from psrl_sglang.lab.sessions import CODING_AGENT, DEFAULT_SCALE, Limits, generate_sessions, replay_trace
from psrl_sglang.lab.zygote import Zygote

WAYS = {
    way.key: way
    for way in (
        Way("flush", "stock, flush", None, flush=True),
        Way("keep", "stock, keep", None),
        Way("strict", "strict, no move", 0),
        Way("strict-async", "strict, async", 0, "async"),
        Way("strict-sync", "strict, sync", 0, "sync"),
        Way("strict-pin", "strict, pin_sync", 0, "pin_sync"),
        Way("lag1", "lag 1, no move", 1),
        Way("lag1-async", "lag 1, async", 1, "async"),
        Way("lag1-sync", "lag 1, sync", 1, "sync"),
        Way("lag1-pin", "lag 1, pin_sync", 1, "pin_sync"),
    )
}
DEMO_WAYS = ("strict", "strict-async", "strict-sync", "strict-pin")
_LIMITS = Limits(turns=8, sequence_tokens=1536)
_POOL_TOKENS = 8192
_DRAM_GIB = 0.25
_RUN_TIMEOUT_S = 600.0
_TURNS_PER_SYNC = 30


@dataclass(frozen=True)
class RerouteOptions:
    """`ways` are keys of WAYS; `kills`: whether an engine dies; `trace` replays real sessions."""

    ways: Sequence[str] = DEMO_WAYS
    sessions: int = 12
    seed: int = 1
    trace: Path | None = None
    scale: float = DEFAULT_SCALE
    preset: str = "bench"
    kills: bool = True
    json_path: Path | None = None
    keep_logs: Path | None = None


def run_reroute(options: RerouteOptions, console: Console) -> list[str]:
    """Run the ways one after the other and print their table; returns what is wrong with the strict ones."""
    if options.trace is not None:
        sessions = replay_trace(options.trace, options.sessions, options.scale, limits=_LIMITS)
    else:
        sessions = generate_sessions(
            CODING_AGENT, options.sessions, seed=options.seed, scale=options.scale, limits=_LIMITS
        )
    turns = sum(len(session.turns) for session in sessions)
    plan = Plan(sessions, _TURNS_PER_SYNC, kill_after=turns // 2 if options.kills else 0)
    found: dict[str, Rerouted] = {}
    with ExitStack() as stack:
        directory = Path(stack.enter_context(TemporaryDirectory(prefix="psrl-reroute-")))
        logs = options.keep_logs or directory
        logs.mkdir(parents=True, exist_ok=True)
        models = [make_model(directory / f"model-{seed}", seed=seed, preset=options.preset) for seed in (1, 2)]
        zygote = stack.enter_context(Zygote(log_path=logs / "zygote.log"))
        for key in options.ways:
            console.print(f"{WAYS[key].title}: {turns} turns of {len(sessions)} sessions over 2 engines …")
            fleet = Fleet(WAYS[key], models, zygote, logs, pool_tokens=_POOL_TOKENS, dram_gib=_DRAM_GIB)
            with fleet:
                found[key] = asyncio.run(RerouteRun(fleet, plan).run(timeout_s=_RUN_TIMEOUT_S))

        def reference(number: int) -> Server:
            args = ("--page-size", "16", "--context-length", "8192", "--disable-radix-cache")
            log_path = logs / f"reference-{number}.log"
            pool = ("--max-total-tokens", str(_POOL_TOKENS))
            return Server(models[number], args=(*args, *pool), log_path=log_path, zygote=zygote)

        legs = {key: one.legs for key, one in found.items()}
        checked = compare(legs, reference, weights=len(models), on_progress=lambda done, total: None)
    console.print(_table(found, checked))
    if options.json_path is not None:
        rows = {key: _figures(one, checked[key]) for key, one in found.items()}
        options.json_path.write_text(json.dumps(rows, indent=2) + "\n")
    return _problems(found, checked)


def _figures(one: Rerouted, checked: Comparison) -> dict[str, Any]:
    return {
        "turns": one.turns,
        "prompt_tokens": one.prompt_tokens,
        "computed_tokens": one.computed_tokens,
        "repeated_tokens": one.repeated_tokens,
        "stale_tokens": one.stale_tokens,
        "moved_tokens": one.moved_tokens,
        "moved_bytes": one.moved_bytes,
        "ttft_p50_s": statistics.median(one.ttft_s),
        "ttft_p99_s": _quantile(one.ttft_s, 0.99),
        "updates": one.updates,
        "failed_updates": one.failed_updates,
        "asked_again": one.retried,
        "compared": checked.compared,
        "beyond_tolerance": checked.beyond_tolerance,
        "wall_s": one.wall_s,
    }


def _quantile(values: Sequence[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def _table(found: dict[str, Rerouted], checked: dict[str, Comparison]) -> Table:
    table = Table("", *(WAYS[key].title for key in found), title="Every turn goes to the other engine")
    rows = {key: _figures(one, checked[key]) for key, one in found.items()}

    def add(name: str, show: Any) -> None:
        table.add_row(name, *(show(row) for row in rows.values()))

    add("prompt tokens", lambda r: f"{r['prompt_tokens']:,}")
    for name, field in (("computed", "computed_tokens"), ("  of these, an engine had it", "repeated_tokens")):
        add(name, lambda r, field=field: f"{r[field]:,} ({r[field] / r['prompt_tokens']:.1%})")
    add("moved tokens", lambda r: f"{r['moved_tokens']:,}")
    add("moved MB", lambda r: f"{r['moved_bytes'] / 1e6:,.1f}")
    add("stale tokens served", lambda r: f"{r['stale_tokens']:,}")
    add(
        "time to first token, p50 / p99",
        lambda r: f"{r['ttft_p50_s'] * 1e3:.0f} / {r['ttft_p99_s'] * 1e3:.0f} ms",
    )
    add("updates, failed", lambda r: f"{r['updates']}, {r['failed_updates']}")
    add("asked again (engine died)", lambda r: str(r["asked_again"]))
    add("answers off by more than 1e-5", lambda r: f"{r['beyond_tolerance']} of {r['compared']}")
    return table


def _problems(found: dict[str, Rerouted], checked: dict[str, Comparison]) -> list[str]:
    problems = []
    for key, one in found.items():
        way = WAYS[key]
        if way.max_version_lag != 0:
            continue
        wrong = {
            f"{one.stale_tokens} stale tokens served, expected 0": one.stale_tokens,
            f"{one.failed_updates} failed updates, expected 0": one.failed_updates,
            f"worst logprob difference {checked[key].worst:.2e}, at most {TOLERANCE:g}": (
                checked[key].beyond_tolerance
            ),
            "no KV was moved": way.mode is not None and not one.moved_tokens,
        }
        problems += [f"{way.title}: {text}" for text, is_so in wrong.items() if is_so]
    return problems
