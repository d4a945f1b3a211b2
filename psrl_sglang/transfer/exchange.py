"""What source and destination say to each other about one move, on a link that is already made.

    source                               destination
    Offer(tag, runs of pages)      ->
                                   <-    Grant(what is missing, and where it goes)
    ... the bytes, as the transport does it ...
    Commit(checksums)              ->
                                   <-    Done(how much of the prefix is there now)

Pages are named by SGLang's own hash, cut to 16 bytes, without the salt that each engine adds for itself.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from psrl_sglang.keys import count

Number = Annotated[int, msgspec.Meta(ge=0, lt=1 << 48)]


class Run(msgspec.Struct, frozen=True, array_like=True):
    """Consecutive pages of one pool that lie side by side at the source: ``digests``, 16 bytes each; ``start``
    is the place of the first one in the sequence, in pages, and ``before`` the digest of the page before it, empty
    at the start."""

    pool: str
    start: Number
    before: bytes
    digests: bytes

    @property
    def pages(self) -> int:
        return count(self.digests)


class Offer(msgspec.Struct, tag="offer", frozen=True):
    """``fingerprint``: what must be the same at the destination for the tag to be the same KV. ``limit_s``: what is
    left of the move's time. The runs of the first run's pool are the prefix, head first; those of other pools
    follow."""

    tag: str
    fingerprint: str
    limit_s: float
    runs: list[Run]


class Granted(msgspec.Struct, frozen=True, array_like=True):
    """``pages`` of run ``run`` from its page ``first`` on, to be put at ``place`` in the destination's arena."""

    run: Number
    first: Number
    pages: Number
    place: Number


class Grant(msgspec.Struct, tag="grant", frozen=True):
    granted: list[Granted]


class Commit(msgspec.Struct, tag="commit", frozen=True):
    """xxh3 of every piece, 8 bytes each, in order."""

    sums: bytes


class Done(msgspec.Struct, tag="done", frozen=True):
    """``present_pages`` of the prefix are at the destination; ``moved_pages`` of it came now."""

    present_pages: Number
    moved_pages: Number
    reason: str = ""


def salted(digests: bytes, salt: bytes) -> bytes:
    """This engine's keys of pages that another one names."""
    number = int.from_bytes(salt * count(digests), "big") ^ int.from_bytes(digests, "big")
    return number.to_bytes(len(digests), "big")
