"""A chunk as one value of a remote store: as in a file, or with every page compressed by itself.

magic, header block as in a file, compressed size of every page (u32), compressed pages
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Literal

import zstandard

from psrl_sglang.store.chunk import (
    BLOCK_BYTES,
    BadChunk,
    Buffer,
    ChunkHeader,
    ChunkImage,
    Found,
    check_holds,
    decode_header,
    encode_header,
    header_bytes,
    padded,
)
from psrl_sglang.store.remote_client import RemoteClient

Compression = Literal["none", "zstd"]

_ZSTD_MAGIC = b"PSRLZS01"
_SIZE_BYTES = 4
_LEVEL = 1  # KV hardly compresses better at a higher one
_PROBE_BYTES = 512  # of a header without its keys and checksums
_PROBE_PAGE_BYTES = 24


class Missing(Exception):
    """There is no such value any more."""


def encode_value(image: ChunkImage, compression: Compression) -> list[Buffer]:
    """The value in parts. The payload is not copied unless it is compressed."""
    header = encode_header(image.header())
    if compression == "none":
        return [header, image.payload]
    compressor = zstandard.ZstdCompressor(level=_LEVEL)
    pages = [
        compressor.compress(image.payload[at : at + image.page_bytes])
        for at in range(0, len(image.payload), image.page_bytes)
    ]
    sizes = struct.pack(f"<{len(pages)}I", *(len(page) for page in pages))
    return [_ZSTD_MAGIC, header, sizes, *pages]


def read_value(
    client: RemoteClient,
    name: str,
    found: Found,
    *,
    layout: bytes,
    pool: str,
    page_bytes: int,
    chunk_pages: int,
    into: Sequence[memoryview],
) -> ChunkHeader:
    """Fill `into` with the pages of `found`, whose checksums are still to be checked against the header.

    `chunk_pages` is only a guess that saves a round trip. Raises `Missing`, `BadChunk`, `RemoteError`.
    """
    start = client.read(name, 0, padded(_PROBE_BYTES + chunk_pages * _PROBE_PAGE_BYTES))
    if start is None:
        raise Missing
    at = len(_ZSTD_MAGIC) if start.startswith(_ZSTD_MAGIC) else 0
    end = at + header_bytes(memoryview(start)[at : at + BLOCK_BYTES])
    if end > len(start):
        start += client.read(name, len(start), end - len(start)) or b""
        if end > len(start):
            raise _cut_short(client, name)
    header = decode_header(memoryview(start)[at:end])
    check_holds(header, layout, pool, found, page_bytes)
    if at:
        _decompress(client, name, end, header, found, into)
    elif not client.read_into(name, end + found.first * page_bytes, into):
        raise _cut_short(client, name)
    return header


def _cut_short(client: RemoteClient, name: str) -> Missing | BadChunk:
    """Why a value has less than its header says: somebody may have deleted it since."""
    return Missing() if client.read(name, 0, 1) is None else BadChunk("value ends before its last page")


def _decompress(
    client: RemoteClient,
    name: str,
    end: int,
    header: ChunkHeader,
    found: Found,
    into: Sequence[memoryview],
) -> None:
    table = client.read(name, end, header.pages * _SIZE_BYTES)
    if table is None or len(table) != header.pages * _SIZE_BYTES:
        raise _cut_short(client, name)
    sizes = struct.unpack(f"<{header.pages}I", table)
    # The table has no checksum, and memory is taken for what it says.
    if max(sizes) > 2 * header.page_bytes + BLOCK_BYTES:
        raise BadChunk(f"compressed page of {max(sizes)} bytes")
    before_bytes = sum(sizes[: found.first])
    sizes = sizes[found.first : found.first + found.pages]
    data = client.read(name, end + len(table) + before_bytes, sum(sizes))
    if data is None or len(data) != sum(sizes):
        raise _cut_short(client, name)
    decompressor = zstandard.ZstdDecompressor()
    at = 0
    for size, view in zip(sizes, into, strict=True):
        page = memoryview(data)[at : at + size]
        at += size
        try:
            # The size that a page claims is checked before memory is taken for it.
            if zstandard.frame_content_size(page) != view.nbytes:
                raise BadChunk("compressed page of another size")
            view[:] = decompressor.decompress(page)
        except zstandard.ZstdError as error:
            raise BadChunk(f"compressed page: {error}") from error
