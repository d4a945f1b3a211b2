"""Memory for the tiers: how much there is, in what pages, and shared memory for UCX and SGLang."""

from __future__ import annotations

import os
from pathlib import Path

import psutil

from psrl_sglang.config import PsrlConfig
from psrl_sglang.doctor.result import CheckResult, fail, ok, skip, warn

_GIB = 1 << 30
_LEAST_SHM_BYTES = _GIB
_CGROUP = Path("/sys/fs/cgroup")
_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def check_memory(config: PsrlConfig) -> list[CheckResult]:
    return [_offload(config), huge_pages(_HUGE_PAGES), shared_memory(Path("/dev/shm"))]


def _offload(config: PsrlConfig) -> CheckResult:
    name, lmcache = "memory", config.lmcache
    free_bytes, limit = available_bytes(_CGROUP)
    have = f"{free_bytes / _GIB:.1f} GiB are available{limit}"
    if not lmcache.enable:
        return skip(name, f"{have}; lmcache.enable is false: no KV is kept in it")
    wanted = lmcache.offload_size_gb + lmcache.reserve_local_cpu_size
    said = f"{have}, offload_size_gb and its reserve are {wanted:g}"
    if wanted * _GIB > free_bytes:
        return fail(
            name, said, "a smaller psrl.lmcache.offload_size_gb; `psrl-sglang size` says what a model needs"
        )
    return ok(name, said)


def available_bytes(cgroup: Path) -> tuple[int, str]:
    """What can be taken now, and by what it is limited if that is a container."""
    free_bytes = psutil.virtual_memory().available
    try:
        most, used = ((cgroup / name).read_text().strip() for name in ("memory.max", "memory.current"))
    except OSError:
        return free_bytes, ""
    if not most.isdigit() or int(most) - int(used) >= free_bytes:
        return free_bytes, ""
    return max(int(most) - int(used), 0), f" of the container's {int(most) / _GIB:.1f}"


def huge_pages(path: Path) -> CheckResult:
    name = "huge pages"
    try:
        text = path.read_text()
    except OSError as error:
        return warn(name, f"{path}: {error.strerror}; loads and moves are slower without them")
    chosen = text.partition("[")[2].partition("]")[0]
    if chosen == "never":
        return warn(name, "never: copies in and out of DRAM run several times slower", f"echo madvise > {path}")
    return ok(name, f"transparent huge pages: {chosen}")


def shared_memory(path: Path) -> CheckResult:
    name = "shared memory"
    try:
        stat = os.statvfs(path)
    except OSError as error:
        return fail(name, f"{path}: {error.strerror}", "mount a tmpfs there")
    free_bytes = stat.f_bavail * stat.f_frsize
    said = f"{path} has {free_bytes / _GIB:.2f} GiB free"
    if free_bytes < _LEAST_SHM_BYTES:
        return warn(
            name, f"{said}; SGLang with tensor parallelism and UCX need some", "docker run --shm-size 8g"
        )
    return ok(name, said)
