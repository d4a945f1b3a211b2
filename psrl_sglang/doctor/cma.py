"""Whether engines of this host can copy out of each other's memory: another process of ours tries it."""

from __future__ import annotations

import base64
import os
from pathlib import Path

from psrl_sglang.doctor.processes import run_module
from psrl_sglang.doctor.result import CheckResult, fail, ok, warn
from psrl_sglang.store.arena import Arena
from psrl_sglang.transfer.cma import CmaTransport
from psrl_sglang.transfer.transport import TransportUnusable

_NAME = "cma"
_CHILD_S = 30.0
_ARENA_BYTES = 1 << 20
_PROC = Path("/proc")
_FIRST_PID_NAMESPACE = "pid:[4026531836]"


def check_cma(channel: str) -> list[CheckResult]:
    """``channel`` is `p2p_transfer_channel`: what is forced must work, else there is another way."""
    around = describe(_PROC)
    bad = fail if channel == "cma" else warn
    remedy = "one user and PID namespace for the engines of a host; no seccomp filter on process_vm_readv"
    try:
        transport = CmaTransport(Arena(1, _ARENA_BYTES))
    except TransportUnusable as why:
        return [bad(_NAME, f"{why}; {around}", remedy)]
    try:
        # The other way round would prove less: a parent may read its child where others may not.
        offer = base64.b64encode(transport.offer()).decode()
        child = run_module("psrl_sglang.doctor.cma", offer, limit_s=_CHILD_S)
    finally:
        transport.close()
    said = " ".join(child.lines)
    if child.exit_code != 0 or said != "read":
        return [bad(_NAME, f"another process: {said or child.error or child.how}; {around}", remedy)]
    return [ok(_NAME, f"another process of this user read our memory; {around}")]


def describe(proc: Path) -> str:
    """What decides it, and what of it reaches further than this one trial."""
    parts = [f"user {os.geteuid()}"]
    try:
        scope = (proc / "sys/kernel/yama/ptrace_scope").read_text().strip()
        meaning = {"0": "all of one user", "1": "who allows it, as our engines do", "2": "CAP_SYS_PTRACE only"}
        parts.append(f"Yama scope {scope} ({meaning.get(scope, 'nobody')})")
    except OSError:
        parts.append("no Yama")
    try:
        status = (proc / "self/status").read_text()
        mode = next(line.split()[1] for line in status.splitlines() if line.startswith("Seccomp:"))
        parts.append("no seccomp filter" if mode == "0" else f"seccomp mode {mode}")
    except (OSError, StopIteration, IndexError):
        pass  # a kernel without it
    try:
        space = os.readlink(proc / "self/ns/pid")
        is_first = space == _FIRST_PID_NAMESPACE
        parts.append("the host's PID namespace" if is_first else f"{space}: with engines of the same container")
    except OSError:
        pass  # not shown to us
    return ", ".join(parts)


def _child(offer: str) -> None:
    transport = CmaTransport(Arena(1, _ARENA_BYTES))
    try:
        transport.accept(base64.b64decode(offer))
    except TransportUnusable as why:
        os.write(1, f"{why}\n".encode())
    else:
        os.write(1, b"read\n")
    transport.close()


if __name__ == "__main__":
    import sys

    _child(sys.argv[1])
