"""What a reader must know of the machine to judge figures from it. Its name and its paths are not among that."""

from __future__ import annotations

import os
import platform
import subprocess
import time
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
_PACKAGES = ("sglang", "torch", "psrl-sglang")
_GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Machine:
    """``load`` is the average over the last minute when this was made: of a quiet machine it is near 0.
    ``commit`` is empty where this is no git checkout, and ends in " and changes" where files were changed since."""

    started: str
    processor: str
    cores: int
    memory_gib: float
    load: float
    python: str
    versions: dict[str, str]
    commit: str

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def this_machine() -> Machine:
    return Machine(
        started=time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        processor=_processor(),
        cores=len(os.sched_getaffinity(0)),
        memory_gib=round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / _GIB, 1),
        load=round(os.getloadavg()[0], 2),
        python=platform.python_version(),
        versions={name: _version(name) for name in _PACKAGES},
        commit=_commit(),
    )


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "model name":
            return value.strip()
    return platform.machine()


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def _commit() -> str:
    try:
        commit = _git("rev-parse", "--short", "HEAD")
        return f"{commit} and changes" if _git("status", "--porcelain") else commit
    except (OSError, subprocess.SubprocessError):
        return ""


def _git(*arguments: str) -> str:
    command = ["git", "-C", str(ROOT), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=30).stdout.strip()
