"""Load generators that others made, as clients of the servers of benchmarks/peers.py.

Both play chats of several rounds over SGLang's OpenAI routes at a fixed rate of requests, so a server that computes
more than another is slower by what its requests wait. Their texts are words that this model's tokenizer cuts in two
to four; sizes are given in words.
"""

from __future__ import annotations

import csv
import importlib.util
import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from peers_servers import NO_LMCACHE, NotRun

from psrl_sglang.lab.servers import Server
from psrl_sglang.lab.sessions import quantile

_SLACK_S = 150.0
_SCRIPT = Path("synthetic-multi-round-qa") / "multi-round-qa.py"


@dataclass(frozen=True, slots=True)
class Load:
    """What a generator is asked for."""

    users: int
    shared_words: int
    own_words: int
    question_words: int
    answer_tokens: int
    requests_per_s: float
    duration_s: int
    rounds: int


@dataclass(frozen=True, slots=True)
class Report:
    """What a generator reported: milliseconds to the first text of an answer, and rates over the whole run."""

    requests: int
    ttft_mean_ms: float
    ttft_p50_ms: float
    ttft_p99_ms: float
    input_tokens_per_s: float
    output_tokens_per_s: float


FULL = Load(
    users=10,
    shared_words=60,
    own_words=200,
    question_words=10,
    answer_tokens=16,
    requests_per_s=1.0,
    duration_s=20,
    rounds=4,
)
QUICK = Load(
    users=4,
    shared_words=60,
    own_words=200,
    question_words=10,
    answer_tokens=8,
    requests_per_s=2.0,
    duration_s=5,
    rounds=3,
)


class LMCacheBench:
    """``lmcache bench engine --workload multi-round-chat``, whose summary is taken as it is. It sends every user's
    history once before it measures. ``NotRun`` without ``packages``, the folder tests/lmcache/install.sh filled."""

    name = "lmcache bench"

    def __init__(self, packages: Path | None) -> None:
        if packages is None:
            raise NotRun(NO_LMCACHE)
        self._packages = packages

    def report(self, server: Server, load: Load, folder: Path) -> Report:
        command = [sys.executable, "-c", "from lmcache.cli.main import main; main()", "bench", "engine"]
        command += ["--workload", "multi-round-chat", "--engine-url", server.url, "--model", server.model_path]
        # It makes as many users as fit into so many GB.
        words = load.shared_words + load.own_words
        command += ["--kv-cache-volume", "1", "--tokens-per-gb-kvcache", str(load.users * words)]
        command += ["--mrc-shared-prompt-length", str(load.shared_words)]
        command += ["--mrc-chat-history-length", str(load.own_words)]
        command += ["--mrc-user-input-length", str(load.question_words)]
        command += ["--mrc-output-length", str(load.answer_tokens), "--mrc-qps", str(load.requests_per_s)]
        command += ["--mrc-duration", str(load.duration_s), "--ignore-eos"]
        command += ["--json", "--no-csv", "--no-interactive", "-q", "--output-dir", str(folder)]
        path = os.pathsep.join(filter(None, (str(self._packages), os.environ.get("PYTHONPATH", ""))))
        _run(command, folder, load, {"PYTHONPATH": path, "LMCACHE_TRACK_USAGE": "false"})
        return _lmcache_report(folder / "bench_summary.json")


class LMBenchmark:
    """LMBenchmark's multi-round QA, from the file that it writes: one line a request. Requests without any text
    have no time to first token there and are left out. ``NotRun`` without ``repository``, a checkout of it, or
    without what it imports."""

    name = "LMBenchmark"

    def __init__(self, repository: Path | None) -> None:
        if repository is None:
            raise NotRun("no --lmbenchmark folder; a checkout of github.com/LMCache/LMBenchmark is one")
        self._script = repository / _SCRIPT
        if not self._script.is_file():
            raise NotRun(f"the --lmbenchmark folder has no {_SCRIPT}")
        if missing := [name for name in ("openai", "pandas") if importlib.util.find_spec(name) is None]:
            raise NotRun(f"it needs {' and '.join(missing)}")

    def report(self, server: Server, load: Load, folder: Path) -> Report:
        command = [sys.executable, str(self._script)]
        command += ["--num-users", str(load.users), "--num-rounds", str(load.rounds)]
        command += ["--shared-system-prompt", str(load.shared_words)]
        command += ["--user-history-prompt", str(load.own_words)]
        command += ["--answer-len", str(load.answer_tokens), "--qps", str(load.requests_per_s)]
        command += ["--time", str(load.duration_s), "--log-interval", "100000"]
        command += ["--model", server.model_path, "--base-url", f"{server.url}/v1"]
        command += ["--output", str(folder / "summary.csv")]
        _run(command, folder, load, {})
        return _lmbenchmark_report(folder / "summary.csv")


def prefilled_tokens(server: Server) -> int:
    """What the engine has computed of prompts since it started, by its own counter."""
    text = server.get("/metrics", follow_redirects=True).raise_for_status().text
    series = re.findall(
        r'^sglang:realtime_tokens_total\{.*mode="prefill_compute".*\} (\S+)$', text, re.MULTILINE
    )
    return round(sum(map(float, series)))


def _run(command: list[str], folder: Path, load: Load, env: dict[str, str]) -> None:
    log_path = folder / "generator.log"
    local = {"NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1", "OPENAI_API_KEY": "none"}
    limit_s = load.duration_s * 3 + _SLACK_S
    with log_path.open("wb") as log:
        try:
            done = subprocess.run(
                command,
                env={**os.environ, **local, **env},
                cwd=folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                timeout=limit_s,
            )
        except subprocess.TimeoutExpired:
            raise NotRun(f"the generator did not end within {limit_s:.0f} s") from None
    if done.returncode:
        lines = [line.strip() for line in log_path.read_text(errors="replace").splitlines() if line.strip()]
        said = lines[-1][:200].replace(str(folder), "…") if lines else "it said nothing"
        raise NotRun(f"the generator ended with status {done.returncode}: {said}")


def _lmcache_report(path: Path) -> Report:
    results: dict[str, Any] = json.loads(path.read_text())["results"]
    if not results["successful_requests"]:
        raise NotRun("the generator reports no successful request")
    return Report(
        requests=results["successful_requests"],
        ttft_mean_ms=results["mean_ttft_ms"],
        ttft_p50_ms=results["p50_ttft_ms"],
        ttft_p99_ms=results["p99_ttft_ms"],
        input_tokens_per_s=results["input_throughput"],
        output_tokens_per_s=results["output_throughput"],
    )


def _lmbenchmark_report(path: Path) -> Report:
    with path.open(newline="") as file:
        lines = [{name: float(value) for name, value in line.items()} for line in csv.DictReader(file)]
    ttft_ms = sorted(line["ttft"] * 1e3 for line in lines if line["ttft"] > 0)
    if not ttft_ms:
        raise NotRun("the generator reports no finished request")
    took_s = max(line["finish_time"] for line in lines) - min(line["launch_time"] for line in lines)
    return Report(
        requests=len(ttft_ms),
        ttft_mean_ms=fmean(ttft_ms),
        ttft_p50_ms=quantile(ttft_ms, 0.5),
        ttft_p99_ms=quantile(ttft_ms, 0.99),
        input_tokens_per_s=sum(line["prompt_tokens"] for line in lines) / took_s,
        output_tokens_per_s=sum(line["generation_tokens"] for line in lines) / took_s,
    )
