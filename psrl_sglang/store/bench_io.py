"""The part of `bench` that does I/O: the disk tier beside fio, the remote tier beside its bare client."""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from psrl_sglang.keys import KEY_BYTES, KVLayout, PoolLayout
from psrl_sglang.store.arena import Arena
from psrl_sglang.store.bench import GB, PAGE_BYTES, BenchError, BenchOptions, Figure, rate
from psrl_sglang.store.chunk import BLOCK_BYTES, ChunkImage, Found, Wanted
from psrl_sglang.store.disk import DiskTier
from psrl_sglang.store.remote_client import RemoteError
from psrl_sglang.store.stats import StoreStats

_DISK_TURNS = 7
_REMOTE_BYTES = 1 << 28
_REMOTE_TIMEOUT_S = 30.0
_FIO_TIMEOUT_S = 600.0
_TAG = "bench"


def disk_figures(options: BenchOptions, arena: Arena) -> Iterator[Figure]:
    """Every chunk written to a file of its own and read back, by ``threads`` threads."""
    images = [_image(arena, slot) for slot in range(options.chunks)]
    with tempfile.TemporaryDirectory(prefix="psrl-bench-", dir=options.path) as folder:
        plain: _Fio | _Plain
        file_bytes = BLOCK_BYTES + options.chunk_bytes
        direct = _takes_direct(Path(folder))
        kind = _Fio if shutil.which("fio") else _Plain
        plain = kind(Path(folder), options.chunks, file_bytes, options.threads, direct)
        rates: dict[str, list[tuple[float, float]]] = {"write": [], "read": []}
        tier = DiskTier(
            Path(folder),
            _layout(),
            budget_bytes=1 << 60,
            policy="LRU",
            dead_rank=lambda _tag: None,
            stats=StoreStats(),
        )
        tier.load_index()
        try:
            for turn in range(_DISK_TURNS):
                for way, ours in (("write", _write_all), ("read", _read_all)):
                    rates[way].append(_both(turn, lambda: ours(tier, images, options.threads), lambda: plain.rate(way)))
                tier.clear()
                plain.clear()
        finally:
            tier.close()
    for way, pairs in rates.items():
        mine, theirs = (statistics.median(column) for column in zip(*pairs, strict=True))
        name = f"disk {way}, {options.threads} threads"
        yield Figure(name, mine, "GB/s", target=0.8, baseline=theirs, baseline_name=plain.name)


def _both(turn: int, ours, plain):
    actions = (ours, plain)
    found = {}
    for action in actions if turn % 2 else reversed(actions):
        os.sync()
        found[action] = action()
    print(found.values())
    return found[ours], found[plain]


def _write_all(tier: DiskTier, images: list[ChunkImage], threads: int) -> float:
    return _rate_of(tier.write, images, threads, sum(len(image.payload) for image in images))


def _read_all(tier: DiskTier, images: list[ChunkImage], threads: int) -> float:
    def read(image: ChunkImage) -> bool:
        wanted = Wanted(image.pool, image.tag, image.keys, 0)
        (found,) = tier.find(wanted)
        return tier.read(found, wanted, _pages(image))

    return _rate_of(read, images, threads, sum(len(image.payload) for image in images))


def _rate_of(action: Callable[[ChunkImage], bool], images: list[ChunkImage], threads: int, size: int) -> float:
    with ThreadPoolExecutor(threads) as pool:
        began_s = time.perf_counter()
        done = list(pool.map(action, images))
        seconds = time.perf_counter() - began_s
    if not all(done):
        raise BenchError(f"{done.count(False)} of {len(done)} chunks failed; the log says why")
    return size / seconds / GB


class _Fio:
    def __init__(self, folder: Path, files: int, file_bytes: int, threads: int, direct: bool) -> None:
        self.name = "fio" if direct else "fio (no O_DIRECT here)"
        self._folder = folder / "fio"
        self._folder.mkdir()
        each = files // threads
        self._command = [
            *("fio", "--name=bench", f"--directory={self._folder}", f"--numjobs={threads}"),
            *(f"--nrfiles={each}", f"--filesize={file_bytes}", f"--size={each * file_bytes}"),
            *(f"--bs={file_bytes}", "--openfiles=1", "--file_service_type=sequential"),
            *(f"--direct={int(direct)}", "--ioengine=psync", "--fallocate=none", "--thread"),
            *("--group_reporting", "--output-format=json"),
        ]

    def rate(self, way: str) -> float:
        try:
            done = subprocess.run(
                [*self._command, f"--rw={way}"],
                capture_output=True,
                text=True,
                check=True,
                timeout=_FIO_TIMEOUT_S,
            )
            report: dict[str, Any] = json.loads(done.stdout[done.stdout.index("{") :])
            return report["jobs"][0][way]["bw_bytes"] / GB
        except subprocess.CalledProcessError as error:
            raise BenchError(f"fio --rw={way} failed: {error.stderr.strip() or error.stdout.strip()}") from error
        except (subprocess.TimeoutExpired, ValueError, LookupError) as error:
            raise BenchError(f"fio --rw={way}: {error!r}") from error

    def clear(self) -> None:
        _empty(self._folder)


class _Plain:
    """Where fio is not installed: files of the same size, each written and read by one call."""

    def __init__(self, folder: Path, files: int, file_bytes: int, threads: int, direct: bool) -> None:
        self.name = "pwrite and pread (no fio here)" if direct else "pwrite and pread (no fio, no O_DIRECT here)"
        self._folder = folder / "plain"
        self._folder.mkdir()
        self._paths = [self._folder / str(number) for number in range(files)]
        self._file_bytes = file_bytes
        self._threads = threads
        self._direct = os.O_DIRECT if direct else 0
        self._buffer = Arena(threads, file_bytes)

    def rate(self, way: str) -> float:
        action, flags = (
            (os.pwritev, os.O_WRONLY | os.O_CREAT | os.O_TRUNC) if way == "write" else (os.preadv, os.O_RDONLY)
        )

        def work(thread: int) -> None:
            view = self._buffer.view(thread, 0, self._file_bytes)
            for path in self._paths[thread :: self._threads]:
                file = os.open(path, flags | self._direct, 0o644)
                try:
                    done = 0
                    while done < self._file_bytes:
                        done += action(file, [view[done:]], done)
                finally:
                    os.close(file)

        with ThreadPoolExecutor(self._threads) as pool:
            began_s = time.perf_counter()
            list(pool.map(work, range(self._threads)))
            return len(self._paths) * self._file_bytes / (time.perf_counter() - began_s) / GB

    def clear(self) -> None:
        _empty(self._folder)


def remote_figures(options: BenchOptions, arena: Arena) -> Iterator[Figure]:
    """Chunks written and read by the tier, beside values of the same size by its client, on one thread."""
    from psrl_sglang.store.remote import RemoteTier
    from psrl_sglang.store.remote_client import connect

    chunks = max(1, min(options.chunks, _REMOTE_BYTES // options.chunk_bytes))
    images = [_image(arena, slot) for slot in range(chunks)]
    mark = os.urandom(8).hex()
    names = [f"psrl-bench:{mark}:{number}" for number in range(chunks)]
    try:
        client = connect(str(options.remote_url), timeout_s=_REMOTE_TIMEOUT_S)
    except ValueError as error:
        raise BenchError(f"--remote-url: {error}") from error
    layout = _layout(f"bench {mark}")
    tier = RemoteTier(
        client, layout=layout, chunk_pages={_TAG: options.chunk_bytes // PAGE_BYTES}, stats=StoreStats()
    )

    def write() -> None:
        tier.clear()
        _must(tier, (tier.write(image) for image in images))

    def put() -> None:
        for name, image in zip(names, images, strict=True):
            client.put([(name, [image.payload])])

    def read() -> None:
        for image in images:
            wanted = Wanted(image.pool, image.tag, image.keys, 0)
            found = tier.find(wanted)
            _must(tier, [sum(one.pages for one in found) == image.pages])
            _must(tier, (tier.read(one, wanted, _pages(image)) for one in found))

    def read_into() -> None:
        for name, image in zip(names, images, strict=True):
            client.read_into(name, 0, _pages(image))

    size_bytes = sum(len(image.payload) for image in images)
    try:
        client.ping()
        yield rate("remote put", size_bytes, write, put, "the bare client")
        yield rate("remote get", size_bytes, read, read_into, "the bare client")
        tier.clear()
        client.delete(names)
    except RemoteError as error:
        raise BenchError(f"--remote-url: {client.url}: {error}") from error
    finally:
        tier.close()


def _must(tier: Any, results: Iterable[bool]) -> None:
    if not all(results):
        raise BenchError(f"--remote-url: {tier.url}: {tier.last_error or 'it no longer has what was written'}")


def _layout(model: str = "bench") -> KVLayout:
    return KVLayout(model, "bfloat16", 16, "0-7", "tp0/1", (PoolLayout(_TAG, PAGE_BYTES),))


def _image(arena: Arena, slot: int) -> ChunkImage:
    return ChunkImage(
        layout=_layout().digest,
        pool=_TAG,
        tag=_TAG,
        start=0,
        parent=b"",
        page_bytes=PAGE_BYTES,
        keys=os.urandom(arena.slot_bytes // PAGE_BYTES * KEY_BYTES),
        payload=arena.view(slot, 0, arena.slot_bytes),
    )


def _pages(image: ChunkImage) -> list[memoryview]:
    return [image.payload[at : at + PAGE_BYTES] for at in range(0, len(image.payload), PAGE_BYTES)]


def _takes_direct(folder: Path) -> bool:
    probe = folder / "probe"
    try:
        os.close(os.open(probe, os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o644))
    except OSError:
        return False
    finally:
        probe.unlink(missing_ok=True)
    return True


def _empty(folder: Path) -> None:
    for path in folder.iterdir():
        path.unlink()
