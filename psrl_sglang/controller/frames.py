"""Frames of the sockets as messages: signature, format, kind. What is none of ours is refused with a reason."""

from __future__ import annotations

import logging
import time
from typing import Any

import msgspec

from psrl_sglang.transfer import messages as wire
from psrl_sglang.transfer.auth import NotAuthorized, Signer

logger = logging.getLogger(__name__)

NOT_AUTHORIZED = "not_authorized"
BAD_FRAMING = "bad_framing"
BAD_MESSAGE = "bad_message"
UNKNOWN_WORKER = "unknown_worker"
NOT_TAKEN = "not_taken"
REASONS = (NOT_AUTHORIZED, BAD_FRAMING, BAD_MESSAGE, UNKNOWN_WORKER, NOT_TAKEN)

_LOG_INTERVAL_S = 10.0
_SIGNATURE_START = b"\x93"  # a MessagePack array of three; a message is a map

_json_decoders: dict[Any, msgspec.json.Decoder[Any]] = {}


class Rejected(Exception):
    """``reason`` is one of `REASONS`; the text is for people."""

    def __init__(self, reason: str, text: str) -> None:
        super().__init__(text)
        self.reason = reason


def payloads(frames: list[bytes], signer: Signer) -> list[bytes]:
    """The messages in what a PULL socket received. An LMCache worker sends several at a time, a frame each, and
    cannot sign them; a signed message comes alone. Raises `Rejected`."""
    if signer.is_on:
        return [_checked(frames, signer)]
    if len(frames) == 2 and frames[1].startswith(_SIGNATURE_START):
        return frames[:1]
    return frames


def question(frames: list[bytes], signer: Signer) -> bytes:
    """The one message in what a ROUTER socket received, its address taken off. Raises `Rejected`."""
    return _checked(frames, signer)


def _checked(frames: list[bytes], signer: Signer) -> bytes:
    try:
        return signer.check(frames)
    except NotAuthorized as error:
        raise Rejected(NOT_AUTHORIZED if signer.is_on else BAD_FRAMING, str(error)) from error


def decode(payload: bytes, kind: Any) -> Any:
    """One message of the union ``kind``, in MessagePack, or in JSON if it begins as that. Raises `Rejected`."""
    try:
        if not payload.startswith(b"{"):
            return wire.decode(payload, kind)
        decoder = _json_decoders.get(kind)
        if decoder is None:
            decoder = _json_decoders[kind] = msgspec.json.Decoder(kind)
        return decoder.decode(payload)
    except (wire.BadMessage, msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise Rejected(BAD_MESSAGE, f"not a message that is known here: {error}") from error


class Complaints:
    """Logs what was refused, of each reason once in a while, with how much was not logged in between."""

    def __init__(self) -> None:
        self._last_s: dict[str, float] = {}
        self._unsaid: dict[str, int] = {}

    def about(self, rejected: Rejected) -> None:
        now_s, reason = time.monotonic(), rejected.reason
        last_s = self._last_s.get(reason)
        if last_s is not None and now_s - last_s < _LOG_INTERVAL_S:
            self._unsaid[reason] = self._unsaid.get(reason, 0) + 1
            return
        self._last_s[reason] = now_s
        unsaid = self._unsaid.pop(reason, 0)
        since = f"; {unsaid} more since the last of these lines" if unsaid else ""
        logger.warning("refused (%s): %s%s", reason, rejected, since)
