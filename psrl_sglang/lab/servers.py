"""A real SGLang server as a context manager, for demos, benchmarks and tests.

    with Server(model, log_path="server.log", psrl_config={...}) as server:
        first = server.generate(prompt, 16)
        server.update_weights(next_model, version="2")

It runs `sglang.launch_server` on the reference CPU platform in a process group of its own, started by this
process or, in seconds, forked from a `Zygote`.
"""

import json
import math
import os
import random
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import httpx

from psrl_sglang.lab import processes
from psrl_sglang.lab.zygote import PLATFORM, Zygote

_CPU_ARGS = (
    *("--device", "cpu", "--attention-backend", "torch_native", "--sampling-backend", "pytorch"),
    *("--dtype", "float32", "--sleep-on-idle", "--skip-server-warmup"),
)
_HOST = "127.0.0.1"
# Below the range that the kernel hands out for outgoing connections.
_PORTS = range(20000, 32000)
_PORT_TRIES = 100
_POLL_S = 0.1
_LOG_TAIL_BYTES = 6000
_FILL_PROMPT_TOKENS = 2048
_FILL_BATCH = 4
_FILL_SHARE = 1.25
_FILL_VOCAB = 256


class ServerError(Exception):
    """The server did not start, has ended, or answered with an error."""


@dataclass(frozen=True)
class Generation:
    """One finished request; `logprobs` are those of `output_ids`, empty when they were not asked for."""

    output_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    cached_tokens: int
    meta_info: Mapping[str, Any]


@dataclass(frozen=True)
class WeightUpdate:
    """What the server said to a weight update."""

    success: bool
    message: str


class Server:
    """Owns one SGLang server from construction to `stop`; requests may be sent from several threads."""

    def __init__(
        self,
        model_path: str | os.PathLike[str],
        *,
        log_path: str | os.PathLike[str],
        args: Sequence[str] = (),
        psrl_config: str | os.PathLike[str] | Mapping[str, Any] | None = None,
        env: Mapping[str, str] | None = None,
        port: int | None = None,
        zygote: Zygote | None = None,
        start_timeout_s: float = 240.0,
        request_timeout_s: float = 300.0,
    ) -> None:
        """Start a server and wait until it is healthy; raises ServerError with the end of its log.

        `args` are added to the command line, last, so that they win. `psrl_config` becomes `--psrl-config`: a
        file, or a mapping passed as JSON. `env` is added to this process's environment.
        """
        self.port = port if port is not None else free_port()
        self.url = f"http://{_HOST}:{self.port}"
        self.log_path = Path(log_path)
        self.model_path = str(model_path)
        self._stop_lock = threading.Lock()
        self._client = httpx.Client(base_url=self.url, timeout=request_timeout_s, trust_env=False)
        argv = ["--model-path", self.model_path, "--host", _HOST, "--port", str(self.port), *_CPU_ARGS]
        if psrl_config is not None:
            is_mapping = isinstance(psrl_config, Mapping)
            argv += ["--psrl-config", json.dumps(psrl_config) if is_mapping else str(psrl_config)]
        environment = {**os.environ, "SGLANG_PLATFORM": PLATFORM, **(env or {})}
        self.log_path.write_bytes(b"")
        start = _Child if zygote is None else _Fork
        self._process = start([*argv, *args], environment, self.log_path, zygote)
        try:
            self._wait_healthy(start_timeout_s)
        except BaseException:
            self.stop(grace_s=0.0)
            raise

    @property
    def pid(self) -> int:
        """The server's main process, leader of its process group."""
        return self._process.pid

    def exit_code(self) -> int | None:
        """None while the server runs, else its exit code (negative: the signal)."""
        return self._process.poll()

    def log_tail(self) -> str:
        return self.log_path.read_bytes()[-_LOG_TAIL_BYTES:].decode(errors="replace")

    def get(self, path: str, *, timeout_s: float | None = None, **options: Any) -> httpx.Response:
        """GET a path; raises httpx errors for connections and time-outs, none for a status."""
        return self._client.get(path, **_timeout(timeout_s), **options)

    def post(
        self,
        path: str,
        body: Mapping[str, Any] | None = None,
        *,
        timeout_s: float | None = None,
        **options: Any,
    ) -> httpx.Response:
        """POST JSON to a path; raises httpx errors for connections and time-outs, none for a status."""
        return self._client.post(path, json=body, **_timeout(timeout_s), **options)

    def generate(
        self, input_ids: Sequence[int], max_new_tokens: int, *, logprobs: bool = True, **extra: Any
    ) -> Generation:
        """Generate greedily, exactly `max_new_tokens` tokens; `extra` are further fields of `/generate`.

        `extra["headers"]` goes into the HTTP headers and `extra["sampling_params"]` over the defaults.
        """
        headers = extra.pop("headers", None)
        sampling = {"temperature": 0, "max_new_tokens": max_new_tokens, "ignore_eos": True}
        body = {
            "input_ids": list(input_ids),
            "sampling_params": {**sampling, **extra.pop("sampling_params", {})},
            "return_logprob": logprobs,
            **extra,
        }
        reply = _json(self.post("/generate", body, headers=headers))
        meta = reply["meta_info"]
        return Generation(
            output_ids=tuple(reply["output_ids"]),
            logprobs=tuple(entry[0] for entry in meta.get("output_token_logprobs") or ()),
            cached_tokens=meta["cached_tokens"],
            meta_info=meta,
        )

    def prompt_logprobs(self, input_ids: Sequence[int], *, start: int = 0) -> tuple[float | None, ...]:
        """The log-probability of every prompt token from `start` on; the very first has none.

        SGLang computes the tokens from `start` on, so a cache hit covers at most those before it.
        """
        generation = self.generate(input_ids, 1, logprob_start_len=start)
        return tuple(entry[0] for entry in generation.meta_info["input_token_logprobs"])

    def update_weights(
        self,
        path: str | os.PathLike[str],
        *,
        version: str | None = None,
        flush_cache: bool = True,
        **extra: Any,
    ) -> WeightUpdate:
        """Load the weights of another model directory; a refusal is an answer, not an error."""
        body = {"model_path": str(path), "flush_cache": flush_cache, **extra}
        if version is not None:
            body["weight_version"] = version
        reply = self.post("/update_weights_from_disk", body)
        if reply.status_code not in (200, 400):
            raise ServerError(f"/update_weights_from_disk answered {reply.status_code}: {reply.text[:500]}")
        return WeightUpdate(success=reply.json()["success"], message=reply.json()["message"])

    def pause(self, mode: str = "in_place") -> None:
        """Stop generating: `abort`, `in_place` or `retract` the running requests."""
        _json(self.post("/pause_generation", {"mode": mode}))

    def resume(self) -> None:
        _json(self.post("/continue_generation", {}))

    def flush_cache(self, *, timeout_s: float = 10.0) -> bool:
        """Whether the device cache was flushed; the server waits up to `timeout_s` for running requests."""
        reply = self.post("/flush_cache", params={"timeout": timeout_s}, timeout_s=timeout_s + 30)
        if reply.status_code not in (200, 400):
            raise ServerError(f"/flush_cache answered {reply.status_code}: {reply.text[:500]}")
        return reply.status_code == 200

    def info(self) -> dict[str, Any]:
        """`/server_info`: the server's arguments and limits."""
        return _json(self.get("/server_info"))

    def overwrite_pool(self) -> int:
        """Write random KV over the whole device pool and return the number of tokens computed.

        Only after this does a hit prove that KV came from elsewhere: a flush frees slots but leaves what they
        hold. Flush first if what is cached now should not compete for the slots.
        """
        info = self.info()
        pool_tokens, page = info["max_total_num_tokens"], info["page_size"]
        source = random.Random(secrets.randbits(64))
        computed, target = 0, math.ceil(_FILL_SHARE * pool_tokens)
        while computed < target:
            # Uneven whole pages: SGLang reuses the lowest free slots first, and equal prompts would leave a
            # remainder of high ones untouched for ever.
            longest = max(min(_FILL_PROMPT_TOKENS, pool_tokens // 8) // page, 1)
            lengths = [page * source.randint(max(longest // 2, 1), longest) for _ in range(_FILL_BATCH)]
            prompts = [[source.randrange(_FILL_VOCAB) for _ in range(length)] for length in lengths]
            sampling = {"temperature": 0, "max_new_tokens": 1, "ignore_eos": True}
            _json(self.post("/generate", {"input_ids": prompts, "sampling_params": sampling}))
            computed += sum(lengths)
        return computed

    def kill(self) -> None:
        """End the server at once, as a crash does; `stop` is still to be called."""
        self._process.kill()

    def stop(self, *, grace_s: float = 15.0, timeout_s: float = 20.0) -> None:
        """End the server and everything it started; may be called again.

        SIGTERM, and SIGKILL for the group after `grace_s`; raises ProcessTimeout if that does not end it.
        """
        with self._stop_lock:
            self._client.close()
            if self._process.poll() is None and grace_s > 0:
                self._process.terminate()
                self._wait_exit(grace_s)
            if self._process.poll() is None:
                self._process.kill()
                if not self._wait_exit(timeout_s):
                    raise processes.ProcessTimeout(f"server {self.pid} outlived SIGKILL by {timeout_s} s")
            processes.wait_group_gone(self.pid, timeout_s=timeout_s)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _wait_exit(self, timeout_s: float) -> bool:
        deadline = time.monotonic() + timeout_s
        while self._process.poll() is None:
            if time.monotonic() > deadline:
                return False
            time.sleep(_POLL_S)
        return True

    def _wait_healthy(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while True:
            code = self._process.poll()
            if code is not None:
                raise ServerError(f"the server exited with code {code}; the end of its log:\n{self.log_tail()}")
            try:
                if self.get("/health", timeout_s=5.0).status_code == 200:
                    return
            except httpx.TransportError:
                pass
            if time.monotonic() > deadline:
                raise ServerError(f"not healthy after {timeout_s} s; the end of the log:\n{self.log_tail()}")
            time.sleep(_POLL_S)


class _Child:
    """A genuine `python -m sglang.launch_server`, our own child."""

    def __init__(self, argv: Sequence[str], env: Mapping[str, str], log_path: Path, _: Zygote | None) -> None:
        with log_path.open("ab") as log:
            self._popen = subprocess.Popen(
                [sys.executable, "-m", "sglang.launch_server", *argv],
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.pid = self._popen.pid
        self._lock = threading.Lock()

    def poll(self) -> int | None:
        with self._lock:
            # Not Popen.poll: it would collect the leader before the rest of its group is killed.
            if self._popen.returncode is None:
                self._popen.returncode = processes.reap_group(self.pid)
            return self._popen.returncode

    def terminate(self) -> None:
        self._end(lambda: os.kill(self.pid, signal.SIGTERM))

    def kill(self) -> None:
        self._end(lambda: processes.kill_group(self.pid))

    def _end(self, act: Callable[[], None]) -> None:
        with self._lock:
            # Not collected yet, so the number is still the server's.
            if self._popen.returncode is None:
                act()


class _Fork:
    """A server forked from a zygote, which alone may collect and signal it."""

    def __init__(
        self, argv: Sequence[str], env: Mapping[str, str], log_path: Path, zygote: Zygote | None
    ) -> None:
        assert zygote is not None
        self._zygote = zygote
        self.pid = zygote.fork(argv, env=env, log_path=log_path)
        self._code: int | None = None

    def poll(self) -> int | None:
        if self._code is None:
            self._code = self._zygote.poll(self.pid)
        return self._code

    def terminate(self) -> None:
        self._zygote.terminate(self.pid)

    def kill(self) -> None:
        self._zygote.kill(self.pid)


def free_port() -> int:
    """A port that nobody listened on a moment ago."""
    for _ in range(_PORT_TRIES):
        port = secrets.choice(_PORTS)
        with socket.socket() as probe:
            try:
                probe.bind((_HOST, port))
            except OSError:
                continue
            return port
    raise ServerError(f"no free port among {_PORT_TRIES} tried in {_PORTS}")


def _timeout(timeout_s: float | None) -> dict[str, float]:
    return {} if timeout_s is None else {"timeout": timeout_s}


def _json(reply: httpx.Response) -> Any:
    if reply.status_code != 200:
        raise ServerError(f"{reply.request.url.path} answered {reply.status_code}: {reply.text[:2000]}")
    return reply.json() if reply.content else None
