"""The disk tier: one file a chunk, named by its content's key, found again after a restart.

Nothing is synced: after a crash of the machine a file may be torn, and its checksums say so. A crash of the
process loses nothing that was renamed into place.
"""

from __future__ import annotations

import errno
import logging
import os
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from psrl_sglang.keys import KEY_BYTES, KVLayout, key_at
from psrl_sglang.store.chunk import (
    BadChunk,
    ChunkHeader,
    ChunkImage,
    Found,
    Wanted,
    check_holds,
    check_pages,
    encode_header,
    padded,
)
from psrl_sglang.store.chunk_io import ChunkFiles
from psrl_sglang.store.directory import (
    Directory,
    IdleDirectory,
    OldFile,
    allocated_bytes,
    chunk_files,
    idle_directories,
    is_read_only,
    other_bytes,
    read_old_file,
    remove_empty_folders,
)
from psrl_sglang.store.disk_space import DiskSpace
from psrl_sglang.store.index import Chunk, DeadRank, PageIndex, Piece
from psrl_sglang.store.stats import StoreStats

logger = logging.getLogger(__name__)

_PAUSE_AFTER_ERROR_S = 5.0
# What a new file may take besides its length: two new folders, a longer one, and a map of its blocks.
_AROUND_FILE_BYTES = 4 * 4096


@dataclass(frozen=True, slots=True)
class DiskPlace:
    name: bytes
    header_bytes: int
    size_bytes: int


class DiskTier:
    """Thread-safe. ``budget_bytes`` is for all there is in this engine's directory and in those below
    ``disk_path`` that no engine uses, whatever their layout.

    ``load_index`` finds what earlier runs left; until it has, everything is a miss and nothing is written. Of
    engines that start together, none should call it before all have made their tiers, else one takes what
    another has not locked yet for unused. Nothing here raises for trouble with the disk: it is counted, writes
    pause for a while, and what cannot be read is a miss.
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
        self._disk_path = disk_path
        self._layout = layout
        self._page_bytes = {pool.name: pool.page_bytes for pool in layout.pools}
        self._whole_pool = layout.pools[0].name
        self._lock = threading.RLock()
        self._dead_rank = dead_rank
        self._stats = stats
        self._notes_use = policy == "LRU"
        self._files = ChunkFiles(direct_io=direct_io)
        self._space = DiskSpace(self.directory, self._error)
        self._landing: set[bytes] = set()  # pages that are being written
        self._writes_resume_s = 0.0
        self._drops = 0
        self._dropped_tags: set[str] | None = set()  # before the index was loaded; None for every tag
        self._closed = False
        self._loading = threading.Lock()

    @property
    def used_bytes(self) -> int:
        """All that counts against the budget."""
        with self._lock:
            return self._space.used_bytes

    def load_index(self) -> int:
        """Find what earlier runs left, delete what is torn; returns the number of chunks. Run it once, on a
        thread of its own when the directory may be large."""
        with self._loading:
            return self._load_index()

    def _load_index(self) -> int:
        found: list[OldFile] = []
        for path in chunk_files(self.directory.path):
            if self._closed:
                return 0
            try:
                found.append(read_old_file(path, self.directory, self._layout))
            except BadChunk as error:
                self._bad_file(path, error)
            except OSError as error:
                self._error("read", error)
                self._space.other_bytes += allocated_bytes(path)
        remove_empty_folders(self.directory.path)
        self._space.other_bytes += other_bytes(self.directory.path)
        try:
            idle = idle_directories(self._disk_path, but=self.directory.path)
        except OSError as error:
            self._error("read", error)
            idle = []
        by_use = sorted(found, key=lambda old: old.used_s)
        stamps = {old.path: number - len(found) for number, old in enumerate(by_use)}
        for old in sorted(found, key=lambda old: (old.header.start, -old.header.pages)):
            with self._lock:
                self._insert_old(old, stamps[old.path])
        with self._lock:
            self._space.idle = idle
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
            if chunk is None or not _is_in(found, chunk):
                return self._late_miss()
            self.index.touch([Piece(chunk, 0, chunk.pages)])
            place: DiskPlace = chunk.place
        path = self.directory.file(chunk.tag, place.name)
        page_bytes = self._page_bytes[wanted.pool]
        try:
            with self._stats.timed("disk", "load", len(into) * page_bytes):
                header = self._files.read(path, place.header_bytes, found.first * page_bytes, into)
                check_holds(header, self._layout.digest, wanted.pool, found, page_bytes)
                check_pages(header, found.first, into)
            if self._notes_use:
                _note_use(path)
        except FileNotFoundError:
            self._forget(chunk)
            return self._late_miss()
        except BadChunk as error:
            with self._lock:
                if not self.index.holds(chunk):  # evicted, and its name given to another meanwhile
                    return self._late_miss()
                self._bad_file(path, error)
                self._forget(chunk)
            return False
        except OSError as error:
            self._error("read", error)
            if error.errno == errno.EIO:
                self._forget(chunk)
            return False
        return True

    def write(self, image: ChunkImage) -> bool:
        """Store a chunk; True if it is here afterwards. It replaces shorter chunks of the same pages. One of the
        first pool that continues what is not here is not taken; other pools may have only windows of a sequence.
        """
        if not self.is_loaded or self._closed:
            return self._reject(image, "loading")
        if time.monotonic() < self._writes_resume_s:
            return self._reject(image, "paused")
        with self._lock:
            missing, shorter = self._to_write(image)
            if not missing.pages:
                return True
            pages = {key_at(missing.keys, page) for page in range(missing.pages)}
            if not self._landing.isdisjoint(pages):
                return self._reject(image, "busy")
            parent = self.index.chunk_of(missing.parent)
            if parent is not None:
                parent.busy += 1  # what this one continues must not make room for it
            elif missing.parent and missing.parent not in self._landing and image.pool == self._whole_pool:
                return self._reject(image, "headless")  # nobody would find it
            self._landing |= pages
            drops = self._drops
        try:
            return self._write(missing, shorter, drops)
        finally:
            with self._lock:
                self._landing -= pages
                if parent is not None:
                    parent.busy -= 1

    def _write(self, image: ChunkImage, shorter: list[Chunk], drops: int) -> bool:
        header = image.header()
        block = encode_header(header)
        size_bytes = len(block) + padded(len(image.payload))
        if not self._make_room(size_bytes):
            return self._reject(image, "full")
        path = self.directory.file(image.tag, image.name)
        temporary = path.with_name(f"{path.name}.tmp-{threading.get_ident()}")
        try:
            with self._stats.timed("disk", "store", len(image.payload)):
                with self._lock:  # else the folder could be deleted again before there is a file in it
                    path.parent.mkdir(parents=True, exist_ok=True)
                    file = self._files.create(temporary, image.payload)
                on_disk_bytes = self._files.write(file, block, image.payload)
            with self._lock:
                if drops != self._drops:  # perhaps of this tag: what was dropped must not come back
                    self._space.delete(temporary, on_disk_bytes)
                    self._space.remove_folders(path.parent)
                    return False
                os.replace(temporary, path)
                self._space.undeleted.pop(path, None)
                for chunk in shorter:
                    self._forget(chunk, unlink=chunk.place.name != image.name)
                self._insert(header, path, DiskPlace(image.name, len(block), on_disk_bytes))
                return True
        except OSError as error:
            self._error("write", error)
            with self._lock:
                self._space.delete(temporary, size_bytes)
                self._space.remove_folders(path.parent)
                at_most_bytes = self.used_bytes - 2 * size_bytes
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                self._make_room(0, at_most_bytes=at_most_bytes)
            return False
        finally:
            with self._lock:
                self._space.landing_bytes -= size_bytes

    def drop_tag(self, tag: str) -> int:
        """Delete every file of a tag; returns the pages dropped."""
        with self._lock:
            self._drops += 1
            if self._dropped_tags is not None and not self.is_loaded:
                self._dropped_tags.add(tag)
            chunks = self.index.of_tag(tag)
            for chunk in chunks:
                self._evict(chunk, "retired")
            return sum(chunk.pages for chunk in chunks)

    def clear(self) -> int:
        with self._lock:
            self._drops += 1
            if not self.is_loaded:
                self._dropped_tags = None
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
            if sum(chunk.place.size_bytes for chunk in chunks) != self._space.files_bytes:
                wrong.append(
                    f"files hold {sum(c.place.size_bytes for c in chunks)} bytes, not {self._space.files_bytes}"
                )
            missing = [c for c in chunks if not self.directory.file(c.tag, c.place.name).exists()]
            if missing:
                wrong.append(f"{len(missing)} files of the index are gone")
            counted, on_disk = self._space.own_bytes, self._space.on_disk_bytes()
            if on_disk > counted:
                wrong.append(f"{on_disk} bytes on disk, {counted} counted")
            if self.is_loaded and counted > self.budget_bytes:
                wrong.append(f"{counted} bytes on disk, {self.budget_bytes} allowed")
            return wrong

    def close(self) -> None:
        """May be called more than once."""
        self._closed = True
        with self._loading:
            self.directory.close()

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
        # Another sequence shares some of it: only the first run of pages that is not here is new.
        first = owners.index(None)
        end = next((page for page in range(first, len(owners)) if owners[page] is not None), len(owners))
        return image.until(end).behind(first), []

    def _insert(self, header: ChunkHeader, path: Path, place: DiskPlace, *, stamp: int | None = None) -> None:
        chunk = Chunk(header.pool, header.tag, header.start, header.parent, place)
        self.index.add(chunk, self.index.chunk_of(header.parent), stamp=stamp)
        self.index.extend(chunk, header.keys)
        self._space.files_bytes += place.size_bytes
        self._space.count_folders(path)

    def _insert_old(self, old: OldFile, stamp: int) -> None:
        header = old.header
        is_dropped = self._dropped_tags is None or header.tag in self._dropped_tags
        is_double = any(key_at(header.keys, page) in self.index for page in range(header.pages))
        if is_dropped or is_double:
            self._space.delete(old.path, old.size_bytes)
            self._space.remove_folders(old.path.parent)
        else:
            place = DiskPlace(header.name, old.header_bytes, old.size_bytes)
            self._insert(header, old.path, place, stamp=stamp)

    def _make_room(self, size_bytes: int, *, at_most_bytes: int | None = None) -> bool:
        """Delete until a file of this size fits, and keep the room for it: what other engines left goes first,
        then dead versions, then the oldest."""
        allowed = self.budget_bytes if at_most_bytes is None else at_most_bytes
        needed = size_bytes + _AROUND_FILE_BYTES if size_bytes else 0
        with self._lock:
            self._space.delete_again()
            if size_bytes and self._space.other_bytes + needed > allowed:
                return False  # it would be in vain to delete all there is
        while True:
            with self._lock:
                if self.used_bytes + needed <= allowed:
                    self._space.landing_bytes += size_bytes
                    return True
                idle = next(iter(self._space.idle), None)
                if idle is None:
                    victim = self.index.victim()
                    if victim is None or is_read_only(self.directory.path):
                        return False
                    reason = "dead" if self._dead_rank(victim.tag) is not None else "full"
                    if not self._evict(victim, reason):
                        return False
            if idle is not None and not self._remove_idle(idle):
                return False

    def _remove_idle(self, idle: IdleDirectory) -> bool:
        try:
            freed = idle.remove()
        except OSError as error:
            self._error("delete", error)
            return False
        with self._lock, suppress(ValueError):  # another thread may have been here too
            self._space.idle.remove(idle)
        self._stats.add("evicted_bytes", freed, tier="disk", reason="other layout")
        return True

    def _evict(self, chunk: Chunk, reason: str) -> bool:
        self._stats.add("evicted_pages", chunk.pages, tier="disk", reason=reason)
        return self._forget(chunk)

    def _forget(self, chunk: Chunk, *, unlink: bool = True) -> bool:
        """Take a chunk out of the index, and delete its file; False if that failed."""
        with self._lock:
            if not self.index.holds(chunk):
                return True
            self.index.remove(chunk)
            place: DiskPlace = chunk.place
            self._space.files_bytes -= place.size_bytes
            path = self.directory.file(chunk.tag, place.name)
            is_deleted = self._space.delete(path, place.size_bytes) if unlink else True
            self._space.remove_folders(path.parent)
            return is_deleted

    def _reject(self, image: ChunkImage, reason: str) -> bool:
        self._stats.add("rejected", image.pages, tier="disk", reason=reason)
        return False

    def _late_miss(self) -> bool:
        self._stats.add("misses_late", tier="disk")
        return False

    def _bad_file(self, path: Path, error: BadChunk) -> None:
        logger.warning("psrl: %s is deleted: %s", path, error)
        self._stats.add("checksum_failures" if "checksum" in str(error) else "bad_files", tier="disk")
        self._space.delete(path, allocated_bytes(path))

    def _error(self, action: str, error: OSError) -> None:
        logger.warning("psrl: disk %s: %s", action, error)
        reason = errno.errorcode.get(error.errno or 0, "other")
        self._stats.add("errors", tier="disk", direction=action, reason=reason)
        if error.errno == errno.EINVAL:
            self._files.direct_io = False  # refused as late as that by some file systems
        if action != "read":
            self._writes_resume_s = time.monotonic() + _PAUSE_AFTER_ERROR_S


def _is_in(found: Found, chunk: Chunk) -> bool:
    at = found.first * KEY_BYTES
    return chunk.place.name == found.name and chunk.keys[at : at + len(found.keys)] == found.keys


def _note_use(path: Path) -> None:
    """The order of use survives a restart, unless the directory became read-only."""
    with suppress(OSError):
        os.utime(path)
