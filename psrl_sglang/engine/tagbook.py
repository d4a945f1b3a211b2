"""Whose pages are meant: the tag of each sequence, by the sequence's first page hash.

A page hash stems from the request's salt, which carries the tag, so a first hash stands for exactly one tag.
"""

from __future__ import annotations

import threading

_MOST_SEQUENCES = 1 << 15


class TagBook:
    """Thread-safe. One thread writes, and on every rank in the same order. When there are too many sequences, the
    one that was noted longest ago goes."""

    def __init__(self, most: int = _MOST_SEQUENCES) -> None:
        self._tags: dict[str, str] = {}
        self._most = most
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._tags)

    def note(self, first_hash: str, tag: str) -> None:
        with self._lock:
            self._tags.pop(first_hash, None)
            self._tags[first_hash] = tag
            if len(self._tags) > self._most:
                del self._tags[next(iter(self._tags))]

    def tag_of(self, first_hash: str) -> str | None:
        with self._lock:
            return self._tags.get(first_hash)

    def forget(self, tag: str | None = None) -> None:
        """The sequences of one tag, or all."""
        with self._lock:
            self._tags = {} if tag is None else {key: held for key, held in self._tags.items() if held != tag}
