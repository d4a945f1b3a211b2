"""What the controller's index costs: memory of an entry, admitting, looking up, losing a worker.

    python benchmarks/controller_scale.py [--workers 10,100,1000] [--chunks 1000,100000,4000000] [--json [FILE]]

``chunks`` are entries over all workers: each holds an equal share, and every tenth of its chunks is one that all
workers have (a common system prompt). No sockets: this is what one message costs beyond its transport.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import resource
import statistics
import sys
import time
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from results import Row, write_rows

from psrl_sglang.controller.lookup import lookup
from psrl_sglang.controller.registry import Limits, Registry
from psrl_sglang.pagehash import chunk_key, page_digests
from psrl_sglang.transfer import messages as wire

PAGE_TOKENS, CHUNK_TOKENS, TAG = 16, 256, "7"
PROMPT_TOKENS = 32_768
_BATCH_KEYS = 2000
_SHARED = 0.1
_LOOKUPS = 20


@dataclass(frozen=True, slots=True)
class Figures:
    workers: int
    chunks: int
    bytes_per_entry: float
    sync_us_per_key: float
    admit_us_per_key: float
    evict_us_per_key: float
    lookup_32k_ms: float
    drop_worker_ms: float
    sweep_s: float
    sweep_longest_slice_ms: float
    expire_ms: float


def status_of(incarnation: str) -> wire.WorkerStatus:
    return wire.WorkerStatus(incarnation, TAG, TAG, [TAG], "l", PAGE_TOKENS, CHUNK_TOKENS, 0, 1)


def resident_bytes() -> int:
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * resource.getpagesize()


def sync(registry: Registry, instance_id: str, keys: list[int]) -> None:
    batches = [keys[at : at + _BATCH_KEYS] for at in range(0, len(keys), _BATCH_KEYS)] or [[]]
    registry.start_sync(wire.FullSyncStartMsg(instance_id, 0, "dram", "s", len(keys), len(batches)))
    for number, batch in enumerate(batches):
        # As from the wire: every message brings numbers of its own.
        fresh = [key + 0 for key in batch]
        registry.sync_batch(wire.FullSyncBatchMsg(instance_id, 0, "dram", "s", number, fresh, TAG))
    registry.end_sync(wire.FullSyncEndMsg(instance_id, 0, "dram", "s", len(keys)))


async def measure(workers: int, chunks: int) -> Figures:
    registry = Registry(Limits(max_workers=workers + 1))
    rng = random.Random(1)
    share = max(1, chunks // workers)
    common = [rng.getrandbits(64) - (1 << 63) for _ in range(int(share * _SHARED))]
    prompt = [rng.randrange(1 << 17) for _ in range(PROMPT_TOKENS)]
    digests = page_digests(prompt, PAGE_TOKENS, cache_salt=f"psrl:{TAG}")
    step = CHUNK_TOKENS // PAGE_TOKENS
    of_prompt = [chunk_key(digests[end - 1]) for end in range(step, len(digests) + 1, step)]
    gc.collect()
    before = resident_bytes()
    sync_s = 0.0
    for number in range(workers):
        instance_id = f"engine-{number}"
        registry.register(wire.RegisterMsg(instance_id, 0, "10.0.0.1", 5000, None, status_of("1")))
        keys = common + [rng.getrandbits(64) - (1 << 63) for _ in range(share - len(common))]
        start = time.perf_counter()
        sync(registry, instance_id, keys)
        sync_s += time.perf_counter() - start
    gc.collect()
    bytes_per_entry = (resident_bytes() - before) / len(registry.index)
    entries = len(registry.index)

    def operate(kind: wire.OpType, keys: list[int], first: int) -> float:
        operations = [wire.KVOpEvent(kind, key, first + at) for at, key in enumerate(keys)]
        message = wire.BatchedKVOperationMsg("engine-0", 0, "dram", operations, TAG)
        start = time.perf_counter()
        registry.apply(message)
        return (time.perf_counter() - start) / len(keys) * 1e6

    fresh = [rng.getrandbits(64) - (1 << 63) for _ in range(10_000)]
    admit_us, evict_us = operate(wire.OpType.ADMIT, fresh, 0), operate(wire.OpType.EVICT, fresh, len(fresh))
    operate(wire.OpType.ADMIT, of_prompt, 2 * len(fresh))
    lookups = []
    for _ in range(_LOOKUPS):
        start = time.perf_counter()
        [found] = await lookup(registry, prompt)
        lookups.append(time.perf_counter() - start)
        assert found.num_tokens == PROMPT_TOKENS
    start = time.perf_counter()
    registry.expire()
    expire_ms = (time.perf_counter() - start) * 1e3
    start = time.perf_counter()
    registry.register(wire.RegisterMsg("engine-1", 0, "10.0.0.1", 5001, None, status_of("2")))
    drop_ms = (time.perf_counter() - start) * 1e3
    slices, start = [], time.perf_counter()
    last = start
    for _ in registry.index.sweep():
        slices.append(time.perf_counter() - last)
        last = time.perf_counter()
    return Figures(
        workers=workers,
        chunks=entries,
        bytes_per_entry=bytes_per_entry,
        sync_us_per_key=sync_s / entries * 1e6,
        admit_us_per_key=admit_us,
        evict_us_per_key=evict_us,
        lookup_32k_ms=statistics.median(lookups) * 1e3,
        drop_worker_ms=drop_ms,
        sweep_s=last - start,
        sweep_longest_slice_ms=max(slices, default=0.0) * 1e3,
        expire_ms=expire_ms,
    )


def tidy(found: list[Figures]) -> list[Row]:
    named = {
        "bytes_per_entry": ("memory of an entry", "bytes"),
        "sync_us_per_key": ("a full sync, a key", "us"),
        "admit_us_per_key": ("a report of chunks that came, a key", "us"),
        "evict_us_per_key": ("a report of chunks that went, a key", "us"),
        "lookup_32k_ms": ("look-up of 32k tokens", "ms"),
        "drop_worker_ms": ("another start of an engine: what it held is dropped", "ms"),
        "sweep_s": ("clearing up after that, all of it", "s"),
        "sweep_longest_slice_ms": ("clearing up after that, the longest step", "ms"),
        "expire_ms": ("a round of looking at all leases", "ms"),
    }
    return [
        Row(
            benchmark="controller_scale",
            case=f"{one.workers:,} engines",
            x_name="chunk entries",
            x=one.chunks,
            metric=metric,
            value=getattr(one, name),
            unit=unit,
        )
        for name, (metric, unit) in named.items()
        for one in found
    ]


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def main() -> None:
    import asyncio
    import subprocess

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--workers", type=_numbers, default=[10, 100, 1000])
    parser.add_argument("--chunks", type=_numbers, default=[1000, 100_000, 4_000_000])
    parser.add_argument(
        "--json", nargs="?", const="", help="print one JSON object a line; with a name, write the rows there"
    )
    options = parser.parse_args()
    pairs = [(workers, chunks) for chunks in options.chunks for workers in options.workers]
    as_lines = options.json == ""
    if len(pairs) == 1 and not options.json:
        print(json.dumps(asdict(asyncio.run(measure(*pairs[0])))))
        return
    found: list[Figures] = []
    if not as_lines:
        print("  ".join(f"{field.name:>{max(8, len(field.name))}}" for field in fields(Figures)))
    for workers, chunks in pairs:
        # Each in a process of its own: memory that was freed is not always given back.
        args = ["--workers", str(workers), "--chunks", str(chunks), "--json"]
        ended = subprocess.run([sys.executable, __file__, *args], check=True, capture_output=True, text=True)
        figures = json.loads(ended.stdout)
        found.append(Figures(**figures))
        if as_lines:
            print(json.dumps(figures), flush=True)
        else:
            cells = (
                f"{value:>{max(8, len(name))},}"
                if isinstance(value, int)
                else f"{value:>{max(8, len(name))},.2f}"
                for name, value in figures.items()
            )
            print("  ".join(cells), flush=True)
    if options.json:
        write_rows(Path(options.json), tidy(found))


if __name__ == "__main__":
    main()
