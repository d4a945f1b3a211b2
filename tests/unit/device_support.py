"""Stand-ins at the edge of the process: the CUDA runtime's calls, and a stream, over host memory."""

from __future__ import annotations

import ctypes
from contextlib import contextmanager
from types import SimpleNamespace

import torch

from psrl_sglang.platforms.device import CudaError, CudaQueue, HostQueue

REFUSED = "cudaHostRegister: out of memory (2)"


class FakeRuntime:
    """Keeps the books of what is registered. ``fails_at``: the number of the registration that fails, from 1."""

    def __init__(self, *, fails_at=0, unregister_fails=False):
        self.registered = {}
        self.unregistered = []
        self.copied_bytes = 0
        self._calls = 0
        self._fails_at = fails_at
        self._unregister_fails = unregister_fails

    def register(self, address, size_bytes):
        self._calls += 1
        if self._calls == self._fails_at:
            raise CudaError(REFUSED)
        self.registered[address] = size_bytes

    def unregister(self, address):
        ctypes.string_at(address, self.registered.pop(address))  # ends the process if it is not mapped any more
        self.unregistered.append(address)
        if self._unregister_fails:
            raise CudaError("cudaHostUnregister: driver shutting down (4)")

    def copy_rows(self, to, to_pitch, source, source_pitch, row_bytes, rows, stream):
        for row in range(rows):
            ctypes.memmove(to + row * to_pitch, source + row * source_pitch, row_bytes)
        self.copied_bytes += rows * row_bytes


class FakeCuda:
    """What a queue uses of ``torch.cuda``. ``calls`` has all of it, in order, with what it was inside of."""

    def __init__(self):
        self.calls = []
        self._inside = ()

    def Stream(self, device):
        return SimpleNamespace(device=device, cuda_stream=7)

    def Event(self, blocking=False):
        return SimpleNamespace(
            record=lambda stream: self.told("record", stream.cuda_stream),
            wait=lambda: self.told("wait"),
            synchronize=lambda: self.told("synchronize", blocking),
        )

    def _sleep(self, cycles):
        self.told("sleep", cycles)

    def told(self, *what):
        self.calls.append((*self._inside, *what))

    @contextmanager
    def device(self, device):
        before, self._inside = self._inside, (*self._inside, str(device))
        yield
        self._inside = before

    @contextmanager
    def stream(self, stream):
        before, self._inside = self._inside, (*self._inside, stream.cuda_stream)
        yield
        self._inside = before


class CudaLikeQueue(CudaQueue):
    """The queue of a CUDA device whose memory is the host's; rows that are apart go through the runtime."""

    def __init__(self, runtime):
        super().__init__(torch.device("cpu"), runtime, FakeCuda())

    def upload(self, rows):
        return rows

    def staging(self, size_bytes):
        return torch.empty(size_bytes, dtype=torch.uint8)


class LateQueue(HostQueue):
    """What goes to the host lands only when somebody waits for it. ``fails_at``: the copy that fails, from 1."""

    def __init__(self, *, fails_at=0):
        super().__init__(torch.device("cpu"))
        self.sizes_bytes = []
        self._fails_at = fails_at
        self._waiting = []

    def to_host(self, host, source):
        self.sizes_bytes.append(len(host))
        if len(self.sizes_bytes) == self._fails_at:
            raise RuntimeError("no memory on the device")
        self._waiting.append((host, source.clone()))

    def settle(self):
        while self._waiting:
            host, source = self._waiting.pop(0)
            host.copy_(source)

    @property
    def is_settled(self):
        return not self._waiting
