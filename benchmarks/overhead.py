"""What versions cost when nothing is gained: TTFT of a miss and of a device hit, against stock SGLang.

Two servers with the same model run side by side, one stock and one with the plugin; requests go to one and the
other in turn, in random order, so that both see the same machine. Ratios of medians are reported with a
bootstrap interval, over all pairs and per prompt length. Nothing is asserted: run it on a quiet machine.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
import time
from pathlib import Path

from results import Row, write_rows

from psrl_sglang.lab.models import make_model
from psrl_sglang.lab.servers import Server
from psrl_sglang.lab.zygote import Zygote

SETTINGS = {"psrl": {"sglang": {"max_version_lag": 0}}}
LENGTHS_TOKENS = (512, 1024, 2048)


def ttft_s(server: Server, prompt: list[int]) -> float:
    """Seconds from sending a request for one token to its reply."""
    began_s = time.perf_counter()
    server.generate(prompt, 1, logprobs=False)
    return time.perf_counter() - began_s


def interval(stock: list[float], ours: list[float], source: random.Random) -> tuple[float, float]:
    """The 90 % bootstrap interval of the ratio of medians, over pairs."""
    pairs = list(zip(stock, ours, strict=True))
    ratios = []
    for _ in range(2000):
        sample = source.choices(pairs, k=len(pairs))
        ratios.append(statistics.median(b for _, b in sample) / statistics.median(a for a, _ in sample))
    ratios.sort()
    return ratios[100], ratios[1899]


def measure(stock: Server, ours: Server, pairs: int, source: random.Random) -> list[dict]:
    rows = []
    for length in LENGTHS_TOKENS:
        times: dict[str, dict[str, list[float]]] = {kind: {"stock": [], "psrl": []} for kind in ("miss", "hit")}
        for _ in range(pairs):
            prompt = [source.randrange(512) for _ in range(length)]
            order = [("stock", stock), ("psrl", ours)]
            source.shuffle(order)
            for kind in ("miss", "hit"):
                for name, server in order:
                    times[kind][name].append(ttft_s(server, prompt))
        for kind, both in times.items():
            medians = {name: statistics.median(values) for name, values in both.items()}
            low, high = interval(both["stock"], both["psrl"], source)
            rows.append(
                {
                    "prompt_tokens": length,
                    "kind": kind,
                    "stock_ms": round(medians["stock"] * 1e3, 2),
                    "psrl_ms": round(medians["psrl"] * 1e3, 2),
                    "ratio": round(medians["psrl"] / medians["stock"], 4),
                    "ratio_p5": round(low, 4),
                    "ratio_p95": round(high, 4),
                }
            )
    return rows


def tidy(rows: list[dict]) -> list[Row]:
    figures = {
        "stock_ms": ("TTFT, stock", "ms"),
        "psrl_ms": ("TTFT, psrl", "ms"),
        "ratio": ("TTFT psrl / stock", "ratio"),
        "ratio_p5": ("TTFT psrl / stock, low end of the 90 % interval", "ratio"),
        "ratio_p95": ("TTFT psrl / stock, high end of the 90 % interval", "ratio"),
    }
    return [
        Row(
            benchmark="overhead",
            case=row["kind"],
            x_name="prompt tokens",
            x=row["prompt_tokens"],
            metric=metric,
            value=row[name],
            unit=unit,
        )
        for name, (metric, unit) in figures.items()
        for row in rows
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=30, help="requests per prompt length and kind")
    parser.add_argument("--preset", default="bench", help="model: tiny or bench")
    parser.add_argument("--tree-core", default="python", choices=("python", "rust"))
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path, help="also write the rows here")
    options = parser.parse_args()
    source = random.Random(options.seed)
    settings = {"psrl": {"sglang": {**SETTINGS["psrl"]["sglang"], "tree_core": options.tree_core}}}
    args = ("--max-total-tokens", "65536", "--page-size", "16", "--weight-version", "1")
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder)
        model = make_model(directory / "model", seed=1, preset=options.preset)
        with (
            Zygote(log_path=directory / "zygote.log") as zygote,
            Server(model, args=args, log_path=directory / "stock.log", zygote=zygote) as stock,
            Server(
                model, args=args, psrl_config=settings, log_path=directory / "psrl.log", zygote=zygote
            ) as ours,
        ):
            measure(stock, ours, 3, source)  # warm both
            rows = measure(stock, ours, options.pairs, source)
    print(f"{'tokens':>7} {'kind':>5} {'stock ms':>9} {'psrl ms':>9} {'ratio':>7}  90 % interval")
    for row in rows:
        print(
            f"{row['prompt_tokens']:>7} {row['kind']:>5} {row['stock_ms']:>9} {row['psrl_ms']:>9} "
            f"{row['ratio']:>7.3f}  {row['ratio_p5']:.3f} .. {row['ratio_p95']:.3f}"
        )
    if options.json is not None:
        write_rows(options.json, tidy(rows))


if __name__ == "__main__":
    main()
