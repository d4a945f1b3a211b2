"""SGLang's hash of a page, without SGLang: for whoever asks about a prefix from outside an engine.

A page's hash is SHA-256 over the hash before it and the page's tokens, four bytes each; the chain begins with a
digest of the namespace, which is where the tag of the weights comes in. A test holds it against SGLang's own.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np

_SEED = b"sglang-cache-namespace-v1"


def namespace_seed(extra_key: str | None, cache_salt: str | None) -> bytes:
    cache_salt = cache_salt or None  # as SGLang: an empty salt is none, an empty extra key is one
    if extra_key is None and cache_salt is None:
        return b""
    digest = hashlib.sha256(_SEED)
    for part in (extra_key, cache_salt):
        if part is None:
            digest.update(b"\0")
        else:
            text = part.encode()
            digest.update(b"\1" + len(text).to_bytes(8, "little") + text)
    return digest.digest()


def page_digests(
    tokens: Sequence[int], page_tokens: int, *, extra_key: str | None = None, cache_salt: str | None = None
) -> list[bytes]:
    """The 32-byte digests of the whole pages of ``tokens``."""
    data = np.asarray(tokens, dtype="<u4").tobytes()
    step = page_tokens * 4
    last = namespace_seed(extra_key, cache_salt)
    digests = []
    for at in range(0, len(data) - step + 1, step):
        last = hashlib.sha256(last + data[at : at + step]).digest()
        digests.append(last)
    return digests


def chunk_key(digest: bytes) -> int:
    """What a controller knows a chunk by: the digest of its last page, cut to a signed 64-bit number."""
    return int.from_bytes(digest[:8], "big", signed=True)
