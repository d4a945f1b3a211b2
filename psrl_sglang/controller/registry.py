"""Who is there: instances, their workers and the leases on them, and through `places` what each holds.

A worker is (instance, worker id). A registration replaces the one before it; if it is of another start of the
engine, what the old one held is dropped. A heartbeat renews the lease, and from a worker that is not known, as
after a restart of the controller, it registers it and asks for everything it holds. Not thread-safe.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Literal

from psrl_sglang.controller.holders import HolderIndex
from psrl_sglang.controller.places import Place
from psrl_sglang.transfer import messages as wire

Key = tuple[str, int]
ALL_INSTANCES = "all"  # what LMCache's /query_worker_info calls them

_MAX_NAME_CHARACTERS = 256
_MAX_WORKER_ID = 65535
_MAX_PLACES = 16


class Refused(ValueError):
    """The message cannot be taken; the text says why."""


class UnknownWorker(Refused):
    """It has not registered, or its lease has run out."""


@dataclass(frozen=True, slots=True)
class Limits:
    """``lease_s``: how long a worker is kept without a heartbeat; after half of it, it is late. A worker that is
    not ours has ``foreign_lease_s``, for LMCache's beats are slower and may be off. A full sync is given up
    ``sync_s`` after its last batch."""

    lease_s: float = 15.0
    foreign_lease_s: float = 300.0
    sync_s: float = 60.0
    max_workers: int = 10_000
    max_chunks: int = 16_000_000


@dataclass(slots=True)
class Worker:
    """One rank of an engine. Only the registry changes it. ``status`` is None for a worker that is not ours;
    ``sync_reason`` says why its full sync is wanted, if it is."""

    instance_id: str
    worker_id: int
    ip: str
    port: int
    peer_init_url: str | None
    status: wire.WorkerStatus | None
    registered_s: float
    heard_s: float
    beat_s: float
    sync_reason: str = ""
    places: dict[str, Place] = field(default_factory=dict)

    @property
    def key(self) -> Key:
        return self.instance_id, self.worker_id

    @property
    def address(self) -> str:
        return f"[{self.ip}]:{self.port}" if ":" in self.ip else f"{self.ip}:{self.port}"

    @property
    def chunks(self) -> int:
        return sum(place.chunks for place in self.places.values())


class Registry:
    def __init__(self, limits: Limits | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self.limits = limits or Limits()
        self.index = HolderIndex(self.limits.max_chunks)
        self._clock = clock
        self._instances: dict[str, dict[int, Worker]] = {}
        self._by_ip: dict[str, dict[Key, None]] = {}
        self._owners: dict[int, Place] = {}
        self._workers = 0

    # ---- who is there ----

    def __len__(self) -> int:
        return self._workers

    @property
    def instance_ids(self) -> list[str]:
        return list(self._instances)

    def ranks(self, instance_id: str) -> list[Worker]:
        """The workers of an instance in the order of their ids; empty when it is not known."""
        workers = self._instances.get(instance_id, {})
        return [workers[worker_id] for worker_id in sorted(workers)]

    def worker(self, instance_id: str, worker_id: int) -> Worker | None:
        return self._instances.get(instance_id, {}).get(worker_id)

    def workers(self) -> Iterator[Worker]:
        for workers in self._instances.values():
            yield from workers.values()

    def instance_at(self, ip: str) -> str | None:
        """The instance that registered first of those at ``ip``."""
        return next((instance_id for instance_id, _ in self._by_ip.get(ip, ())), None)

    def state(self, worker: Worker) -> Literal["live", "late"]:
        return "late" if self._clock() - worker.beat_s > self._lease_s(worker) / 2 else "live"

    def holders(self, key: int) -> list[Place]:
        """The places that have a chunk."""
        owners = self._owners
        return [owners[number] for number in self.index.holders(key) if number in owners]

    # ---- coming and going ----

    def register(self, message: wire.RegisterMsg | wire.HeartbeatMsg) -> Worker:
        """Raises `Refused`."""
        _check(message)
        old = self.worker(message.instance_id, message.worker_id)
        if old is None and self._workers >= self.limits.max_workers:
            raise Refused(f"{self._workers} workers are registered, which is the most")
        now_s = time.time()
        worker = Worker(
            instance_id=message.instance_id,
            worker_id=message.worker_id,
            ip=message.ip,
            port=message.port,
            peer_init_url=message.peer_init_url,
            status=message.psrl,
            registered_s=now_s,
            heard_s=now_s,
            beat_s=self._clock(),
        )
        if old is not None and message.psrl is not None and _incarnation(old) == message.psrl.incarnation:
            worker.places, worker.sync_reason = old.places, old.sync_reason
            for place in worker.places.values():
                place.forget_order()
        elif message.psrl is not None:
            worker.sync_reason = "the worker is new here"
        if old is not None:
            self._remove(old, keep_places=old.places is worker.places)
        self._instances.setdefault(worker.instance_id, {})[worker.worker_id] = worker
        self._by_ip.setdefault(worker.ip, {})[worker.key] = None
        self._workers += 1
        return worker

    def heartbeat(self, message: wire.HeartbeatMsg) -> list[wire.FullSyncCommand]:
        """Returns what the worker is asked to do. Raises `Refused`."""
        worker = self.worker(message.instance_id, message.worker_id)
        if worker is None or not _is_same(worker, message):
            worker = self.register(message)
            if not worker.places:
                worker.sync_reason = "the controller did not know this worker"
        else:
            worker.status = message.psrl or worker.status
            worker.peer_init_url = message.peer_init_url
            worker.heard_s, worker.beat_s = time.time(), self._clock()
        for place in worker.places.values():
            worker.sync_reason = worker.sync_reason or place.lost(self._clock())
        is_syncing = any(place.sync is not None for place in worker.places.values())
        if worker.sync_reason and not is_syncing:
            return [wire.FullSyncCommand(reason=worker.sync_reason)]
        return []

    def deregister(self, message: wire.DeRegisterMsg) -> bool:
        """False: another worker has taken its place, or none is known."""
        worker = self.worker(message.instance_id, message.worker_id)
        if worker is None or (worker.ip, worker.port) != (message.ip, message.port):
            return False
        self._remove(worker)
        return True

    def expire(self) -> list[Worker]:
        """Drop workers whose lease has run out, and give up syncs that have stopped. Returns the dropped."""
        now_s = self._clock()
        gone = [worker for worker in self.workers() if now_s - worker.beat_s > self._lease_s(worker)]
        for worker in gone:
            self._remove(worker)
        for worker in self.workers():
            for place in worker.places.values():
                if place.sync is not None and place.sync.deadline_s < now_s:
                    place.give_up_sync()
                    worker.sync_reason = "a full sync was not finished"
        return gone

    def _remove(self, worker: Worker, *, keep_places: bool = False) -> None:
        del self._instances[worker.instance_id][worker.worker_id]
        if not self._instances[worker.instance_id]:
            del self._instances[worker.instance_id]
        at_ip = self._by_ip[worker.ip]
        at_ip.pop(worker.key, None)
        if not at_ip:
            del self._by_ip[worker.ip]
        self._workers -= 1
        if not keep_places:
            for place in worker.places.values():
                place.drop()

    def _lease_s(self, worker: Worker) -> float:
        return self.limits.foreign_lease_s if worker.status is None else self.limits.lease_s

    # ---- what they hold ----

    def apply(self, message: wire.BatchedKVOperationMsg) -> None:
        """Raises `Refused`."""
        worker = self._known(message)
        if problem := _too_long("tag", message.tag):
            raise Refused(problem)
        trouble = self._place(worker, message.location).apply(message.operations, message.tag, self._clock())
        if trouble and not worker.sync_reason:
            worker.sync_reason = trouble

    def start_sync(self, message: wire.FullSyncStartMsg) -> wire.FullSyncStartRetMsg:
        try:
            worker = self._known(message)
            place = self._place(worker, message.location)
        except Refused as error:
            return wire.FullSyncStartRetMsg(message.sync_id, False, str(error))
        problem = _too_long("sync_id", message.sync_id)
        if not 0 <= message.total_keys <= self.limits.max_chunks:
            problem = f"total_keys is {message.total_keys}; at most {self.limits.max_chunks}"
        deadline_s = self._clock() + self.limits.sync_s
        problem = problem or place.start_sync(message.sync_id, message.batch_count, deadline_s)
        if not problem:
            worker.sync_reason = ""
        return wire.FullSyncStartRetMsg(message.sync_id, not problem, problem or None)

    def sync_batch(self, message: wire.FullSyncBatchMsg) -> bool:
        """False: it is of no sync under way. Raises `Refused`."""
        place = self._known(message).places.get(message.location)
        if problem := _too_long("tag", message.tag):
            raise Refused(problem)
        deadline_s = self._clock() + self.limits.sync_s
        return place is not None and place.sync_batch(
            message.sync_id, message.batch_id, message.keys, message.tag, deadline_s
        )

    def end_sync(self, message: wire.FullSyncEndMsg) -> bool:
        """False: it is of no sync under way. Raises `Refused`."""
        place = self._known(message).places.get(message.location)
        return place is not None and place.end_sync(message.sync_id)

    def sync_status(self, message: wire.FullSyncStatusMsg) -> wire.FullSyncStatusRetMsg:
        """A sync that was given up is not complete and misses nothing: the worker need not wait for it."""
        worker = self.worker(message.instance_id, message.worker_id)
        for place in worker.places.values() if worker is not None else ():
            if place.last_sync_id == message.sync_id:
                return wire.FullSyncStatusRetMsg(message.sync_id, True, 1.0, True)
            if place.sync is not None and place.sync.sync_id == message.sync_id:
                sync = place.sync
                return wire.FullSyncStatusRetMsg(message.sync_id, False, sync.progress, False, sync.missing())
        return wire.FullSyncStatusRetMsg(message.sync_id, False, 0.0, True)

    def _known(self, message: wire.BatchedKVOperationMsg | _SyncMessage) -> Worker:
        worker = self.worker(message.instance_id, message.worker_id)
        if worker is None:
            raise UnknownWorker(f"worker {message.worker_id} of {message.instance_id!r} is not registered")
        return worker

    def _place(self, worker: Worker, location: str) -> Place:
        place = worker.places.get(location)
        if place is None:
            if problem := _too_long("location", location):
                raise Refused(problem)
            if len(worker.places) >= _MAX_PLACES:
                raise Refused(f"a worker has at most {_MAX_PLACES} locations")
            place = worker.places[location] = Place(worker.key, location, self.index, self._owners)
        return place


_SyncMessage = wire.FullSyncStartMsg | wire.FullSyncBatchMsg | wire.FullSyncEndMsg


def _incarnation(worker: Worker) -> str | None:
    return worker.status.incarnation if worker.status is not None else None


def _is_same(worker: Worker, message: wire.HeartbeatMsg) -> bool:
    at_same_address = (worker.ip, worker.port) == (message.ip, message.port)
    return at_same_address and (message.psrl is None or _incarnation(worker) == message.psrl.incarnation)


def _check(message: wire.RegisterMsg | wire.HeartbeatMsg) -> None:
    problem = _too_long("instance_id", message.instance_id) or _too_long("ip", message.ip)
    if not message.instance_id or message.instance_id == ALL_INSTANCES:
        problem = f"instance_id is {message.instance_id!r}, which is no name for one instance"
    elif not 0 <= message.worker_id <= _MAX_WORKER_ID:
        problem = f"worker_id is {message.worker_id}; a rank is from 0 to {_MAX_WORKER_ID}"
    elif not message.ip or any(character.isspace() or character in "/@" for character in message.ip):
        problem = f"ip is {message.ip!r}, which is no address"
    elif not 1 <= message.port <= 65535:
        problem = f"port is {message.port}; it must be from 1 to 65535"
    if problem:
        raise Refused(problem)


def _too_long(name: str, text: str) -> str:
    if len(text) > _MAX_NAME_CHARACTERS:
        return f"{name} has {len(text)} characters; at most {_MAX_NAME_CHARACTERS}"
    return ""
