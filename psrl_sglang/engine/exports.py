"""Device-only KV to DRAM, for a move: asked for on a move worker's thread, done on the scheduler's.

The request travels as a command into the scheduler's own input socket, so that all ranks handle it at the same
step, idle, busy or paused. Only the first rank has that socket; the workers of the others, which are told of the
same move, wait until the command comes by.
"""

from __future__ import annotations

import logging
import tempfile
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

import zmq
from sglang.srt.managers.io_struct import sock_send

from psrl_sglang.engine.command_types import PsrlCommand
from psrl_sglang.transfer.link import Deadline

if TYPE_CHECKING:
    from sglang.srt.managers.scheduler import Scheduler

    from psrl_sglang.engine.linker import PsrlLinker

_REMEMBERED_S = 5.0
_LONGEST_WAIT_S = 10.0
_WAIT_SHARE = 0.5  # of a move's time: a scheduler in a long prefill does not answer

logger = logging.getLogger(__name__)


class Exports:
    """``open`` and ``done`` belong to the scheduler thread, ``bring`` to the others. Owns its socket."""

    def __init__(self, linker: PsrlLinker) -> None:
        self._linker = linker
        self._done: dict[str, tuple[float, int]] = {}
        self._changed = threading.Condition()
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._socket: zmq.Socket[bytes] | None = None

    def open(self, scheduler: Scheduler) -> None:
        """Where this rank has the scheduler's input socket, give it a second entrance."""
        inlet = scheduler.ipc_channels.recv_from_tokenizer
        if inlet is None:
            return
        if not isinstance(inlet, zmq.Socket):
            raise TypeError(f"the scheduler's input is a {type(inlet).__name__}, not a ZeroMQ socket")
        self._folder = tempfile.TemporaryDirectory(prefix="psrl-")
        address = f"ipc://{Path(self._folder.name) / 'commands'}"
        inlet.bind(address)
        entrance = inlet.context.socket(zmq.PUSH)
        entrance.setsockopt(zmq.LINGER, 0)
        entrance.connect(address)
        self._socket = entrance

    def bring(self, command: PsrlCommand, deadline: Deadline) -> None:
        """Have ``command`` handled and wait until what it offloaded is in DRAM, or until half the time is over."""
        end_s = time.monotonic() + min(deadline.left_s * _WAIT_SHARE, _LONGEST_WAIT_S)
        name = command.grant
        if self._socket is not None:
            with self._changed:
                self._done.pop(name, None)
                try:  # never wait here: the scheduler takes this lock too
                    sock_send(self._socket, command, zmq.NOBLOCK)
                except zmq.Again:
                    logger.warning("psrl: the scheduler takes no more commands; what DRAM has is moved")
                    return
        with self._changed:
            self._changed.wait_for(lambda: name in self._done, max(0.0, end_s - time.monotonic()))
            done = self._done.get(name)
        if done is None:
            logger.info("psrl: the scheduler was too busy to offload the KV of a move; what DRAM has is moved")
        else:
            self._linker.wait_for_offload(done[1], max(0.0, end_s - time.monotonic()))

    def done(self, name: str) -> None:
        """The command of that name was handled on this rank."""
        now_s = time.monotonic()
        with self._changed:
            for old in [old for old, (when_s, _) in self._done.items() if when_s < now_s - _REMEMBERED_S]:
                del self._done[old]
            self._done[name] = (now_s, self._linker.offered_offloads)
            self._changed.notify_all()

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
        if self._folder is not None:
            self._folder.cleanup()
