"""What the linker does between a device and DRAM, tried on a device without a model or a server.

Pools, copiers, counter and queues are those of an engine. What is found is told; what to think of it is up to the
caller. Each function makes its own pool and arena and gives them back.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from psrl_sglang.engine.copier import Copier, DirectCopier
from psrl_sglang.engine.device_copiers import PinnedCopier, StagedCopier
from psrl_sglang.engine.layers import LoadCounter, load_layers
from psrl_sglang.engine.selftest_pools import KINDS, PoolKind, TriedPool
from psrl_sglang.platforms.device import CopyQueue, PageLockError, lock_pages, open_queue
from psrl_sglang.store.arena import Arena

_CHUNK_PAGES = 4
_MOVED_PAGES = 13  # three chunks and a part of one
_PAUSES_S = (0.02, 0.1, 0.5)  # longer ones where a reader of a busy machine came too late to show anything
_REPEATS = 5
_WAIT_S = 60.0
_LARGE = PoolKind("nhd", torch.bfloat16, heads=8, layers=32)  # 2 MiB a page
_MATRIX = 4096

PAGE_LOCKED, STAGED, DIRECT = "page-locked", "staged", "direct"


@dataclass(frozen=True, slots=True)
class Difference:
    """Where pages that went out and came back are not what they were."""

    kind: str
    layer: int
    pages: int
    first_page: int


@dataclass(frozen=True, slots=True)
class LayerOrder:
    """``is_shown``: a reader that did not wait saw that the load was still to come. ``early_layers``: those that a
    reader that waited got before they had landed."""

    is_shown: bool
    layers: int
    early_layers: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Overlap:
    """Seconds; medians."""

    load_s: float
    compute_s: float
    both_s: float

    @property
    def ratio(self) -> float:
        """1: the shorter one is hidden. Without any overlap it is the sum of both over the longer."""
        return self.both_s / max(self.load_s, self.compute_s)


@dataclass(frozen=True, slots=True)
class Bandwidth:
    """Bytes a second, medians; ``plain``: one copy of as many bytes, from and to memory that torch has page-locked
    (on a CPU: any), ``pageable``: ordinary memory, None on a CPU."""

    size_bytes: int
    store: float
    load: float
    plain_store: float
    plain_load: float
    pageable_store: float | None
    pageable_load: float | None


def paths(device: torch.device) -> tuple[str, ...]:
    """The ways of copying that can be tried. On a CPU the device's ones run over its own memory."""
    return (DIRECT, PAGE_LOCKED, STAGED) if device.type == "cpu" else (PAGE_LOCKED, STAGED)


def page_lock_error(device: torch.device, size_bytes: int) -> PageLockError | None:
    """Why an arena of this size cannot be page-locked; None if it can."""
    arena = Arena(size_bytes >> 20, 1 << 20)
    try:
        arena.page_lock(partial(lock_pages, device=device))
        if not torch.from_numpy(arena.memory).is_pinned():
            return PageLockError("CUDA took it, and torch does not see it", "one CUDA runtime in the process")
    except PageLockError as error:
        return error
    finally:
        arena.close()
    return None


def round_trip(device: torch.device, path: str, kinds: Sequence[PoolKind] = KINDS) -> list[Difference]:
    """Store pages of each kind of pool and load them layer by layer into other pages; where any byte of the pool is
    not what it must be then."""
    differences: list[Difference] = []
    for kind in kinds:
        with _tried(kind, 3 * _MOVED_PAGES, device, path) as tried:
            before = [buffer.clone() for buffer in tried.pool.buffers]
            _settle_all(device)
            tried.store()
            tried.load()
            _settle_all(device)
            buffers = iter(zip(tried.pool.buffers, before, strict=True))
            for layer, parts in enumerate(tried.pool.geometry.layers):
                for _ in parts:
                    buffer, expected = next(buffers)
                    expected[tried.target.to(device)] = expected[tried.source.to(device)]
                    wrong = torch.nonzero((buffer != expected).any(dim=1)).flatten()
                    if len(wrong):
                        differences.append(Difference(kind.name, layer, len(wrong), int(wrong[0])))
    return differences


def layer_order(device: torch.device, path: str) -> LayerOrder:
    """Read each layer, on a queue of its own, behind a load that is held up before every layer."""
    found: LayerOrder | None = None
    for pause_s in _PAUSES_S:
        found = _layer_order(device, path, pause_s)
        if found.is_shown or found.early_layers:
            break
    assert found is not None
    return found


def _layer_order(device: torch.device, path: str, pause_s: float) -> LayerOrder:
    kind = PoolKind("nhd", torch.bfloat16, layers=6)
    with _tried(kind, 3 * _MOVED_PAGES, device, path) as tried:
        rows = tried.target.to(device)
        originals = [buffer[tried.source.to(device)] for buffer in tried.pool.buffers]
        stale = [buffer[rows] for buffer in tried.pool.buffers]
        tried.store()
        _settle_all(device)
        reader, seen = open_queue(device), []
        with tried.loading(lambda layer: tried.queue.pause(pause_s)) as (counter, index), reader.running():
            counter.futures[index][0].exception(_WAIT_S)
            unfenced = tried.pool.buffers[-1][rows]
            for layer, parts in enumerate(tried.pool.geometry.layers):
                counter.wait_until(layer)
                seen += [part.buffer[rows] for part in parts]
            reader.settle()
        _settle_all(device)
        per_layer = len(seen) // kind.layers
        early = {
            number // per_layer
            for number, (got, wanted) in enumerate(zip(seen, originals, strict=True))
            if not torch.equal(got, wanted)
        }
        return LayerOrder(torch.equal(unfenced, stale[-1]), kind.layers, tuple(sorted(early)))


def overlap(device: torch.device, path: str, size_bytes: int) -> Overlap:
    """Load layer by layer while matrices are multiplied, which wait for their layer as a forward does."""
    with _tried(_LARGE, _pages_of(size_bytes), device, path, moved=_pages_of(size_bytes)) as tried:
        tried.store()
        compute = open_queue(device)
        with compute.running():
            matrix = torch.randn(_MATRIX, _MATRIX, device=device, dtype=torch.bfloat16)
            product = torch.empty_like(matrix)

        def multiply(times: int) -> None:
            with compute.running():
                for _ in range(times):
                    torch.mm(matrix, matrix, out=product)

        def computing(times: int) -> None:
            multiply(times)
            compute.settle()

        def both(times: int) -> None:
            with tried.loading() as (counter, _):
                for layer in range(_LARGE.layers):
                    with compute.running():
                        counter.wait_until(layer)
                    multiply(times)
                compute.settle()

        load_s = _median_s(tried.load)
        once_s = _median_s(lambda: computing(_LARGE.layers)) / _LARGE.layers
        times = max(1, round(load_s / _LARGE.layers / once_s))
        compute_s = _median_s(lambda: computing(times * _LARGE.layers))
        return Overlap(load_s, compute_s, _median_s(lambda: both(times)))


def bandwidth(device: torch.device, path: str, size_bytes: int) -> Bandwidth:
    pages = _pages_of(size_bytes)
    with _tried(_LARGE, pages, device, path, moved=pages) as tried:
        moved_bytes = pages * tried.pool.geometry.page_bytes
        store_s, load_s = _median_s(tried.store), _median_s(tried.load)
    there = torch.zeros(moved_bytes, dtype=torch.uint8, device=device)
    _settle_all(device)
    queue = open_queue(device)
    plain = _plain_s(queue, queue.staging(moved_bytes).fill_(1), there)
    pageable: tuple[float, float] | None = None
    if device.type != "cpu":
        pageable = _plain_s(queue, torch.ones(moved_bytes, dtype=torch.uint8), there)
    return Bandwidth(
        size_bytes=moved_bytes,
        store=moved_bytes / store_s,
        load=moved_bytes / load_s,
        plain_store=moved_bytes / plain[0],
        plain_load=moved_bytes / plain[1],
        pageable_store=None if pageable is None else moved_bytes / pageable[0],
        pageable_load=None if pageable is None else moved_bytes / pageable[1],
    )


class _Tried:
    """A pool, an arena, and a copier between them; ``source`` pages are stored, and loaded to ``target``."""

    def __init__(
        self, pool: TriedPool, arena: Arena, copier: Copier, queue: CopyQueue, moved: int, *, in_place: bool
    ) -> None:
        self.pool = pool
        self.queue = queue
        self._copier = copier
        random = np.random.default_rng(moved)
        pages = 1 + random.permutation(pool.pages)
        self.source = pool.rows(torch.from_numpy(pages[:moved]))
        self.target = self.source if in_place else pool.rows(torch.from_numpy(pages[-moved:]))
        # As DRAM has them: chunks anywhere, the pages of one behind each other.
        slots = random.permutation(arena.slots)
        page = np.arange(moved)
        self._offsets = (
            slots[page // _CHUNK_PAGES] * arena.slot_bytes + page % _CHUNK_PAGES * pool.geometry.page_bytes
        ).astype(np.int64)

    def store(self) -> None:
        self._copier.to_arena(self.pool.geometry, self.source, self._offsets)

    def load(self) -> None:
        with self.loading():
            pass

    @contextmanager
    def loading(self, before_layer: Callable[[int], None] | None = None) -> Iterator[tuple[LoadCounter, int]]:
        """The load runs as in an engine while the block does, and has landed behind it. Raises what it raised."""
        counter = LoadCounter(len(self.pool.geometry.layers))
        index = counter.update_producer()
        counter.set_consumer(index)
        errors: list[Exception] = []

        def run() -> None:
            try:
                pages = [(self.pool.geometry, self.target, self._offsets)]
                load_layers(self._copier, counter, index, pages, before_layer=before_layer)
            except Exception as error:  # noqa: BLE001 - raised again on the thread that waits
                errors.append(error)
                counter.fail(index, error)

        thread = threading.Thread(target=run, name="psrl-selftest", daemon=True)
        thread.start()
        try:
            yield counter, index
        finally:
            thread.join(_WAIT_S)
        if errors:
            raise errors[0]
        if thread.is_alive() or not counter.finish(index):
            raise TimeoutError(f"a load has not ended in {_WAIT_S:.0f} s")


@contextmanager
def _tried(
    kind: PoolKind, pages: int, device: torch.device, path: str, *, moved: int = _MOVED_PAGES
) -> Iterator[_Tried]:
    """Raises ``PageLockError`` where the path needs it and it cannot be had."""
    pool = TriedPool(kind, pages, device)
    pool.fill(seed=pages)
    arena = Arena(-(-moved // _CHUNK_PAGES), _CHUNK_PAGES * pool.geometry.page_bytes)
    try:
        if path == PAGE_LOCKED and device.type == "cuda":
            arena.page_lock(partial(lock_pages, device=device))
        queue = open_queue(device)
        copier: Copier
        if path == DIRECT:
            copier = DirectCopier(arena, [pool.geometry])
        elif path == PAGE_LOCKED:
            copier = PinnedCopier(arena, [pool.geometry], queue)
        else:
            copier = StagedCopier(arena, queue)
        _settle_all(device)
        yield _Tried(pool, arena, copier, queue, moved, in_place=moved == pages)
        queue.settle()
    finally:
        arena.close()


def _settle_all(device: torch.device) -> None:
    """What the tests do between the parts is on the thread's own stream."""
    if device.type != "cpu":
        torch.get_device_module(device).synchronize(device)


def _pages_of(size_bytes: int) -> int:
    return max(_CHUNK_PAGES, size_bytes >> 21)


def _plain_s(queue: CopyQueue, host: torch.Tensor, there: torch.Tensor) -> tuple[float, float]:
    def copy(to: torch.Tensor, source: torch.Tensor) -> None:
        with queue.running():
            to.copy_(source, non_blocking=True)
        queue.settle()

    return _median_s(lambda: copy(host, there)), _median_s(lambda: copy(there, host))


def _median_s(run: Callable[[], object]) -> float:
    run()
    taken_s = []
    for _ in range(_REPEATS):
        began_s = time.perf_counter()
        run()
        taken_s.append(time.perf_counter() - began_s)
    return statistics.median(taken_s)
