"""What the remote tier needs of a store that other machines share, and which stores there are."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Literal, Protocol
from urllib.parse import urlsplit

from psrl_sglang.store.chunk import Buffer

Reason = Literal["unreachable", "timeout", "refused", "breaker"]

REDIS_SCHEMES = ("redis", "rediss", "unix", "valkey", "valkeys")
MOONCAKE_SCHEMES = ("mooncake",)


class RemoteError(Exception):
    """The store did not do what was asked; the message says what happened, `reason` is a label for counters.

    "refused" is the answer of a store that is alive (out of memory, read-only, no permission); after any other
    reason nobody knows whether the store has done it.
    """

    def __init__(self, message: str, *, reason: Reason = "unreachable") -> None:
        super().__init__(message)
        self.reason: Reason = reason


class RemoteClient(Protocol):
    """A pool of connections to one store of named values. Thread-safe; made without connecting.

    Every call ends by the time-out given at construction, plus as much again when it has to connect first,
    and raises `RemoteError` if the store has not done it by then. A later call connects anew.
    """

    @property
    def url(self) -> str:
        """Where the store is, without its password."""
        ...

    def put(self, items: Sequence[tuple[str, Sequence[Buffer]]]) -> None:
        """Set values, in this order; each is its buffers joined. Not atomic. The buffers are not used after
        the call."""
        ...

    def get_small(self, names: Sequence[str]) -> list[bytes | None]:
        """Values of at most 64 bytes, in one round trip; None for an absent one."""
        ...

    def read(self, name: str, offset_bytes: int, size_bytes: int) -> bytes | None:
        """A range of a value, shorter where the value ends; None if there is no value."""
        ...

    def read_into(self, name: str, offset_bytes: int, into: Sequence[memoryview]) -> bool:
        """Fill the views with what follows `offset_bytes`. False if the value is absent or too short, and then,
        as after an error, they hold anything. They are not used after the call."""
        ...

    def delete(self, names: Sequence[str]) -> None: ...

    def delete_matching(self, prefix: str) -> int:
        """Delete every value whose name begins so, and say how many. May take many round trips, each of which
        has the time-out, but no more than a minute."""
        ...

    def ping(self) -> None: ...

    def close(self) -> None:
        """The last call."""
        ...


def connect(url: str, *, timeout_s: float, ttl_s: float = 0.0) -> RemoteClient:
    """A client for the store at `url`, not connected yet. Values expire `ttl_s` after they were set (0: never).

    ``redis://``, ``rediss://`` and ``unix://`` are what redis-py takes, ``valkey://`` and ``valkeys://`` the same
    under another name; for ``mooncake://`` see `mooncake_client`. Raises `ValueError` for a URL that it cannot
    use and for a client library that is not installed.
    """
    scheme = urlsplit(url).scheme
    try:
        if scheme in REDIS_SCHEMES:
            extra = "redis"
            from psrl_sglang.store.redis_client import RedisClient

            return RedisClient(url, timeout_s=timeout_s, ttl_s=ttl_s)
        if scheme in MOONCAKE_SCHEMES:
            extra = "mooncake"
            from psrl_sglang.store.mooncake_client import MooncakeClient

            return MooncakeClient(url, timeout_s=timeout_s)
    except ImportError as error:
        raise ValueError(f"{scheme}:// needs pip install 'psrl-sglang[{extra}]': {error}") from error
    known = ", ".join(f"{name}://" for name in (*REDIS_SCHEMES, *MOONCAKE_SCHEMES))
    raise ValueError(f"unknown remote store {masked(url)!r}; known are {known}")


def masked(url: str) -> str:
    """The URL with its password, in either of the places where redis-py looks for one, as three stars."""
    without = re.sub(r"(://[^:/?#]*:)[^/]*@", r"\1***@", url)
    return re.sub(r"([?&]password=)[^&#]*", r"\1***", without)
