"""Server-sent events of `/generate`, and what they come to when an answer takes several replies.

SGLang tells either all tokens so far in each event, or (``--incremental-streaming-output``) only what is new. Which
of the two it is shows in the second event; from then on those that tell all pass unread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from psrl_sglang.gateway.loopback import Continuation, NotContinued, is_abort, merged_parts

ABORT_MARK = b'"abort"'
DONE = b"data: [DONE]\n\n"
_DATA = b"data:"
_END = b"\n\n"

Opener = Callable[[Continuation | None], Continuation]
"""The answer so far, which goes on. Raises `NotContinued`."""


class EventSplitter:
    """Whole events out of pieces of a stream; the rest is kept for the next piece. An event of many pieces is put
    together once."""

    def __init__(self) -> None:
        self._pieces: list[bytes] = []

    @property
    def rest(self) -> bytes:
        return b"".join(self._pieces)

    def whole(self, piece: bytes) -> bytes:
        """All events that are complete now, as they came."""
        end = piece.rfind(_END) + len(_END)
        if end < len(_END):
            ends_in_between = self._pieces and self._pieces[-1][-1:] == piece[:1] == b"\n"
            if not ends_in_between:
                self._pieces.append(piece)
                return b""
            end = 1
        whole = b"".join((*self._pieces, piece[:end])) if self._pieces or end < len(piece) else piece
        self._pieces = [piece[end:]] if end < len(piece) else []
        return whole


def each_event(events: bytes) -> Iterator[bytes]:
    start = 0
    while start < len(events):
        end = events.index(_END, start) + len(_END)
        yield events[start:end]
        start = end


def encoded(reply: dict[str, Any]) -> bytes:
    return b"data: " + msgspec.json.encode(reply) + _END


class AnswerEvents:
    """Turns the events of one answer's replies into those of one reply. ``answer`` is what was broken off so far;
    ``is_broken_off``: the reply under way was, and the answer goes on with another."""

    def __init__(self, open_answer: Opener) -> None:
        self._open = open_answer
        self._tells_new_only: bool | None = None
        self._parts: list[dict[str, Any]] = []
        self._told = 0
        self.answer: Continuation | None = None
        self.is_broken_off = False
        self.not_continued = ""

    @property
    def tells_new_only(self) -> bool:
        return bool(self._tells_new_only)

    def next_reply(self) -> None:
        """What comes now is of another reply."""
        self._parts, self._told, self.is_broken_off = [], 0, False

    def passes_unread(self, events: bytes) -> bool:
        return self.answer is None and self._tells_new_only is False and ABORT_MARK not in events

    def take(self, event: bytes) -> bytes:
        """What the client gets for an event, which may be nothing."""
        if self.is_broken_off:
            return b""  # its end mark
        reply = _decoded(event)
        if reply is None:
            return event
        ids, meta = reply.get("output_ids") or [], reply["meta_info"]
        told, completion = self._told, meta.get("completion_tokens", len(ids))
        if surplus := self._surplus(ids, completion):
            reply, ids = _without_last(reply, surplus), ids[: len(ids) - surplus]
        self._learn(told, len(ids), completion)
        if is_abort(reply) and not self.not_continued:
            try:
                return self._break_off(reply, ids, told)
            except NotContinued as reason:
                self.not_continued = str(reason)
        self._keep(reply, ids)
        if self.answer is None:
            return event
        return encoded(self._joined(self.answer, reply, told))

    def _break_off(self, reply: dict[str, Any], ids: list[int], told: int) -> bytes:
        before = self.answer
        opened = self._open(before)
        said = b""
        if self._tells_new_only and ids:
            quiet = {**reply, "meta_info": {**reply["meta_info"], "finish_reason": None}}
            said = encoded(self._joined(opened, quiet, told))
        self._keep(reply, ids)
        opened.take(merged_parts(self._parts))
        self.answer, self.is_broken_off = opened, True
        return said

    def _joined(self, answer: Continuation, reply: dict[str, Any], told: int) -> dict[str, Any]:
        return answer.joined_delta(reply, told) if self._tells_new_only else answer.joined(reply)

    def _keep(self, reply: dict[str, Any], ids: list[int]) -> None:
        if self._tells_new_only:
            self._parts.append(reply)
            self._told += len(ids)
        else:
            self._parts, self._told = [reply], len(ids)

    def _learn(self, told: int, count: int, completion: int) -> None:
        if self._tells_new_only is None and told:
            self._tells_new_only = count < completion

    def _surplus(self, ids: list[int], completion: int) -> int:
        """SGLang repeats the last token of a request that it aborts in its queue, where events tell what is new."""
        known_to_be_new = self._tells_new_only or (self._told and len(ids) < completion)
        return max(0, min(len(ids), self._told + len(ids) - completion)) if known_to_be_new else 0


def _decoded(event: bytes) -> dict[str, Any] | None:
    if not event.startswith(_DATA):
        return None
    try:
        reply = msgspec.json.decode(event[len(_DATA) :].strip())
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    return reply if isinstance(reply, dict) and isinstance(reply.get("meta_info"), dict) else None


def _without_last(reply: dict[str, Any], count: int) -> dict[str, Any]:
    """Such an event also tells the log-probabilities of all tokens again."""
    meta = {name: value for name, value in reply["meta_info"].items() if not name.startswith("output_")}
    return {**reply, "text": "", "output_ids": reply["output_ids"][:-count], "meta_info": meta}
