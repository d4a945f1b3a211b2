"""How the bytes of a move get from one arena to the other, and which way is taken."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from psrl_sglang.store.arena import Arena
from psrl_sglang.transfer.link import Deadline, Link, TransferError

logger = logging.getLogger(__name__)

_ORDER = {
    "auto": ("cma", "nixl", "tcp"),
    "nixl": ("nixl", "cma", "tcp"),
    "cma": ("cma", "tcp"),
    "tcp": ("tcp",),
}


class TransportUnusable(Exception):
    """Not on this machine, or not with this peer; the text says why."""


class Transport(Protocol):
    """One way to move bytes, over the arena it was made for. Thread-safe; ``close`` when no move runs.

    ``is_one_sided``: the source writes into the destination's memory by itself, so that after a move that broke
    off nobody but the source knows when its last byte lands.
    """

    name: str
    is_one_sided: bool

    def offer(self) -> bytes:
        """What the other side needs to know of this one."""
        ...

    def accept(self, offer: bytes) -> None:
        """At the destination: raises `TransportUnusable` if that source cannot be received from."""
        ...

    def connect(self, peer: str, offer: bytes) -> Any:
        """At the source: the way to a destination, given to ``send``; ``peer`` is its incarnation. Raises
        `TransportUnusable`."""
        ...

    def send(
        self,
        link: Link,
        way: Any,
        pieces: Sequence[memoryview],
        places: Sequence[int],
        read: Callable[[int], None] | None,
        deadline: Deadline,
    ) -> None:
        """Deliver ``pieces``, each to its ``place`` in the other arena. Calls ``read``, where it is
        given, with the index of each once, when it is cheapest to read, on any thread. They stay as they are until
        this returns, or after it raised until ``is_drained``. Raises `TransferError`."""
        ...

    def receive(
        self,
        link: Link,
        offer: bytes,
        pieces: Sequence[memoryview],
        landed: Callable[[int], None],
        deadline: Deadline,
    ) -> None:
        """Calls ``landed`` with the index of each piece once its bytes are here, on any thread. When this has
        returned or raised, nothing on this side writes to them. Raises `TransferError`."""
        ...

    def is_drained(self, link: Link) -> bool:
        """Whether nothing that was given up on a link, which need not be open any more, still reads this arena."""
        ...

    def forget(self, peer: str) -> None:
        """That incarnation is gone, or cannot be reached, and no move to it is under way."""
        ...

    def close(self) -> None: ...


@dataclass
class Transports:
    """What this machine has, the preferred one first, and why it lacks the others. Owns them."""

    usable: dict[str, Transport] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)

    def offers(self) -> dict[str, bytes]:
        return {name: transport.offer() for name, transport in self.usable.items()}

    def accepted(self, offers: dict[str, bytes]) -> dict[str, bytes]:
        """At the destination: what of the source's ``offers`` can be used, with what the source needs for it."""
        mine = {}
        for name, transport in self.usable.items():
            if name in offers:
                try:
                    transport.accept(offers[name])
                except TransportUnusable as why:
                    logger.info("psrl: no %s from a source: %s", name, why)
                else:
                    mine[name] = transport.offer()
        return mine

    def connect(self, peer: str, offers: dict[str, bytes]) -> tuple[Transport, Any]:
        """At the source: the best way to a destination. Raises `TransferError`."""
        reasons = []
        for name, transport in self.usable.items():
            if name not in offers:
                continue
            try:
                return transport, transport.connect(peer, offers[name])
            except TransportUnusable as why:
                reasons.append(f"{name}: {why}")
                logger.warning("psrl: no %s to %s: %s", name, peer, why)
        offered = ", ".join(offers) or "none"
        raise TransferError(f"no transport in common (offered: {offered}) {'; '.join(reasons)}".rstrip())

    def forget(self, peer: str) -> None:
        for transport in self.usable.values():
            transport.forget(peer)

    def close(self) -> None:
        for transport in self.usable.values():
            transport.close()


def make_transports(channel: str, arena: Arena) -> Transports:
    """The transports for ``psrl.lmcache.p2p_transfer_channel``, those that work here."""
    makers = _makers()
    made = Transports()
    for name in _ORDER[channel]:
        try:
            made.usable[name] = makers[name](arena)
        except TransportUnusable as why:
            made.missing[name] = str(why)
            (logger.warning if name == channel else logger.info)("psrl: no %s here: %s", name, why)
    return made


def _makers() -> dict[str, Callable[[Arena], Transport]]:
    from psrl_sglang.transfer.cma import CmaTransport
    from psrl_sglang.transfer.nixl import NixlTransport
    from psrl_sglang.transfer.tcp import TcpTransport

    return {"cma": CmaTransport, "nixl": NixlTransport, "tcp": TcpTransport}
