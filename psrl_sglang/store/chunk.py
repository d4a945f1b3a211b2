"""A chunk of KV as one object: what a disk file and a remote value hold.

    magic, header length, header (MessagePack), xxh3 of the header, zeros to a multiple of 4096, pages, zeros

Pages follow each other in the order of `keys`. The block sizes let a file be read with O_DIRECT straight into
the arena. Every page has its own checksum, so a prefix of a chunk can be read and checked alone.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, replace

import msgspec
import xxhash

from psrl_sglang.keys import KEY_BYTES, count, key_at

BLOCK_BYTES = 4096
MAX_HEADER_BYTES = 1 << 24
_MAGIC = b"PSRLKV01"
_PREFIX = struct.Struct("<8sI")
_SUM = struct.Struct("<Q")

Buffer = bytes | bytearray | memoryview


class BadChunk(Exception):
    """The bytes are not the chunk that was asked for; the message says what is wrong with them."""


class ChunkHeader(msgspec.Struct, frozen=True, array_like=True):
    """Says what the pages of a chunk are. `layout` is `KVLayout.digest`; `start` the place of the first page
    in its sequence, in pages; `parent` the key of the page before it, empty at the start of a sequence."""

    layout: bytes
    pool: str
    tag: str
    start: int
    parent: bytes
    page_bytes: int
    keys: bytes
    sums: bytes

    @property
    def pages(self) -> int:
        return count(self.keys)

    @property
    def name(self) -> bytes:
        """The key of the last page: with the chain of hashes it names everything before it too."""
        return key_at(self.keys, self.pages - 1)


@dataclass(frozen=True, slots=True)
class ChunkImage:
    """A chunk on its way out. `payload` is borrowed from the arena until the write has ended."""

    layout: bytes
    pool: str
    tag: str
    start: int
    parent: bytes
    page_bytes: int
    keys: bytes
    payload: memoryview

    @property
    def pages(self) -> int:
        return count(self.keys)

    @property
    def name(self) -> bytes:
        return key_at(self.keys, self.pages - 1)

    def until(self, page: int) -> ChunkImage:
        """Only the first ``page`` pages."""
        return replace(self, keys=self.keys[: page * KEY_BYTES], payload=self.payload[: page * self.page_bytes])

    def behind(self, page: int) -> ChunkImage:
        """The same without its first ``page`` pages."""
        if not page:
            return self
        return replace(
            self,
            start=self.start + page,
            parent=key_at(self.keys, page - 1),
            keys=self.keys[page * KEY_BYTES :],
            payload=self.payload[page * self.page_bytes :],
        )

    def header(self) -> ChunkHeader:
        """With the checksums, which takes a pass over the payload."""
        return ChunkHeader(
            layout=self.layout,
            pool=self.pool,
            tag=self.tag,
            start=self.start,
            parent=self.parent,
            page_bytes=self.page_bytes,
            keys=self.keys,
            sums=checksums(self.payload, self.page_bytes),
        )


@dataclass(frozen=True, slots=True)
class Wanted:
    """Consecutive pages that are looked for: `keys`, the first of which is page `start` of its sequence."""

    pool: str
    tag: str
    keys: bytes
    start: int


@dataclass(frozen=True, slots=True)
class Found:
    """Pages of a `Wanted` that a tier has in one chunk: `keys`, from page `first` of the chunk `name` on."""

    name: bytes
    first: int
    keys: bytes

    @property
    def pages(self) -> int:
        return count(self.keys)


def padded(size_bytes: int) -> int:
    return -(-size_bytes // BLOCK_BYTES) * BLOCK_BYTES


def checksums(payload: Buffer, page_bytes: int) -> bytes:
    view = memoryview(payload).cast("B")
    return b"".join(
        _SUM.pack(xxhash.xxh3_64_intdigest(view[at : at + page_bytes]))
        for at in range(0, len(view), page_bytes)
    )


def encode_header(header: ChunkHeader) -> bytes:
    """The header block, a multiple of `BLOCK_BYTES` long; the pages follow it."""
    body = msgspec.msgpack.encode(header)
    block = _PREFIX.pack(_MAGIC, len(body)) + body
    block += _SUM.pack(xxhash.xxh3_64_intdigest(block))
    return block.ljust(padded(len(block)), b"\0")


def header_bytes(start: Buffer) -> int:
    """How long the whole header block is, from its first `BLOCK_BYTES`. Raises `BadChunk`."""
    if len(start) < _PREFIX.size:
        raise BadChunk(f"{len(start)} bytes are too few for a header")
    magic, length = _PREFIX.unpack_from(start)
    if magic != _MAGIC:
        raise BadChunk("not a chunk of KV, or of another format")
    if length > MAX_HEADER_BYTES:
        raise BadChunk(f"header of {length} bytes")
    return padded(_PREFIX.size + length + _SUM.size)


def decode_header(block: Buffer) -> ChunkHeader:
    """Check and decode a whole header block. Raises `BadChunk`."""
    if header_bytes(block) > len(block):
        raise BadChunk(f"header cut short at {len(block)} bytes")
    (length,) = struct.unpack_from("<I", block, len(_MAGIC))
    end = _PREFIX.size + length
    if xxhash.xxh3_64_intdigest(memoryview(block)[:end]) != _SUM.unpack_from(block, end)[0]:
        raise BadChunk("header checksum differs")
    try:
        header = msgspec.msgpack.decode(memoryview(block)[_PREFIX.size : end], type=ChunkHeader)
    except (msgspec.DecodeError, msgspec.ValidationError, RecursionError) as error:
        raise BadChunk(f"header: {error}") from error
    if not header.keys or len(header.keys) % KEY_BYTES or len(header.sums) != header.pages * _SUM.size:
        raise BadChunk(f"header has {len(header.keys)} bytes of keys and {len(header.sums)} of checksums")
    if len({key_at(header.keys, page) for page in range(header.pages)}) != header.pages:
        raise BadChunk("header has a page twice")
    if header.page_bytes <= 0 or header.start < 0 or len(header.parent) not in (0, KEY_BYTES):
        raise BadChunk(
            f"header says {header.page_bytes} bytes a page, first page {header.start}, behind {header.parent!r}"
        )
    return header


def check_holds(header: ChunkHeader, layout: bytes, pool: str, found: Found, page_bytes: int) -> None:
    """Raise `BadChunk` unless the chunk has the pages of `found` where it says, in the expected layout."""
    if header.layout != layout or header.pool != pool or header.page_bytes != page_bytes:
        raise BadChunk("chunk of another layout")
    at = found.first * KEY_BYTES
    if header.keys[at : at + len(found.keys)] != found.keys:
        raise BadChunk("chunk holds other pages")


def check_pages(header: ChunkHeader, first: int, pages: Sequence[Buffer]) -> None:
    """Raise `BadChunk` unless `pages` are, byte for byte, the pages of the chunk from `first` on."""
    for index, page in enumerate(pages, first):
        if xxhash.xxh3_64_intdigest(page) != _SUM.unpack_from(header.sums, index * _SUM.size)[0]:
            raise BadChunk(f"checksum of page {index} differs")
