"""A real LMCache server, and engines that read and write it; skipped where LMCache is not installed.

PSRL_LMCACHE_DIR names the directory that `install.sh` filled. Without it LMCache is looked for in this
interpreter's own packages.
"""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import httpx
import pytest
from support import NAMED, STRICT, assert_same

from psrl_sglang.lab import processes
from psrl_sglang.lab.servers import Generation, Server, free_port
from psrl_sglang.lab.zygote import Zygote

EngineFactory = Callable[..., AbstractContextManager[Server]]

# What an engine answered with the weights of a seed: (seed, prompt, answer).
Claim = tuple[int, list[int], Generation]

CHUNK_TOKENS = 16
_SMALL_POOL = ("--max-total-tokens", "4096", "--page-size", "16", "--context-length", "4096")
_SERVER_ARGS = (
    *("--host", "127.0.0.1", "--http-host", "127.0.0.1", "--l1-size-gb", "1"),
    *("--chunk-size", str(CHUNK_TOKENS), "--eviction-policy", "LRU", "--supported-transfer-mode", "auto"),
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
        pytest.skip(f"{sys.executable} cannot import lmcache; run tests/lmcache/install.sh, set PSRL_LMCACHE_DIR")
    return env


@pytest.fixture(scope="session")
def lmcache_config(lmcache_env: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A running LMCache server, as the file that `--lmcache-config-file` takes."""
    directory = tmp_path_factory.mktemp("lmcache")
    port, http_port = free_port(), free_port()
    main = "from lmcache.cli.main import main; main()"
    command = [sys.executable, "-c", main, "server", *_SERVER_ARGS]
    command += ["--port", str(port), "--http-port", str(http_port)]
    log_path = directory / "lmcache.log"
    with log_path.open("wb") as log:
        process = subprocess.Popen(
            command,
            env={**os.environ, **lmcache_env},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        _wait_healthy(process, f"http://127.0.0.1:{http_port}/healthcheck", log_path)
        config = directory / "lmcache.yaml"
        config.write_text(f'mp_host: "tcp://127.0.0.1"\nmp_port: {port}\n')
        yield config
    finally:
        if process.returncode is None:
            processes.kill_group(process.pid)
            process.wait(timeout=30)


@pytest.fixture(scope="session")
def lmcache_zygote(lmcache_env: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Zygote]:
    """A zygote that sees LMCache's packages. The common one may hold other versions of them in memory."""
    with Zygote(log_path=tmp_path_factory.mktemp("lmcache-zygote") / "zygote.log", env=lmcache_env) as process:
        yield process


@pytest.fixture
def engine(
    lmcache_config: Path,
    lmcache_env: dict[str, str],
    lmcache_zygote: Zygote,
    models: dict[int, Path],
    tmp_path: Path,
) -> EngineFactory:
    """Starts an engine on the LMCache server: `with engine(psrl_config=..., args=...)`, by default strict, on
    version "1"; `psrl_config=None` is an SGLang without the plugin."""
    numbers = count()

    @contextmanager
    def start(*, args: tuple[str, ...] = NAMED, psrl_config: Any = STRICT) -> Iterator[Server]:
        lmcache = ("--enable-lmcache", "--lmcache-config-file", str(lmcache_config))
        server = Server(
            models[1],
            args=(*_SMALL_POOL, *lmcache, *args),
            psrl_config=psrl_config,
            env=lmcache_env,
            zygote=lmcache_zygote,
            log_path=tmp_path / f"engine-{next(numbers)}.log",
        )
        try:
            yield server
        finally:
            # A killed client would stay registered with the LMCache server.
            server.stop(grace_s=20.0)

    return start


@pytest.fixture
def assert_never_stale(
    lmcache_env: dict[str, str], lmcache_zygote: Zygote, models: dict[int, Path], tmp_path: Path
) -> Callable[[list[Claim]], None]:
    """Checks claims against an engine without any cache; called once the engine that made them has ended."""

    def check(claims: list[Claim]) -> None:
        options = {"env": lmcache_env, "zygote": lmcache_zygote, "log_path": tmp_path / "reference.log"}
        with Server(models[1], args=(*_SMALL_POOL, "--disable-radix-cache"), **options) as reference:
            for seed in sorted({seed for seed, _, _ in claims}):
                assert reference.update_weights(models[seed]).success
                for _, asked, answer in (claim for claim in claims if claim[0] == seed):
                    assert_same(answer, reference.generate(asked, len(answer.output_ids)))

    return check


def _wait_healthy(process: subprocess.Popen[bytes], url: str, log_path: Path) -> None:
    deadline = time.monotonic() + _START_S
    while True:
        ended = process.poll()
        tail = log_path.read_bytes()[-4000:].decode(errors="replace")
        assert ended is None, f"the LMCache server exited with code {ended}; the end of its log:\n{tail}"
        try:
            if httpx.get(url, timeout=5.0, trust_env=False).status_code == 200:
                return
        except httpx.TransportError:
            pass
        assert time.monotonic() < deadline, f"no LMCache server after {_START_S} s; the end of its log:\n{tail}"
        time.sleep(0.2)
