"""The disk tier: one file a chunk, named by its content's key, found again after a restart.

Nothing is synced: after a crash of the machine a file may be torn, and its checksums say so. A crash of the
process loses nothing that was renamed into place.
"""

from __future__ import annotations

import errno
import logging
import mmap
import os
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from psrl_sglang.keys import KEY_BYTES, KVLayout, key_at
from psrl_sglang.store.chunk import (
    BLOCK_BYTES,
    BadChunk,
    ChunkHeader,
    ChunkImage,
    Found,
    Wanted,
    check_holds,
    check_pages,
    decode_header,
    encode_header,
    header_bytes,
    padded,
)
from psrl_sglang.store.directory import Directory, chunk_files, disk_bytes, idle_directories, read_header
from psrl_sglang.store.index import Chunk, DeadRank, PageIndex, Piece
from psrl_sglang.store.stats import StoreStats

logger = logging.getLogger(__name__)

_PAUSE_AFTER_ERROR_S = 5.0
_READ_VECTORS = 512  # IOV_MAX is 1024
_FOLDER_BYTES = 4096


@dataclass(frozen=True, slots=True)
class DiskPlace:
    name: bytes
    header_bytes: int
    size_bytes: int


class DiskTier:
    """Thread-safe. ``budget_bytes`` is for all there is below ``disk_path``, what other layouts left included.

    ``load_index`` finds the files of earlier runs; until it has, they are misses. Nothing here raises for
    trouble with the disk: it is counted, writes pause for a while, and what cannot be read is a miss.
    """

    def __init__(
        self,
        disk_path: Path,
        layout: KVLayout,
        *,
        budget_bytes: int,
        policy: str,
        dead_rank: DeadRank,
        stats: StoreStats,
        direct_io: bool = True,
    ) -> None:
        self.directory = Directory(disk_path, layout)
        self.budget_bytes = budget_bytes
        self.index = PageIndex(policy, dead_rank)
        self.is_loaded = False
        self._layout = layout.digest
        self._page_bytes = {pool.name: pool.page_bytes for pool in layout.pools}
        self._lock = threading.RLock()
        self._dead_rank = dead_rank
        self._stats = stats
        self._direct = os.O_DIRECT if direct_io else 0
        self._folders: set[Path] = set()
        self._files_bytes = 0
        self._idle = idle_directories(disk_path, but=self.directory.path)
        self._writes_resume_s = 0.0
        self._buffers = threading.local()
        self._closed = False

    @property
    def used_bytes(self) -> int:
        """All below ``disk_path``."""
        with self._lock:
            idle = sum(directory.size_bytes for directory in self._idle)
            return self._files_bytes + len(self._folders) * _FOLDER_BYTES + idle

    def load_index(self) -> int:
        """Find what earlier runs left, delete what is torn; returns the number of chunks. Run it once, on a
        thread of its own when the directory may be large."""
        found: list[tuple[float, ChunkHeader, int]] = []
        for path in chunk_files(self.directory.path):
            if self._closed:
                return 0
            try:
                if not path.name.endswith(".kv"):
                    raise BadChunk("left by a write that did not end")
                header = read_header(path)
                if header.layout != self._layout or self._page_bytes.get(header.pool) != header.page_bytes:
                    raise BadChunk("of another layout")
                stat = path.stat()
                found.append((stat.st_mtime, header, stat.st_size))
            except BadChunk as error:
                self._bad_file(path, error)
            except OSError as error:
                self._error("read", error)
        found.sort(key=lambda entry: entry[0])
        order = {id(header): number for number, (_, header, _) in enumerate(found)}
        with self._lock:
            for _, header, size_bytes in sorted(found, key=lambda entry: (entry[1].start, -entry[1].pages)):
                self._insert(header, size_bytes, stamp=order[id(header)])
            self.is_loaded = True
        self._make_room(0)
        return len(found)

    def find(self, wanted: Wanted) -> list[Found]:
        """The longest prefix that is here, in chunks. A probe."""
        with self._lock:
            pieces = self.index.match(wanted.keys)
        return [Found(piece.chunk.place.name, piece.first, piece.keys) for piece in pieces]

    def read(self, found: Found, wanted: Wanted, into: Sequence[memoryview]) -> bool:
        """Fill ``into``, one page each, and check them. False if anything is not as it should be: then the
        file is gone from the index, and ``into`` holds anything."""
        with self._lock:
            chunk = self.index.chunk_of(key_at(found.keys, 0))
            if chunk is None or chunk.place.name != found.name:
                return self._late_miss()
            self.index.touch([Piece(chunk, 0, chunk.pages)])
            place: DiskPlace = chunk.place
        path = self.directory.file(chunk.tag, place.name)
        page_bytes = self._page_bytes[wanted.pool]
        try:
            with self._stats.timed("disk", "load", len(into) * page_bytes):
                header = self._read_file(path, place, found.first * page_bytes, into)
                check_holds(header, self._layout, wanted.pool, found, page_bytes)
                check_pages(header, found.first, into)
            _note_use(path)
        except FileNotFoundError:
            self._forget(chunk, unlink=False)
            return self._late_miss()
        except BadChunk as error:
            self._forget(chunk, unlink=False)
            self._bad_file(path, error)
            return False
        except OSError as error:
            self._error("read", error)
            return False
        return True

    def write(self, image: ChunkImage) -> bool:
        """Store a chunk; True if it is here afterwards. It replaces shorter chunks of the same pages."""
        if time.monotonic() < self._writes_resume_s or not self.is_loaded:
            self._stats.add(
                "rejected", image.pages, tier="disk", reason="paused" if self.is_loaded else "loading"
            )
            return False
        with self._lock:
            image, shorter = self._to_write(image)
        if not image.pages:
            return True
        header = image.header()
        block = encode_header(header)
        size_bytes = len(block) + padded(len(image.payload))
        if not self._make_room(size_bytes):
            self._stats.add("rejected", image.pages, tier="disk", reason="full")
            return False
        path = self.directory.file(image.tag, image.name)
        temporary = path.with_name(f"{path.name}.tmp-{threading.get_ident()}")
        try:
            with self._stats.timed("disk", "store", len(image.payload)):
                self._make_folder(path.parent)
                self._write_file(temporary, block, image.payload)
                os.replace(temporary, path)
        except OSError as error:
            self._error("write", error)
            self._writes_resume_s = time.monotonic() + _PAUSE_AFTER_ERROR_S
            _unlink(temporary)
            if error.errno == errno.ENOSPC:
                self._make_room(2 * size_bytes, beyond_budget=True)
            return False
        with self._lock:
            heirs = [chunk for chunk in self.index.of_tag(image.tag) if chunk.parent in shorter]
            for chunk in shorter:
                self._forget(chunk, unlink=True)
            self._insert(header, size_bytes)
            self.index.adopt(heirs, header.keys)
        return True

    def drop_tag(self, tag: str) -> int:
        """Delete every file of a tag; returns the pages dropped."""
        with self._lock:
            chunks = self.index.of_tag(tag)
            for chunk in chunks:
                self._evict(chunk, "retired")
            return sum(chunk.pages for chunk in chunks)

    def clear(self) -> int:
        with self._lock:
            return sum(self.drop_tag(tag) for tag in self.index.tags())

    def status(self) -> dict[str, Any]:
        with self._lock:
            return {
                "used_bytes": self.used_bytes,
                "budget_bytes": self.budget_bytes,
                "pages": len(self.index),
                "index_loaded": self.is_loaded,
                "writes_paused": time.monotonic() < self._writes_resume_s,
                "pages_by_tag": self.index.pages_by_tag(),
            }

    def check_integrity(self) -> list[str]:
        """What is wrong with the books. Exact only while nothing is being written."""
        with self._lock:
            wrong = self.index.wrong()
            chunks = list(self.index.chunks())
            if sum(chunk.place.size_bytes for chunk in chunks) != self._files_bytes:
                wrong.append(
                    f"files hold {sum(c.place.size_bytes for c in chunks)} bytes, not {self._files_bytes}"
                )
            missing = [c for c in chunks if not self.directory.file(c.tag, c.place.name).exists()]
            if missing:
                wrong.append(f"{len(missing)} files of the index are gone")
            on_disk = disk_bytes(self.directory.path.parents[2])
            if on_disk > self.budget_bytes:
                wrong.append(f"{on_disk} bytes on disk, {self.budget_bytes} allowed")
            return wrong

    def close(self) -> None:
        self._closed = True
        self.directory.close()

    def _read_file(self, path: Path, place: DiskPlace, skip: int, into: Sequence[memoryview]) -> ChunkHeader:
        head = self._header_buffer(place.header_bytes)
        file = self._open(path, os.O_RDONLY, [head, *into], place.header_bytes + skip)
        try:
            _fill(file, [head], 0)
            header = decode_header(head)
            if header_bytes(head) != place.header_bytes:
                raise BadChunk("header of another length")
            _fill(file, into, place.header_bytes + skip)
        finally:
            os.close(file)
        return header

    def _write_file(self, path: Path, block: bytes, payload: memoryview) -> None:
        head = self._header_buffer(len(block))
        head[:] = block
        rest = padded(len(payload)) - len(payload)
        parts = [head, payload] + ([memoryview(bytes(rest))] if rest else [])
        file = self._open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, parts, 0)
        try:
            done = 0
            size_bytes = sum(map(len, parts))
            while done < size_bytes:
                written = os.pwritev(file, _behind(parts, done), done)
                if written <= 0:
                    raise OSError(errno.ENOSPC, "wrote nothing", str(path))
                done += written
        finally:
            os.close(file)

    def _open(self, path: Path, flags: int, parts: Sequence[memoryview], offset: int) -> int:
        """O_DIRECT where everything is aligned for it: it writes several times faster and leaves the page cache
        to others. A file system that refuses it is used without."""
        if self._direct and offset % BLOCK_BYTES == 0 and all(_is_aligned(part) for part in parts):
            try:
                return os.open(path, flags | self._direct, 0o644)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                self._direct = 0
        return os.open(path, flags, 0o644)

    def _header_buffer(self, size_bytes: int) -> memoryview:
        """A page-aligned buffer, one for each thread, valid until the thread asks again."""
        buffer: mmap.mmap | None = getattr(self._buffers, "header", None)
        if buffer is None or len(buffer) < size_bytes:
            buffer = self._buffers.header = mmap.mmap(-1, max(size_bytes, 16 * BLOCK_BYTES))
        return memoryview(buffer)[:size_bytes]

    def _make_folder(self, folder: Path) -> None:
        with self._lock:
            if folder not in self._folders:
                folder.mkdir(parents=True, exist_ok=True)
                self._folders |= {folder, folder.parent}

    def _to_write(self, image: ChunkImage) -> tuple[ChunkImage, list[Chunk]]:
        """The part of a chunk that is missing here, and the chunks that it makes needless."""
        owners = [
            self.index.chunk_of(image.keys[at : at + KEY_BYTES]) for at in range(0, len(image.keys), KEY_BYTES)
        ]
        if None not in owners:
            return image.behind(image.pages), []
        shorter = {chunk for chunk in owners if chunk is not None}
        if all(chunk.keys in image.keys for chunk in shorter):
            return image, list(shorter)
        # Another sequence shares its head: only what is behind that is new.
        last = max(page for page, chunk in enumerate(owners) if chunk is not None)
        return image.behind(last + 1), []

    def _insert(self, header: ChunkHeader, size_bytes: int, stamp: int | None = None) -> None:
        path = self.directory.file(header.tag, header.name)
        if any(key_at(header.keys, page) in self.index for page in range(header.pages)):
            _unlink(path)  # a shorter chunk of pages that an earlier run stored twice
            return
        place = DiskPlace(header.name, size_bytes - padded(header.pages * header.page_bytes), size_bytes)
        chunk = Chunk(header.pool, header.tag, header.start, header.parent, place)
        self.index.add(chunk, self.index.chunk_of(header.parent))
        if stamp is not None:
            chunk.stamp = stamp - (1 << 40)  # older than anything of this run
        self.index.extend(chunk, header.keys)
        self._files_bytes += size_bytes
        self._folders |= {path.parent, path.parent.parent}

    def _make_room(self, size_bytes: int, *, beyond_budget: bool = False) -> bool:
        """Delete until ``size_bytes`` more fit: what other layouts left, then dead versions, then the oldest."""
        with self._lock:
            allowed = self.used_bytes if beyond_budget else self.budget_bytes
            needed = size_bytes + 3 * _FOLDER_BYTES
            while self.used_bytes + needed > allowed:
                if self._idle:
                    oldest = self._idle.pop(0)
                    self._stats.add("evicted_bytes", oldest.remove(), tier="disk", reason="other layout")
                    continue
                victim = self.index.victim()
                if victim is None:
                    return False
                self._evict(victim, "dead" if self._dead_rank(victim.tag) is not None else "full")
            return True

    def _evict(self, chunk: Chunk, reason: str) -> None:
        self._stats.add("evicted_pages", chunk.pages, tier="disk", reason=reason)
        self._forget(chunk, unlink=True)

    def _forget(self, chunk: Chunk, *, unlink: bool) -> None:
        with self._lock:
            if self.index.chunk_of(key_at(chunk.keys, 0)) is not chunk:
                return
            self.index.remove(chunk)
            self._files_bytes -= chunk.place.size_bytes
            path = self.directory.file(chunk.tag, chunk.place.name)
            if unlink:
                _unlink(path)
            for folder in (path.parent, path.parent.parent):
                try:
                    folder.rmdir()
                except OSError:
                    break  # not empty, or not ours to remove: then it stays counted
                self._folders.discard(folder)

    def _late_miss(self) -> bool:
        self._stats.add("misses_late", tier="disk")
        return False

    def _bad_file(self, path: Path, error: BadChunk) -> None:
        logger.warning("psrl: %s is deleted: %s", path, error)
        self._stats.add("checksum_failures" if "checksum" in str(error) else "bad_files", tier="disk")
        _unlink(path)

    def _error(self, action: str, error: OSError) -> None:
        logger.warning("psrl: disk %s: %s", action, error)
        reason = errno.errorcode.get(error.errno or 0, "other")
        self._stats.add("errors", tier="disk", direction=action, reason=reason)


def _is_aligned(part: memoryview) -> bool:
    return len(part) % BLOCK_BYTES == 0 and np.frombuffer(part, dtype=np.uint8).ctypes.data % BLOCK_BYTES == 0


def _behind(parts: Sequence[memoryview], done: int) -> list[memoryview]:
    """What is left of ``parts`` once ``done`` bytes of them are through."""
    left = []
    for part in parts:
        if done < len(part):
            left.append(part[done:] if done > 0 else part)
        done = max(0, done - len(part))
    return left[:_READ_VECTORS]


def _fill(file: int, parts: Sequence[memoryview], offset: int) -> None:
    done, size_bytes = 0, sum(map(len, parts))
    while done < size_bytes:
        got = os.preadv(file, _behind(parts, done), offset + done)
        if got <= 0:
            raise BadChunk(f"cut short at {offset + done} bytes")
        done += got


def _note_use(path: Path) -> None:
    """The order of use survives a restart, unless the directory became read-only."""
    with suppress(OSError):
        os.utime(path)


def _unlink(path: Path) -> None:
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        logger.warning("psrl: %s cannot be deleted: %s", path, error)
