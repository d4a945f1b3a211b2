"""Peers as processes that can be killed, stopped and cut off, and what must hold once all is over."""

from __future__ import annotations

import dataclasses
import json
import os
import random
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from peer import PAGE_TOKENS, PeerOptions

PEER = Path(__file__).with_name("peer.py")
ANSWER_S = 20.0
SLACK_S = 1.5  # machines that run tests are busy


def tokens_of(pages: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(1000), k=pages * PAGE_TOKENS)


def eventually(holds: Callable[[], Any], seconds: float = 8.0) -> Any:
    """The first true value, or the last one."""
    end_s = time.monotonic() + seconds
    while not (value := holds()) and time.monotonic() < end_s:
        time.sleep(0.03)
    return value


class PeerProcess:
    """Owns the process."""

    def __init__(self, options: PeerOptions, *, tls: str = "", inside: tuple[str, ...] = ()) -> None:
        self.options = options
        environment = os.environ | ({"UCX_TLS": tls} if tls else {})
        given = {
            field.name: value
            for field in dataclasses.fields(options)
            if (value := getattr(options, field.name)) != field.default
        }
        self._process = subprocess.Popen(
            [*inside, sys.executable, str(PEER), json.dumps(given)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        try:
            addresses = self._read()
        except BaseException:
            self.kill()
            raise
        self.command, self.data = addresses["command"], addresses["data"]

    def ask(self, *question: Any) -> Any:
        """What the method of `Peer` says."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(question) + "\n")
        self._process.stdin.flush()
        return self._read()

    def state(self) -> dict[str, Any]:
        return self.ask("state")

    def cpu_s(self) -> float:
        """Of all its threads, since it began."""
        fields = Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def kill(self) -> None:
        self._process.kill()
        self._process.communicate()

    def stop(self) -> None:
        self._process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def end(self) -> int:
        """As an engine ends; its exit code."""
        self.go_on()
        self._process.communicate(timeout=ANSWER_S)
        return self._process.returncode

    def __enter__(self) -> PeerProcess:
        return self

    def __exit__(self, *_: object) -> None:
        if self._process.poll() is None:
            self.go_on()
            self.kill()

    def _read(self) -> Any:
        assert self._process.stdout is not None
        if not select.select([self._process.stdout], [], [], ANSWER_S)[0]:
            raise TimeoutError(f"no answer of peer {self.options.instance_id} in {ANSWER_S} s")
        line = self._process.stdout.readline()
        if not line:
            raise EOFError(f"peer {self.options.instance_id} ended with {self._process.wait()}")
        return json.loads(line)


def is_settled(state: dict[str, Any]) -> bool:
    """Nothing is under way or kept."""
    busy = ("running_out", "waiting_out", "running_in", "quarantined", "held_after_failure")
    return not any(state["moves"][name] for name in busy) and not state["pins"] and not state["held"]
