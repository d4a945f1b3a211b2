"""What a message of a worker does to what the controller knows, and the answer to it where one is due."""

from __future__ import annotations

import socket

import msgspec

from psrl_sglang.controller.events import Feed
from psrl_sglang.controller.frames import NOT_TAKEN, UNKNOWN_WORKER, Rejected
from psrl_sglang.controller.metrics import Metrics
from psrl_sglang.controller.recent import Move, Moves, Sessions, outcome_of
from psrl_sglang.controller.registry import Refused, Registry, UnknownWorker
from psrl_sglang.transfer import messages as wire

_ANY_ADDRESS = ("0.0.0.0", "::", "*", "")
_MAX_TEXT = 1000


class Inbox:
    """Owns nothing; changes the registry, sessions and moves it was given."""

    def __init__(
        self, registry: Registry, sessions: Sessions, moves: Moves, feed: Feed, metrics: Metrics
    ) -> None:
        self._registry = registry
        self._sessions = sessions
        self._moves = moves
        self._feed = feed
        self._metrics = metrics

    def answer(self, request: wire.WorkerRequest, reply_address: str) -> wire.Message:
        """``reply_address``: where this worker reaches the controller. Raises `Rejected`."""
        try:
            match request:
                case wire.RegisterMsg():
                    self._registry.register(request)
                    return wire.RegisterRetMsg({"heartbeat_url": reply_address})
                case wire.HeartbeatMsg():
                    return wire.HeartbeatRetMsg(self._registry.heartbeat(request))
                case wire.BatchedP2PLookupMsg():
                    return self._who_holds(request)
                case wire.FullSyncStartMsg():
                    return self._registry.start_sync(request)
                case wire.FullSyncStatusMsg():
                    return self._registry.sync_status(request)
        except Refused as error:
            raise Rejected(NOT_TAKEN, str(error)) from error

    def hear(self, event: wire.WorkerEvent) -> None:
        """Raises `Rejected`."""
        try:
            taken = self._hear(event)
        except UnknownWorker as error:
            raise Rejected(UNKNOWN_WORKER, str(error)) from error
        except Refused as error:
            raise Rejected(NOT_TAKEN, str(error)) from error
        if not taken:
            of = f"of worker {event.worker_id} of {event.instance_id!r}"
            raise Rejected(NOT_TAKEN, f"a {type(event).__name__} {of} that belongs to nothing under way")

    def _hear(self, event: wire.WorkerEvent) -> bool:
        match event:
            case wire.BatchedKVOperationMsg():
                self._registry.apply(event)
            case wire.DeRegisterMsg():
                return self._registry.deregister(event)
            case wire.FullSyncBatchMsg():
                return self._registry.sync_batch(event)
            case wire.FullSyncEndMsg():
                return self._registry.end_sync(event)
            case wire.SessionsMsg():
                self._must_know(event)
                for held in event.sessions:
                    self._sessions.serve(event.instance_id, held)
            case wire.MovedMsg():
                self._must_know(event)
                for record in event.moves:
                    self.moved(event.instance_id, event.worker_id, record)
        return True

    def moved(
        self, instance_id: str, worker_id: int, record: wire.MoveRecord, outcome: str | None = None
    ) -> None:
        """A move has ended."""
        known = outcome or outcome_of(record.num_tokens, record.present_tokens)
        move = self._moves.add(instance_id, worker_id, known, _clipped(record))
        self._metrics.count(move)
        self._feed.publish("move", msgspec.json.encode(move_view(move)))

    def _must_know(self, event: wire.SessionsMsg | wire.MovedMsg) -> None:
        if self._registry.worker(event.instance_id, event.worker_id) is None:
            raise UnknownWorker(f"worker {event.worker_id} of {event.instance_id!r} is not registered")

    def _who_holds(self, request: wire.BatchedP2PLookupMsg) -> wire.BatchedP2PLookupRetMsg:
        """The same rank of another instance that has the most of these chunks from the first on."""
        best = ("", "", 0, "")
        candidates: set[str] | None = None
        for count, key in enumerate(request.hashes, 1):
            found = {
                place.worker[0]: place.location
                for place in self._registry.holders(key)
                if place.worker[1] == request.worker_id and place.worker[0] != request.instance_id
            }
            candidates = set(found) if candidates is None else candidates & set(found)
            if not candidates:
                break
            instance_id = min(candidates)
            worker = self._registry.worker(instance_id, request.worker_id)
            if worker is not None:
                location = found[instance_id] if count == 1 or best[0] != instance_id else best[1]
                best = (instance_id, location, count, worker.peer_init_url or "")
        return wire.BatchedP2PLookupRetMsg([best])


def _clipped(record: wire.MoveRecord) -> wire.MoveRecord:
    names = ("source", "destination", "tag", "transport", "reason", "session")
    return msgspec.structs.replace(record, **{name: getattr(record, name)[:_MAX_TEXT] for name in names})


def move_view(move: Move) -> dict[str, object]:
    record = msgspec.to_builtins(move.record)
    defaults = {"transport": "", "reason": "", "session": ""}
    place = {"number": move.number, "instance_id": move.instance_id, "worker_id": move.worker_id}
    return {**place, "outcome": move.outcome, **defaults, **record}


def local_address(bound_host: str, peer_ip: str) -> str:
    """Under which address a peer at ``peer_ip`` reaches a socket of ours that is bound to ``bound_host``."""
    if bound_host not in _ANY_ADDRESS:
        return bound_host
    family = socket.AF_INET6 if ":" in peer_ip else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((peer_ip, 9))  # sends nothing; the system only chooses the way
        except OSError:
            return socket.gethostname()
        return probe.getsockname()[0]
