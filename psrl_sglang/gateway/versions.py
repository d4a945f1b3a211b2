"""Which of two weight versions is the newer one. Versions are opaque strings."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cmp_to_key

_MOST_SEEN = 100_000


class VersionOrder:
    """Whole numbers compare as such; other names in the order in which they were first seen here."""

    def __init__(self) -> None:
        self._seen: dict[str, int] = {}
        self._next = 0

    def see(self, version: str) -> None:
        if version not in self._seen:
            self._seen[version] = self._next
            self._next += 1
            if len(self._seen) > _MOST_SEEN:
                del self._seen[next(iter(self._seen))]

    def is_at_least(self, version: str, tag: str) -> bool:
        """Whether ``version`` is ``tag`` or newer. A name never seen is newer than all that were."""
        return self._compare(version, tag) >= 0

    def ordered(self, versions: Iterable[str], *, newest_first: bool) -> list[str]:
        return sorted(set(versions), key=cmp_to_key(self._compare), reverse=newest_first)

    def _compare(self, one: str, other: str) -> int:
        if one == other:
            return 0
        if _is_number(one) and _is_number(other):
            return int(one) - int(other)
        first, second = self._seen.get(one, self._next), self._seen.get(other, self._next)
        # Two names that were never seen cannot be told apart; neither may stand for the other.
        return first - second or -1


_MOST_DIGITS = 64


def _is_number(version: str) -> bool:
    return version.isdecimal() and version.isascii() and len(version) <= _MOST_DIGITS
