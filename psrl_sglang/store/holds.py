"""What keeps pages in DRAM where they are: leases on what is there, and reservations of what is to come.

Both end by themselves when the object is dropped, so that none can leak.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from psrl_sglang.store.index import Chunk, Piece

if TYPE_CHECKING:
    from psrl_sglang.store.dram import DramTier


class Lease:
    """Keeps pages where they are until it is released, is left as a context, or is dropped."""

    def __init__(self, tier: DramTier, pieces: Sequence[Piece], expires_s: float) -> None:
        self.pieces = list(pieces)
        self.expires_s = expires_s
        self._release = partial(tier._release, [piece.chunk for piece in pieces])
        self._end = weakref.finalize(self, tier._dropped.append, self._release)
        self._end.atexit = False

    @property
    def is_held(self) -> bool:
        return self._end.alive

    @property
    def pages(self) -> int:
        return sum(piece.pages for piece in self.pieces)

    def release(self) -> None:
        """May be called more than once."""
        if self._end.detach() is not None:
            self._release()

    def __enter__(self) -> Lease:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


@dataclass(frozen=True, slots=True)
class Write:
    """``pages`` pages to be filled: ``chunk``'s from ``first`` on, which are the offered ones from ``source``."""

    chunk: Chunk
    first: int
    source: int
    pages: int


class Reservation:
    """Room for the offered pages that were missing. Whoever made it fills it, then commits; leaving the
    context without a commit, or dropping the object, gives the room back. Nothing is visible before."""

    def __init__(self, tier: DramTier, keys: bytes) -> None:
        self.keys = keys
        self.writes: list[Write] = []
        self.rejected_pages = 0
        self._tier = tier
        self._abort = partial(tier._abort, keys, self.writes)
        self._end = weakref.finalize(self, tier._dropped.append, self._abort)
        self._end.atexit = False

    @property
    def pages(self) -> int:
        return sum(write.pages for write in self.writes)

    def commit(self) -> list[Chunk]:
        """Make the pages visible; returns the chunks that grew."""
        if self._end.detach() is None:
            raise RuntimeError("a reservation ends once")
        return self._tier._commit(self.keys, self.writes)

    def abort(self) -> None:
        if self._end.detach() is not None:
            self._abort()

    def forsake(self) -> None:
        """These pages will not come, but something may still write where they were to go: others can bring them
        elsewhere at once, and the room stays taken until ``abort``."""
        if self._end.alive:
            self._tier._forsake(self.keys, self.writes)

    def __enter__(self) -> Reservation:
        return self

    def __exit__(self, *_: object) -> None:
        self.abort()
