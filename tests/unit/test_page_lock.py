"""The DRAM arena is page-locked as a whole or not at all, and never for longer than it is mapped."""

import logging

import numpy as np
import pytest
import torch
from device_support import REFUSED, FakeRuntime

from psrl_sglang.platforms import device
from psrl_sglang.platforms.device import PageLockError, cuda_runtime, lock_pages
from psrl_sglang.store.arena import Arena

CPU = torch.device("cpu")
KIB = 1 << 10


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch):
    monkeypatch.setattr(device, "_MOST_LOCKED_AT_ONCE_BYTES", 40 * KIB)


def locked(arena, runtime):
    arena.page_lock(lambda memory, slot_bytes: lock_pages(memory, slot_bytes, device=CPU, runtime=runtime))


@pytest.mark.parametrize(("slots", "slot_bytes"), [(9, 12 * KIB), (8, 5 * KIB), (3, 100 * KIB), (1, 1)])
def test_every_byte_is_locked_once_in_pieces_that_end_between_slots_and_pages_of_the_host(slots, slot_bytes):
    arena, runtime = Arena(slots, slot_bytes), FakeRuntime()
    locked(arena, runtime)
    ends = np.cumsum(list(runtime.registered.values()))
    begins = [address - arena.address for address in runtime.registered]
    assert begins == [0, *ends[:-1].tolist()]
    assert ends[-1] == arena.size_bytes
    assert all(end % slot_bytes == 0 and end % 4096 == 0 for end in ends[:-1])
    assert arena.is_page_locked
    arena.close()


def test_a_piece_that_fails_leaves_nothing_locked_and_says_why_and_what_to_do():
    arena, runtime = Arena(9, 12 * KIB), FakeRuntime(fails_at=2)
    first = arena.address
    with pytest.raises(PageLockError) as raised:
        locked(arena, runtime)
    assert runtime.registered == {}
    assert runtime.unregistered == [first]
    assert not arena.is_page_locked
    for text in (REFUSED, "memlock", "container", "offload_size_gb"):
        assert text in str(raised.value)
    arena.memory[:] = 1  # as usable as before
    arena.close()
    assert runtime.unregistered == [first]


def test_memory_is_unlocked_before_it_is_unmapped_and_once():
    arena, runtime = Arena(9, 12 * KIB), FakeRuntime()
    locked(arena, runtime)
    addresses = list(runtime.registered)
    assert len(addresses) > 1
    arena.close()
    arena.close()
    assert sorted(runtime.unregistered) == addresses
    assert not arena.is_page_locked


def test_a_shared_arena_is_locked_too():
    arena, runtime = Arena(2, 12 * KIB, shared=True), FakeRuntime()
    locked(arena, runtime)
    assert sum(runtime.registered.values()) == arena.size_bytes
    arena.close()
    assert runtime.registered == {}


def test_a_piece_that_stays_locked_is_told_and_does_not_keep_the_others(caplog):
    arena, runtime = Arena(9, 12 * KIB), FakeRuntime(unregister_fails=True)
    locked(arena, runtime)
    pieces = len(runtime.registered)
    with caplog.at_level(logging.WARNING):
        arena.close()
    assert len(runtime.unregistered) == pieces
    assert "driver shutting down" in caplog.text


@pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without a device")
def test_the_real_runtime_says_why_it_locks_nothing_here():
    with pytest.raises(PageLockError, match=r"cuda|CUDA"):
        lock_pages(np.zeros(8192, dtype=np.uint8), 4096, device=CPU)


def test_a_torch_without_cuda_is_named(monkeypatch):
    cuda_runtime.cache_clear()
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(PageLockError, match="not built for CUDA"):
        lock_pages(np.zeros(8192, dtype=np.uint8), 4096, device=CPU)
    cuda_runtime.cache_clear()
