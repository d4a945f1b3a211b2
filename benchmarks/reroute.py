"""Sessions of a coding agent over two engines, with updates: {flush, keep, strict, lag 1} x {no move, async, sync,
pin_sync}.

    python benchmarks/reroute.py [--trace cc_weka_compact.jsonl.gz] [--sessions 12] [--json FILE]

Every turn is sent round robin by the gateway, so that it finds its KV only where that was moved. Stock SGLang has
no moves: its two columns are what re-routing costs there. Nothing is asserted, run it on a quiet machine.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from fractions import Fraction
from pathlib import Path
from typing import Any

from results import Row, at_most, write_rows
from rich.console import Console

from psrl_sglang.lab.reroute_demo import WAYS, RerouteOptions, run_reroute

_FIGURES = {  # name: metric, unit, factor
    "prompt_tokens": ("prompt tokens", "tokens", 1),
    "computed_tokens": ("prompt tokens computed", "tokens", 1),
    "repeated_tokens": ("of these, an engine had the KV", "tokens", 1),
    "moved_tokens": ("tokens moved", "tokens", 1),
    "moved_bytes": ("bytes moved", "MB", 1e-6),
    "stale_tokens": ("stale tokens served", "tokens", 1),
    "ttft_p50_s": ("time to first token, p50", "ms", 1e3),
    "ttft_p99_s": ("time to first token, p99", "ms", 1e3),
    "updates": ("updates", "updates", 1),
    "failed_updates": ("updates that failed", "updates", 1),
    "beyond_tolerance": ("answers off by more than 1e-5", "answers", 1),
    "compared": ("answers compared", "answers", 1),
    "wall_s": ("the whole run", "s", 1),
}
_NONE_IF_STRICT = ("stale_tokens", "failed_updates", "beyond_tolerance")


def tidy(benchmark: str, by_way: dict[str, dict[str, Any]]) -> list[Row]:
    """A way is a case. The rules for strict ways are targets: nothing stale, nothing failed, nothing off."""
    rows: list[Row] = []
    for name, (metric, unit, factor) in _FIGURES.items():
        for key, figures in by_way.items():
            is_ruled = WAYS[key].max_version_lag == 0 and name in _NONE_IF_STRICT
            rows.append(
                Row(
                    benchmark=benchmark,
                    case=WAYS[key].title,
                    metric=metric,
                    value=figures[name] * factor,
                    unit=unit,
                    target=at_most(0) if is_ruled else None,
                )
            )
            if name == "computed_tokens":
                share = 100 * figures[name] / figures["prompt_tokens"]
                rows.append(
                    Row(
                        benchmark=benchmark,
                        case=WAYS[key].title,
                        metric="share of prompt tokens computed",
                        value=share,
                        unit="%",
                    )
                )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trace", type=Path, help="real sessions instead of generated ones")
    parser.add_argument("--sessions", type=int, default=12)
    parser.add_argument("--scale", default="1/32", help="factor for all token counts")
    parser.add_argument("--preset", default="bench", help="model: tiny or bench")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--ways", default=",".join(WAYS), help="which columns")
    parser.add_argument("--json", type=Path, help="also write the rows here")
    options = parser.parse_args()
    console = Console(width=200)
    with tempfile.TemporaryDirectory() as folder:
        figures_path = Path(folder) / "figures.json"
        problems = run_reroute(
            RerouteOptions(
                ways=options.ways.split(","),
                sessions=options.sessions,
                seed=options.seed,
                trace=options.trace,
                scale=float(Fraction(options.scale)),
                preset=options.preset,
                kills=False,
                json_path=figures_path,
            ),
            console,
        )
        if options.json is not None:
            benchmark = "reroute" if options.trace is None else "reroute_trace"
            write_rows(options.json, tidy(benchmark, json.loads(figures_path.read_text())))
    for problem in problems:
        print(problem)


if __name__ == "__main__":
    main()
