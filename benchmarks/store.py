"""How fast the store's tiers are, beside the plainest way to move the same bytes: `psrl-sglang bench store`.

    python benchmarks/store.py [--size-gb 1] [--chunk-mb 16] [--threads 4] [--remote-url URL] [--json FILE]

The targets are those of `psrl_sglang.store.bench`. Needs twice --size-gb of memory and of room on disk.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from results import Row, Target, at_least, at_most, write_rows

from psrl_sglang.store.bench import GIB, MIB, BenchError, BenchOptions, Figure, run_bench


def tidy(figure: Figure) -> list[Row]:
    """The figure, what it stands beside, and their ratio, which has the target if there is one."""

    def row(case: str, metric: str, value: float, unit: str, target: Target | None = None) -> Row:
        return Row(benchmark="store", case=case, metric=metric, value=value, unit=unit, target=target)

    if figure.ratio is None or figure.baseline is None:
        return [row("", figure.name, figure.value, figure.unit, at_most(figure.target))]
    return [
        row(figure.name, "rate", figure.value, figure.unit),
        row(figure.name, "rate of the plainest way", figure.baseline, figure.unit),
        row(figure.name, "ratio to the plainest way", figure.ratio, "ratio", at_least(figure.target)),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--path", type=Path, help="where to write files; default: for temporary files")
    parser.add_argument("--size-gb", type=float, default=1.0, help="GiB to move in each measurement")
    parser.add_argument("--chunk-mb", type=float, default=16.0, help="MiB of a chunk")
    parser.add_argument("--threads", type=int, default=4, help="threads that read from disk")
    parser.add_argument("--remote-url", help="measure this remote store too")
    parser.add_argument("--json", type=Path, help="also write the rows here")
    given = parser.parse_args()
    options = BenchOptions(
        path=given.path or Path(tempfile.gettempdir()),
        size_bytes=int(given.size_gb * GIB),
        chunk_bytes=int(given.chunk_mb * MIB),
        threads=given.threads,
        remote_url=given.remote_url,
    )
    rows: list[Row] = []
    try:
        for figure in run_bench(options):
            beside = (
                f", {figure.ratio:.2f} of {figure.baseline_name}, at least {figure.target:g}"
                if figure.ratio is not None
                else f", at most {figure.target:g}"
            )
            missed = "" if figure.is_met else "  MISSED"
            print(f"{figure.name}: {figure.value:.2f} {figure.unit}{beside}{missed}", flush=True)
            rows += tidy(figure)
    except BenchError as error:
        raise SystemExit(str(error)) from error
    if given.json is not None:
        write_rows(given.json, rows)


if __name__ == "__main__":
    main()
