"""What this host may still take: memory within its control group, and room on a disk."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

_GIB = 2.0**30
_CGROUP = Path("/sys/fs/cgroup")
_UNLIMITED = 1 << 60  # version 1 writes "no limit" as a huge number


@dataclass(frozen=True, slots=True)
class Room:
    """``free_bytes`` can be taken now; ``limit_bytes`` is all there is; ``source`` says whose limit that is."""

    free_bytes: int
    limit_bytes: int
    source: str

    def __str__(self) -> str:
        return f"{self.free_bytes / _GIB:.2f} GiB are free of {self.limit_bytes / _GIB:.2f} GiB ({self.source})"


def memory_room(cgroup: Path = _CGROUP, meminfo: Path = Path("/proc/meminfo")) -> Room:
    """The tighter of what the host has and what the control group of this process allows. Page cache counts as
    free: the kernel gives it back."""
    host = _host_memory(meminfo)
    group = _cgroup_memory(cgroup)
    return host if group is None or group.free_bytes >= host.free_bytes else group


def disk_room(path: Path) -> Room:
    """Of the file system that ``path``, or the nearest directory above it, is on."""
    while not path.exists():
        path = path.parent
    usage = shutil.disk_usage(path)
    return Room(usage.free, usage.total, f"file system of {path}")


def unwritable(path: Path) -> str | None:
    """Why no file can be made below ``path``, which is created if need be; None if one can."""
    probe = path / f".psrl-probe-{os.getpid()}"
    try:
        path.mkdir(parents=True, exist_ok=True)
        probe.write_bytes(b"\0" * 4096)
        probe.unlink()
    except OSError as error:
        return f"{error.strerror or error} ({error.filename or path})"
    return None


def _host_memory(meminfo: Path) -> Room:
    values = dict(line.split(":", 1) for line in meminfo.read_text().splitlines() if ":" in line)
    kib = {name: int(values[name].split()[0]) for name in ("MemTotal", "MemAvailable")}
    return Room(kib["MemAvailable"] << 10, kib["MemTotal"] << 10, "memory of this host")


def _cgroup_memory(cgroup: Path) -> Room | None:
    version_2 = _Files("memory.max", "memory.current", "memory.stat", "inactive_file")
    version_1 = _Files(
        "memory/memory.limit_in_bytes",
        "memory/memory.usage_in_bytes",
        "memory/memory.stat",
        "total_inactive_file",
    )
    for files in (version_2, version_1):
        if (room := files.read(cgroup)) is not None:
            return room
    return None


@dataclass(frozen=True, slots=True)
class _Files:
    limit: str
    used: str
    stat: str
    cache: str

    def read(self, cgroup: Path) -> Room | None:
        try:
            limit = (cgroup / self.limit).read_text().strip()
            used = int((cgroup / self.used).read_text())
            stat = dict(line.split(" ", 1) for line in (cgroup / self.stat).read_text().splitlines())
        except (OSError, ValueError):
            return None  # no control group of this kind here
        if limit == "max" or int(limit) >= _UNLIMITED:
            return None
        free = int(limit) - used + int(stat.get(self.cache, 0))
        return Room(max(0, free), int(limit), "limit of this control group")
