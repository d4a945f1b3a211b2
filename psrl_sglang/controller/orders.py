"""Commands to all ranks of an instance, and moves between two: who is asked what, and what came of it.

Every question has the deadline of the call, so a worker that is dead costs that call its time and no other
anything. What cannot be is refused before a worker is asked, with what to do about it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from psrl_sglang.controller.inbox import Inbox
from psrl_sglang.controller.recent import Sessions
from psrl_sglang.controller.registry import Registry, Worker
from psrl_sglang.transfer import messages as wire
from psrl_sglang.transfer.ask import Answer, AsyncAsker
from psrl_sglang.transfer.client import (
    DRAM_LOCATION,
    MoveResult,
    event_id,
    merge_moves,
    request_configs,
    worker_timeout_s,
)

_MOST_NAMED = 8


class Refusal(Exception):
    """It was not done. ``status``: the HTTP status that says whose fault it is."""

    def __init__(self, status: int, text: str, ranks: tuple[RankResult, ...] = ()) -> None:
        super().__init__(text)
        self.status = status
        self.ranks = ranks


@dataclass(frozen=True, slots=True)
class RankResult:
    """What one rank did. ``reason``: why it is not all, or what went wrong."""

    worker_id: int
    ok: bool
    num_tokens: int = 0
    present_tokens: int = 0
    size_bytes: int = 0
    seconds: float = 0.0
    transport: str = ""
    reason: str = ""


@dataclass(frozen=True, slots=True)
class MoveOrder:
    """``source`` None: whoever holds ``session``. ``version`` None: the one both are on."""

    source: str | None
    destination: str
    tokens: list[int]
    copy: bool
    source_location: str = DRAM_LOCATION
    destination_location: str = DRAM_LOCATION
    version: str | None = None
    cache_salt: str | None = None
    extra_key: str | None = None
    session: str | None = None
    timeout_s: float = 5.0


@dataclass(frozen=True, slots=True)
class PlannedMove:
    """A move that can be tried: every source rank with the peer address of its counterpart."""

    order: MoveOrder
    source: str
    version: str
    pairs: tuple[tuple[Worker, str], ...]


class Orders:
    def __init__(self, asker: AsyncAsker, registry: Registry, sessions: Sessions, inbox: Inbox) -> None:
        self._asker = asker
        self._registry = registry
        self._sessions = sessions
        self._inbox = inbox

    def ranks(self, instance_id: str, field: str = "instance_id") -> list[Worker]:
        """Raises `Refusal`."""
        ranks = self._registry.ranks(instance_id)
        if not ranks:
            raise Refusal(404, f"{field}: no instance {instance_id!r}; {self._known()}")
        expected = max((worker.status.ranks for worker in ranks if worker.status is not None), default=0)
        if len(ranks) < expected:
            raise Refusal(
                409, f"{field}: {len(ranks)} of the {expected} ranks of {instance_id!r} are registered; wait"
            )
        return ranks

    async def ask(self, workers: Sequence[Worker], message: wire.Message, timeout_s: float) -> list[Answer]:
        """The answers of all of them, in order."""
        return await self.ask_each([(worker, message) for worker in workers], timeout_s)

    async def ask_each(self, asks: Sequence[tuple[Worker, wire.Message]], timeout_s: float) -> list[Answer]:
        addressed = [(worker.address, message) for worker, message in asks]
        return await self._asker.ask_all(addressed, timeout_s)

    async def command(self, workers: Sequence[Worker], message: wire.Message, timeout_s: float) -> list[Answer]:
        """`ask`, where every rank must have done it. Raises `Refusal`."""
        answers = await self.ask(workers, message, timeout_s)
        _raise_for(workers, answers)
        return answers

    def plan(self, order: MoveOrder) -> PlannedMove:
        """Raises `Refusal`."""
        source = order.source if order.source is not None else self._holder(order.session)
        if source == order.destination:
            raise Refusal(422, f"old_position and new_position are both {source!r}; there is nothing to move")
        senders = self.ranks(source, "old_position")
        receivers = self.ranks(order.destination, "new_position")
        if len(senders) != len(receivers):
            raise Refusal(
                409,
                f"{source!r} has {len(senders)} ranks and {order.destination!r} {len(receivers)}: each rank's KV "
                "goes to the same rank, so both need the same tensor parallel size",
            )
        pairs = []
        for sender, receiver in zip(senders, receivers, strict=True):
            if not receiver.peer_init_url:
                raise Refusal(
                    409,
                    f"rank {receiver.worker_id} of {order.destination!r} takes no moves; "
                    "set psrl.lmcache.enable_p2p: true there",
                )
            pairs.append((sender, receiver.peer_init_url))
        version = order.version if order.version is not None else _common_version(senders, receivers)
        return PlannedMove(order, source, version, tuple(pairs))

    async def move(self, plan: PlannedMove) -> tuple[MoveResult, tuple[RankResult, ...]]:
        """Raises `Refusal` when a rank does not answer or refuses; then nothing may be assumed of any rank."""
        order, start_s = plan.order, time.monotonic()
        configs = request_configs(
            plan.version,
            cache_salt=order.cache_salt,
            extra_key=order.extra_key,
            timeout_s=worker_timeout_s(order.timeout_s),
            session=order.session,
        )
        told = event_id("Worker")
        asks = [
            (
                sender.address,
                wire.MoveWorkerMsg(
                    worker_event_id=f"{told}-{sender.worker_id}",
                    old_position=order.source_location,
                    new_position=(peer_url, order.destination_location),
                    tokens=order.tokens,
                    copy=order.copy,
                    request_configs=configs,
                ),
            )
            for sender, peer_url in plan.pairs
        ]
        answers = await self._asker.ask_all(asks, order.timeout_s)
        seconds = time.monotonic() - start_s
        self._record(plan, answers, seconds)
        senders = [sender for sender, _ in plan.pairs]
        _raise_for(senders, answers)
        result = merge_moves(answers, seconds)
        self._note_session(plan, result)
        return result, _rank_results(senders, answers)

    def _holder(self, session: str | None) -> str:
        if not session:
            raise Refusal(422, "old_position: name the source, or name a `session` whose holder is the source")
        holder = self._sessions.holder(session)
        if holder is None:
            raise Refusal(404, f"session: no instance has reported {session!r}; name old_position")
        return holder.instance_id

    def _known(self) -> str:
        known = self._registry.instance_ids
        if not known:
            return "none has registered: do the engines' controller_host and ports point here?"
        more = f" and {len(known) - _MOST_NAMED} more" if len(known) > _MOST_NAMED else ""
        return f"known are {', '.join(known[:_MOST_NAMED])}{more}"

    def _record(self, plan: PlannedMove, answers: list[Answer], seconds: float) -> None:
        """A worker of ours tells of its moves itself; of others, and of what no worker could tell, we do."""
        for (sender, _), answer in zip(plan.pairs, answers, strict=True):
            if answer.kind == "ok" and sender.status is not None:
                continue
            reply = (
                answer.reply if isinstance(answer.reply, wire.MoveWorkerRetMsg) else wire.MoveWorkerRetMsg(0)
            )
            record = wire.MoveRecord(
                source=plan.source,
                destination=plan.order.destination,
                tag=plan.version,
                num_tokens=reply.num_tokens,
                present_tokens=reply.present_tokens,
                size_bytes=reply.size_bytes,
                seconds=seconds,
                reason=answer.problem or reply.reason,
                session=plan.order.session or "",
                time_s=time.time(),
            )
            outcome = None if answer.kind == "ok" else "failed"
            self._inbox.moved(sender.instance_id, sender.worker_id, record, outcome)

    def _note_session(self, plan: PlannedMove, result: MoveResult) -> None:
        """The destination is the holder now if it has as much of the session as the source had, or alone has it."""
        session, destination = plan.order.session, plan.order.destination
        known = self._sessions.holder(session) if session else None
        if session is None or not result.ok:
            return
        if known is None or not plan.order.copy or result.present_tokens >= known.tokens:
            ranks = self._registry.ranks(destination)
            tag = ranks[0].status.tag if ranks and ranks[0].status is not None else plan.version
            self._sessions.serve(destination, wire.SessionHeld(session, result.present_tokens, tag))


def _common_version(senders: list[Worker], receivers: list[Worker]) -> str:
    source, destination = senders[0].status, receivers[0].status
    if source is None or destination is None:
        raise Refusal(422, "version: needed, because not both instances report the version they are on")
    if source.tag != destination.tag:
        raise Refusal(
            409,
            f"version: needed, because {senders[0].instance_id!r} is on {source.version!r} and "
            f"{receivers[0].instance_id!r} on {destination.version!r} (tags {source.tag}, {destination.tag})",
        )
    return destination.version


def _rank_results(workers: Sequence[Worker], answers: list[Answer]) -> tuple[RankResult, ...]:
    results = []
    for worker, answer in zip(workers, answers, strict=True):
        if answer.kind != "ok":
            results.append(RankResult(worker.worker_id, False, reason=answer.problem))
            continue
        reply = answer.reply
        values = {
            name: getattr(reply, name)
            for name in ("num_tokens", "present_tokens", "size_bytes", "seconds", "transport", "reason")
            if hasattr(reply, name)
        }
        results.append(RankResult(worker.worker_id, True, **values))
    return tuple(results)


def _raise_for(workers: Sequence[Worker], answers: list[Answer]) -> None:
    failed = [(worker, answer) for worker, answer in zip(workers, answers, strict=True) if answer.kind != "ok"]
    if failed:
        status = 504 if any(answer.kind == "silent" for _, answer in failed) else 502
        text = "; ".join(
            f"rank {worker.worker_id} of {worker.instance_id!r}: {a.problem}" for worker, a in failed
        )
        raise Refusal(status, text, _rank_results(workers, answers))
