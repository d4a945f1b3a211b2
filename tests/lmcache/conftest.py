"""A real LMCache server, and engines that read and write it; skipped where LMCache is not installed.

PSRL_LMCACHE_DIR names the directory that `install.sh` filled. Without it LMCache is looked for in this
interpreter's own packages.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import httpx
import pytest
from support import NAMED, STRICT

from psrl_sglang.lab import processes
from psrl_sglang.lab.servers import Server, free_port
from psrl_sglang.lab.zygote import Zygote

EngineFactory = Callable[..., Server]

_SMALL_POOL = ("--max-total-tokens", "4096", "--page-size", "16", "--context-length", "4096")
_SERVER_ARGS = (
    *("--host", "127.0.0.1", "--http-host", "127.0.0.1", "--l1-size-gb", "1"),
    *("--chunk-size", "16", "--eviction-policy", "LRU", "--supported-transfer-mode", "auto"),
)
_START_S = 180.0


@pytest.fixture(scope="session")
def lmcache_env() -> dict[str, str]:
    """The environment of every process that imports LMCache."""
    directory = os.environ.get("PSRL_LMCACHE_DIR", "")
    paths = [path for path in (directory, os.environ.get("PYTHONPATH", "")) if path]
    # The usage report goes over the network and is on by default.
    env = {"PYTHONPATH": os.pathsep.join(paths), "LMCACHE_TRACK_USAGE": "false"}
    found = "import importlib.util, sys; sys.exit(importlib.util.find_spec('lmcache') is None)"
    if subprocess.run([sys.executable, "-c", found], env={**os.environ, **env}, timeout=60).returncode:
        pytest.skip("the server's interpreter cannot import lmcache: run install.sh, set PSRL_LMCACHE_DIR")
    return env


class LMCacheServer:
    """A running LMCache server; `stop` ends it."""

    def __init__(self, directory: Path, env: dict[str, str]) -> None:
        port, http_port = free_port(), free_port()
        main = "from lmcache.cli.main import main; main()"
        command = [sys.executable, "-c", main, "server", *_SERVER_ARGS]
        command += ["--port", str(port), "--http-port", str(http_port)]
        self.url = f"http://127.0.0.1:{http_port}"
        self.config = directory / "lmcache.yaml"
        self.config.write_text(f'mp_host: "tcp://127.0.0.1"\nmp_port: {port}\n')
        self._log_path = directory / "lmcache.log"
        with self._log_path.open("wb") as log:
            self._process = subprocess.Popen(
                command,
                env={**os.environ, **env},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            self._wait_healthy()
        except BaseException:
            self.stop()
            raise

    @contextmanager
    def frozen(self) -> Iterator[None]:
        """Meanwhile it answers nothing, and nothing that was sent is lost."""
        os.killpg(self._process.pid, signal.SIGSTOP)
        try:
            yield
        finally:
            os.killpg(self._process.pid, signal.SIGCONT)

    def status(self) -> dict[str, Any]:
        return httpx.get(f"{self.url}/status", timeout=30.0, trust_env=False).raise_for_status().json()

    def stop(self) -> None:
        # Collected after its group was killed, so the number is still its own.
        if self._process.returncode is None:
            processes.kill_group(self._process.pid)
            self._process.wait(timeout=30)

    def _wait_healthy(self) -> None:
        deadline = time.monotonic() + _START_S
        while True:
            ended = os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            tail = self._log_path.read_bytes()[-4000:].decode(errors="replace")
            assert ended is None, f"the LMCache server has ended; the end of its log:\n{tail}"
            try:
                if httpx.get(f"{self.url}/healthcheck", timeout=5.0, trust_env=False).status_code == 200:
                    return
            except httpx.TransportError:
                pass
            assert time.monotonic() < deadline, f"not up after {_START_S} s; the end of the log:\n{tail}"
            time.sleep(0.2)


@pytest.fixture(scope="session")
def lmcache(lmcache_env: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[LMCacheServer]:
    server = LMCacheServer(tmp_path_factory.mktemp("lmcache"), lmcache_env)
    yield server
    server.stop()


@pytest.fixture(scope="session")
def lmcache_zygote(lmcache_env: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Zygote]:
    """A zygote that sees LMCache's packages. The common one may hold other versions of them in memory."""
    with Zygote(log_path=tmp_path_factory.mktemp("lmcache-zygote") / "zygote.log", env=lmcache_env) as process:
        yield process


@pytest.fixture(scope="module")
def engine(
    lmcache: LMCacheServer,
    lmcache_env: dict[str, str],
    lmcache_zygote: Zygote,
    models: dict[int, Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[EngineFactory]:
    """Starts an engine, the one before it having ended: `engine(psrl_config=..., args=..., external=True)`.

    By default strict, on version "1", on the LMCache server; `psrl_config=None` is SGLang without the plugin.
    """
    logs, numbers = tmp_path_factory.mktemp("engines"), count()
    running: list[Server] = []

    def stop() -> None:
        for server in running:
            # A killed client would stay registered with the LMCache server.
            server.stop(grace_s=20.0)
        running.clear()

    def start(*, args: tuple[str, ...] = NAMED, psrl_config: Any = STRICT, external: bool = True) -> Server:
        stop()
        if external:
            args = ("--enable-lmcache", "--lmcache-config-file", str(lmcache.config), *args)
        server = Server(
            models[1],
            args=(*_SMALL_POOL, *args),
            psrl_config=psrl_config,
            env=lmcache_env,
            zygote=lmcache_zygote,
            log_path=logs / f"engine-{next(numbers)}.log",
        )
        running.append(server)
        return server

    yield start
    stop()
