"""Which benchmarks the suite has, with the sizes of a full and of a quick run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from machine import ROOT
from suite_run import Benchmark, Place

HERE = Path(__file__).resolve().parent
_LMCACHE = "no --lmcache folder; `sh tests/lmcache/install.sh DIR` fills one"
_ROUTERS = "no --routers folder; `sh tests/routers/install.sh DIR` fills one"
_TINY = ("--preset", "tiny")


@dataclass(frozen=True, slots=True)
class Peers:
    """What others made and is compared with, where it is here."""

    lmcache: Path | None = None
    routers: Path | None = None
    lmbenchmark: Path | None = None
    trace: Path | None = None


def benchmarks(peers: Peers, *, is_quick: bool) -> list[Benchmark]:
    """In the order in which they run. ``expected_s`` is of two cores."""

    def sized(
        name: str,
        full: tuple[str | Place, ...],
        full_s: float,
        quick: tuple[str | Place, ...],
        quick_s: float,
        *,
        script: str = "",
        more: tuple[str | Place, ...] = (),
        absent: tuple[tuple[str, str], ...] = (),
        skipped: str = "",
    ) -> Benchmark:
        arguments, expected_s = (quick, quick_s) if is_quick else (full, full_s)
        path = HERE / f"{script or name}.py"
        return Benchmark(name, path, (*arguments, *more), expected_s, absent, skipped)

    with_lmcache = _option("--lmcache", peers.lmcache, "DIR")
    with_routers = _option("--routers", peers.routers, "DIR")
    with_trace = _option("--trace", peers.trace, "FILE")
    no_lmcache = () if peers.lmcache else (("lmcache", _LMCACHE),)
    no_routers = () if peers.routers else (("smg, sglang-router", _ROUTERS),)
    few = ("--sessions", "4", "--ways", "flush,strict-sync")
    found = [
        sized("overhead", (), 90, ("--pairs", "3", *_TINY), 50),
        sized("bump_stall", (), 90, ("--changes", "3", "--flushes", "10"), 40),
        sized("tiers", (), 300, ("--repeats", "1", *_TINY), 90, more=with_lmcache, absent=no_lmcache),
        sized("transports", (), 120, ("--turns", "2", "--idle-s", "2"), 30),
        sized("moves", (), 240, ("--repeats", "1", *_TINY), 70),
        sized("reroute", (), 500, few, 90),
        sized(
            "reroute_trace",
            (),
            500,
            few,
            90,
            script="reroute",
            more=with_trace,
            skipped="" if peers.trace else "no --trace file of real sessions",
        ),
        sized("gateway", (), 30, ("--requests", "60"), 15, more=with_routers, absent=no_routers),
        sized("middleware", (), 5, ("--requests", "1000"), 5),
        sized("controller_scale", (), 25, ("--workers", "10,100", "--chunks", "1000,100000"), 5),
        sized("store", (), 60, ("--size-gb", "0.125", "--chunk-mb", "4"), 15),
        sized("growth", (), 40, ("--quick",), 15),
    ]
    if (HERE / "peers.py").is_file():  # it says itself who is not here
        more = (*with_lmcache, *_option("--lmbenchmark", peers.lmbenchmark, "DIR"))
        found.append(sized("peers", (), 1500, ("--quick",), 300, more=more))
    return found


def _option(name: str, path: Path | None, shown: str) -> tuple[str | Place, ...]:
    if path is None:
        return ()
    if path.is_relative_to(ROOT):
        shown = str(path.relative_to(ROOT))
    return (name, Place(path, shown))
