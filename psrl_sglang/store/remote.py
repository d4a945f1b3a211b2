"""The remote tier: chunks that engines on other machines have written, or this one before it restarted.

    psrl:<layout>:c:<tag>:<name of the chunk>    the chunk, as in `remote_value`
    psrl:<layout>:p:<tag>:<key of a page>        where the page is: the chunk's name, the page's place in it

One round trip over the pointers says how far a prefix reaches, to the page, without a list of what the store
has: whatever it evicts, loses or gets from elsewhere shows when it is read, as a miss.
"""

from __future__ import annotations

import hashlib
import logging
import struct
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from psrl_sglang.keys import KEY_BYTES, KVLayout, count, key_at
from psrl_sglang.store.breaker import CircuitBreaker, CircuitOpen
from psrl_sglang.store.chunk import BadChunk, ChunkImage, Found, Wanted, check_pages
from psrl_sglang.store.remote_client import RemoteClient, RemoteError
from psrl_sglang.store.remote_value import Compression, Missing, encode_value, read_value
from psrl_sglang.store.stats import StoreStats

logger = logging.getLogger(__name__)

_POINTER = struct.Struct("<16sI")
_SHUN_S = 10.0
_MAX_SHUNNED = 1024


class _Pointer(NamedTuple):
    name: bytes
    place: int


class RemoteTier:
    """Finds, reads and writes chunks of one layout. Thread-safe.

    Trouble with the store is never an exception here: it is a miss or a False, counted in `stats`, and after
    some in a row the breaker leaves the store alone. A call lasts a few time-outs of the client at most.
    """

    def __init__(
        self,
        client: RemoteClient,
        *,
        layout: KVLayout,
        chunk_pages: Mapping[str, int] | int,
        stats: StoreStats,
        breaker: CircuitBreaker | None = None,
        compress: Compression = "none",
    ) -> None:
        self._client = client
        self._layout = layout.digest
        self._prefix = f"psrl:{layout.digest.hex()}"
        self._page_bytes = {pool.name: pool.page_bytes for pool in layout.pools}
        self._chunk_pages = (
            dict.fromkeys(self._page_bytes, chunk_pages) if isinstance(chunk_pages, int) else dict(chunk_pages)
        )
        self._stats = stats
        self._breaker = breaker or CircuitBreaker()
        self._compress: Compression = compress
        self._last_error = ""
        self._shunned = _Shunned()

    @property
    def url(self) -> str:
        """Without the password."""
        return self._client.url

    @property
    def is_open(self) -> bool:
        """Whether the breaker is open, so that the store is not asked."""
        return self._breaker.is_open

    @property
    def last_error(self) -> str:
        """What went wrong last, "" if nothing has yet."""
        return self._last_error

    def find(self, wanted: Wanted) -> list[Found]:
        """How much of `wanted` the store has, from its first page on, by chunk; [] also if it cannot be asked."""
        parts = _parts(wanted, self._chunk_pages[wanted.pool])
        if not parts:
            return []
        try:
            with self._attempt():
                lasts = self._pointers(wanted.tag, [key_at(part, count(part) - 1) for part in parts])
                if None in lasts:
                    del parts[lasts.index(None) + 1 :]
                whole = [self._in_chunk(part, last) for part, last in zip(parts, lasts, strict=False)]
                # Pages of a part that are in several chunks, as where sequences branch, or end before its end.
                broken = [part for part, chunk in zip(parts, whole, strict=True) if chunk is None]
                pages = iter(self._pointers(wanted.tag, [key for part in broken for key in _keys(part)]))
        except RemoteError:
            return []
        found: list[Found] = []
        for part, chunk in zip(parts, whole, strict=True):
            if chunk is not None:
                found.append(chunk)
                continue
            places = [next(pages) for _ in range(count(part))]
            found += _by_chunk(part, places)
            if None in places:
                break
        return found

    def read(self, found: Found, wanted: Wanted, into: Sequence[memoryview]) -> bool:
        """Fill one view per page of `found`, which `find(wanted)` returned, and check every byte.

        After False they hold anything, and what is known to be wrong in the store has been deleted there.
        """
        page_bytes = self._page_bytes[wanted.pool]
        try:
            with self._attempt(), self._stats.timed("remote", "load", found.pages * page_bytes):
                header = read_value(
                    self._client,
                    self._chunk(wanted.tag, found.name),
                    found,
                    layout=self._layout,
                    pool=wanted.pool,
                    page_bytes=page_bytes,
                    chunk_pages=self._chunk_pages[wanted.pool],
                    into=into,
                )
                if header.tag != wanted.tag:
                    raise BadChunk("chunk of another tag")
                try:
                    check_pages(header, found.first, into)
                except BadChunk:
                    self._stats.add("checksum_failures", tier="remote")
                    raise
        except RemoteError:
            return False
        except Missing:
            self._stats.add("misses_late", tier="remote")
            self._forget(found, wanted)
            return False
        except BadChunk as error:
            self._stats.add("errors", tier="remote", reason="bad_chunk")
            self._last_error = f"{self._chunk(wanted.tag, found.name)}: {error}"
            logger.warning("remote store %s: %s", self.url, self._last_error)
            self._forget(found, wanted)
            return False
        return True

    def write(self, image: ChunkImage) -> bool:
        """Store a chunk, replacing a shorter one of the same pages. True if the store has it afterwards."""
        pointers = {
            self._pointer(image.tag, key_at(image.keys, page)): _POINTER.pack(image.name, page)
            for page in range(image.pages)
        }
        try:
            with self._attempt():
                first, last = self._pointers(image.tag, [key_at(image.keys, 0), image.name])
                if last is not None:
                    self._stats.add("duplicates", tier="remote")
                    return True
                with self._stats.timed("remote", "store", len(image.payload)):
                    value = encode_value(image, self._compress)
                    self._client.put(
                        [
                            (self._chunk(image.tag, image.name), value),
                            *((name, [pointer]) for name, pointer in pointers.items()),
                        ]
                    )
                self._shunned.discard(image.name)
                # A chunk that has all its pages from ours. One that has others too is still needed.
                if first is not None and first.place == 0 and self._pointer(image.tag, first.name) in pointers:
                    self._client.delete([self._chunk(image.tag, first.name)])
        except RemoteError:
            return False
        return True

    def drop_tag(self, tag: str) -> int:
        """Delete every chunk of this layout and tag, whoever wrote it. How many, or -1 if that failed."""
        return self._delete(f"{_digest(tag)}:")

    def clear(self) -> int:
        """Delete every chunk of this layout, whoever wrote it. How many, or -1 if that failed."""
        return self._delete("")

    def status(self) -> dict[str, Any]:
        return {"url": self.url, "is_open": self.is_open, "last_error": self.last_error}

    def close(self) -> None:
        """The last call."""
        self._client.close()

    def _chunk(self, tag: str, name: bytes) -> str:
        return f"{self._prefix}:c:{_digest(tag)}:{name.hex()}"

    def _pointer(self, tag: str, key: bytes) -> str:
        return f"{self._prefix}:p:{_digest(tag)}:{key.hex()}"

    def _pointers(self, tag: str, keys: Sequence[bytes]) -> list[_Pointer | None]:
        """Where pages are, in one round trip; None also for a chunk that was bad a moment ago."""
        values = self._client.get_small([self._pointer(tag, key) for key in keys])
        pointers = [
            _Pointer(*_POINTER.unpack(value)) if value is not None and len(value) == _POINTER.size else None
            for value in values
        ]
        return [None if pointer and pointer.name in self._shunned else pointer for pointer in pointers]

    def _delete(self, below: str) -> int:
        try:
            with self._attempt():
                # Pointers first: a chunk that nobody finds is a miss, a pointer to nothing is a late one.
                self._client.delete_matching(f"{self._prefix}:p:{below}")
                return self._client.delete_matching(f"{self._prefix}:c:{below}")
        except RemoteError:
            return -1

    def _forget(self, found: Found, wanted: Wanted) -> None:
        """The chunk is not what its pointers say; nobody shall come upon it again."""
        self._shunned.add(found.name)
        keys = {key_at(found.keys, page) for page in range(found.pages)} | {found.name}
        try:
            with self._attempt():
                self._client.delete(
                    [self._chunk(wanted.tag, found.name), *(self._pointer(wanted.tag, key) for key in keys)]
                )
        except RemoteError:
            pass  # counted; for the others it stays a late miss

    @contextmanager
    def _attempt(self) -> Iterator[None]:
        """Around what asks the store: through the breaker, and with every failure counted."""
        was_open = self._breaker.is_open
        try:
            with self._breaker.attempt():
                yield
        except CircuitOpen:
            self._stats.add("rejected", tier="remote", reason="breaker")
            raise
        except RemoteError as error:
            self._stats.add("errors", tier="remote", reason=error.reason)
            self._last_error = str(error)
            if not was_open and self._breaker.is_open:
                logger.warning("remote store is left alone, only misses until it answers: %s", error)
            raise
        finally:
            if was_open and not self._breaker.is_open:
                logger.info("remote store %s answers again", self.url)

    @staticmethod
    def _in_chunk(keys: bytes, last: _Pointer | None) -> Found | None:
        """Consecutive pages, given where the last of them is, if all can be in its chunk."""
        if last is None or last.place < count(keys) - 1:
            return None
        return Found(last.name, last.place - (count(keys) - 1), keys)


class _Shunned:
    """Names of chunks that were bad, each for `_SHUN_S`; the oldest gives way when there are too many."""

    def __init__(self) -> None:
        self._until_s: dict[bytes, float] = {}
        self._lock = threading.Lock()

    def __contains__(self, name: bytes) -> bool:
        return self._until_s.get(name, 0.0) > time.monotonic()

    def add(self, name: bytes) -> None:
        with self._lock:
            self._until_s.pop(name, None)
            while len(self._until_s) >= _MAX_SHUNNED:
                del self._until_s[next(iter(self._until_s))]
            self._until_s[name] = time.monotonic() + _SHUN_S

    def discard(self, name: bytes) -> None:
        with self._lock:
            self._until_s.pop(name, None)


def _parts(wanted: Wanted, chunk_pages: int) -> list[bytes]:
    """The keys, cut where chunks end."""
    parts: list[bytes] = []
    page = 0
    while page < count(wanted.keys):
        end = page + chunk_pages - (wanted.start + page) % chunk_pages
        parts.append(wanted.keys[page * KEY_BYTES : end * KEY_BYTES])
        page = end
    return parts


def _digest(tag: str) -> str:
    return hashlib.blake2b(tag.encode(), digest_size=8).hexdigest()


def _keys(part: bytes) -> list[bytes]:
    return [key_at(part, page) for page in range(count(part))]


def _by_chunk(part: bytes, places: Sequence[_Pointer | None]) -> list[Found]:
    """The pages before the first one that is nowhere, cut where the chunk changes."""
    found: list[Found] = []
    for page, place in enumerate(places):
        if place is None:
            break
        key = key_at(part, page)
        before = found[-1] if found else None
        if before is not None and (before.name, before.first + before.pages) == place:
            found[-1] = Found(before.name, before.first, before.keys + key)
        else:
            found.append(Found(place.name, place.place, key))
    return found
