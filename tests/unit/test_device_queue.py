"""What is asked of CUDA for a copy: on which device and stream, with which addresses; what its errors become."""

from types import SimpleNamespace

import pytest
import torch
from device_support import FakeCuda, FakeRuntime

from psrl_sglang.platforms import device
from psrl_sglang.platforms.device import CudaError, CudaQueue, CudaRuntime, HostQueue, StreamQueue

SECOND = torch.device("cuda", 1)


def test_work_is_on_the_device_and_the_stream_of_its_queue():
    cuda = FakeCuda()
    queue = CudaQueue(SECOND, FakeRuntime(), cuda)
    with queue.running():
        cuda.told("work")
    queue.pause(0.5)
    assert cuda.calls[0] == ("cuda:1", 7, "work")
    assert cuda.calls[1][:3] == ("cuda:1", 7, "sleep")
    assert cuda.calls[1][3] > 0


def test_a_fence_is_recorded_behind_what_is_in_the_queue_and_the_host_waits_without_spinning():
    cuda = FakeCuda()
    queue = CudaQueue(SECOND, FakeRuntime(), cuda)
    fence = queue.fence()
    fence.wait()
    assert cuda.calls == [("record", 7), ("wait",)]
    queue.settle()
    assert cuda.calls[2:] == [("record", 7), ("synchronize", True)]


def test_rows_that_are_apart_are_copied_in_one_call_and_no_byte_between_them():
    calls = []
    runtime = SimpleNamespace(copy_rows=lambda *arguments: calls.append(arguments))
    memory, to = torch.zeros(100, dtype=torch.uint8), torch.zeros((3, 8), dtype=torch.uint8)
    CudaQueue(SECOND, runtime, FakeCuda()).from_host(to, memory.as_strided((3, 8), (30, 1), 5))
    assert calls == [(to.data_ptr(), 8, memory.data_ptr() + 5, 30, 8, 3, 7)]


def test_rows_that_are_apart_are_no_copy_of_another_accelerator():
    memory, to = torch.zeros(100, dtype=torch.uint8), torch.zeros((3, 8), dtype=torch.uint8)
    with pytest.raises(ValueError, match="apart"):
        StreamQueue(SECOND, FakeCuda()).from_host(to, memory.as_strided((3, 8), (30, 1)))


class Library:
    """CUDA's runtime, of which a call fails."""

    def __init__(self, code):
        self.calls = []
        for name in ("cudaHostRegister", "cudaHostUnregister", "cudaMemcpy2DAsync"):
            setattr(self, name, self._call(name, code))
        self.cudaGetErrorString = self._call("cudaGetErrorString", b"out of memory")
        self.cudaGetLastError = self._call("cudaGetLastError", code)

    def _call(self, name, result):
        def call(*arguments):
            self.calls.append((name, *arguments))
            return result

        return call


def test_an_error_has_the_name_of_the_call_and_the_words_of_cuda_and_is_left_to_nobody_else():
    library = Library(2)
    with pytest.raises(CudaError, match=r"cudaHostRegister: out of memory \(2\)"):
        CudaRuntime(library).register(4096, 8192)
    assert library.calls[0] == ("cudaHostRegister", 4096, 8192, 1)  # 1: for every device of the process
    assert ("cudaGetLastError",) in library.calls


def test_what_succeeds_asks_for_no_error():
    library = Library(0)
    CudaRuntime(library).copy_rows(1, 2, 3, 4, 5, 6, 7)
    assert library.calls == [("cudaMemcpy2DAsync", 1, 2, 3, 4, 5, 6, 1, 7)]  # the second 1: from host to device


def test_a_cuda_device_without_a_usable_runtime_has_a_queue_all_the_same(monkeypatch):
    def missing():
        raise CudaError("not here")

    monkeypatch.setattr(device, "cuda_runtime", missing)
    monkeypatch.setattr(torch, "get_device_module", lambda at: FakeCuda())
    assert type(device.open_queue(SECOND)) is StreamQueue
    monkeypatch.setattr(device, "cuda_runtime", FakeRuntime)
    assert type(device.open_queue(SECOND)) is CudaQueue
    assert type(device.open_queue(torch.device("cpu"))) is HostQueue
