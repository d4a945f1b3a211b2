"""What the tests of routers share: a router as a process, conversations through it, and a line that can be cut."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import httpx
from tier_support import PAGE

from psrl_sglang.lab.servers import free_port

CONFIGS = Path(__file__).parents[2] / "configs"
COMMAND = str(Path(sys.executable).with_name("psrl-sglang"))
START_S = 60.0
TURN_S = 120.0
_TURN_TOKENS = 40
_NEW_TOKENS = 8


class Router:
    """``configs/<script>`` with a policy, in a process group of its own, until `stop`."""

    def __init__(
        self, script: str, policy: str, engines: Sequence[str], *, log_path: Path, env: dict[str, str]
    ) -> None:
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        environment = os.environ | {"PYTHON": sys.executable, "PORT": str(port), **env}
        with log_path.open("wb") as log:
            self._process = subprocess.Popen(
                ["sh", str(CONFIGS / script), policy, *engines],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            self.wait_healthy(engines)
        except AssertionError as error:
            self.stop()
            raise AssertionError(f"{error}; {script} {policy}:\n{log_path.read_text()[-3000:]}") from error

    def workers(self) -> dict[str, bool]:
        """Its engines, and whether it takes them for healthy."""
        reply = httpx.get(f"{self.url}/workers", timeout=10, trust_env=False)
        return {worker["url"]: worker["is_healthy"] for worker in reply.raise_for_status().json()["workers"]}

    def wait_healthy(self, engines: Sequence[str]) -> None:
        self._wait(lambda workers: all(workers.get(engine) for engine in engines))

    def wait_down(self, engine: str) -> None:
        self._wait(lambda workers: not workers.get(engine))

    def stop(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(20)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _wait(self, holds: Any) -> None:
        deadline = time.monotonic() + START_S
        while True:
            with contextlib.suppress(httpx.TransportError, httpx.HTTPStatusError):
                if holds(self.workers()):
                    return
            assert self._process.poll() is None, "the router has ended"
            assert time.monotonic() < deadline, f"not within {START_S} s: {self.workers()}"
            time.sleep(0.1)


@dataclass
class Turn:
    """What of a turn could be reused, and what was."""

    session: str
    ceiling: int
    reused: int
    source: str


@dataclass
class Conversations:
    """Sessions of an agent, through a router; ``turns`` leaves the first one of each out."""

    url: str
    prefix: str
    count: int = 16
    tokens: dict[str, list[int]] = field(default_factory=dict)
    ceilings: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._source = random.Random(self.prefix)
        for number in range(self.count):
            self.tokens[f"{self.prefix}-{number}"] = self._some(272 + 4 * number)

    def turn(self) -> list[Turn]:
        """One turn of all sessions at a time."""
        return asyncio.run(self._turn())

    def turns(self, count: int) -> list[Turn]:
        return [one for _ in range(count) for one in self.turn() if one.ceiling]

    async def _turn(self) -> list[Turn]:
        order = list(self.tokens)
        self._source.shuffle(order)  # else an even number of sessions that goes round two engines stays put
        async with httpx.AsyncClient(timeout=TURN_S, trust_env=False) as client:
            return list(await asyncio.gather(*(self._ask(client, session) for session in order)))

    async def _ask(self, client: httpx.AsyncClient, session: str) -> Turn:
        tokens = self.tokens[session]
        sampling = {"temperature": 0, "max_new_tokens": _NEW_TOKENS, "ignore_eos": True}
        body = {"input_ids": tokens, "sampling_params": sampling}
        reply = await client.post(f"{self.url}/generate", json=body, headers={"x-smg-routing-key": session})
        assert reply.status_code == 200, reply.text
        said = reply.json()
        done = Turn(
            session,
            self.ceilings.get(session, 0),
            said["meta_info"]["cached_tokens"],
            reply.headers.get("x-psrl-kv-source", ""),
        )
        tokens += said["output_ids"]
        self.ceilings[session] = len(tokens) // PAGE * PAGE
        tokens += self._some(_TURN_TOKENS)
        return done

    def _some(self, count: int) -> list[int]:
        return [self._source.randrange(256) for _ in range(count)]


def share(turns: Sequence[Turn]) -> float:
    """Reused of what the turns before left, to the page."""
    return sum(one.reused for one in turns) / sum(one.ceiling for one in turns)


@contextlib.contextmanager
def gateway(*workers: str, kv_transfer: dict[str, Any]) -> Iterator[str]:
    """The URL of a gateway in a process of its own, which sends turns round robin."""
    routing = {"method": "round_robin", "kv_transfer": kv_transfer}
    config = {"psrl": {"rollout_coordination": {"routing_strategy": routing}}}
    command = [COMMAND, "gateway", "--port", "0", "--json-ready", "--config", json.dumps(config)]
    for worker in workers:
        command += ["--worker", worker]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield f"http://127.0.0.1:{json.loads(process.stdout.readline())['port']}"
    finally:
        process.terminate()
        assert process.wait(40) == 0


class Line:
    """A TCP line to an engine that can be cut, and mended: who uses it finds the engine dead, others do not."""

    def __init__(self, port: int) -> None:
        self._to = port
        self._is_cut = False
        self._open: set[socket.socket] = set()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self) -> None:
        self._is_cut = True
        for one in list(self._open):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

    def mend(self) -> None:
        self._is_cut = False

    def close(self) -> None:
        self.cut()
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            if self._is_cut:
                near.close()
                continue
            far = socket.create_connection(("127.0.0.1", self._to), timeout=10)
            far.settimeout(None)
            self._open |= {near, far}
            for one, other in ((near, far), (far, near)):
                threading.Thread(target=self._carry, args=(one, other), daemon=True).start()

    def _carry(self, one: socket.socket, other: socket.socket) -> None:
        try:
            while data := one.recv(1 << 16):
                other.sendall(data)
        except OSError:
            pass  # cut
        with contextlib.suppress(OSError):
            other.shutdown(socket.SHUT_RDWR)
        self._open.discard(one)
        one.close()
