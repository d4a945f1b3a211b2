"""The identity of a page of KV outside the device, and its one hash.

SGLang hashes a page over its tokens, everything before it, and the request's namespace, which carries the
weight version. What it does not hash is what the bytes look like and whose weights a version's name names:
`KVLayout` and `identity` say that, and `page_keys` folds both into every key. A page of another model, dtype,
page size, rank or run is then simply not there.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

KEY_BYTES = 16
SCHEMA = 1  # of the bytes of a page and of the chunk format; a new one makes all old KV a miss


@dataclass(frozen=True, slots=True)
class PoolLayout:
    """One device pool: `name` as SGLang calls it, and the bytes a page of it takes on one rank, all layers."""

    name: str
    page_bytes: int


@dataclass(frozen=True, slots=True)
class KVLayout:
    """What, besides the tag, two engines must have in common for one to use the other's pages.

    `model` is a digest of the model's architecture, `dtype` the logical type of KV (fp8 and uint8 differ),
    `rank` the part of it that this rank holds ("tp0/2", or "replicated"), `layers` the layers of this rank.
    """

    model: str
    dtype: str
    page_tokens: int
    layers: str
    rank: str
    pools: tuple[PoolLayout, ...]
    form: str = "page-first"

    @property
    def text(self) -> str:
        pools = ",".join(f"{pool.name}={pool.page_bytes}" for pool in self.pools)
        return (
            f"schema={SCHEMA} model={self.model} dtype={self.dtype} page={self.page_tokens} "
            f"layers={self.layers} rank={self.rank} form={self.form} pools={pools}"
        )

    @property
    def digest(self) -> bytes:
        return hashlib.blake2b(self.text.encode(), digest_size=KEY_BYTES).digest()


def pool_salt(layout: KVLayout, pool: str, identity: str) -> bytes:
    """What `page_keys` folds into the keys of one pool; `identity` says whose weights the tag names."""
    text = f"{pool}\0{identity}".encode()
    return hashlib.blake2b(text, digest_size=KEY_BYTES, key=layout.digest).digest()


def page_keys(hashes: Sequence[str], salt: bytes) -> bytes:
    """The keys of consecutive pages, `KEY_BYTES` each, from SGLang's hashes (64 hex digits each).

    The upper half of a SHA-256 is as good a hash; the salt is a keyed hash and changes every bit with even
    odds, so keys under two salts meet no more often than keys of different tokens.
    """
    if not hashes:
        return b""
    digests = np.frombuffer(bytes.fromhex("".join(hashes)), dtype=np.uint64).reshape(len(hashes), -1)
    return (digests[:, :2] ^ np.frombuffer(salt, dtype=np.uint64)).tobytes()


def key_at(keys: bytes, page: int) -> bytes:
    return keys[page * KEY_BYTES : (page + 1) * KEY_BYTES]


def count(keys: bytes) -> int:
    return len(keys) // KEY_BYTES


def common_pages(a: bytes, b: bytes) -> int:
    """How many pages two key runs have in common at their start."""
    shorter = min(len(a), len(b))
    if a[:shorter] == b[:shorter]:
        return shorter // KEY_BYTES
    differ = np.frombuffer(a[:shorter], dtype=np.uint64) != np.frombuffer(b[:shorter], dtype=np.uint64)
    return int(np.argmax(differ)) // (KEY_BYTES // 8)
