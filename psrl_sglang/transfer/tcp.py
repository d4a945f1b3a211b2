"""Bytes down the link itself: works between any two hosts that can reach each other."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from psrl_sglang.store.arena import Arena
from psrl_sglang.transfer.link import Deadline, Link


class TcpTransport:
    name = "tcp"
    is_one_sided = False

    def __init__(self, arena: Arena) -> None:
        pass

    def offer(self) -> bytes:
        return b""

    def accept(self, offer: bytes) -> None:
        pass

    def connect(self, peer: str, offer: bytes) -> None:
        return None

    def send(
        self,
        link: Link,
        way: None,
        pieces: Sequence[memoryview],
        places: Sequence[int],
        read: Callable[[int], None] | None,
        deadline: Deadline,
    ) -> None:
        for index, piece in enumerate(pieces):
            if read is not None:
                read(index)  # which brings it into the cache
            link.send_views([piece], deadline)

    def receive(
        self,
        link: Link,
        offer: bytes,
        pieces: Sequence[memoryview],
        landed: Callable[[int], None],
        deadline: Deadline,
    ) -> None:
        for index, piece in enumerate(pieces):
            link.receive_into(piece, deadline)
            landed(index)

    def is_drained(self, link: Link) -> bool:
        return True

    def forget(self, peer: str) -> None:
        pass

    def close(self) -> None:
        pass
