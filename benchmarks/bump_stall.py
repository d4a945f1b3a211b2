"""How long a version change stops an engine with 64 requests, running and waiting.

The change is named through ``/update_weight_version``, so no load of weights hides in the figure. Two views: the
scheduler's own time per change, and what a client sees, the largest gap between two streamed tokens while the
version changes against the largest gap of the same length of time without a change.
Also: how long ``POST /flush_cache`` takes while these requests run.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
import threading
import time
from itertools import pairwise
from pathlib import Path

import httpx
from results import Row, Target, at_most, write_rows

from psrl_sglang.lab.models import make_model
from psrl_sglang.lab.servers import Server
from psrl_sglang.lab.zygote import Zygote

WINDOW_S = 1.0
SETTINGS = {"psrl": {"sglang": {"max_version_lag": 0}}}
_RATIO = "ratio of gaps"
_LIMITS_MS: dict[str, Target] = {
    "scheduler time per change, longest ms": at_most(50),
    "flush_cache while running, p99 ms": at_most(100),
}


class Stream:
    """One endless streamed request; keeps the time of every chunk."""

    def __init__(self, url: str, prompt: list[int], stop: threading.Event) -> None:
        self.arrivals_s: list[float] = []
        self._thread = threading.Thread(target=self._run, args=(url, prompt, stop), daemon=True)
        self._thread.start()

    def _run(self, url: str, prompt: list[int], stop: threading.Event) -> None:
        sampling = {"temperature": 0, "max_new_tokens": 1500, "ignore_eos": True}
        body = {"input_ids": prompt, "sampling_params": sampling, "stream": True}
        try:
            with (
                httpx.Client(trust_env=False, timeout=120) as client,
                client.stream("POST", f"{url}/generate", json=body) as reply,
            ):
                for line in reply.iter_lines():
                    if line.startswith("data: {"):
                        self.arrivals_s.append(time.perf_counter())
                    if stop.is_set():
                        return
        except httpx.HTTPError:
            if not stop.is_set():  # the server may end before a queued request does
                raise

    def join(self) -> None:
        self._thread.join(60)

    def largest_gap_s(self, start_s: float, end_s: float) -> float:
        inside = [t for t in self.arrivals_s if start_s <= t <= end_s]
        return max((b - a for a, b in pairwise(inside)), default=end_s - start_s)


def percentile(values: list[float], share: float) -> float:
    return sorted(values)[min(int(len(values) * share), len(values) - 1)]


def tidy(figures: dict, options: argparse.Namespace) -> list[Row]:
    """Those that are times or the ratio; how many requests there were is the case."""
    return [
        Row(
            benchmark="bump_stall",
            case=f"{options.requests} requests, at most {options.running} running",
            metric=name.removesuffix(" ms"),
            value=value,
            unit="ms" if name.endswith(" ms") else "ratio" if name == _RATIO else "requests",
            target=_LIMITS_MS.get(name),
        )
        for name, value in figures.items()
        if name.endswith(" ms") or name in (_RATIO, "requests crossing per change")
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--running", type=int, default=48, help="of these, at most so many run at once")
    parser.add_argument("--changes", type=int, default=20)
    parser.add_argument("--flushes", type=int, default=100)
    parser.add_argument("--json", type=Path, help="also write the figures here")
    options = parser.parse_args()
    source = random.Random(1)
    args = ("--max-total-tokens", "131072", "--page-size", "16", "--weight-version", "0")
    args += ("--max-running-requests", str(options.running), "--context-length", "4096")
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder)
        model = make_model(directory / "model", seed=1)
        with (
            Zygote(log_path=directory / "zygote.log") as zygote,
            Server(model, args=args, psrl_config=SETTINGS, log_path=directory / "log", zygote=zygote) as server,
        ):
            figures = measure(server, options, source)
    for name, value in figures.items():
        print(f"{name:40} {value}")
    if options.json is not None:
        write_rows(options.json, tidy(figures, options))


def measure(server: Server, options: argparse.Namespace, source: random.Random) -> dict:
    stop = threading.Event()
    prompts = [[source.randrange(512) for _ in range(128)] for _ in range(options.requests)]
    streams = [Stream(server.url, prompt, stop) for prompt in prompts]
    deadline_s = time.monotonic() + 120
    while sum(bool(stream.arrivals_s) for stream in streams) < options.running:
        if time.monotonic() > deadline_s:
            raise TimeoutError("the requests did not start")
        time.sleep(0.1)
    time.sleep(2)
    seen = server.get("/psrl/v1/status").json()["requests"]
    gaps: dict[str, list[float]] = {"quiet": [], "change": []}
    change_s = []
    for number in range(options.changes):
        for kind in ("quiet", "change"):
            start_s = time.perf_counter()
            if kind == "change":
                body = {"new_version": str(number + 1), "abort_all_requests": False}
                server.post("/update_weight_version", body).raise_for_status()
            time.sleep(max(0.0, start_s + WINDOW_S - time.perf_counter()))
            end_s = time.perf_counter()
            alive = [s for s in streams if s.arrivals_s and s.arrivals_s[-1] > start_s]
            gaps[kind].append(max((s.largest_gap_s(start_s, end_s) for s in alive), default=WINDOW_S))
        change_s.append(server.get("/psrl/v1/status").json()["counters"]["last_change_s"])
    flush_s = []
    for _ in range(options.flushes):
        began_s = time.perf_counter()
        server.post("/flush_cache").raise_for_status()
        flush_s.append(time.perf_counter() - began_s)
    counters = server.get("/psrl/v1/status").json()["counters"]
    stop.set()
    for stream in streams:
        stream.join()
    quiet, change = statistics.median(gaps["quiet"]), statistics.median(gaps["change"])
    return {
        "requests running / waiting": f"{seen['running']} / {seen['waiting']}",
        "changes": options.changes,
        "scheduler time per change, median ms": round(statistics.median(change_s) * 1e3, 3),
        "scheduler time per change, longest ms": round(counters["longest_change_s"] * 1e3, 3),
        "requests crossing per change": round(counters["crossing_requests"] / max(counters["changes"], 1), 1),
        "largest token gap, quiet, median ms": round(quiet * 1e3, 1),
        "largest token gap, change, median ms": round(change * 1e3, 1),
        _RATIO: round(change / quiet, 3),
        "flush_cache while running, median ms": round(statistics.median(flush_s) * 1e3, 2),
        "flush_cache while running, p99 ms": round(percentile(flush_s, 0.99) * 1e3, 2),
    }


if __name__ == "__main__":
    main()
