"""What a move needs of a request's body. All else in it is skipped, unread."""

from __future__ import annotations

from typing import Any

import msgspec


class Fields(msgspec.Struct, frozen=True):
    """``problem``: why the prompt's tokens are not known from the body, empty if they are."""

    input_ids: Any = None
    routing_key: Any = None
    cache_salt: Any = None
    extra_key: Any = None
    problem: str = ""

    @property
    def tokens(self) -> list[int]:
        return [] if self.problem else self.input_ids


class _Flat(msgspec.Struct):
    input_ids: list[int]
    routing_key: str | None = None
    cache_salt: str | None = None
    extra_key: str | None = None


class _Any(msgspec.Struct):
    input_ids: msgspec.Raw = msgspec.Raw(b"")
    routing_key: Any = None


_flat = msgspec.json.Decoder(_Flat)
_any = msgspec.json.Decoder(_Any)


def read_fields(body: bytes) -> Fields:
    """Never raises: a body that cannot be read is the engine's to refuse."""
    try:
        flat = _flat.decode(body)
        return Fields(
            flat.input_ids,
            flat.routing_key,
            flat.cache_salt,
            flat.extra_key,
            "" if flat.input_ids else "no_tokens",
        )
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        pass
    try:
        other = _any.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return Fields(problem="malformed")
    key = other.routing_key if isinstance(other.routing_key, str) else None
    return Fields(routing_key=key, problem="batch" if bytes(other.input_ids)[:1] == b"[" else "no_tokens")
