"""What copies to and from a device need besides torch's own operations: queues, fences, and page-locked memory.

Every call of a stream, an event or the CUDA runtime that this package makes for its copies is in this module. Where
there is no device (``HostQueue``) everything has been done when a call returns.
"""

from __future__ import annotations

import ctypes
import logging
import math
import resource
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, Protocol

import numpy as np
import torch

logger = logging.getLogger(__name__)

_HOST_PAGE_BYTES = 4096
# A registration of 512 GiB or more fails with some drivers, whatever memory there is.
_MOST_LOCKED_AT_ONCE_BYTES = 4 << 30
_PORTABLE = 1  # page-locked for every device of the process
_HOST_TO_DEVICE = 1
_CYCLES_A_SECOND = 1.5e9


class CudaError(RuntimeError):
    """A call of the CUDA runtime failed; the text has CUDA's own words."""


class PageLockError(RuntimeError):
    """Memory could not be page-locked: why, and what to do about it."""

    def __init__(self, why: str, remedy: str) -> None:
        super().__init__(f"{why}. {remedy}")
        self.why = why
        self.remedy = remedy


class Fence(Protocol):
    """Reached when all that was put in a queue before it has been done."""

    def wait(self) -> None:
        """Let what is put in the current stream from now on run behind the fence. Does not block the host."""

    def synchronize(self) -> None:
        """Block the host until the fence is reached."""


class CopyQueue(Protocol):
    """Work on one device that is done in order, beside everything else there. One thread at a time."""

    device: torch.device

    def running(self) -> Any:
        """A context: torch's operations inside of it are put in this queue."""

    def fence(self) -> Fence | None:
        """None where everything so far has been done already."""

    def settle(self) -> None:
        """Block until everything so far has been done."""

    def pause(self, seconds: float) -> None:
        """Keep the queue busy for about so long, for tests of what waits for it."""

    def upload(self, rows: torch.Tensor) -> torch.Tensor:
        """``rows`` (int64, host) on the device. Call it inside of ``running``, as the two below."""
        ...

    def to_host(self, host: torch.Tensor, source: torch.Tensor) -> None:
        """Copy ``source`` (uint8, contiguous, on the device) to ``host``, page-locked memory of that shape, which
        is the queue's until a later fence."""

    def from_host(self, to: torch.Tensor, host: torch.Tensor) -> None:
        """Copy rows of page-locked memory (uint8, any distance apart) to ``to``, contiguous and on the device."""

    def staging(self, size_bytes: int) -> torch.Tensor:
        """Host memory (uint8) that the device copies to and from fastest."""
        ...


class HostQueue:
    """For pools in host memory, and in tests for a device's."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    @contextmanager
    def running(self) -> Iterator[None]:
        yield

    def fence(self) -> Fence | None:
        return None

    def settle(self) -> None:
        pass

    def pause(self, seconds: float) -> None:
        time.sleep(seconds)

    def upload(self, rows: torch.Tensor) -> torch.Tensor:
        return rows

    def to_host(self, host: torch.Tensor, source: torch.Tensor) -> None:
        host.copy_(source)

    def from_host(self, to: torch.Tensor, host: torch.Tensor) -> None:
        to.copy_(host)

    def staging(self, size_bytes: int) -> torch.Tensor:
        return torch.empty(size_bytes, dtype=torch.uint8)


class StreamQueue:
    """A stream of its own, of any accelerator that torch knows. ``module`` is torch's for the device."""

    def __init__(self, device: torch.device, module: Any = None) -> None:
        self.device = device
        self._module = module or torch.get_device_module(device)
        self._stream = self._module.Stream(device=device)

    @contextmanager
    def running(self) -> Iterator[None]:
        # The device too: a new thread's is number 0, whose context a call of the runtime would create.
        with self._module.device(self.device), self._module.stream(self._stream):
            yield

    def fence(self) -> Fence | None:
        event = self._module.Event()
        event.record(self._stream)
        return event

    def settle(self) -> None:
        self._stream.synchronize()

    def pause(self, seconds: float) -> None:
        raise NotImplementedError(f"no delay for a stream of {self.device.type}")

    def upload(self, rows: torch.Tensor) -> torch.Tensor:
        # From pageable memory it would wait for everything in the queue.
        return rows.pin_memory().to(self.device, non_blocking=True)

    def to_host(self, host: torch.Tensor, source: torch.Tensor) -> None:
        host.copy_(source, non_blocking=True)

    def from_host(self, to: torch.Tensor, host: torch.Tensor) -> None:
        if not host.is_contiguous():
            raise ValueError("rows that are apart need a copy of CUDA's own")
        to.copy_(host, non_blocking=True)

    def staging(self, size_bytes: int) -> torch.Tensor:
        return torch.empty(size_bytes, dtype=torch.uint8, pin_memory=True)


class CudaQueue(StreamQueue):
    """As ``StreamQueue``, and rows that are apart are copied in one call."""

    def __init__(self, device: torch.device, runtime: CudaRuntime, module: Any = None) -> None:
        super().__init__(device, module)
        self._runtime = runtime

    def settle(self) -> None:
        # Unlike the stream's own, this leaves the core to others while copies run.
        event = self._module.Event(blocking=True)
        event.record(self._stream)
        event.synchronize()

    def pause(self, seconds: float) -> None:
        with self.running():
            self._module._sleep(int(seconds * _CYCLES_A_SECOND))

    def from_host(self, to: torch.Tensor, host: torch.Tensor) -> None:
        if host.is_contiguous():
            super().from_host(to, host)
            return
        # torch would first bring the rows together in pageable memory, and block.
        rows, row_bytes = host.shape
        self._runtime.copy_rows(
            to.data_ptr(), row_bytes, host.data_ptr(), host.stride(0), row_bytes, rows, self._stream.cuda_stream
        )


def open_queue(device: torch.device) -> CopyQueue:
    """A new queue on a device; for CUDA's, one that `lock_pages` makes good use of if there is a runtime."""
    if device.type == "cpu":
        return HostQueue(device)
    if device.type == "cuda":
        try:
            return CudaQueue(device, cuda_runtime())
        except CudaError:
            return StreamQueue(device)  # and nothing will be page-locked, which says why
    return StreamQueue(device)


class CudaRuntime:
    """The calls of CUDA's runtime that torch does not offer, in the library that torch has loaded.

    Raises ``CudaError`` for what fails, after the runtime has forgotten it: else the next, innocent operation of
    torch on this thread would be blamed.
    """

    def __init__(self, library: Any) -> None:
        self._library = library
        library.cudaGetErrorString.restype = ctypes.c_char_p
        library.cudaHostRegister.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint)
        library.cudaHostUnregister.argtypes = (ctypes.c_void_p,)
        library.cudaMemcpy2DAsync.argtypes = (
            *(ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p, ctypes.c_size_t),
            *(ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p),
        )

    def register(self, address: int, size_bytes: int) -> None:
        self._check("cudaHostRegister", address, size_bytes, _PORTABLE)

    def unregister(self, address: int) -> None:
        self._check("cudaHostUnregister", address)

    def copy_rows(
        self, to: int, to_pitch: int, source: int, source_pitch: int, row_bytes: int, rows: int, stream: int
    ) -> None:
        """Put a copy of rows from host to device memory in a stream; addresses, and distances in bytes."""
        self._check(
            *("cudaMemcpy2DAsync", to, to_pitch, source, source_pitch),
            *(row_bytes, rows, _HOST_TO_DEVICE, stream),
        )

    def driver_version(self) -> str:
        """The newest CUDA that the driver knows, as 13.0."""
        number = ctypes.c_int()
        self._check("cudaDriverGetVersion", ctypes.byref(number))
        return f"{number.value // 1000}.{number.value % 1000 // 10}"

    def _check(self, name: str, *arguments: Any) -> None:
        code = getattr(self._library, name)(*arguments)
        if code:
            self._library.cudaGetLastError()
            raise CudaError(f"{name}: {self._library.cudaGetErrorString(code).decode()} ({code})")


@lru_cache(maxsize=1)
def cuda_runtime() -> CudaRuntime:
    """Raises ``CudaError`` if this torch has none."""
    if torch.version.cuda is None:
        raise CudaError(f"torch {torch.__version__} is not built for CUDA")
    name = f"libcudart.so.{torch.version.cuda.partition('.')[0]}"
    try:
        return CudaRuntime(ctypes.CDLL(name))  # by its name: the one that torch has loaded
    except (OSError, AttributeError) as error:
        raise CudaError(f"torch's CUDA runtime is not usable: {error}") from error


class PageLock:
    """Memory that the device copies to and from by itself. ``close`` it before the memory goes."""

    def __init__(self, runtime: CudaRuntime, memory: np.ndarray) -> None:
        self._runtime = runtime
        self._memory = memory  # stays mapped for as long as it is locked
        self._addresses: list[int] = []

    @property
    def pieces(self) -> int:
        return len(self._addresses)

    def add(self, first_byte: int, size_bytes: int) -> None:
        address = self._memory.ctypes.data + first_byte
        self._runtime.register(address, size_bytes)
        self._addresses.append(address)

    def close(self) -> None:
        """No copy may be under way. May be called more than once."""
        while self._addresses:
            try:
                self._runtime.unregister(self._addresses.pop())
            except CudaError as error:
                logger.warning("psrl: memory stays page-locked: %s", error)


def lock_pages(
    memory: np.ndarray, unit_bytes: int, *, device: torch.device, runtime: CudaRuntime | None = None
) -> PageLock:
    """Page-lock all of ``memory`` (uint8, 1-D) for CUDA, in pieces that end between units of ``unit_bytes``: no
    copy may span two pieces. About 0.1 s a GiB.

    Raises ``PageLockError``, and nothing is locked then.
    """
    unit = math.lcm(unit_bytes, _HOST_PAGE_BYTES)
    step = max(1, _MOST_LOCKED_AT_ONCE_BYTES // unit) * unit
    lock: PageLock | None = None
    try:
        lock = PageLock(runtime or cuda_runtime(), memory)
        with torch.cuda.device(device if device.type == "cuda" else -1):
            for first_byte in range(0, memory.size, step):
                lock.add(first_byte, min(step, memory.size - first_byte))
    except CudaError as error:
        done = lock.pieces * step if lock is not None else 0
        if lock is not None:
            lock.close()
        raise PageLockError(
            f"{error}, after {done / 2**30:.1f} of {memory.size / 2**30:.1f} GiB", _remedy()
        ) from error
    return lock


def _remedy() -> str:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    allowed = "without limit" if soft == resource.RLIM_INFINITY else f"up to {soft / 2**20:.0f} MiB"
    return (
        f"this process may lock {allowed} (`ulimit -l unlimited`; `docker run --ulimit memlock=-1`), and the "
        "memory limit of its container must cover it; a smaller psrl.lmcache.offload_size_gb needs less"
    )
