"""Chunks to and from files, past the page cache where the file system and the buffers allow it."""

from __future__ import annotations

import errno
import mmap
import os
import threading
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from psrl_sglang.store.chunk import BLOCK_BYTES, BadChunk, ChunkHeader, decode_header, header_bytes, padded

_MOST_VECTORS = 512  # IOV_MAX is 1024


class ChunkFiles:
    """Thread-safe. ``direct_io``: O_DIRECT where everything is aligned for it, which is several times faster and
    leaves the page cache to others; switched off for good when a file system refuses it."""

    def __init__(self, *, direct_io: bool) -> None:
        self.direct_io = direct_io
        self._buffers = threading.local()

    def create(self, path: Path, payload: memoryview) -> int:
        """An empty file for ``write``, which closes it."""
        return self._open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, [payload], 0)

    def write(self, file: int, block: bytes, payload: memoryview) -> int:
        """Fill a new file and close it; returns what it takes on disk. Raises ``OSError``."""
        head = self._header_buffer(len(block))
        head[:] = block
        rest = padded(len(payload)) - len(payload)
        parts = [head, payload] + ([memoryview(bytes(rest))] if rest else [])
        try:
            done, size_bytes = 0, sum(map(len, parts))
            while done < size_bytes:
                written = os.pwritev(file, _behind(parts, done), done)
                if written <= 0:
                    raise OSError(errno.ENOSPC, "wrote nothing")
                done += written
            # Some file systems say late how many blocks a file has, but none has less than its length.
            return max(size_bytes, os.fstat(file).st_blocks * 512)
        finally:
            os.close(file)

    def read(self, path: Path, header_size: int, skip: int, into: Sequence[memoryview]) -> ChunkHeader:
        """Fill ``into`` from byte ``skip`` of the pages on. Raises ``OSError`` and ``BadChunk``."""
        head = self._header_buffer(header_size)
        file = self._open(path, os.O_RDONLY, [head, *into], header_size + skip)
        try:
            _fill(file, [head], 0)
            header = decode_header(head)
            if header_bytes(head) != header_size:
                raise BadChunk("header of another length")
            _fill(file, into, header_size + skip)
        finally:
            os.close(file)
        return header

    def _open(self, path: Path, flags: int, parts: Sequence[memoryview], offset: int) -> int:
        if self.direct_io and offset % BLOCK_BYTES == 0 and all(_is_aligned(part) for part in parts):
            try:
                return os.open(path, flags | os.O_DIRECT, 0o644)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                self.direct_io = False
        return os.open(path, flags, 0o644)

    def _header_buffer(self, size_bytes: int) -> memoryview:
        """A page-aligned buffer, one for each thread, valid until the thread asks again."""
        buffer: mmap.mmap | None = getattr(self._buffers, "header", None)
        if buffer is None or len(buffer) < size_bytes:
            buffer = self._buffers.header = mmap.mmap(-1, max(size_bytes, 16 * BLOCK_BYTES))
        return memoryview(buffer)[:size_bytes]


def _is_aligned(part: memoryview) -> bool:
    return len(part) % BLOCK_BYTES == 0 and np.frombuffer(part, dtype=np.uint8).ctypes.data % BLOCK_BYTES == 0


def _behind(parts: Sequence[memoryview], done: int) -> list[memoryview]:
    """What is left of ``parts`` once ``done`` bytes of them are through."""
    left = []
    for part in parts:
        if done < len(part):
            left.append(part[done:] if done > 0 else part)
            if len(left) == _MOST_VECTORS:
                break
        done = max(0, done - len(part))
    return left


def _fill(file: int, parts: Sequence[memoryview], offset: int) -> None:
    done, size_bytes = 0, sum(map(len, parts))
    while done < size_bytes:
        got = os.preadv(file, _behind(parts, done), offset + done)
        if got <= 0:
            raise BadChunk(f"cut short at {offset + done} bytes")
        done += got
