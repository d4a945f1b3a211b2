"""A probe in a process of its own: it may crash or hang without harm to who asks."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass

_MOST_ERROR = 400


@dataclass(frozen=True, slots=True)
class Ended:
    """``exit_code`` None: it was killed at the deadline. Negative: by that signal."""

    exit_code: int | None
    lines: list[str]
    error: str

    @property
    def how(self) -> str:
        if self.exit_code is None:
            return "hung"
        if self.exit_code < 0:
            return f"crashed with {signal.Signals(-self.exit_code).name}"
        return f"ended with {self.exit_code}"


def run_module(module: str, *args: str, limit_s: float) -> Ended:
    """`python -m module args`, in a group that is killed at the deadline; what it printed until then is kept."""
    return run_command([sys.executable, "-m", module, *args], limit_s=limit_s)


def run_command(command: Sequence[str], *, limit_s: float, text: str = "") -> Ended:
    process = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    code: int | None
    try:
        out, error = process.communicate(text, timeout=limit_s)
        code = process.returncode
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        out, error = process.communicate()
        code = None
    lines = [line for line in out.splitlines() if line]
    return Ended(code, lines, error.strip()[-_MOST_ERROR:])
