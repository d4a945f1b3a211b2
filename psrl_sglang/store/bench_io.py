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
from typing import Any, Protocol

from psrl_sglang.keys import KEY_BYTES, KVLayout, PoolLayout
from psrl_sglang.store.arena import Arena
from psrl_sglang.store.bench import GB, PAGE_BYTES, BenchError, BenchOptions, Figure, in_turns, rate
from psrl_sglang.store.chunk import BLOCK_BYTES, ChunkImage, Wanted
from psrl_sglang.store.disk import DiskTier
from psrl_sglang.store.remote_client import RemoteError
from psrl_sglang.store.stats import StoreStats

_DISK_TURNS = 7
_REMOTE_BYTES = 1 << 28
_REMOTE_TIMEOUT_S = 30.0
_FIO_TIMEOUT_S = 600.0
_TAG = "bench"

_Action = Callable[[DiskTier, ChunkImage], bool]


def disk_figures(options: BenchOptions, arena: Arena) -> Iterator[Figure]:
    """Every chunk written to a file of its own by one thread, as the store does, and read back by ``threads``."""
    layout = _layout()
    images = [_image(arena, slot, layout) for slot in range(options.chunks)]
    with tempfile.TemporaryDirectory(prefix="psrl-bench-", dir=options.path) as folder:
        plain = _plain_disk(Path(folder), options)
        tier = _disk_tier(Path(folder), layout)
        try:
            for name, action, way, threads in (
                ("disk write, 1 thread", _write, "write", 1),
                (f"disk read, {options.threads} threads", _read, "read", options.threads),
            ):

                def ours(action: _Action = action, threads: int = threads) -> float:
                    if action is _write:
                        tier.clear()
                    os.sync()
                    return _rate(tier, action, images, threads)

                def theirs(way: str = way, threads: int = threads) -> float:
                    if way == "write":
                        plain.clear()
                    os.sync()
                    return plain.rate(way, threads)

                pairs = in_turns(_DISK_TURNS, ours, theirs)
                mine, other = (statistics.median(column) for column in zip(*pairs, strict=True))
                yield Figure(name, mine, "GB/s", target=0.8, baseline=other, baseline_name=plain.name)
        finally:
            tier.close()


def _disk_tier(folder: Path, layout: KVLayout) -> DiskTier:
    tier = DiskTier(
        folder,
        layout,
        budget_bytes=1 << 60,
        policy="LRU",
        dead_rank=lambda _tag: None,
        stats=StoreStats(),
    )
    tier.load_index()
    return tier


def _write(tier: DiskTier, image: ChunkImage) -> bool:
    return tier.write(image)


def _read(tier: DiskTier, image: ChunkImage) -> bool:
    wanted = Wanted(image.pool, image.tag, image.keys, 0)
    (found,) = tier.find(wanted)
    return tier.read(found, wanted, _pages(image))


def _rate(tier: DiskTier, action: _Action, images: list[ChunkImage], threads: int) -> float:
    with ThreadPoolExecutor(threads) as pool:
        began_s = time.perf_counter()
        done = list(pool.map(lambda image: action(tier, image), images))
        seconds = time.perf_counter() - began_s
    if not all(done):
        raise BenchError(f"--path: {done.count(False)} of {len(done)} chunks failed; the log says why")
    return sum(len(image.payload) for image in images) / seconds / GB


class _PlainDisk(Protocol):
    name: str

    def rate(self, way: str, threads: int) -> float:
        """Write or read every file; GB/s."""
        ...

    def clear(self) -> None: ...


def _plain_disk(folder: Path, options: BenchOptions) -> _PlainDisk:
    kind = _Fio if shutil.which("fio") else _Loop
    return kind(folder, options.chunks, BLOCK_BYTES + options.chunk_bytes, _takes_direct(folder))


class _Fio:
    """Makes the files that it reads by itself, when it reads them for the first time."""

    def __init__(self, folder: Path, files: int, file_bytes: int, direct: bool) -> None:
        self.name = "fio" if direct else "fio (no O_DIRECT here)"
        self._folder = folder / "fio"
        self._folder.mkdir()
        self._files = files
        self._file_bytes = file_bytes
        self._direct = direct

    def rate(self, way: str, threads: int) -> float:
        files = self._files // threads
        command = [
            *(
                "fio",
                f"--name={way}",
                f"--rw={way}",
                f"--directory={self._folder}",
                f"--direct={self._direct:d}",
            ),
            *(
                f"--numjobs={threads}",
                f"--nrfiles={files}",
                f"--size={files * self._file_bytes}",
                "--openfiles=1",
            ),
            *(f"--filesize={self._file_bytes}", f"--bs={self._file_bytes}", "--file_service_type=sequential"),
            *("--ioengine=psync", "--fallocate=none", "--thread", "--group_reporting", "--output-format=json"),
        ]
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=_FIO_TIMEOUT_S)
            report: dict[str, Any] = json.loads(done.stdout[done.stdout.index("{") :])
            return report["jobs"][0][way]["bw_bytes"] / GB
        except subprocess.CalledProcessError as error:
            raise BenchError(
                f"fio --rw={way} failed: {error.stderr.strip() or error.stdout.strip()}"
            ) from error
        except (subprocess.TimeoutExpired, ValueError, LookupError) as error:
            raise BenchError(f"fio --rw={way} gave no result: {error!r}") from error

    def clear(self) -> None:
        _empty(self._folder)


class _Loop:
    """Where fio is not installed: each file written and read by one call."""

    def __init__(self, folder: Path, files: int, file_bytes: int, direct: bool) -> None:
        self.name = "one call a file (no fio here)" if direct else "one call a file (no fio, no O_DIRECT here)"
        self._folder = folder / "plain"
        self._folder.mkdir()
        self._paths = [self._folder / str(number) for number in range(files)]
        self._file_bytes = file_bytes
        self._direct = os.O_DIRECT if direct else 0

    def rate(self, way: str, threads: int) -> float:
        transfer = os.pwritev if way == "write" else os.preadv
        flags = self._direct | (os.O_WRONLY | os.O_CREAT | os.O_TRUNC if way == "write" else os.O_RDONLY)
        buffers = Arena(threads, self._file_bytes)

        def work(thread: int) -> None:
            view = buffers.view(thread, 0, self._file_bytes)
            for path in self._paths[thread::threads]:
                file = os.open(path, flags, 0o644)
                try:
                    done = 0
                    while done < self._file_bytes:
                        done += transfer(file, [view[done:]], done)
                finally:
                    os.close(file)

        with ThreadPoolExecutor(threads) as pool:
            began_s = time.perf_counter()
            list(pool.map(work, range(threads)))
            return len(self._paths) * self._file_bytes / (time.perf_counter() - began_s) / GB

    def clear(self) -> None:
        _empty(self._folder)


def remote_figures(options: BenchOptions, arena: Arena) -> Iterator[Figure]:
    """Chunks written and read by the tier, beside values of the same size by its client, on one thread."""
    from psrl_sglang.store.remote import RemoteTier
    from psrl_sglang.store.remote_client import connect

    layout = _layout()
    chunks = max(1, min(options.chunks, _REMOTE_BYTES // options.chunk_bytes))
    images = [_image(arena, slot, layout) for slot in range(chunks)]
    names = [f"psrl-bench:{layout.digest.hex()}:{number}" for number in range(chunks)]
    try:
        client = connect(str(options.remote_url), timeout_s=_REMOTE_TIMEOUT_S)
    except ValueError as error:
        raise BenchError(f"--remote-url: {error}") from error
    chunk_pages = {_TAG: options.chunk_bytes // PAGE_BYTES}
    tier = RemoteTier(client, layout=layout, chunk_pages=chunk_pages, stats=StoreStats())

    def empty() -> None:  # the tier does not write what the store has, and a store is faster at overwriting
        tier.clear()
        client.delete(names)

    def write() -> None:
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
        try:
            yield rate("remote put, 1 thread", size_bytes, write, put, "the bare client", prepare=empty)
            write()
            put()
            yield rate("remote get, 1 thread", size_bytes, read, read_into, "the bare client")
        finally:
            empty()
    except RemoteError as error:
        raise BenchError(f"--remote-url: {error}") from error
    finally:
        tier.close()


def _must(tier: Any, results: Iterable[bool]) -> None:
    if not all(results):
        raise BenchError(f"--remote-url: {tier.url}: {tier.last_error or 'it no longer has what was written'}")


def _layout() -> KVLayout:
    """One that nobody else has, so that what belongs to it can be deleted."""
    return KVLayout(
        f"bench {os.urandom(8).hex()}", "bfloat16", 16, "0-7", "tp0/1", (PoolLayout(_TAG, PAGE_BYTES),)
    )


def _image(arena: Arena, slot: int, layout: KVLayout) -> ChunkImage:
    return ChunkImage(
        layout=layout.digest,
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
