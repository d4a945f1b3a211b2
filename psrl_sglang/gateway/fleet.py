"""The workers: which are there, whether they answer, and at which version of the weights they are."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from psrl_sglang.gateway.versions import VersionOrder

logger = logging.getLogger(__name__)

Origin = Literal["static", "api", "controller"]


@dataclass(frozen=True, slots=True)
class MoveAddresses:
    """Where the ranks of an engine take commands, and where they take KV, in the order of the ranks."""

    command: tuple[str, ...]
    data: tuple[str, ...]


@dataclass(eq=False, slots=True)
class Worker:
    """One engine. ``version`` is None while it is not known; ``generation`` counts its losses.

    ``is_up``: it answered last. ``is_draining``: it ends what it has and gets nothing new.
    """

    url: str
    index: int
    origin: Origin
    id: str = field(init=False)
    is_up: bool = True
    is_gone: bool = False
    is_draining: bool = False
    is_removed: bool = False
    version: str | None = None
    in_flight: int = 0
    tokens: int = 0
    served: int = 0
    generation: int = 0
    instance_id: str = ""
    addresses: MoveAddresses | None = None
    trouble: str = ""

    def __post_init__(self) -> None:
        self.id = hashlib.blake2b(self.url.encode(), digest_size=8).hexdigest()

    @property
    def takes_requests(self) -> bool:
        return self.is_up and not self.is_draining

    @property
    def tp(self) -> int:
        return len(self.addresses.command) if self.addresses is not None else 1


class Fleet:
    """Everything happens on one event loop. ``on_change`` is called when a request might be placed that could not
    be before; ``on_trouble`` when a worker went out; ``on_join`` and ``on_leave`` with the worker."""

    def __init__(self) -> None:
        self._workers: dict[str, Worker] = {}
        self._next_index = 0
        self.order = VersionOrder()
        self.on_change: Callable[[], None] = lambda: None
        self.on_trouble: Callable[[Worker], None] = lambda worker: None
        self.on_join: Callable[[Worker], None] = lambda worker: None
        self.on_leave: Callable[[Worker], None] = lambda worker: None

    def __len__(self) -> int:
        return len(self._workers)

    def workers(self) -> list[Worker]:
        return list(self._workers.values())

    def get(self, url: str) -> Worker | None:
        return self._workers.get(url)

    def find(self, name: str) -> Worker | None:
        """By id or URL."""
        found = self._workers.get(name.rstrip("/"))
        return found or next((worker for worker in self._workers.values() if worker.id == name), None)

    def add(self, url: str, origin: Origin) -> Worker:
        """The worker of this URL, which is new or there already. It is taken to be up until it shows otherwise."""
        worker = self._workers.get(url)
        if worker is not None:
            return worker
        worker = Worker(url, self._next_index, origin)
        self._next_index += 1
        self._workers[url] = worker
        logger.info("worker %s joins (%s)", url, origin)
        self.on_join(worker)
        self.on_change()
        return worker

    def drain(self, worker: Worker) -> None:
        worker.is_draining = True

    def resume(self, worker: Worker) -> None:
        """Undo `drain` and `remove`, as long as the worker is there."""
        worker.is_draining = worker.is_removed = False
        self.on_change()

    def remove(self, worker: Worker) -> None:
        """It gets nothing new, and is forgotten once what it has is over."""
        worker.is_draining = worker.is_removed = True
        self._forget_if_idle(worker)

    def released(self, worker: Worker) -> None:
        """A request of it has ended."""
        if worker.is_removed:
            self._forget_if_idle(worker)

    def fail(self, worker: Worker, reason: str, *, is_gone: bool) -> None:
        """It is out until a probe succeeds. ``is_gone``: nobody is there, so that what it had is lost as well."""
        worker.trouble = reason
        if worker.is_up:
            logger.warning("worker %s is out: %s", worker.url, reason)
        worker.is_up, worker.version = False, None
        if is_gone and not worker.is_gone:
            worker.is_gone, worker.addresses = True, None
            worker.generation += 1
        self.on_trouble(worker)

    def restore(self, worker: Worker, version: str | None) -> None:
        """A probe was answered."""
        if not worker.is_up:
            logger.info("worker %s is back", worker.url)
        changed = not worker.is_up
        worker.is_up, worker.is_gone, worker.trouble = True, False, ""
        if version is not None and version != worker.version:
            self.order.see(version)
            worker.version = version
            changed = True
        if changed:
            self.on_change()

    def saw(self, worker: Worker, version: str) -> None:
        """A reply of it was made by this version. One that is older is from before an update."""
        self.order.see(version)
        if worker.is_up and (worker.version is None or self.order.is_at_least(version, worker.version)):
            self.restore(worker, version)

    def _forget_if_idle(self, worker: Worker) -> None:
        if worker.in_flight == 0 and self._workers.get(worker.url) is worker:
            del self._workers[worker.url]
            self.on_leave(worker)
