"""A process that has SGLang imported already and forks servers: ready in seconds instead of a minute.

`Zygote` is the owner's end. The other end is `python -m psrl_sglang.lab.zygote`, which imports SGLang, then
waits on the socket it was born with. A server forked from it runs `sglang.launch_server` as its main module
in its own session, with the argv, environment, working directory and log file of the request, and loads its
plugins itself; so do its children (`nursery.py`). What differs from a genuine start: variables that SGLang
or torch read while they are imported keep the zygote's value. `SGLANG_PLATFORM` is one, so a server that
asks for another platform is refused.

The zygote serves one owner, and ends with it: when the owner's end of the socket closes, however that
happens, every server is killed and the zygote exits.
"""

import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from psrl_sglang.lab import nursery, processes

PLATFORM = "psrl_cpu"
_PRELOAD = (
    "sglang.launch_server",
    "sglang.srt.entrypoints.http_server",
    "sglang.srt.managers.scheduler",
    "sglang.srt.managers.detokenizer_manager",
    "sglang.srt.models.registry",
    "sglang.srt.layers.attention.torch_native_backend",
    "sglang.srt.mem_cache.memory_pool_host",
    "sglang.srt.mem_cache.unified_radix_cache",
    "sglang.srt.disaggregation.decode",
    "sglang.srt.disaggregation.prefill",
    "transformers.models.qwen3",
)
_REAP_PERIOD_S = 1.0
_REPLY_TIMEOUT_S = 60.0
_LOG_TAIL_BYTES = 4000


class ZygoteError(Exception):
    """The zygote did not start, has ended, or refused a request."""


class Zygote:
    """Owns a zygote process and every server forked from it until `stop`; safe to use from threads."""

    def __init__(
        self,
        *,
        log_path: str | os.PathLike[str],
        env: Mapping[str, str] | None = None,
        start_timeout_s: float = 180.0,
    ) -> None:
        """Start the process and wait until SGLang is imported; raises ZygoteError with the log's tail."""
        self._log_path = Path(log_path)
        self._lock = threading.Lock()
        self._socket, theirs = socket.socketpair()
        environment = {**os.environ, "SGLANG_PLATFORM": PLATFORM, **(env or {})}
        with theirs, self._log_path.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", __name__, str(theirs.fileno())],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        self._replies = self._socket.makefile("r", encoding="utf-8")
        self._socket.settimeout(start_timeout_s)
        try:
            self._read_reply()
        except ZygoteError:
            self.stop()
            raise
        self._socket.settimeout(_REPLY_TIMEOUT_S)

    @property
    def pid(self) -> int:
        return self._process.pid

    def fork(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str],
        log_path: str | os.PathLike[str],
        cwd: str | os.PathLike[str] | None = None,
    ) -> int:
        """Start a server with the arguments of `sglang.launch_server` and exactly this environment.

        Returns its process id, which is its group's as well. The caller polls until it has ended.
        """
        if env.get("SGLANG_PLATFORM") != PLATFORM:
            raise ZygoteError(
                f"a forked server runs on {PLATFORM}, got SGLANG_PLATFORM={env.get('SGLANG_PLATFORM')}"
            )
        request = {
            "argv": list(argv),
            "env": dict(env),
            "log_path": str(Path(log_path).absolute()),
            "cwd": str(Path(cwd or Path.cwd()).absolute()),
        }
        return self._request("fork", **request)

    def poll(self, pid: int) -> int | None:
        """The exit code of a forked server (negative: the signal), None while it runs.

        Once there is a code, the rest of the server's group is killed and the number no longer its own.
        """
        return self._request("poll", pid=pid)

    def terminate(self, pid: int) -> None:
        """Ask a forked server to end; does nothing when it has ended."""
        self._request("terminate", pid=pid)

    def kill(self, pid: int) -> None:
        """Kill a forked server and everything it started; does nothing when it has ended."""
        self._request("kill", pid=pid)

    def stop(self, *, timeout_s: float = 20.0) -> None:
        """Kill every server and end the zygote; may be called again."""
        self._socket.close()
        self._replies.close()
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(timeout_s)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _request(self, operation: str, **arguments: Any) -> Any:
        message = json.dumps({"operation": operation, **arguments}) + "\n"
        with self._lock:
            try:
                self._socket.sendall(message.encode())
            except OSError as error:
                raise ZygoteError(f"the zygote has ended ({error}){self._tail()}") from error
            return self._read_reply()

    def _read_reply(self) -> Any:
        try:
            line = self._replies.readline()
        except OSError as error:
            raise ZygoteError(f"no answer from the zygote ({error!r}){self._tail()}") from error
        if not line:
            raise ZygoteError(f"the zygote has ended{self._tail()}")
        reply = json.loads(line)
        if "error" in reply:
            raise ZygoteError(reply["error"])
        return reply["result"]

    def _tail(self) -> str:
        tail = self._log_path.read_bytes()[-_LOG_TAIL_BYTES:].decode(errors="replace")
        return f"; the end of {self._log_path}:\n{tail}"


class _Nest:
    """The zygote's own side: forks servers and collects them."""

    def __init__(self, owner: socket.socket) -> None:
        self._owner = owner
        self._running: set[int] = set()
        self._codes: dict[int, int] = {}

    def serve(self) -> None:
        """Answer the owner until it is gone, then leave nothing running."""
        requests = self._owner.makefile("r", encoding="utf-8")
        self._reply({"result": "ready"})
        while True:
            # The owner waits for each answer before it asks again, so a line never hides in the buffer.
            readable, _, _ = select.select([self._owner], [], [], _REAP_PERIOD_S)
            self._reap()
            if not readable:
                continue
            try:
                line = requests.readline()
            except OSError:
                line = ""
            if not line:
                break
            self._reply(self._answer(json.loads(line)))
        for pid in self._running:
            processes.kill_group(pid)
        deadline = time.monotonic() + _REPLY_TIMEOUT_S
        while self._running and time.monotonic() < deadline:
            time.sleep(0.05)
            self._reap()

    def _answer(self, request: dict[str, Any]) -> dict[str, Any]:
        operation = request.pop("operation")
        if operation == "fork":
            return {"result": self._fork(**request)}
        pid = request["pid"]
        if pid not in self._running and pid not in self._codes:
            return {"error": f"process {pid} is no server of this zygote"}
        # While it is not collected, the number is still the server's.
        if operation == "terminate" and pid in self._running:
            os.kill(pid, signal.SIGTERM)
        if operation == "kill" and pid in self._running:
            processes.kill_group(pid)
        return {"result": self._codes.get(pid) if operation == "poll" else None}

    def _fork(self, argv: list[str], env: dict[str, str], log_path: str, cwd: str) -> int:
        pid = os.fork()
        if pid == 0:
            self._owner.close()
            nursery.run_and_exit(lambda: _become_server(argv, env, log_path, cwd))
        self._running.add(pid)
        return pid

    def _reap(self) -> None:
        for pid in list(self._running):
            code = processes.reap_group(pid)
            if code is not None:
                self._running.remove(pid)
                self._codes[pid] = code

    def _reply(self, reply: dict[str, Any]) -> None:
        try:
            self._owner.sendall((json.dumps(reply) + "\n").encode())
        except OSError:
            # The owner is gone; the next read says so and ends the loop.
            return


def _become_server(argv: list[str], env: dict[str, str], log_path: str, cwd: str) -> None:
    os.setsid()
    nursery.die_with_parent()
    log = os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for stream in (1, 2):
        os.dup2(log, stream)
    os.close(log)
    os.chdir(cwd)
    nursery.apply_environment(env)
    gc.enable()
    nursery.install()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.argv = ["sglang.launch_server", *argv]
    sys.modules.pop("sglang.launch_server", None)
    runpy.run_module("sglang.launch_server", run_name="__main__", alter_sys=True)


def main() -> None:
    owner = socket.socket(fileno=int(sys.argv[1]))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for name in _PRELOAD:
        importlib.import_module(name)
    # Imports only: torch's thread pools must not exist at a fork. (OpenBLAS's do, and are made for it.)
    gc.collect()
    gc.freeze()
    _Nest(owner).serve()


if __name__ == "__main__":
    main()
