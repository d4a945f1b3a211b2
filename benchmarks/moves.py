"""Moving a prompt's KV to another engine against computing it there, by length, and where the crossover lies.

    python benchmarks/moves.py [--channel auto|cma|nixl|tcp] [--repeats 3] [--json FILE]

Two engines of one model. For every length: the prompt is computed by A, asked again of A after /flush_cache (a
local host hit), computed by B (recompute), and, once B has forgotten it, moved to B and asked there. "over local"
is (move + request on B) over (move + local host hit on A): what a re-routed turn pays beyond the way itself.
Ratios of medians; nothing is asserted, run it on a quiet machine.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from results import Row, at_most, write_rows

from psrl_sglang.lab.models import make_model
from psrl_sglang.lab.servers import Server
from psrl_sglang.lab.zygote import Zygote
from psrl_sglang.transfer.client import MoveClient, MoveResult

LENGTHS_TOKENS = (32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16000)
OVER_LOCAL = at_most(1.3)  # asked for above the crossover
ARGS = (
    *("--max-total-tokens", "40960", "--page-size", "16", "--weight-version", "1"),
    *("--context-length", "16384"),
)


def settings(name: str, channel: str, policy: str) -> dict[str, Any]:
    tiers = {"enable": True, "offload_size_gb": 3.0, "enable_p2p": True, "p2p_transfer_channel": channel}
    ours = {"instance_id": name, "move_policy": policy, "load_policy": "always"}
    return {"psrl": {"lmcache": tiers, "sglang": ours}}


class Engine:
    def __init__(self, server: Server) -> None:
        self.server = server
        moves = server.get("/psrl/v1/status").json()["moves"]
        self.command, self.data = moves["command_address"], moves["data_address"]
        self._client = MoveClient()

    def ask(self, prompt: list[int], *, host_tokens: int) -> float:
        """Seconds of a request for one token, of which so many must come from DRAM and none from the device."""
        began_s = time.perf_counter()
        reply = self.server.generate(prompt, 1, logprobs=False)
        seconds = time.perf_counter() - began_s
        details = reply.meta_info["cached_tokens_details"] or {}
        found = details.get("host", 0), details.get("device", 0)
        if found != (host_tokens, 0):
            raise SystemExit(f"{len(prompt)} tokens: {found} (host, device) reused, not {host_tokens}, 0")
        return seconds

    def flush(self) -> None:
        time.sleep(0.1)  # what was computed last is on its way to DRAM
        self.server.flush_cache()

    def forget(self) -> None:
        """The device and DRAM hold nothing any more."""
        self.flush()
        cleared = self._client.clear(self.command)
        if not cleared.ok:
            raise SystemExit(f"cannot clear: {cleared.reason}")

    def move_to(self, other: Engine, prompt: list[int]) -> MoveResult:
        return self._client.transfer_direct(prompt, self.command, other.data, "1", timeout_s=30.0)


def measure(a: Engine, b: Engine, length: int, repeats: int, source: random.Random) -> dict[str, Any]:
    times: dict[str, list[float]] = {}
    size_bytes = 0
    transport = ""
    reusable = (length - 1) // 16 * 16
    for _ in range(repeats):
        prompt = [source.randrange(512) for _ in range(length)]
        took = {"compute": b.ask(prompt, host_tokens=0)}
        b.forget()
        a.ask(prompt, host_tokens=0)
        a.flush()
        took["local"] = a.ask(prompt, host_tokens=reusable)
        a.flush()
        began_s = time.perf_counter()
        result = a.move_to(b, prompt)
        took["move"] = time.perf_counter() - began_s
        if result.num_tokens < reusable:
            raise SystemExit(f"{length} tokens: only {result.num_tokens} moved: {result.reason}")
        took["moved"] = b.ask(prompt, host_tokens=reusable)
        b.forget()
        size_bytes, transport = result.size_bytes, result.transport
        for name, seconds in took.items():
            times.setdefault(name, []).append(seconds)
    compute, local, move, moved = (
        statistics.median(times[name]) for name in ("compute", "local", "move", "moved")
    )
    return {
        "tokens": length,
        "transport": transport,
        "MB": round(size_bytes / 1e6, 2),
        "recompute_ms": round(compute * 1e3, 1),
        "move_ms": round(move * 1e3, 1),
        "request_after_move_ms": round(moved * 1e3, 1),
        "local_host_hit_ms": round(local * 1e3, 1),
        "over_local": round((move + moved) / (move + local), 2),
        "recompute_over_move": round(compute / (move + moved), 2),
        "GB_per_s": round(size_bytes / move / 1e9, 2),
    }


def measure_policy(a: Engine, b: Engine, source: random.Random) -> list[dict[str, Any]]:
    """What ``move_policy: auto`` does once the destination knows what computing and moving cost it."""
    for length in (64, 512, 64, 1024, 256, 512, 128, 2048, 64, 1024):
        prompt = [source.randrange(512) for _ in range(length)]
        a.ask(prompt, host_tokens=0)
        time.sleep(0.1)
        if a.move_to(b, prompt).ok:
            b.server.generate(prompt, 1)
        b.server.generate([source.randrange(512) for _ in range(length)], 1)
    rows = []
    for length in (17, 33, 65, 129, 513, 2049):
        prompt = [source.randrange(512) for _ in range(length)]
        a.ask(prompt, host_tokens=0)
        time.sleep(0.1)
        result = a.move_to(b, prompt)
        said = "moved" if result.num_tokens else f"left: {result.reason}"
        rows.append({"auto_tokens": length, "decision": said})
    return rows


def tidy(rows: list[dict[str, Any]]) -> list[Row]:
    figures = {
        "recompute_ms": ("computed there", "ms"),
        "move_ms": ("the move", "ms"),
        "request_after_move_ms": ("the request after the move", "ms"),
        "local_host_hit_ms": ("a local DRAM hit", "ms"),
        "over_local": ("(move + request there) / (move + local DRAM hit)", "ratio"),
        "recompute_over_move": ("computed there / (move + request there)", "ratio"),
        "GB_per_s": ("the move's rate", "GB/s"),
    }
    found: list[Row] = []
    for row in rows:
        if "tokens" in row:
            above_crossover = row["recompute_over_move"] > 1
            found += [
                Row(
                    benchmark="moves",
                    case=row["transport"],
                    x_name="prompt tokens",
                    x=row["tokens"],
                    metric=metric,
                    value=row[name],
                    unit=unit,
                    target=OVER_LOCAL if name == "over_local" and above_crossover else None,
                )
                for name, (metric, unit) in figures.items()
            ]
        elif "auto_tokens" in row:
            moved = row["decision"] == "moved"
            found.append(
                Row(
                    benchmark="moves",
                    case="move_policy: auto",
                    x_name="prompt tokens",
                    x=row["auto_tokens"],
                    metric="whether it was moved",
                    value=float(moved),
                    unit="yes or no",
                    note="" if moved else row["decision"],
                )
            )
        elif row["crossover_tokens"] is not None:
            value = row["crossover_tokens"]
            found.append(
                Row(benchmark="moves", case="", metric="crossover, at most", value=value, unit="tokens")
            )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--channel", default="auto", help="psrl.lmcache.p2p_transfer_channel")
    parser.add_argument("--repeats", type=int, default=3, help="prompts of each length")
    parser.add_argument("--preset", default="bench", help="model: tiny or bench")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path, help="also write the rows here")
    options = parser.parse_args()
    source = random.Random(options.seed)
    with tempfile.TemporaryDirectory() as folder, ExitStack() as running:
        directory = Path(folder)
        model = make_model(directory / "model", seed=1, preset=options.preset)
        zygote = running.enter_context(Zygote(log_path=directory / "zygote.log"))

        def start(name: str, policy: str = "always") -> Engine:
            config = settings(name, options.channel, policy)
            log_path = directory / f"{name}.log"
            server = Server(model, args=ARGS, psrl_config=config, log_path=log_path, zygote=zygote)
            return Engine(running.enter_context(server))

        a, b = start("a"), start("b")
        measure(a, b, 512, 1, source)  # warm both
        rows = [measure(a, b, length, options.repeats, source) for length in LENGTHS_TOKENS]
        worth = [row["tokens"] for row in rows if row["recompute_over_move"] > 1]
        rows.append({"crossover_tokens": worth[0] if worth else None})
        rows += measure_policy(a, start("c", "auto"), source)
    for row in rows:
        if "crossover_tokens" in row:
            print("crossover_tokens", f"at most {worth[0]}" if worth else "none")
        else:
            print("  ".join(f"{name} {value}" for name, value in row.items()))
    if options.json is not None:
        write_rows(options.json, tidy(rows))


if __name__ == "__main__":
    main()
