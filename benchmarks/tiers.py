"""What a hit in DRAM is worth: against computing the prompt again, against a hit on the device, and beside LMCache.

    python benchmarks/tiers.py [--repeats 5] [--lmcache DIR] [--json FILE]

One model, the same prompts for every server, requests in turn. "host" is asked after /flush_cache, so that its
KV comes from the tier (each reply says so, and the run ends if one does not). Overlap: a prompt of which the
first part is loaded and the rest computed, against either alone. Miss: a prompt nobody has seen, against stock
SGLang. Ratios of medians; nothing is asserted, run it on a quiet machine.
"""

from __future__ import annotations

import argparse
import random
import re
import statistics
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lmcache_peer import LMCachePeer
from results import Row, write_rows

from psrl_sglang.lab.models import make_model
from psrl_sglang.lab.servers import Server
from psrl_sglang.lab.zygote import Zygote

LENGTHS_TOKENS = (1024, 4096, 8000)
OVERLAP_TOKENS = ((4096, 1024), (7168, 512))
ARGS = (
    "--max-total-tokens",
    "49152",
    "--page-size",
    "16",
    "--weight-version",
    "1",
    "--context-length",
    "16384",
)
SETTINGS = {"psrl": {"lmcache": {"enable": True, "offload_size_gb": 3.0}}}
_ALONE = {  # figures by name: case, metric, unit
    "miss_over_stock": ("1,024 tokens", "TTFT of a miss, tiers on / stock", "ratio"),
    "dram_store_gb_per_s": ("psrl", "DRAM stored to", "GB/s"),
    "dram_load_gb_per_s": ("psrl", "DRAM loaded from", "GB/s"),
    "lmcache_store_gb_per_s": ("lmcache", "DRAM stored to", "GB/s"),
    "lmcache_load_gb_per_s": ("lmcache", "DRAM loaded from", "GB/s"),
    "store_over_lmcache": ("", "stored to, psrl / lmcache", "ratio"),
    "load_over_lmcache": ("", "loaded from, psrl / lmcache", "ratio"),
    **{
        f"load_wait_over_ours_{length}": (f"{length:,} tokens", "wait for a load, lmcache / psrl", "ratio")
        for length in LENGTHS_TOKENS
    },
}
_SETTLE_S = 10.0  # servers that have just started are busy with that


@dataclass
class Times:
    """Seconds of every request, by what it was."""

    seconds: dict[str, list[float]] = field(default_factory=dict)

    def add(self, name: str, value: float) -> None:
        self.seconds.setdefault(name, []).append(value)

    def median(self, name: str) -> float:
        return statistics.median(self.seconds[name])


def ask(server: Server, prompt: list[int], *, from_tier: str | None = None) -> float:
    """Seconds of a request for one token, whose cached tokens must come from ``from_tier``."""
    began_s = time.perf_counter()
    reply = server.generate(prompt, 1, logprobs=False)
    seconds = time.perf_counter() - began_s
    details = reply.meta_info["cached_tokens_details"] or {}
    found = {name: tokens for name in ("device", "host", "storage") if (tokens := details.get(name, 0))}
    if set(found) != ({from_tier} if from_tier else set()):
        raise SystemExit(
            f"a prompt of {len(prompt)} tokens was to come from {from_tier}, but came from {found}"
        )
    return seconds


def forget(server: Server) -> None:
    """Empty the device; what the tier holds stays. Waits for the offload of the last request."""
    time.sleep(0.2)
    server.flush_cache()


def measure_hits(
    servers: dict[str, Server], tiers: dict[str, str], repeats: int, source: random.Random
) -> Times:
    times = Times()
    for length in LENGTHS_TOKENS:
        for _ in range(repeats):
            prompt = [source.randrange(512) for _ in range(length)]
            for name, server in servers.items():
                times.add(f"{name} cold {length}", ask(server, prompt))
                times.add(f"{name} device {length}", ask(server, prompt, from_tier="device"))
                for _ in range(2):
                    forget(server)
                    times.add(f"{name} host {length}", ask(server, prompt, from_tier=tiers[name]))
    return times


def measure_overlap(server: Server, repeats: int, source: random.Random) -> Times:
    times = Times()
    for loaded, computed in OVERLAP_TOKENS:
        for _ in range(repeats):
            head = [source.randrange(512) for _ in range(loaded)]
            name = f"{loaded}+{computed}"
            ask(server, head)
            ask(server, head, from_tier="device")
            tails = [[source.randrange(512) for _ in range(computed)] for _ in range(2)]
            times.add(f"prefill {name}", ask(server, head + tails[0], from_tier="device"))
            forget(server)
            times.add(f"load {name}", ask(server, [*head, 1], from_tier="host"))
            forget(server)
            times.add(f"both {name}", ask(server, head + tails[1], from_tier="host"))
    return times


def measure_misses(stock: Server, ours: Server, repeats: int, source: random.Random) -> Times:
    times = Times()
    for _ in range(repeats * 4):
        prompt = [source.randrange(512) for _ in range(1024)]
        order = [("stock", stock), ("ours", ours)]
        source.shuffle(order)
        for name, server in order:
            times.add(f"{name} miss", ask(server, prompt))
    return times


def bandwidth(server: Server) -> dict[str, float]:
    """Bytes a second of the DRAM tier, by direction, over all so far."""
    counters = server.get("/psrl/v1/status").json()["tiers"]["counters"]
    total = {
        (entry["name"], entry["labels"].get("direction")): entry["total"]
        for entry in counters
        if entry["labels"].get("tier") == "dram"
    }
    return {way: total["bytes", way] / total["seconds", way] for way in ("store", "load")}


def waits(hits: Times) -> dict[str, float]:
    """What a request waits for its KV, LMCache's over ours: the TTFT of a hit less that of a device hit. What
    LMCache's server says of a load ends before the KV is in SGLang's pool."""

    def wait_s(name: str, length: int) -> float:
        return hits.median(f"{name} host {length}") - hits.median(f"{name} device {length}")

    return {
        f"load_wait_over_ours_{length}": round(wait_s("lmcache", length) / wait_s("psrl", length), 1)
        for length in LENGTHS_TOKENS
    }


def token_bytes(server: Server) -> int:
    """KV of one token, all layers, as the engine says it stores it."""
    layout = server.get("/psrl/v1/status").json()["tiers"]["layout"]
    page_tokens, page_bytes = (re.search(rf"\b{name}=(\d+)", layout) for name in ("page", "kv"))
    assert page_tokens is not None
    assert page_bytes is not None
    return int(page_bytes[1]) // int(page_tokens[1])


def report(hits: Times, overlap: Times, misses: Times, names: list[str]) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for name in names:
        for length in LENGTHS_TOKENS:
            cold, device, host = (hits.median(f"{name} {kind} {length}") for kind in ("cold", "device", "host"))
            rows.append(
                {
                    "server": name,
                    "prompt_tokens": length,
                    "recompute_ms": round(cold * 1e3, 1),
                    "device_hit_ms": round(device * 1e3, 1),
                    "host_hit_ms": round(host * 1e3, 1),
                    "recompute_over_host": round(cold / host, 2),
                    "host_minus_device_ms": round((host - device) * 1e3, 1),
                }
            )
    for loaded, computed in OVERLAP_TOKENS:
        name = f"{loaded}+{computed}"
        load, prefill, both = (overlap.median(f"{kind} {name}") for kind in ("load", "prefill", "both"))
        rows.append(
            {
                "overlap": name,
                "load_ms": round(load * 1e3, 1),
                "prefill_ms": round(prefill * 1e3, 1),
                "both_ms": round(both * 1e3, 1),
                "both_over_longer": round(both / max(load, prefill), 3),
            }
        )
    rows.append({"miss_over_stock": round(misses.median("ours miss") / misses.median("stock miss"), 3)})
    return rows


def tidy(rows: list[dict[str, Any]]) -> list[Row]:
    hits = {
        "recompute_ms": ("TTFT, computed again", "ms"),
        "device_hit_ms": ("TTFT, device hit", "ms"),
        "host_hit_ms": ("TTFT, loaded", "ms"),
        "recompute_over_host": ("computed again / loaded", "ratio"),
        "host_minus_device_ms": ("loaded, minus a device hit", "ms"),
    }
    overlap = {
        "load_ms": ("TTFT, the loaded part alone", "ms"),
        "prefill_ms": ("TTFT, the computed part alone", "ms"),
        "both_ms": ("TTFT, both", "ms"),
        "both_over_longer": ("both / the longer of the two", "ratio"),
    }
    found: list[Row] = []
    for row in rows:
        for name, value in row.items():
            if "server" in row and name in hits:
                metric, unit = hits[name]
                axis = {"x_name": "prompt tokens", "x": row["prompt_tokens"]}
                found.append(
                    Row(benchmark="tiers", case=row["server"], metric=metric, value=value, unit=unit, **axis)
                )
            elif "overlap" in row and name in overlap:
                metric, unit = overlap[name]
                case = f"{row['overlap'].replace('+', ' loaded + ')} computed tokens"
                found.append(Row(benchmark="tiers", case=case, metric=metric, value=value, unit=unit))
            elif "server" not in row and "overlap" not in row:
                case, metric, unit = _ALONE[name]
                found.append(Row(benchmark="tiers", case=case, metric=metric, value=value, unit=unit))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=5, help="prompts of each length")
    parser.add_argument("--preset", default="bench", help="model: tiny or bench")
    parser.add_argument(
        "--lmcache", type=Path, help="the folder tests/lmcache/install.sh filled: compare with it"
    )
    parser.add_argument("--lmcache-chunk", type=int, default=256, help="LMCache's tokens per chunk")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path, help="also write the rows here")
    options = parser.parse_args()
    source = random.Random(options.seed)
    with tempfile.TemporaryDirectory() as folder, ExitStack() as running:
        directory = Path(folder)
        model = make_model(directory / "model", seed=1, preset=options.preset)
        zygote = running.enter_context(Zygote(log_path=directory / "zygote.log"))

        def start(name: str, **settings: Any) -> Server:
            log_path = directory / f"{name}.log"
            return running.enter_context(Server(model, args=ARGS, log_path=log_path, zygote=zygote, **settings))

        servers, tiers = {"psrl": start("psrl", psrl_config=SETTINGS)}, {"psrl": "host"}
        stock = start("stock")
        if options.lmcache is not None:
            peer = running.enter_context(LMCachePeer(directory, options.lmcache, options.lmcache_chunk))
            servers["lmcache"] = running.enter_context(peer.engine(model, ARGS))
            tiers["lmcache"] = "storage"
        time.sleep(_SETTLE_S)
        measure_misses(stock, servers["psrl"], 1, source)  # warm all
        misses = measure_misses(stock, servers["psrl"], options.repeats, source)
        hits = measure_hits(servers, tiers, options.repeats, source)
        overlap = measure_overlap(servers["psrl"], options.repeats, source)
        rows = report(hits, overlap, misses, list(servers))
        rates = bandwidth(servers["psrl"])
        rows.append({f"dram_{way}_gb_per_s": round(rate / 1e9, 2) for way, rate in rates.items()})
        if options.lmcache is not None:
            theirs = {way: rate * token_bytes(servers["psrl"]) for way, rate in peer.tokens_per_s().items()}
            rows.append({f"lmcache_{way}_gb_per_s": round(rate / 1e9, 2) for way, rate in theirs.items()})
            rows.append({f"{way}_over_lmcache": round(rates[way] / rate, 2) for way, rate in theirs.items()})
            rows.append(waits(hits))
    for row in rows:
        print("  ".join(f"{name} {value}" for name, value in row.items()))
    if options.json is not None:
        write_rows(options.json, tidy(rows))


if __name__ == "__main__":
    main()
