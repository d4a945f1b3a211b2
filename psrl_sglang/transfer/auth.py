"""The shared secret of a fleet: who may speak to its workers.

Control frames carry a signature in a frame of their own, so a frame of an LMCache peer, which has none, is still
understood where no secret is set. Byte links prove the secret once, by a challenge to each side.

HMAC-SHA256 (RFC 2104) over what was said, when, and a random number that is taken once.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import threading
import time
from collections import deque
from pathlib import Path

import msgspec

SECRET_VARIABLE = "PSRL_SECRET"
CONTROLLER_TOKEN_VARIABLE = "PSRL_CONTROLLER_TOKEN"  # of the controller's HTTP, for all who ask it
MAX_SKEW_S = 30.0
_NONCE_BYTES = 16
_LEAST_SECRET_BYTES = 16


class NotAuthorized(Exception):
    """The peer does not know the secret, or its clock is off; the text says which, never the secret."""


class _Signature(msgspec.Struct, frozen=True, array_like=True):
    time_s: float
    nonce: bytes
    mac: bytes


def read_secret(path: str | None) -> bytes:
    """The secret of a file, else of the environment, else empty: no authorization. Raises ``ValueError``."""
    if path is not None:
        try:
            secret = Path(path).read_bytes().strip()
        except OSError as error:
            raise ValueError(f"cannot read it: {error.strerror or error}") from error
        where = path
    else:
        secret = os.environ.get(SECRET_VARIABLE, "").strip().encode()
        where = SECRET_VARIABLE
        if not secret:
            return b""
    if len(secret) < _LEAST_SECRET_BYTES:
        raise ValueError(f"{where} holds {len(secret)} bytes; a secret needs {_LEAST_SECRET_BYTES} or more")
    return secret


class Signer:
    """Signs and checks frames. Thread-safe. With an empty secret it signs nothing and lets all through."""

    def __init__(self, secret: bytes) -> None:
        self._secret = secret
        self._seen: dict[bytes, None] = {}
        self._order: deque[tuple[float, bytes]] = deque()
        self._lock = threading.Lock()

    @property
    def is_on(self) -> bool:
        return bool(self._secret)

    def sign(self, payload: bytes) -> list[bytes]:
        """The frames to send for ``payload``."""
        if not self._secret:
            return [payload]
        now_s, nonce = time.time(), os.urandom(_NONCE_BYTES)
        return [payload, msgspec.msgpack.encode(_Signature(now_s, nonce, self._mac(now_s, nonce, payload)))]

    def check(self, frames: list[bytes]) -> bytes:
        """The payload of received frames. Raises `NotAuthorized`."""
        if not frames or len(frames) > 2:
            raise NotAuthorized(f"a message of {len(frames)} frames")
        payload = frames[0]
        if not self._secret:
            return payload
        if len(frames) == 1:
            raise NotAuthorized("the message is not signed; give the sender the fleet's secret")
        try:
            signature = msgspec.msgpack.decode(frames[1], type=_Signature)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise NotAuthorized("the signature is not one") from error
        if not hmac.compare_digest(signature.mac, self._mac(signature.time_s, signature.nonce, payload)):
            raise NotAuthorized("the signature is of another secret")
        skew_s = time.time() - signature.time_s
        if not abs(skew_s) <= MAX_SKEW_S:
            raise NotAuthorized(f"signed {skew_s:+.0f} s ago by the clocks of both; at most {MAX_SKEW_S:.0f} s")
        self._take(signature.nonce)
        return payload

    def proof(self, role: str, theirs: bytes, mine: bytes, said: bytes) -> bytes:
        """What shows one side of a link that the other knows the secret; ``theirs`` is the challenge it answers."""
        parts = (role.encode(), theirs, mine, said)
        return hmac.digest(self._secret, b"".join(len(p).to_bytes(4, "big") + p for p in parts), hashlib.sha256)

    def _mac(self, time_s: float, nonce: bytes, payload: bytes) -> bytes:
        head = f"{time_s!r}\0".encode() + nonce
        return hmac.digest(self._secret, head + payload, hashlib.sha256)

    def _take(self, nonce: bytes) -> None:
        now_s = time.monotonic()
        with self._lock:
            while self._order and self._order[0][0] < now_s - 2 * MAX_SKEW_S:
                self._seen.pop(self._order.popleft()[1], None)
            if nonce in self._seen:
                raise NotAuthorized("the message was heard before")
            self._seen[nonce] = None
            self._order.append((now_s, nonce))
