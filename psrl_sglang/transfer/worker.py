"""The move worker of one rank: takes commands, sends KV, receives KV, reports to the controller.

It lives in the engine's process beside the scheduler, on threads of its own, and never on the scheduler's.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import threading
import time
from array import array
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from psrl_sglang.keys import count
from psrl_sglang.store.store import KVStore
from psrl_sglang.transfer import messages as wire
from psrl_sglang.transfer.auth import Signer
from psrl_sglang.transfer.cargo import load
from psrl_sglang.transfer.desk import CommandDesk, Reply
from psrl_sglang.transfer.engine_side import EngineSide, Prefix
from psrl_sglang.transfer.handshake import Party
from psrl_sglang.transfer.landing import Landing
from psrl_sglang.transfer.link import Deadline, DeadlinePassed, TransferError, address_of, clipped, listen
from psrl_sglang.transfer.pins import Pins
from psrl_sglang.transfer.queueing import FairQueue
from psrl_sglang.transfer.reports import ControllerAddress, Reports
from psrl_sglang.transfer.sending import Cargo, Sender, Sent
from psrl_sglang.transfer.transport import make_transports

logger = logging.getLogger(__name__)

DRAM_LOCATION = "LocalCPUBackend"  # as LMCache calls the tiers
DISK_LOCATION = "LocalDiskBackend"
_LONGEST_MOVE_S = 600.0
_STOPPING = "the engine is stopping"


@dataclass(frozen=True, slots=True)
class WorkerSettings:
    """``port`` 0 takes any two free ones, else ``port`` and the next are used. Without ``controller`` it reports to
    nobody. ``takes_unversioned``: a command that names no version means the current one, else it is refused."""

    instance_id: str
    incarnation: str
    namespace: str
    rank: int
    ranks: int
    host: str
    port: int
    channel: str
    move_s: float
    moves_at_once: int
    pin_s: float
    chunk_tokens: int
    heartbeat_s: float
    controller: ControllerAddress | None
    takes_unversioned: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class _Flight:
    """One move, and who waits for it."""

    name: bytes
    prefix: Prefix
    destination: str
    deadline: Deadline
    is_copy: bool
    replies: list[Reply]


class MoveWorker:
    """Owns its sockets, threads and pins until ``close``; the store stays the caller's. Raises ``OSError`` where a
    port is taken."""

    def __init__(self, settings: WorkerSettings, store: KVStore, engine: EngineSide, signer: Signer) -> None:
        self.settings = settings
        self.store = store
        self._engine = engine
        party = Party(
            settings.instance_id,
            f"{settings.incarnation}/{settings.rank}",
            store.layout.text,
            settings.namespace,
        )
        self._flights: dict[bytes, _Flight] = {}
        self._lock = threading.Lock()
        self._is_closed = False
        with contextlib.ExitStack() as undo:
            listener = listen(settings.host, settings.port and settings.port + 1)
            undo.callback(listener.close)
            self._transports = make_transports(settings.channel, store.dram.arena)
            undo.callback(self._transports.close)
            self._sender = Sender(store.dram, self._transports, party, signer)
            undo.callback(self._sender.close)
            self._pins = Pins(store.dram, settings.pin_s)
            self._queue = FairQueue(settings.moves_at_once, "psrl-move-out")
            undo.callback(self._queue.close)
            self._desk = CommandDesk(settings.host, settings.port, signer, self._handle)
            undo.pop_all()
        self._landing = Landing(listener, store, self._transports, engine, party, signer)
        self.data_address = address_of(settings.host, listener.getsockname()[1])
        self.command_port = self._desk.port
        self._reports = Reports(
            settings.controller,
            (settings.instance_id, settings.rank),
            partial(self._greeting, wire.RegisterMsg),
            partial(self._greeting, wire.HeartbeatMsg),
            store,
            engine,
            signer,
            heartbeat_s=settings.heartbeat_s,
            tidy=self._tidy,
        )
        logger.info(
            "psrl: move worker %s/%d: commands on %s, KV on %s, transports %s",
            settings.instance_id,
            settings.rank,
            self.command_address,
            self.data_address,
            ", ".join(self._transports.usable),
        )

    @property
    def command_address(self) -> str:
        return address_of(self.settings.host, self.command_port)

    def close(self) -> None:
        """Moves that wait or are under way are answered before it returns. May be called more than once."""
        with self._lock:
            was_closed, self._is_closed = self._is_closed, True
        if was_closed:
            return
        self._reports.close()
        self._sender.interrupt()
        self._queue.close()
        self._desk.close()
        self._sender.close()
        self._landing.close()
        self._pins.close()
        self._transports.close()

    def status(self) -> dict[str, Any]:
        """Plain values; on any thread."""
        return {
            "instance_id": self.settings.instance_id,
            "incarnation": self.settings.incarnation,
            "command_address": self.command_address,
            "data_address": self.data_address,
            "transports": list(self._transports.usable),
            "missing_transports": dict(self._transports.missing),
            "moves": {
                "running_out": self._queue.running,
                "waiting_out": self._queue.waiting,
                "running_in": self._landing.running,
                "links_in": self._landing.links,
                "quarantined": self._landing.quarantined,
                "held_after_failure": self._sender.held,
            },
            "pins": self._pins.status(),
            "controller": self._reports.status(),
        }

    # ---- commands, on the desk's thread ----

    def _handle(self, command: Any, reply: Reply) -> None:
        match command:
            case wire.MoveWorkerMsg():
                self._queue_move(command, reply)
            case wire.PinWorkerMsg() | wire.UnpinWorkerMsg() | wire.LookupWorkerMsg() | wire.ClearWorkerMsg():
                self._queue_other(command, reply)
            case wire.HealthWorkerMsg():
                reply(wire.HealthWorkerRetMsg(0))
            case _:
                reply(wire.ErrorMsg(f"{type(command).__name__}: KV is kept as it is here; nothing was done"))

    def _queue_move(self, command: wire.MoveWorkerMsg, reply: Reply) -> None:
        try:
            prefix = Prefix.of(command.tokens, command.request_configs, self._usual_version())
            limit_s = _limit_s(command.request_configs, self.settings.move_s)
        except TransferError as error:
            reply(wire.ErrorMsg(str(error)))
            return
        destination, is_copy = command.new_position[0], command.copy is not False
        hashed = hashlib.blake2b(digest_size=16)
        for part in (destination, prefix.version, prefix.cache_salt, prefix.extra_key, is_copy):
            hashed.update(f"{part!r}\0".encode())
        hashed.update(array("q", prefix.tokens).tobytes())
        flight = _Flight(hashed.digest(), prefix, destination, Deadline(limit_s), is_copy, [reply])
        with self._lock:
            same = self._flights.get(flight.name)
            if same is not None and same.deadline.end_s <= flight.deadline.end_s:
                same.replies.append(reply)  # one is enough for both, and it will have ended in time
                return
            self._flights[flight.name] = flight
        if not self._queue.put(destination, partial(self._move, flight), flight.deadline):
            self._end(flight, wire.ErrorMsg(_STOPPING))

    def _queue_other(self, command: Any, reply: Reply) -> None:
        try:
            configs = getattr(command, "request_configs", None)
            deadline = Deadline(_limit_s(configs, self.settings.move_s))
        except TransferError as error:
            reply(wire.ErrorMsg(str(error)))
            return
        task = partial(self._answer, command, reply, deadline)
        if not self._queue.put(type(command).__name__, task, deadline):
            reply(wire.ErrorMsg(_STOPPING))

    # ---- moves, on the queue's threads ----

    def _move(self, flight: _Flight) -> None:
        deadline = flight.deadline
        began_s = deadline.end_s - deadline.seconds
        result = Sent()
        tag = ""
        try:
            tag = self._engine.tag_of(flight.prefix.version)
            if self._queue.is_closed:
                raise TransferError(_STOPPING)
            deadline.require("waiting for other moves")
            result = self._send(flight, tag)
        except DeadlinePassed as error:
            result = Sent(reason=f"late: {error}", failure="late")
        except TransferError as error:
            result = Sent(reason=str(error))
        except Exception as error:
            logger.exception("psrl: a move to %s failed", clipped(flight.destination))
            result = Sent(reason=f"{type(error).__name__}: {error}")
        finally:
            self._finish(flight, tag, result, time.monotonic() - began_s)

    def _send(self, flight: _Flight, tag: str) -> Sent:
        cargo = self._cargo(flight.prefix, tag, flight.deadline)
        if not cargo.runs:
            cargo.release()
            reason = f"no KV of this prompt under version {flight.prefix.version!r} here"
            return Sent(reason=reason, failure="miss")
        pieces = [piece for lease in cargo.leases for piece in lease.pieces]
        sent = self._sender.send(cargo, flight.destination, flight.deadline)
        if flight.is_copy:
            return sent
        if sent.present_pages < cargo.prefix_pages:
            return replace(sent, reason=f"{sent.reason or 'not all of it is there'}; this side keeps its copy")
        whole = [piece.chunk for piece in pieces if piece.pages == piece.chunk.pages]
        self.store.dram.drop(whole[::-1], "moved")
        return sent

    def _cargo(self, prefix: Prefix, tag: str, deadline: Deadline) -> Cargo:
        self._engine.flush(prefix, tag, deadline)
        return load(
            self.store,
            tag,
            self._engine.digests(prefix, tag),
            lambda pool: self._engine.salt(pool, tag),
            fingerprint=lambda: self._engine.fingerprint(tag),
            windows=self._engine.windows(),
            deadline=deadline,
        )

    def _finish(self, flight: _Flight, tag: str, sent: Sent, seconds: float) -> None:
        page = self.store.layout.page_tokens
        reason = clipped(sent.reason)
        if not reason and not sent.moved_pages and sent.present_pages:
            reason = "the destination has it already"
        answer = wire.MoveWorkerRetMsg(
            num_tokens=sent.moved_pages * page,
            present_tokens=sent.present_pages * page,
            size_bytes=sent.size_bytes,
            seconds=seconds,
            transport=sent.transport,
            reason=reason,
            outcome=sent.outcome,
        )
        stats = self.store.stats
        stats.add("moves", direction="out", outcome=sent.outcome, transport=sent.transport or "none")
        stats.add("move_tokens", answer.num_tokens, direction="out")
        stats.add("move_bytes", sent.size_bytes, direction="out")
        stats.add("move_seconds", seconds, direction="out")
        self._end(flight, answer)
        if flight.prefix.session:  # whatever came of it: another engine serves the session now
            self._engine.left(flight.prefix.session)
        self._reports.moved(
            wire.MoveRecord(
                self.settings.instance_id,
                clipped(flight.destination),
                tag,
                answer.num_tokens,
                answer.present_tokens,
                sent.size_bytes,
                seconds,
                sent.transport,
                reason,
                flight.prefix.session,
                time.time(),
            )
        )

    def _end(self, flight: _Flight, answer: wire.Message) -> None:
        with self._lock:
            if self._flights.get(flight.name) is flight:
                del self._flights[flight.name]
            replies = list(flight.replies)
        for reply in replies:
            reply(answer)

    def _answer(self, command: Any, reply: Reply, deadline: Deadline) -> None:
        try:
            deadline.require("waiting for moves")
            reply(self._answered(command, deadline))
        except TransferError as error:
            reply(wire.ErrorMsg(clipped(str(error))))
        except Exception as error:
            logger.exception("psrl: command %s failed", type(command).__name__)
            reply(wire.ErrorMsg(clipped(f"{type(error).__name__}: {error}")))

    def _answered(self, command: Any, deadline: Deadline) -> Any:
        page = self.store.layout.page_tokens
        if isinstance(command, wire.ClearWorkerMsg):
            return wire.ClearWorkerRetMsg(self._clear(command.location) * page)
        prefix = Prefix.of(command.tokens, command.request_configs, self._usual_version())
        tag = self._engine.tag_of(prefix.version)
        if isinstance(command, wire.UnpinWorkerMsg):
            return wire.UnpinWorkerRetMsg(self._pins.unpin(self._engine.digests(prefix, tag)) * page)
        cargo = self._cargo(prefix, tag, deadline)
        pages = cargo.prefix_pages
        if isinstance(command, wire.LookupWorkerMsg):
            cargo.release()
            return wire.LookupWorkerRetMsg(pages * page)
        digests = self._engine.digests(prefix, tag)
        assert pages <= count(digests)
        return wire.PinWorkerRetMsg(self._pins.pin(digests, cargo.leases, pages) * page)

    def _clear(self, location: str) -> int:
        if location == DRAM_LOCATION:
            return self.store.dram.clear()
        if location == DISK_LOCATION and self.store.disk is not None:
            self.store.disk.clear()
            return 0
        raise TransferError(f"location {location!r} is not one of {DRAM_LOCATION}, {DISK_LOCATION}")

    def _usual_version(self) -> str | None:
        return self._engine.status()["version"] if self.settings.takes_unversioned else None

    # ---- reports ----

    def _greeting(self, kind: Callable[..., Any]) -> Any:
        settings = self.settings
        told = self._engine.status()
        tiers = self.store.status()["tiers"]
        status = wire.WorkerStatus(
            incarnation=settings.incarnation,
            version=told["version"],
            tag=told["tag"],
            window=told["window"],
            layout=self.store.layout.text,
            page_tokens=self.store.layout.page_tokens,
            chunk_tokens=settings.chunk_tokens,
            rank=settings.rank,
            ranks=settings.ranks,
            transports=list(self._transports.usable),
            http_url=told.get("http_url", ""),
            namespace=settings.namespace,
            pages_by_tag=self.store.dram.pages_by_tag(),
            tiers={
                name: (int(tier.get("used_bytes", 0)), int(tier.get("budget_bytes", 0)))
                for name, tier in tiers.items()
            },
            moves_running=self._queue.running,
            moves_waiting=self._queue.waiting,
        )
        address = (settings.host, self.command_port, self.data_address)
        return kind(settings.instance_id, settings.rank, *address, status)

    def _tidy(self) -> None:
        self._sender.tidy()
        self._landing.release_quarantined()
        self._pins.expire()


def _limit_s(configs: dict[str, Any] | None, usual_s: float) -> float:
    limit_s = (configs or {}).get(wire.TIMEOUT_KEY, usual_s)
    if not isinstance(limit_s, int | float) or not 0 < limit_s <= _LONGEST_MOVE_S:
        most_s = f"{_LONGEST_MOVE_S:.0f}"
        raise TransferError(
            clipped(f"request_configs[{wire.TIMEOUT_KEY!r}] is {limit_s!r}; it must be seconds up to {most_s}")
        )
    return float(limit_s)
