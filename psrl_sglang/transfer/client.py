"""Moving KV between engines without a controller: the calls a framework that routes by itself makes.

Trouble of a worker is a result with a reason, never an exception, and every call returns within its
``timeout_s``. A call over several ranks asks all at once and counts what every rank has: the minimum.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Self, TypedDict, Unpack, get_args

import zmq
import zmq.asyncio

from psrl_sglang.transfer import messages as wire
from psrl_sglang.transfer.ask import Answer, Ask, AsyncAsker, ask_all_blocking
from psrl_sglang.transfer.auth import Signer

DRAM_LOCATION = "LocalCPUBackend"
_ANSWER_MARGIN_S = 0.25
_ANSWER_SHARE = 0.2

Addresses = str | Sequence[str]
"""``host:port`` of a worker, or one for each rank in their order."""


MoveOutcome = Literal["moved", "present", "miss", "late", "failed"]
_OUTCOMES: dict[str, MoveOutcome] = {name: name for name in get_args(MoveOutcome)}  # from best to worst


class Salts(TypedDict, total=False):
    """What separates KV within a version, as the requests that made it had it."""

    cache_salt: str | None
    extra_key: str | None


@dataclass(frozen=True, slots=True)
class MoveResult:
    """``num_tokens`` went over, and of the prompt the destination has the first ``present_tokens``, on every rank.

    ``ok``: there is something of it at the destination now. ``reason`` says why it is not all, or why nothing
    had to go. ``outcome`` says the same to a program: "moved", "present" (nothing had to go), "miss" (the source
    has none of it under this version), "late" (the deadline, or no answer by then), or "failed"; over several ranks
    the worst of theirs. ``size_bytes`` is over all ranks.
    """

    ok: bool
    num_tokens: int = 0
    present_tokens: int = 0
    size_bytes: int = 0
    seconds: float = 0.0
    transport: str = ""
    reason: str = ""
    outcome: MoveOutcome = "failed"


@dataclass(frozen=True, slots=True)
class CountResult:
    """Tokens that every rank pinned, unpinned, cleared or holds. ``ok``: every rank answered."""

    ok: bool
    num_tokens: int = 0
    reason: str = ""


@dataclass(frozen=True, slots=True)
class HealthResult:
    """``error_codes`` by rank, 0 for healthy, None where none came. ``ok``: all are 0."""

    ok: bool
    error_codes: tuple[int | None, ...] = ()
    reason: str = ""


def request_configs(
    version: str,
    *,
    cache_salt: str | None = None,
    extra_key: str | None = None,
    timeout_s: float | None = None,
    session: str | None = None,
) -> dict[str, Any]:
    """What a command about tokens says of them beside the tokens."""
    optional = {
        wire.SALT_KEY: cache_salt,
        wire.EXTRA_KEY: extra_key,
        wire.TIMEOUT_KEY: timeout_s,
        wire.SESSION_KEY: session,
    }
    return {wire.VERSION_KEY: version} | {key: value for key, value in optional.items() if value is not None}


def worker_timeout_s(timeout_s: float) -> float:
    """What to allow a worker when the asker waits ``timeout_s``: its own reason must arrive before that."""
    return timeout_s - min(_ANSWER_MARGIN_S, timeout_s * _ANSWER_SHARE)


def event_id(kind: str) -> str:
    return f"{kind}{uuid.uuid4()}"


def merge_moves(answers: Sequence[Answer], seconds: float) -> MoveResult:
    """One result of the ranks' answers to a `MoveWorkerMsg`."""
    reason = _reasons(answers)
    if any(answer.kind != "ok" for answer in answers):
        return MoveResult(False, seconds=seconds, reason=reason, outcome=_worst(map(_outcome, answers)))
    replies: list[wire.MoveWorkerRetMsg] = [answer.reply for answer in answers]
    num_tokens = min(reply.num_tokens for reply in replies)
    present_tokens = min(reply.present_tokens for reply in replies)
    ok = num_tokens > 0 or present_tokens > 0
    return MoveResult(
        ok=ok,
        num_tokens=num_tokens,
        present_tokens=present_tokens,
        size_bytes=sum(reply.size_bytes for reply in replies),
        seconds=seconds,
        transport=", ".join(dict.fromkeys(reply.transport for reply in replies if reply.transport)),
        reason=reason
        or ("" if ok else "the source gave no reason; does it hold the prompt under this version?"),
        outcome=_worst(map(_outcome, answers)),
    )


def _outcome(answer: Answer) -> MoveOutcome:
    if answer.kind != "ok":
        return "late" if answer.kind == "silent" else "failed"
    reply: wire.MoveWorkerRetMsg = answer.reply
    guessed: MoveOutcome = "moved" if reply.num_tokens else "present" if reply.present_tokens else "miss"
    return _OUTCOMES.get(reply.outcome, guessed)


def _worst(outcomes: Iterable[MoveOutcome]) -> MoveOutcome:
    order = list(_OUTCOMES)
    return max(outcomes, key=lambda outcome: order.index(outcome))


def merge_counts(answers: Sequence[Answer]) -> CountResult:
    """One result of the ranks' answers to a command that counts tokens."""
    if not answers:
        return CountResult(False, reason="no worker was named")
    if any(answer.kind != "ok" for answer in answers):
        return CountResult(False, reason=_reasons(answers))
    return CountResult(True, min(answer.reply.num_tokens for answer in answers))


def _reasons(answers: Sequence[Answer]) -> str:
    said = (answer.problem or getattr(answer.reply, "reason", "") for answer in answers)
    return "; ".join(dict.fromkeys(text for text in said if text))


def _on_each(worker: Addresses, message: wire.Message) -> list[Ask]:
    return [(address, message) for address in _listed(worker)]


def _listed(addresses: Addresses) -> list[str]:
    return [addresses] if isinstance(addresses, str) else list(addresses)


def _move_asks(
    tokens: Sequence[int], src: list[str], dst: list[str], copy: bool, configs: dict[str, Any]
) -> list[Ask]:
    told = event_id("move-")
    return [
        (
            source,
            wire.MoveWorkerMsg(
                worker_event_id=f"{told}-{rank}",
                old_position=DRAM_LOCATION,
                new_position=(destination, DRAM_LOCATION),
                tokens=[int(token) for token in tokens],
                copy=copy,
                request_configs=configs,
            ),
        )
        for rank, (source, destination) in enumerate(zip(src, dst, strict=True))
    ]


def _unequal(src: list[str], dst: list[str]) -> MoveResult | None:
    if src and len(src) == len(dst):
        return None
    reason = f"{len(src)} source ranks and {len(dst)} destination ranks: each rank moves to its own counterpart"
    return MoveResult(False, reason=reason)


def _pin_asks(kind: type[Any], tokens: Sequence[int], worker: Addresses, configs: dict[str, Any]) -> list[Ask]:
    return _on_each(worker, kind(event_id("pin-"), DRAM_LOCATION, [int(token) for token in tokens], configs))


def _lookup_asks(tokens: Sequence[int], worker: Addresses, configs: dict[str, Any]) -> list[Ask]:
    return _on_each(
        worker, wire.LookupWorkerMsg(event_id("lookup-"), [int(token) for token in tokens], configs)
    )


def _clear_asks(worker: Addresses, location: str) -> list[Ask]:
    return _on_each(worker, wire.ClearWorkerMsg(event_id("clear-"), location))


def _health_asks(worker: Addresses) -> list[Ask]:
    return _on_each(worker, wire.HealthWorkerMsg(event_id("health-")))


def _health_of(answers: Sequence[Answer]) -> HealthResult:
    codes = tuple(answer.reply.error_code if answer.kind == "ok" else None for answer in answers)
    return HealthResult(all(code == 0 for code in codes), codes, _reasons(answers))


class MoveClient:
    """Thread-safe: a call shares nothing with another. Owns its ZMQ context: close it, or use it in a `with`."""

    def __init__(self, secret: bytes = b"") -> None:
        self._signer = Signer(secret)
        self._context: zmq.Context[Any] = zmq.Context()

    def transfer_direct(
        self,
        tokens: Sequence[int],
        src: Addresses,
        dst: Addresses,
        version: str,
        *,
        cache_salt: str | None = None,
        extra_key: str | None = None,
        timeout_s: float = 5.0,
        session: str | None = None,
        copy: bool = True,
    ) -> MoveResult:
        """Have the worker ``src`` send the KV of ``tokens`` to the peer address ``dst``; rank by rank for lists.

        With ``copy`` false the source gives its own up. Returns within ``timeout_s``.
        """
        configs = request_configs(
            version,
            cache_salt=cache_salt,
            extra_key=extra_key,
            timeout_s=worker_timeout_s(timeout_s),
            session=session,
        )
        sources, destinations = _listed(src), _listed(dst)
        if unequal := _unequal(sources, destinations):
            return unequal
        start_s = time.monotonic()
        answers = self._ask(_move_asks(tokens, sources, destinations, copy, configs), timeout_s)
        return merge_moves(answers, time.monotonic() - start_s)

    def pin(
        self,
        tokens: Sequence[int],
        worker: Addresses,
        version: str,
        *,
        timeout_s: float = 5.0,
        **salts: Unpack[Salts],
    ) -> CountResult:
        """Keep what the worker holds of ``tokens`` until the lease of its settings ends."""
        asks = _pin_asks(wire.PinWorkerMsg, tokens, worker, request_configs(version, **salts))
        return merge_counts(self._ask(asks, timeout_s))

    def unpin(
        self,
        tokens: Sequence[int],
        worker: Addresses,
        version: str,
        *,
        timeout_s: float = 5.0,
        **salts: Unpack[Salts],
    ) -> CountResult:
        asks = _pin_asks(wire.UnpinWorkerMsg, tokens, worker, request_configs(version, **salts))
        return merge_counts(self._ask(asks, timeout_s))

    def lookup(
        self,
        tokens: Sequence[int],
        worker: Addresses,
        version: str,
        *,
        timeout_s: float = 5.0,
        **salts: Unpack[Salts],
    ) -> CountResult:
        """How many of ``tokens`` the worker could serve or send, exact to the page."""
        asks = _lookup_asks(tokens, worker, request_configs(version, **salts))
        return merge_counts(self._ask(asks, timeout_s))

    def clear(self, worker: Addresses, *, location: str = DRAM_LOCATION, timeout_s: float = 5.0) -> CountResult:
        return merge_counts(self._ask(_clear_asks(worker, location), timeout_s))

    def health(self, worker: Addresses, *, timeout_s: float = 5.0) -> HealthResult:
        return _health_of(self._ask(_health_asks(worker), timeout_s))

    def close(self) -> None:
        """Waits for calls of other threads, which have their deadlines."""
        self._context.term()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _ask(self, asks: Sequence[Ask], timeout_s: float) -> list[Answer]:
        return ask_all_blocking(self._context, asks, self._signer, timeout_s)


class AsyncMoveClient:
    """`MoveClient` for an event loop. Close it, or use it in an `async with`."""

    def __init__(self, secret: bytes = b"") -> None:
        self._context = zmq.asyncio.Context()
        self._asker = AsyncAsker(self._context, Signer(secret))

    async def transfer_direct(
        self,
        tokens: Sequence[int],
        src: Addresses,
        dst: Addresses,
        version: str,
        *,
        cache_salt: str | None = None,
        extra_key: str | None = None,
        timeout_s: float = 5.0,
        session: str | None = None,
        copy: bool = True,
    ) -> MoveResult:
        """As `MoveClient.transfer_direct`."""
        configs = request_configs(
            version,
            cache_salt=cache_salt,
            extra_key=extra_key,
            timeout_s=worker_timeout_s(timeout_s),
            session=session,
        )
        sources, destinations = _listed(src), _listed(dst)
        if unequal := _unequal(sources, destinations):
            return unequal
        start_s = time.monotonic()
        answers = await self._ask(_move_asks(tokens, sources, destinations, copy, configs), timeout_s)
        return merge_moves(answers, time.monotonic() - start_s)

    async def pin(
        self,
        tokens: Sequence[int],
        worker: Addresses,
        version: str,
        *,
        timeout_s: float = 5.0,
        **salts: Unpack[Salts],
    ) -> CountResult:
        asks = _pin_asks(wire.PinWorkerMsg, tokens, worker, request_configs(version, **salts))
        return merge_counts(await self._ask(asks, timeout_s))

    async def unpin(
        self,
        tokens: Sequence[int],
        worker: Addresses,
        version: str,
        *,
        timeout_s: float = 5.0,
        **salts: Unpack[Salts],
    ) -> CountResult:
        asks = _pin_asks(wire.UnpinWorkerMsg, tokens, worker, request_configs(version, **salts))
        return merge_counts(await self._ask(asks, timeout_s))

    async def lookup(
        self,
        tokens: Sequence[int],
        worker: Addresses,
        version: str,
        *,
        timeout_s: float = 5.0,
        **salts: Unpack[Salts],
    ) -> CountResult:
        asks = _lookup_asks(tokens, worker, request_configs(version, **salts))
        return merge_counts(await self._ask(asks, timeout_s))

    async def clear(
        self, worker: Addresses, *, location: str = DRAM_LOCATION, timeout_s: float = 5.0
    ) -> CountResult:
        return merge_counts(await self._ask(_clear_asks(worker, location), timeout_s))

    async def health(self, worker: Addresses, *, timeout_s: float = 5.0) -> HealthResult:
        return _health_of(await self._ask(_health_asks(worker), timeout_s))

    def close(self) -> None:
        """Calls still under way are cancelled."""
        self._context.destroy(linger=0)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()

    async def _ask(self, asks: Sequence[Ask], timeout_s: float) -> list[Answer]:
        return await self._asker.ask_all(asks, timeout_s)
