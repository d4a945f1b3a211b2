"""Sessions of a coding agent over two engines, with updates: {flush, keep, strict, lag 1} x {no move, async, sync,
pin_sync}.

    python benchmarks/reroute.py [--trace cc_weka_compact.jsonl.gz] [--sessions 24] [--json FILE]

Every turn is sent round robin by the gateway, so that it finds its KV only where that was moved. Stock SGLang has
no moves: its two columns are what re-routing costs there. Nothing is asserted, run it on a quiet machine.
"""

from __future__ import annotations

import argparse
from fractions import Fraction
from pathlib import Path

from rich.console import Console

from psrl_sglang.lab.reroute_demo import WAYS, RerouteOptions, run_reroute


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trace", type=Path, help="real sessions instead of generated ones")
    parser.add_argument("--sessions", type=int, default=24)
    parser.add_argument("--scale", default="1/32", help="factor for all token counts")
    parser.add_argument("--preset", default="tiny", help="model: tiny or bench")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--ways", default=",".join(WAYS), help="which columns")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    options = parser.parse_args()
    console = Console(width=200)
    problems = run_reroute(
        RerouteOptions(
            ways=options.ways.split(","),
            sessions=options.sessions,
            seed=options.seed,
            trace=options.trace,
            scale=float(Fraction(options.scale)),
            preset=options.preset,
            kills=False,
            json_path=options.json,
        ),
        console,
    )
    for problem in problems:
        print(problem)


if __name__ == "__main__":
    main()
