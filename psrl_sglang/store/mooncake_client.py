"""Mooncake Store as a remote store, through Mooncake's own Python client (0.3.13 or later).

    mooncake://<master>:<port>?protocol=tcp&segment_gb=4&buffer_gb=0.25&metadata=P2PHANDSHAKE&device=&host=

`segment_gb` is the memory that this process gives to the store, 0 by default: then others must give some, for
example a `mooncake_client` on each machine. `buffer_gb` is the client's own send buffer and must hold a chunk,
`host` the address under which others reach this process, by default the one that it reaches the master from.

Mooncake has no expiry; it evicts what was used least recently once its memory is full. Its calls have no
time-out of ours, so each runs in a thread of its own, which is left to itself when the time is up. Such a thread
may still write into its buffer, so it never gets a page of the arena, and its buffer is not used again before it
has ended.

`setup`, unlike all that follows it, holds Python's lock: without a master the whole process would stand still for
90 s. So it is only called when the master accepts connections, and unless the environment says otherwise it tries
once (`MC_STORE_CLIENT_SETUP_RETRIES`) and waits no longer than our time-out (`MC_RPC_TIMEOUT_MS`). What is left is
a master that accepts and does not answer: each try to set up then stops the process for that long.
"""

from __future__ import annotations

import ctypes
import importlib
import mmap
import os
import queue
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager
from typing import Any, TypeVar
from urllib.parse import parse_qs, urlsplit

from psrl_sglang.store.chunk import Buffer
from psrl_sglang.store.remote_client import RemoteError, masked

# Not an import statement: a type checker need not have the package.
_mooncake: Any = importlib.import_module("mooncake.store")

T = TypeVar("T")

_CALLS = 4  # at the same time, those that hang included
_SMALL_BYTES = 64
_SWEEP_S = 60.0
_CLOSE_S = 5.0
_DEFAULTS = {
    "protocol": "tcp",
    "metadata": "P2PHANDSHAKE",
    "device": "",
    "host": "",
    "segment_gb": "0",
    "buffer_gb": "0.25",
}

# Error codes of Mooncake (types.h). From -100 to -799 they are answers of the master.
_NO_SPACE = -200
_WRONG_SIZE = -600
_NOT_THERE = (-703, -704, -712)  # not written to the end, absent, gone with the process that held it
_REFUSED = range(-799, -99)


class MooncakeClient:
    """A `RemoteClient`. Names are replaced and deleted whoever may be reading them: a reader checks its bytes."""

    def __init__(self, url: str, *, timeout_s: float) -> None:
        self._url = masked(url)
        self._timeout_s = timeout_s
        try:
            options = _options(url)
            self._host = options["host"]
            self._master = options["master"]
            self._setup = (
                options["metadata"],
                int(float(options["segment_gb"]) * 1e9),
                int(float(options["buffer_gb"]) * 1e9),
                options["protocol"],
                options["device"],
                self._master,
            )
        except ValueError as error:
            raise ValueError(f"remote store {self._url!r}: {error}") from error
        os.environ.setdefault("MC_STORE_CLIENT_SETUP_RETRIES", "1")
        os.environ.setdefault("MC_RPC_TIMEOUT_MS", str(max(1, round(timeout_s * 1000))))
        self._store: Any = _mooncake.MooncakeDistributedStore()
        self._ready = False
        self._setup_lock = threading.Lock()
        self._idle: queue.LifoQueue[_Staging] = queue.LifoQueue()
        for _ in range(_CALLS):
            self._idle.put(_Staging())

    @property
    def url(self) -> str:
        return self._url

    def put(self, items: Sequence[tuple[str, Sequence[Buffer]]]) -> None:
        values = [(name, b"".join(buffers)) for name, buffers in items]

        def run(store: Any, staging: _Staging) -> None:
            (name, value), *others = values
            self._check(store.upsert(name, value), name)
            if others:
                self._check(store.upsert_batch([n for n, _ in others], [v for _, v in others]), others[0][0])

        if values:
            with self._call(run):
                pass

    def get_small(self, names: Sequence[str]) -> list[bytes | None]:
        if not names:
            return []
        sizes = [_SMALL_BYTES] * len(names)

        def run(store: Any, staging: _Staging) -> list[int]:
            at = staging.address(store, len(names) * _SMALL_BYTES)
            return store.batch_get_into(list(names), [at + i * _SMALL_BYTES for i in range(len(names))], sizes)

        with self._call(run) as (codes, staging):
            return [
                bytes(staging.memory[i * _SMALL_BYTES : i * _SMALL_BYTES + code])
                if self._exists(code, name)
                else None
                for i, (code, name) in enumerate(zip(codes, names, strict=True))
            ]

    def read(self, name: str, offset_bytes: int, size_bytes: int) -> bytes | None:
        def run(store: Any, staging: _Staging) -> int:
            code = _read_range(store, staging, name, offset_bytes, size_bytes)
            if code != _WRONG_SIZE:
                return code
            whole_bytes = store.get_size(name)
            if whole_bytes <= offset_bytes:
                return min(whole_bytes, 0)
            return _read_range(store, staging, name, offset_bytes, whole_bytes - offset_bytes)

        with self._call(run) as (code, staging):
            return bytes(staging.memory[:code]) if self._exists(code, name) else None

    def read_into(self, name: str, offset_bytes: int, into: Sequence[memoryview]) -> bool:
        size_bytes = sum(view.nbytes for view in into)

        def run(store: Any, staging: _Staging) -> int:
            return _read_range(store, staging, name, offset_bytes, size_bytes)

        with self._call(run) as (code, staging):
            if not self._exists(code, name):
                return False
            at = 0
            for view in into:
                view[:] = staging.memory[at : at + view.nbytes]
                at += view.nbytes
            return True

    def delete(self, names: Sequence[str]) -> None:
        def run(store: Any, staging: _Staging) -> list[int]:
            return store.batch_remove(list(names), True)

        if names:
            with self._call(run) as (codes, _):
                for code, name in zip(codes, names, strict=True):
                    self._exists(code, name)

    def delete_matching(self, prefix: str) -> int:
        def run(store: Any, staging: _Staging) -> int:
            return store.remove_by_regex(f"^{re.escape(prefix)}.*", True)

        with self._call(run, timeout_s=_SWEEP_S) as (count, _):
            return count if self._exists(count, prefix) else 0

    def ping(self) -> None:
        # Mooncake's own health check asks nobody.
        self.get_small(["ping"])

    def close(self) -> None:
        ends_s = time.monotonic() + _CLOSE_S
        try:
            for _ in range(_CALLS):
                self._idle.get(timeout=max(ends_s - time.monotonic(), 0.0))
        except queue.Empty:
            return  # a call hangs in there, and would find its connection destroyed
        closing = threading.Thread(target=self._store.close, name="mooncake-close", daemon=True)
        closing.start()
        closing.join(_CLOSE_S)

    def _exists(self, code: int, name: str) -> bool:
        if code in (*_NOT_THERE, _WRONG_SIZE):
            return False
        self._check(code, name)
        return True

    def _check(self, code: int, name: str) -> None:
        if code == _NO_SPACE:
            raise RemoteError(f"{self._url}: no memory left; add segment_gb= or clients", reason="refused")
        if code < 0:
            reason = "refused" if code in _REFUSED else "unreachable"
            raise RemoteError(f"{self._url}: error {code} for {name}", reason=reason)

    @contextmanager
    def _call(self, run: Callable[[Any, _Staging], T], timeout_s: float = 0.0) -> Iterator[tuple[T, _Staging]]:
        """Run it in a thread until the time-out; its staging buffer is the body's until the body ends."""
        timeout_s = timeout_s or self._timeout_s
        ends_s = time.monotonic() + timeout_s
        try:
            staging = self._idle.get(timeout=timeout_s)
        except queue.Empty:
            raise RemoteError(f"{self._url}: {_CALLS} calls hang", reason="timeout") from None
        done: Future[T] = Future()

        def work() -> None:
            result: Any = None
            error = None
            try:
                result = run(self._connected(done), staging)
            except RemoteError as caught:
                error = caught
            except Exception as caught:  # noqa: BLE001 - whatever a binding raises; it belongs to the caller
                error = RemoteError(f"{self._url}: {type(caught).__name__}: {caught}")
            if not done.set_running_or_notify_cancel():
                self._idle.put(staging)
            elif error is not None:
                done.set_exception(error)
            else:
                done.set_result(result)

        threading.Thread(target=work, name="mooncake-call", daemon=True).start()
        try:
            wait([done], max(ends_s - time.monotonic(), 0.0))
        finally:
            # From here on the buffer is the thread's if it has not ended, and else ours.
            abandoned = done.cancel()
        if abandoned:
            raise RemoteError(f"{self._url}: no answer in {timeout_s} s", reason="timeout")
        try:
            yield done.result(), staging
        finally:
            self._idle.put(staging)

    def _connected(self, done: Future[Any]) -> Any:
        """The store, set up by the first call that comes here; those who come meanwhile wait for it."""
        with self._setup_lock:
            if not self._ready:
                if done.cancelled():
                    raise RemoteError(f"{self._url}: gave up", reason="timeout")
                address = self._try_master()
                code = self._store.setup(self._host or address, *self._setup)
                if code:
                    raise RemoteError(f"{self._url}: setup failed with {code}")
                self._ready = True
        return self._store

    def _try_master(self) -> str:
        """Raise unless the master accepts a connection. The address from which it was made."""
        host, port = self._master.rsplit(":", 1)
        try:
            with socket.create_connection((host, int(port)), timeout=self._timeout_s) as probe:
                return probe.getsockname()[0]
        except OSError as error:
            raise RemoteError(f"{self._url}: {error}") from error


class _Staging:
    """Memory that Mooncake knows, as it must for a transfer into it."""

    def __init__(self) -> None:
        self.memory = memoryview(b"")
        self._address = 0

    def address(self, store: Any, size_bytes: int) -> int:
        """Of at least so many bytes."""
        if size_bytes > self.memory.nbytes:
            if self._address:
                store.unregister_buffer(self._address)
            pages = mmap.mmap(-1, 1 << (size_bytes - 1).bit_length())
            address = ctypes.addressof(ctypes.c_char.from_buffer(pages))
            if store.register_buffer(address, len(pages)):
                raise RemoteError(f"Mooncake would not register {len(pages)} bytes")
            self.memory, self._address = memoryview(pages), address
        return self._address


def _read_range(store: Any, staging: _Staging, name: str, offset_bytes: int, size_bytes: int) -> int:
    """Into the beginning of the staging buffer. The bytes read, or an error code."""
    at = staging.address(store, size_bytes)
    return store.get_into_ranges([at], [[name]], [[[0]]], [[[offset_bytes]]], [[[size_bytes]]])[0][0][0]


def _options(url: str) -> dict[str, str]:
    """The query, and the address of the master under "master"."""
    parts = urlsplit(url)
    if not parts.hostname or not parts.port:
        raise ValueError("expected mooncake://<master>:<port>")
    given = {name: values[-1] for name, values in parse_qs(parts.query, keep_blank_values=True).items()}
    unknown = sorted(given.keys() - _DEFAULTS.keys())
    if unknown:
        raise ValueError(f"unknown {', '.join(unknown)}; known are {', '.join(_DEFAULTS)}")
    return _DEFAULTS | given | {"master": f"{parts.hostname}:{parts.port}"}
