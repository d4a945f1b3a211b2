"""Checksums of KV in DRAM, by pieces: what the two ends of a move compare."""

from __future__ import annotations

from collections.abc import Iterator

import xxhash

PIECE_BYTES = 2 << 20  # stays in a core's cache between its copy and its checksum
SUM_BYTES = 8


def cut(view: memoryview) -> Iterator[memoryview]:
    """The pieces of one range: what is checked, and by some transports copied, at a time."""
    for at in range(0, len(view), PIECE_BYTES):
        yield view[at : at + PIECE_BYTES]


def checksum(piece: memoryview) -> bytes:
    return xxhash.xxh3_64_digest(piece)
