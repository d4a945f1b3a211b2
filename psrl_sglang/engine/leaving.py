"""Tells the engine's HTTP processes which sessions' KV another engine took."""

from __future__ import annotations

import tempfile
import threading
from pathlib import Path

import zmq


class Leaving:
    """Owns its socket. ``tell`` on any thread. Who does not listen misses it: a hint, not a record."""

    def __init__(self) -> None:
        self.address = ""
        self._lock = threading.Lock()
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._socket: zmq.Socket[bytes] | None = None

    def open(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="psrl-")
        self.address = f"ipc://{Path(self._folder.name) / 'left'}"
        self._context = zmq.Context(io_threads=1)
        self._socket = self._context.socket(zmq.PUB)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.bind(self.address)

    def tell(self, session: str) -> None:
        with self._lock:
            if self._socket is not None:
                self._socket.send(session.encode(), flags=zmq.NOBLOCK)

    def close(self) -> None:
        with self._lock:
            if self._socket is not None:
                self._socket.close()
                self._socket = None
        if self._context is not None:
            self._context.term()
        if self._folder is not None:
            self._folder.cleanup()
