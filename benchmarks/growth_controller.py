"""Growth of the controller: simulated engines, their chunks, sessions and versions, against what each call takes.

No sockets, as in `controller_scale`: what one message costs beyond its transport.
"""

from __future__ import annotations

import asyncio
import gc
import random
import statistics
import time
import tracemalloc
from collections.abc import Callable

from controller_scale import CHUNK_TOKENS, PAGE_TOKENS, TAG, status_of, sync
from results import Row

from psrl_sglang.controller.lookup import lookup
from psrl_sglang.controller.recent import Sessions
from psrl_sglang.controller.registry import Limits, Registry
from psrl_sglang.pagehash import chunk_key, page_digests
from psrl_sglang.transfer import messages as wire

_CHUNKS = 200_000  # entries over all engines
_PROMPT_TOKENS = 32_768
_SYSTEM_TOKENS = 4_096
_VERSIONS_TOKENS = 8_192
_VERSIONS_ENGINES = 200
_LOOKUPS = 15
_ROUNDS = 5
_TIMES = 200  # a round


def by_engines(engines: int) -> list[Row]:
    """All serve one version and hold an equal share of a constant number of chunks."""
    source = random.Random(1)
    registry = Registry(Limits(max_workers=2 * engines + 2 * _ROUNDS * _TIMES))
    for number in range(engines):
        registry.register(_registration(number))
        keys = [_random_key(source) for _ in range(max(1, _CHUNKS // engines))]
        sync(registry, f"engine-{number}", keys)
    alone = [source.randrange(1 << 17) for _ in range(_PROMPT_TOKENS)]
    system = [source.randrange(1 << 17) for _ in range(_SYSTEM_TOKENS)]
    for number in range(engines):
        _admit(registry, number, _chunk_keys(system))
    _admit(registry, 0, _chunk_keys(alone), first=len(_chunk_keys(system)))
    numbers = iter(range(engines, 1 << 30))

    def beat() -> None:
        assert not registry.heartbeat(_heartbeat(source.randrange(engines)))

    def register() -> None:
        registry.register(_registration(next(numbers)))

    def row(metric: str, value: float, unit: str) -> Row:
        return Row(
            benchmark="growth",
            case="controller",
            x_name="engines",
            x=engines,
            metric=metric,
            value=value,
            unit=unit,
        )

    return [
        row("look-up of 32k tokens that one engine holds", 1e3 * _look_up(registry, alone, 1), "ms"),
        row("look-up of 4k tokens that all engines hold", 1e3 * _look_up(registry, system, engines), "ms"),
        row("look-up of 4k tokens that nobody holds", 1e3 * _look_up(registry, alone[1:4097], 0), "ms"),
        row("a heartbeat", 1e6 * _seconds(beat), "us"),
        row("a round of looking at all leases", 1e3 * _seconds(lambda: registry.expire(), times=10), "ms"),
        row("a registration", 1e6 * _seconds(register), "us"),
    ]


def by_versions(versions: int) -> list[Row]:
    """A look-up that names no version asks for every version that some engine serves now; one engine has it."""
    registry = Registry(Limits())
    source = random.Random(2)
    prompt = [source.randrange(1 << 17) for _ in range(_VERSIONS_TOKENS)]
    for number in range(_VERSIONS_ENGINES):
        tag = str(number % versions)
        status = wire.WorkerStatus("1", tag, tag, [tag], "l", PAGE_TOKENS, CHUNK_TOKENS, 0, 1)
        registry.register(_registration(number, status))
    _admit(registry, 0, _chunk_keys(prompt, "0"), "0")
    unnamed_s = _look_up(registry, prompt, 1)
    named_s = _look_up(registry, prompt, 1, version="0")

    def row(metric: str, value_s: float) -> Row:
        return Row(
            benchmark="growth",
            case=f"controller, {_VERSIONS_ENGINES} engines",
            x_name="versions",
            x=versions,
            metric=metric,
            value=value_s * 1e3,
            unit="ms",
        )

    return [
        row("look-up of 8k tokens under all versions", unnamed_s),
        row("look-up of 8k tokens under one version", named_s),
    ]


def by_sessions(count: int) -> list[Row]:
    tracemalloc.start()
    sessions = Sessions()
    for number in range(count):
        sessions.serve(f"engine-{number % 1000}", wire.SessionHeld(f"session-{number:08}", number, TAG))
    gc.collect()
    taken_bytes, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    source = random.Random(3)

    def holder() -> None:
        assert sessions.holder(f"session-{source.randrange(count):08}") is not None

    def serve() -> None:
        number = source.randrange(count)
        sessions.serve("engine-7", wire.SessionHeld(f"session-{number:08}", number, TAG))

    def row(metric: str, value: float, unit: str) -> Row:
        return Row(
            benchmark="growth",
            case="controller",
            x_name="sessions",
            x=count,
            metric=metric,
            value=value,
            unit=unit,
        )

    return [
        row("who has a session", 1e6 * _seconds(holder), "us"),
        row("a report of a session", 1e6 * _seconds(serve), "us"),
        row("the 100 latest sessions", 1e6 * _seconds(lambda: sessions.latest(100), times=20), "us"),
        row("memory of a session", taken_bytes / count, "bytes"),
    ]


def _registration(number: int, status: wire.WorkerStatus | None = None) -> wire.RegisterMsg:
    host = f"10.{number >> 16 & 255}.{number >> 8 & 255}.{number & 255}"
    return wire.RegisterMsg(f"engine-{number}", 0, host, 5000, None, status or status_of("1"))


def _heartbeat(number: int) -> wire.HeartbeatMsg:
    said = _registration(number)
    return wire.HeartbeatMsg(said.instance_id, 0, said.ip, said.port, None, said.psrl)


def _admit(registry: Registry, number: int, keys: list[int], tag: str = TAG, *, first: int = 0) -> None:
    operations = [wire.KVOpEvent(wire.OpType.ADMIT, key, first + at) for at, key in enumerate(keys)]
    registry.apply(wire.BatchedKVOperationMsg(f"engine-{number}", 0, "dram", operations, tag))


def _chunk_keys(tokens: list[int], tag: str = TAG) -> list[int]:
    digests = page_digests(tokens, PAGE_TOKENS, cache_salt=f"psrl:{tag}")
    step = CHUNK_TOKENS // PAGE_TOKENS
    return [chunk_key(digests[end - 1]) for end in range(step, len(digests) + 1, step)]


def _random_key(source: random.Random) -> int:
    return source.getrandbits(64) - (1 << 63)


def _look_up(registry: Registry, tokens: list[int], holders: int, version: str | None = None) -> float:
    """Seconds, the median; it must find so many."""
    times: list[float] = []

    async def look_up() -> None:
        for _ in range(_LOOKUPS):
            began_s = time.thread_time()
            found = await lookup(registry, tokens, version=version)
            times.append(time.thread_time() - began_s)
            assert len(found) == holders

    asyncio.run(look_up())
    return statistics.median(times)


def _seconds(action: Callable[[], object], times: int = _TIMES) -> float:
    """Of one call: the median round's mean."""
    rounds = []
    for _ in range(_ROUNDS):
        began_s = time.thread_time()
        for _ in range(times):
            action()
        rounds.append((time.thread_time() - began_s) / times)
    return statistics.median(rounds)
