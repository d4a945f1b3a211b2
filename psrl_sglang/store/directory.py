"""Where the disk tier keeps its files, and what is there. Also used by ``psrl-sglang store``.

    DISK_PATH/psrl-kv/LOCK                               held for a moment by who takes or deletes directories
    DISK_PATH/psrl-kv/<layout digest>/LAYOUT             what the digest stands for
    DISK_PATH/psrl-kv/<layout digest>/<n>/LOCK           held by the engine process that uses the directory
    DISK_PATH/psrl-kv/<layout digest>/<n>/<tag digest>/<first digit>/<chunk name>.kv

Two engines of one layout on one host get a directory each; a restarted engine takes the first free one again.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from psrl_sglang.keys import KVLayout
from psrl_sglang.store.chunk import BLOCK_BYTES, BadChunk, ChunkHeader, decode_header, header_bytes, padded

ROOT = "psrl-kv"
SUFFIX = ".kv"
_LOCK = "LOCK"
_LAYOUT = "LAYOUT"
_MOST_DIRECTORIES = 256


def tag_folder(tag: str) -> str:
    """A file name for any tag; every chunk's header spells the tag out."""
    return hashlib.blake2b(tag.encode(), digest_size=8).hexdigest()


class Directory:
    """One engine's own directory, locked until ``close``. Raises ``OSError`` if none can be made."""

    def __init__(self, disk_path: Path, layout: KVLayout) -> None:
        self._root = disk_path / ROOT
        self._base = self._root / layout.digest.hex()
        self._root.mkdir(parents=True, exist_ok=True)
        with guarded(self._root):
            self._base.mkdir(exist_ok=True)
            (self._base / _LAYOUT).write_text(layout.text + "\n")
            for number in range(_MOST_DIRECTORIES):
                self.path = self._base / str(number)
                self.path.mkdir(exist_ok=True)
                lock = lock_of(self.path)
                if lock is not None:
                    self._lock = lock
                    os.utime(lock)
                    return
        raise OSError(f"{self._base}: all of {_MOST_DIRECTORIES} directories are in use")

    @property
    def outside_bytes(self) -> int:
        """What there is on disk because of this directory, but not below it."""
        outside = (self._root.parent, self._root, self._root / _LOCK, self._base, self._base / _LAYOUT)
        return sum(map(allocated_bytes, outside))

    def file(self, tag: str, name: bytes) -> Path:
        text = name.hex()
        return self.path / tag_folder(tag) / text[:1] / (text + SUFFIX)

    def close(self) -> None:
        """May be called more than once."""
        lock, self._lock = self._lock, -1
        if lock >= 0:
            with suppress(OSError):
                os.utime(lock)
            os.close(lock)


@dataclass(frozen=True, slots=True)
class IdleDirectory:
    """Another directory below the same ``disk_path`` that no running engine holds."""

    path: Path
    size_bytes: int
    used_s: float

    def remove(self) -> int:
        """Delete it unless an engine has taken it meanwhile; returns the bytes freed. Raises ``OSError`` if
        nothing can be deleted there."""
        base = self.path.parent
        with guarded(base.parent):
            if not self.path.is_dir() or (lock := lock_of(self.path)) is None:
                return 0
            try:
                shutil.rmtree(self.path, ignore_errors=True)
            finally:
                os.close(lock)
            if not any(path.is_dir() for path in base.iterdir()):
                shutil.rmtree(base, ignore_errors=True)
        return self.size_bytes - disk_bytes(self.path)


def idle_directories(disk_path: Path, but: Path) -> list[IdleDirectory]:
    """The longest unused first. Raises ``OSError`` where directories can only be read."""
    idle = []
    with guarded(disk_path / ROOT):
        for path in (disk_path / ROOT).glob("*/[0-9]*"):
            if path == but or not path.is_dir():
                continue
            lock = lock_of(path)
            if lock is not None:
                idle.append((os.fstat(lock).st_mtime, path))
                os.close(lock)
    found: list[IdleDirectory] = []
    counted = {but.parent}
    for used_s, path in sorted(idle, reverse=True):
        size_bytes = disk_bytes(path)
        if path.parent not in counted:  # it is deleted with the last of its directories
            counted.add(path.parent)
            size_bytes += allocated_bytes(path.parent) + allocated_bytes(path.parent / _LAYOUT)
        found.append(IdleDirectory(path, size_bytes, used_s))
    return found[::-1]


@contextmanager
def guarded(root: Path) -> Iterator[None]:
    """Nobody else takes, judges or deletes a directory meanwhile: else an engine that starts could find its own
    locked by one that only looks, or lock one that is being deleted."""
    guard = os.open(root / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(guard, fcntl.LOCK_EX)
        yield
    finally:
        os.close(guard)


def lock_of(path: Path) -> int | None:
    """The lock of a directory, held until it is closed; None if another has it."""
    lock = os.open(path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(lock)
        if isinstance(error, BlockingIOError):
            return None
        raise
    return lock


def allocated_bytes(path: Path) -> int:
    """What ``du`` says of one file or folder: blocks, not length; 0 for one that is gone."""
    try:
        return os.lstat(path).st_blocks * 512
    except OSError:
        return 0


def disk_bytes(path: Path) -> int:
    """What ``du`` says of a directory and all below it; 0 for one that is gone."""
    return sum(
        allocated_bytes(Path(folder, name)) for folder, _, files in os.walk(path) for name in (".", *files)
    )


def is_read_only(path: Path) -> bool:
    """Whether the file system is, so that no file can be deleted either."""
    try:
        return bool(os.statvfs(path).f_flag & os.ST_RDONLY)
    except OSError:
        return False


def remove_empty_folders(path: Path) -> None:
    """Below ``path``, which stays."""
    for folder, _, _ in os.walk(path, topdown=False):
        if Path(folder) != path:
            with suppress(OSError):
                os.rmdir(folder)


def chunk_files(path: Path) -> Iterator[Path]:
    """Every file below that is or may become a chunk; files of other makes are not ours to judge."""
    return (file for file in _files(path) if _is_chunk(file))


def other_bytes(path: Path) -> int:
    """What the files below take that are no chunks."""
    return sum(allocated_bytes(file) for file in _files(path) if not _is_chunk(file))


def _files(path: Path) -> Iterator[Path]:
    return (Path(folder, name) for folder, _, files in os.walk(path) for name in files)


def _is_chunk(file: Path) -> bool:
    return file.name.endswith(SUFFIX) or ".tmp-" in file.name


def read_header(path: Path) -> ChunkHeader:
    """The header of a file whose length is right. Raises ``BadChunk`` and ``OSError``."""
    with open(path, "rb", buffering=0) as file:
        block = file.read(BLOCK_BYTES)
        size = header_bytes(block)
        if size > len(block):
            block += file.read(size - len(block))
        header = decode_header(block)
        expected = size + padded(header.pages * header.page_bytes)
        if (found := os.fstat(file.fileno()).st_size) != expected:
            raise BadChunk(f"{found} bytes long, not {expected}")
    if path.name != header.name.hex() + SUFFIX:
        raise BadChunk(f"named {path.name}, holds {header.name.hex()}")
    return header


@dataclass(frozen=True, slots=True)
class OldFile:
    """A chunk that an earlier run left."""

    path: Path
    header: ChunkHeader
    size_bytes: int
    header_bytes: int
    used_s: float


def read_old_file(path: Path, directory: Directory, layout: KVLayout) -> OldFile:
    """One that this engine can use. Raises ``BadChunk`` and ``OSError``."""
    if not path.name.endswith(SUFFIX):
        raise BadChunk("left by a write that did not end")
    header = read_header(path)
    page_bytes = {pool.name: pool.page_bytes for pool in layout.pools}.get(header.pool)
    if header.layout != layout.digest or page_bytes != header.page_bytes:
        raise BadChunk("of another layout")
    if path != directory.file(header.tag, header.name):
        raise BadChunk("in another one's place")
    payload_bytes = padded(header.pages * header.page_bytes)
    stat = path.stat()
    size_bytes = max(stat.st_size, stat.st_blocks * 512)
    return OldFile(path, header, size_bytes, stat.st_size - payload_bytes, stat.st_mtime)
