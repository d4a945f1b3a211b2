"""Copies that a device does by itself: what must have landed when, and what may be given away."""

import logging
from types import SimpleNamespace

import pytest

pytest.importorskip("sglang")

import numpy as np
import torch
from device_support import CudaLikeQueue, FakeRuntime, LateQueue

from psrl_sglang.engine import copier, device_copiers
from psrl_sglang.engine.geometry import Part, PoolGeometry
from psrl_sglang.platforms.device import HostQueue, PageLockError, lock_pages
from psrl_sglang.store.arena import Arena

ROW_BYTES = 24
PAGE_BYTES = 4 * ROW_BYTES
ROWS = torch.tensor([5, 1, 3, 2])


@pytest.fixture
def pool():
    """Two layers of K and V, of six pages."""
    random = torch.Generator().manual_seed(1)
    buffers = [
        torch.randint(0, 256, (6, ROW_BYTES), generator=random, dtype=torch.int64).to(torch.uint8)
        for _ in range(4)
    ]
    parts = [Part(buffer, ROW_BYTES, number * ROW_BYTES) for number, buffer in enumerate(buffers)]
    return PoolGeometry("kv", SimpleNamespace(), PAGE_BYTES, (tuple(parts[:2]), tuple(parts[2:])))


def images(pool):
    parts = [part for parts in pool.layers for part in parts]
    return torch.cat([part.buffer[ROWS] for part in parts], dim=1).numpy()


OFFSETS = np.array([0, 1, 2, 3], dtype=np.int64) * PAGE_BYTES


def test_pages_are_in_the_arena_when_the_copy_returns(pool):
    arena, queue = Arena(2, 2 * PAGE_BYTES), LateQueue()
    device_copiers.PinnedCopier(arena, [pool], queue).to_arena(pool, ROWS, OFFSETS)
    assert (arena.memory.reshape(4, PAGE_BYTES) == images(pool)).all()


def test_a_copy_spans_no_two_slots_and_is_as_long_as_it_can_be(pool):
    arena, queue = Arena(2, 2 * PAGE_BYTES), LateQueue()
    device_copiers.PinnedCopier(arena, [pool], queue).to_arena(pool, ROWS, OFFSETS)
    assert queue.sizes_bytes == [2 * PAGE_BYTES, 2 * PAGE_BYTES]


def test_after_an_error_nothing_lands_in_room_that_is_another_ones_by_then(pool):
    arena, queue = Arena(2, 2 * PAGE_BYTES), LateQueue(fails_at=2)
    with pytest.raises(RuntimeError, match="no memory on the device"):
        device_copiers.PinnedCopier(arena, [pool], queue).to_arena(pool, ROWS, OFFSETS)
    assert queue.is_settled


def test_a_layer_crosses_the_bus_in_one_piece_a_run_and_alone(pool):
    arena, runtime = Arena(1, 4 * PAGE_BYTES), FakeRuntime()
    arena.memory[:] = np.arange(arena.size_bytes, dtype=np.uint64) % 251
    before = [part.buffer.clone() for parts in pool.layers for part in parts]
    copies = device_copiers.PinnedCopier(arena, [pool], CudaLikeQueue(runtime))
    copies.to_device(pool, 1, ROWS, OFFSETS)
    assert runtime.copied_bytes == 4 * 2 * ROW_BYTES
    image = torch.from_numpy(arena.memory.reshape(4, PAGE_BYTES))
    for number, part in enumerate(pool.layers[1], start=2):
        assert torch.equal(part.buffer[ROWS], image[:, number * ROW_BYTES : (number + 1) * ROW_BYTES])
    assert all(torch.equal(part.buffer, old) for part, old in zip(pool.layers[0], before[:2], strict=True))


def test_bytes_that_are_not_of_whole_words_are_copied_too():
    buffer = torch.arange(35, dtype=torch.uint8).view(5, 7)
    odd = PoolGeometry("kv", SimpleNamespace(), 7, ((Part(buffer, 7, 0),),))
    arena = Arena(3, 7)
    copies = device_copiers.PinnedCopier(arena, [odd], HostQueue(torch.device("cpu")))
    offsets = np.array([14, 0], dtype=np.int64)
    copies.to_arena(odd, torch.tensor([4, 1]), offsets)
    copies.to_device(odd, 0, torch.tensor([0, 2]), offsets)
    assert buffer[0].tolist() == list(range(28, 35))
    assert buffer[2].tolist() == list(range(7, 14))


def test_a_page_locked_arena_is_copied_to_directly_and_any_other_through_a_buffer(pool):
    plain, locked = Arena(1, PAGE_BYTES), Arena(1, PAGE_BYTES)
    locked.page_lock(
        lambda memory, unit: lock_pages(memory, unit, device=torch.device("cpu"), runtime=FakeRuntime())
    )
    host = HostQueue(torch.device("cpu"))
    assert isinstance(copier.make_copier(plain, [pool], host), copier.DirectCopier)
    queue = CudaLikeQueue(FakeRuntime())
    queue.device = torch.device("meta")  # any that is not the host
    assert isinstance(copier.make_copier(locked, [pool], queue), device_copiers.PinnedCopier)
    assert isinstance(copier.make_copier(plain, [pool], queue), device_copiers.StagedCopier)
    locked.close()


def test_an_arena_that_cannot_be_locked_is_told_with_the_remedy_and_used(monkeypatch, caplog):
    def refuse(*_, **__):
        raise PageLockError("cudaHostRegister: out of memory (2)", "`ulimit -l unlimited`")

    monkeypatch.setattr(copier, "lock_pages", refuse)
    arena = Arena(1, PAGE_BYTES)
    with caplog.at_level(logging.WARNING):
        copier.page_lock(arena, torch.device("cuda"))
    assert not arena.is_page_locked
    for text in ("out of memory", "ulimit", "pin_arena"):
        assert text in caplog.text


def test_only_a_cuda_device_has_memory_locked_for_it(monkeypatch):
    monkeypatch.setattr(copier, "lock_pages", lambda *_, **__: pytest.fail("locked"))
    copier.page_lock(Arena(1, PAGE_BYTES), torch.device("cpu"))
    copier.page_lock(Arena(1, PAGE_BYTES), torch.device("xpu"))
