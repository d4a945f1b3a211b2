"""Two engines, a controller and a gateway, for the demo and benchmarks of re-routing; an engine can be killed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from psrl_sglang.lab import processes
from psrl_sglang.lab.servers import Server, free_port
from psrl_sglang.lab.zygote import Zygote

ENGINES = 2
TRANSFER_TIMEOUT_MS = 5000
_READY_S = 30.0
_ENGINE_ARGS = ("--page-size", "16", "--context-length", "8192", "--chunked-prefill-size", "512")


@dataclass(frozen=True)
class Way:
    """One way to run the fleet. `max_version_lag` None is stock SGLang; `mode` None moves no KV."""

    key: str
    title: str
    max_version_lag: int | None
    mode: str | None = None
    flush: bool = False

    def settings(self, dram_gib: float) -> dict[str, Any] | None:
        """Of an engine, and of the gateway, which reads what concerns it; None for stock engines."""
        if self.max_version_lag is None:
            return None
        moves = self.mode is not None
        lmcache = {"enable": True, "offload_size_gb": dram_gib, "chunk_size": 64, "enable_p2p": moves}
        kv_transfer: dict[str, Any] = {"enable": moves, "transfer_timeout_ms": TRANSFER_TIMEOUT_MS}
        if self.mode is not None:
            kv_transfer["transfer_mode"] = self.mode
        return {
            "psrl": {
                "lmcache": lmcache | ({"p2p_transfer_channel": "auto"} if moves else {}),
                # A killed engine comes back from another checkpoint, and is of the same run.
                "sglang": {"max_version_lag": self.max_version_lag, "namespace": "demo"},
                "rollout_coordination": {
                    "routing_strategy": {"method": "round_robin", "kv_transfer": kv_transfer}
                },
            }
        }


class Fleet:
    """Owns its engines and its gateway until the context is left. `models[n]` are the weights of version n + 1."""

    def __init__(
        self, way: Way, models: Sequence[Path], zygote: Zygote, logs: Path, *, pool_tokens: int, dram_gib: float
    ) -> None:
        self.way = way
        self.models = models
        self._zygote = zygote
        self._logs = logs
        self._pool_tokens = pool_tokens
        self._settings = way.settings(dram_gib)
        self._ports = [free_port() for _ in range(ENGINES)]
        self._stack = ExitStack()
        self.engines: list[Server] = []
        self.url = ""

    def __enter__(self) -> Fleet:
        with ExitStack() as undo:
            undo.callback(self._stack.close)
            controller = self._start_controller()
            self._stack.callback(self._stop_engines)
            for number in range(ENGINES):
                self.engines.append(self._start(number, version=1))
            self._start_gateway(controller)
            undo.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def kill(self, number: int) -> None:
        """As a machine that is gone: nothing is closed."""
        processes.kill_group(self.engines[number].pid)

    def revive(self, number: int, version: int) -> None:
        """Start it again at its old address, with the weights of ``version``. Waits until it is healthy."""
        self.engines[number].stop(grace_s=0.0)
        self.engines[number] = self._start(number, version=version)

    def statuses(self) -> list[dict[str, Any]]:
        """Of the engines that answer; empty for stock ones."""
        if self._settings is None:
            return []
        found = []
        for engine in self.engines:
            try:
                found.append(engine.get("/psrl/v1/status", timeout_s=10.0).raise_for_status().json())
            except httpx.HTTPError:
                continue
        return found

    def _start(self, number: int, *, version: int) -> Server:
        args = (*_ENGINE_ARGS, "--max-total-tokens", str(self._pool_tokens), "--weight-version", str(version))
        return Server(
            self.models[(version - 1) % len(self.models)],
            args=args,
            psrl_config=self._settings,
            env={"OMP_NUM_THREADS": "1"},
            log_path=self._logs / f"{self.way.key}-engine{number}.log",
            port=self._ports[number],
            zygote=self._zygote,
        )

    def _start_controller(self) -> str:
        """Its URL; empty for stock engines. The engines' settings have its ports from now on."""
        if self._settings is None:
            return ""
        ready = self._command("controller", "--http-port", "0", "--pull-port", "0", "--reply-port", "0")
        ports = {"base": "http_port", "pull": "pull_port", "reply": "reply_port"}
        self._settings["psrl"]["lmcache"] |= {"controller_host": "127.0.0.1"} | {
            f"controller_{setting}_port": ready[port] for setting, port in ports.items()
        }
        return f"http://127.0.0.1:{ready['http_port']}"

    def _start_gateway(self, controller: str) -> None:
        command = ["gateway", "--port", "0"]
        for engine in self.engines:
            command += ["--worker", engine.url]
        if controller:
            command += ["--controller", controller]
        routing = {"psrl": {"rollout_coordination": {"routing_strategy": {"method": "round_robin"}}}}
        command += ["--config", json.dumps(self._settings or routing)]
        self.url = f"http://127.0.0.1:{self._command(*command)['port']}"

    def _command(self, *words: str) -> dict[str, Any]:
        """Start one of ours, which ends with the fleet; returns what it says once it listens."""
        command = [str(Path(sys.executable).with_name("psrl-sglang")), *words, "--json-ready"]
        log = self._stack.enter_context((self._logs / f"{self.way.key}-{words[0]}.log").open("w"))
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True, env=dict(os.environ))
        self._stack.callback(self._stop_command, process)
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line:
            raise RuntimeError(f"{words[0]} did not start; see {log.name}")
        return json.loads(line)

    @staticmethod
    def _stop_command(process: subprocess.Popen[str]) -> None:
        process.terminate()
        try:
            process.wait(_READY_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(_READY_S)

    def _stop_engines(self) -> None:
        for engine in self.engines:
            engine.stop(grace_s=0.0)
