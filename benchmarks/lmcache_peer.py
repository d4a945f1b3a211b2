"""An LMCache server and an SGLang engine on it, for comparisons."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import httpx

from psrl_sglang.lab import processes
from psrl_sglang.lab.servers import Server, free_port
from psrl_sglang.lab.zygote import Zygote

_START_S = 180.0


class LMCachePeer:
    """Its server, until the context is left. ``packages`` is the folder that tests/lmcache/install.sh filled."""

    def __init__(self, directory: Path, packages: Path, chunk_tokens: int) -> None:
        self._directory = directory
        paths = [str(packages), os.environ.get("PYTHONPATH", "")]
        self._env = {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "LMCACHE_TRACK_USAGE": "false"}
        port, self._http_port = free_port(), free_port()
        self._config = directory / "lmcache.yaml"
        self._config.write_text(f'mp_host: "tcp://127.0.0.1"\nmp_port: {port}\n')
        command = [sys.executable, "-c", "from lmcache.cli.main import main; main()", "server"]
        command += ["--host", "127.0.0.1", "--http-host", "127.0.0.1", "--l1-size-gb", "3"]
        command += ["--chunk-size", str(chunk_tokens), "--eviction-policy", "LRU"]
        command += [
            "--supported-transfer-mode",
            "auto",
            "--port",
            str(port),
            "--http-port",
            str(self._http_port),
            "--shm-name",  # several times as fast as the default, which sends KV through its socket
            f"psrl-peer-{port}",
        ]
        self._log_path = directory / "lmcache.log"
        with self._log_path.open("wb") as log:
            self._process = subprocess.Popen(
                command,
                env={**os.environ, **self._env},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        # Its own: the common one may hold other versions of LMCache's packages in memory.
        self._zygote = Zygote(log_path=directory / "lmcache-zygote.log", env=self._env)

    def engine(self, model: Path, args: tuple[str, ...]) -> Server:
        """A started engine on this server; the caller's."""
        return Server(
            model,
            args=(*args, "--enable-lmcache", "--lmcache-config-file", str(self._config)),
            env=self._env,
            zygote=self._zygote.__enter__(),
            log_path=self._directory / "lmcache-engine.log",
        )

    def tokens_per_s(self) -> dict[str, float]:
        """Its own account of how fast it stored and loaded, from its log."""
        rates = {}
        for way, verb in (("store", "Stored"), ("load", "Retrieved")):
            found = re.findall(rf"{verb} (\d+) tokens in ([\d.]+) seconds", self._log_path.read_text())
            rates[way] = sum(int(tokens) for tokens, _ in found) / sum(float(took_s) for _, took_s in found)
        return rates

    def __enter__(self) -> LMCachePeer:
        deadline = time.monotonic() + _START_S
        url = f"http://127.0.0.1:{self._http_port}/healthcheck"
        while True:
            try:
                if httpx.get(url, timeout=5.0, trust_env=False).status_code == 200:
                    return self
            except httpx.TransportError:
                pass
            if time.monotonic() > deadline or self._process.poll() is not None:
                self.__exit__()
                raise SystemExit(f"LMCache did not start:\n{self._log_path.read_text()[-3000:]}")
            time.sleep(0.2)

    def __exit__(self, *_: object) -> None:
        self._zygote.__exit__(None, None, None)
        if self._process.returncode is None:
            processes.kill_group(self._process.pid)
            self._process.wait(timeout=30)
