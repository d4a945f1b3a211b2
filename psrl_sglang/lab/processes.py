"""Ending a process together with its whole group, without ever signalling a recycled number."""

import os
import signal
import time
from collections.abc import Callable

import psutil

_POLL_S = 0.02
# How long the resource tracker may take to unlink what the killed processes left in shared memory.
_TRACKER_S = 2.0


class ProcessTimeout(Exception):
    """A process outlived its deadline, SIGKILL included."""


def reap_group(pid: int) -> int | None:
    """Collect our child `pid`, the leader of its own group, if it has ended; kill what it left in the group.

    Returns its exit code (negative: the signal), or None while it runs. To be called until it returns a code,
    and then never again.
    """
    if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
        return None
    # Uncollected, the ended leader still holds its number, so the group cannot be anybody else's.
    kill_group(pid)
    _, status = os.waitpid(pid, 0)
    return os.waitstatus_to_exitcode(status)


def kill_group(pgid: int) -> None:
    """Kill a group that may be gone; the caller knows that the number is still its own.

    The resource tracker goes last: it ends by itself when the processes it serves have, and removes their
    semaphores and shared memory. Killed with them it would leave those on the machine for ever.
    """
    members = group_members(pgid)
    trackers = {pid for pid in members if _is_tracker(pid)}
    for pid in set(members) - trackers:
        _kill(os.kill, pid)
    deadline = time.monotonic() + _TRACKER_S
    while trackers & set(group_members(pgid)) and time.monotonic() < deadline:
        time.sleep(_POLL_S)
    # Also whatever was started since the list was made.
    _kill(os.killpg, pgid)


def group_members(pgid: int) -> list[int]:
    """The live processes of a group; ended ones that nobody collected do not count."""
    members = []
    for process in psutil.process_iter():
        try:
            if os.getpgid(process.pid) == pgid and process.status() != psutil.STATUS_ZOMBIE:
                members.append(process.pid)
        except (ProcessLookupError, psutil.NoSuchProcess):
            continue
    return members


def wait_group_gone(pgid: int, *, timeout_s: float) -> None:
    """Wait until nothing of a killed group runs any more; raises ProcessTimeout."""
    deadline = time.monotonic() + timeout_s
    while members := group_members(pgid):
        if time.monotonic() > deadline:
            raise ProcessTimeout(f"processes {members} of group {pgid} still run {timeout_s} s after SIGKILL")
        time.sleep(_POLL_S)


def _is_tracker(pid: int) -> bool:
    try:
        return "multiprocessing.resource_tracker" in " ".join(psutil.Process(pid).cmdline())
    except psutil.NoSuchProcess:
        return False


def _kill(send: Callable[[int, int], None], number: int) -> None:
    try:
        send(number, signal.SIGKILL)
    except ProcessLookupError:
        pass
