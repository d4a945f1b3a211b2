"""What was lately: which instance served a session last, and the moves that were made. Bounded, in memory."""

from __future__ import annotations

import time
from collections import OrderedDict, deque
from dataclasses import dataclass

from psrl_sglang.transfer.messages import MoveRecord, SessionHeld

_MAX_CHARACTERS = 512


@dataclass(frozen=True, slots=True)
class Holder:
    """``tokens`` of a session's KV are with ``instance_id`` under ``tag``, as it said at ``time_s``."""

    instance_id: str
    tokens: int
    tag: str
    time_s: float


class Sessions:
    """The last to serve a session is its holder. The longest unheard-of are forgotten first."""

    def __init__(self, most: int = 200_000) -> None:
        self._most = most
        self._holders: OrderedDict[str, Holder] = OrderedDict()

    def __len__(self) -> int:
        return len(self._holders)

    def serve(self, instance_id: str, held: SessionHeld) -> None:
        if not held.session or max(len(held.session), len(held.tag)) > _MAX_CHARACTERS:
            return
        self._holders[held.session] = Holder(instance_id, held.tokens, held.tag, time.time())
        self._holders.move_to_end(held.session)
        if len(self._holders) > self._most:
            self._holders.popitem(last=False)

    def holder(self, session: str) -> Holder | None:
        return self._holders.get(session)

    def latest(self, most: int) -> list[tuple[str, Holder]]:
        """The latest first."""
        return [item for item, _ in zip(reversed(self._holders.items()), range(most), strict=False)]


@dataclass(frozen=True, slots=True)
class Move:
    """A move as a worker told it, or as the controller saw it fail. ``outcome``: "moved", "present" (nothing had
    to go), "nothing" (with the reason in the record) or "failed"."""

    number: int
    instance_id: str
    worker_id: int
    outcome: str
    record: MoveRecord


def outcome_of(num_tokens: int, present_tokens: int) -> str:
    if num_tokens > 0:
        return "moved"
    return "present" if present_tokens > 0 else "nothing"


class Moves:
    """The last ``most`` moves; `number` counts all there were."""

    def __init__(self, most: int = 1000) -> None:
        self._moves: deque[Move] = deque(maxlen=most)
        self.number = 0

    def add(self, instance_id: str, worker_id: int, outcome: str, record: MoveRecord) -> Move:
        self.number += 1
        move = Move(self.number, instance_id, worker_id, outcome, record)
        self._moves.append(move)
        return move

    def latest(self, most: int) -> list[Move]:
        """The latest first."""
        return [move for move, _ in zip(reversed(self._moves), range(most), strict=False)]
