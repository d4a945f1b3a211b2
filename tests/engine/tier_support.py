"""What the tests of the tiers share: settings by size, where a hit came from, counters, quiet states, mounts."""

from __future__ import annotations

import os
import subprocess
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from support import NAMED, assert_same, prompt, status, wait_until

from psrl_sglang.lab.servers import Generation, Server

PAGE = 16
CHUNK = 256
CHUNK_BYTES = CHUNK * 2048  # float32 K and V of the tiny model's 4 layers, 2 heads of 32
POOL_TOKENS = 8192
NEW_TOKENS = 8
# A device pool and DRAM behind it that other prompts soon push everything out of.
SMALLER_POOL = ("--max-total-tokens", "4096")
FEW_CHUNKS = 16


def gib(chunks: float) -> float:
    """The setting that holds so many chunks of the tiny model, with half a chunk to spare for rounding."""
    return (chunks + 0.5) * CHUNK_BYTES / 2**30


def tiers(*, chunks: float = 512, sglang: dict[str, Any] | None = None, **lmcache: Any) -> dict[str, Any]:
    """Settings with DRAM for so many chunks."""
    dram = {"enable": True, "offload_size_gb": gib(chunks), **lmcache}
    return {"psrl": {"lmcache": dram, "sglang": {"load_policy": "always", **(sglang or {})}}}


def with_disk(path: Path, *, disk_gb: float = 0.5, **options: Any) -> dict[str, Any]:
    return tiers(backend="disk", disk_path=str(path), max_disk_size_gb=disk_gb, **options)


def with_remote(url: str, **options: Any) -> dict[str, Any]:
    return tiers(backend="remote", remote_url=url, **options)


def start(
    server_factory: Callable[..., Server],
    settings: dict[str, Any],
    *args: str,
    model: Path | None = None,
    env: dict[str, str] | None = None,
    named: bool = True,
) -> Server:
    """A server with these settings, its weights named "1". One thread computes: on a machine that others use
    too, several wait for each other most of the time."""
    names = NAMED if named else ()
    environment = {"OMP_NUM_THREADS": "1", **(env or {})}
    return server_factory(model, args=(*names, *args), psrl_config=settings, env=environment)


def cached_from(generation: Generation) -> dict[str, int]:
    """Reused tokens by tier: device, host (DRAM) and storage (disk or remote)."""
    details = generation.meta_info["cached_tokens_details"] or {}
    return {tier: details.get(tier, 0) for tier in ("device", "host", "storage")}


def whole_pages(tokens: int) -> int:
    """How much of a prompt can be reused: its last token is always computed."""
    return (tokens - 1) // PAGE * PAGE


def tier_status(server: Server) -> dict[str, Any]:
    return status(server)["tiers"]


def total(server: Server, name: str, **labels: str) -> float:
    """A counter of the tiers, summed over every set of labels that includes these."""
    return sum(
        entry["total"]
        for entry in tier_status(server)["counters"]
        if entry["name"] == name and labels.items() <= entry["labels"].items()
    )


def settle(server: Server, *, timeout_s: float = 60.0) -> None:
    """Until everything computed so far has arrived in every tier, or was given up."""
    wait_until(
        lambda: not any(tier_status(server)["queues"].values()), "the tiers are quiet", timeout_s=timeout_s
    )


def assert_nothing_held(server: Server) -> None:
    """At idle nothing is pinned or on its way any more."""
    settle(server)
    shown = status(server)
    assert shown["tiers"]["tiers"]["dram"]["busy_chunks"] == 0
    assert shown["device"]["locked_tokens"] == 0


def push_out(server: Server) -> None:
    """Compute other prompts until neither the device nor DRAM for few chunks can have anything that was there."""
    pushed = 0
    while pushed < 1.25 * FEW_CHUNKS * CHUNK:
        pushed += server.overwrite_pool()
        settle(server)


def stored(server: Server, asked: list[int], new_tokens: int = NEW_TOKENS) -> Generation:
    """Compute a prompt and wait until all tiers have it."""
    answer = server.generate(asked, new_tokens)
    settle(server)
    return answer


def assert_hit(
    server: Server, asked: list[int], expected: Generation, tier: str, tokens: int | None = None
) -> Generation:
    """The prompt is answered from exactly one tier, and the answer is the one it had."""
    again = server.generate(asked, len(expected.output_ids))
    wanted = dict.fromkeys(("device", "host", "storage"), 0)
    wanted[tier] = whole_pages(len(asked)) if tokens is None else tokens
    assert cached_from(again) == wanted
    assert_same(again, expected)
    return again


def disk_bytes(path: Path) -> int:
    """What ``du`` says."""
    said = subprocess.run(["du", "-s", "-B1", str(path)], capture_output=True, text=True, check=True)
    return int(said.stdout.split()[0])


def chunk_files(path: Path) -> list[Path]:
    return sorted(path.rglob("*.kv"))


def in_schedulers(directory: Path, body: str) -> dict[str, str]:
    """An environment in which every scheduler process runs ``body`` before its cache exists, as another plugin."""
    info = directory / "meddler-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: meddler\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[sglang.srt.plugins]\nmeddler = meddler:register\n")
    guard = 'def register():\n    if "PSRL_SGLANG_SETTINGS" in __import__("os").environ:\n'
    (directory / "meddler.py").write_text(guard + textwrap.indent(textwrap.dedent(body).strip(), " " * 8))
    return {"PYTHONPATH": os.pathsep.join([str(directory), *filter(None, [os.environ.get("PYTHONPATH")])])}


def can_mount() -> bool:
    return os.geteuid() == 0 and subprocess.run(["unshare", "-m", "true"], check=False).returncode == 0


@contextmanager
def small_file_system(path: Path, size_bytes: int) -> Iterator[Path]:
    """A tmpfs of so many bytes, for as long as the context lasts."""
    path.mkdir()
    _run("mount", "-t", "tmpfs", "-o", f"size={size_bytes}", "tmpfs", str(path))
    try:
        yield path
    finally:
        _run("umount", "--lazy", str(path))


@contextmanager
def read_only(path: Path) -> Iterator[None]:
    """What is below the path can be read and neither changed nor added to, not even by root."""
    _run("mount", "--bind", str(path), str(path))
    try:
        _run("mount", "-o", "remount,ro,bind", str(path))
        yield
    finally:
        _run("umount", "--lazy", str(path))


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)


def prompts(first_seed: int, count: int, length: int) -> list[list[int]]:
    return [prompt(first_seed + number, length) for number in range(count)]
