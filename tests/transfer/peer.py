"""A move worker over a real store, with a stand-in for the engine around it; also as a process of its own:

    python peer.py '{"instance_id": "b", ...}'     prints its addresses as a line of JSON, then serves

and answers questions about itself, one line of JSON each (see `answer`).

What a page holds follows from its name, so that any byte that lands anywhere can be checked.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import numpy as np

from psrl_sglang.keys import KEY_BYTES, KVLayout, PoolLayout, count, key_at, pool_salt
from psrl_sglang.namespace import compose_salt
from psrl_sglang.pagehash import page_digests
from psrl_sglang.store.arena import Arena
from psrl_sglang.store.stats import StoreStats
from psrl_sglang.store.store import KVStore, LowerTiers
from psrl_sglang.transfer import nixl, quarantine
from psrl_sglang.transfer.auth import Signer
from psrl_sglang.transfer.engine_side import Prefix
from psrl_sglang.transfer.landing import salted
from psrl_sglang.transfer.link import Deadline, PeerRefused, TransferError
from psrl_sglang.transfer.reports import ControllerAddress
from psrl_sglang.transfer.worker import MoveWorker, WorkerSettings

PAGE_TOKENS = 16
CHUNK_PAGES = 4
PAGE_BYTES = 64 << 10


@dataclass(frozen=True)
class PeerOptions:
    instance_id: str = "a"
    namespace: str = ""
    rank: int = 0
    ranks: int = 1
    version: str = "1"
    window: tuple[str, ...] = ()
    channel: str = "tcp"
    host: str = "127.0.0.1"
    slots: int = 32
    page_tokens: int = PAGE_TOKENS
    page_bytes: int = PAGE_BYTES
    chunk_pages: int = CHUNK_PAGES
    model: str = "m"
    secret: str = ""
    move_s: float = 5.0
    moves_at_once: int = 2
    port: int = 0
    fingerprint: str = ""
    least_tokens: int = 0
    windows: tuple[tuple[str, int], ...] = ()
    pin_s: float = 60.0
    heartbeat_s: float = 0.3
    controller: tuple[str, int, int] | None = None
    takes_unversioned: bool = False
    send_pause_s: float = 0.0  # a source that is slow with the bytes
    land_pause_s: float = 0.0
    pace_s: float = 0.0  # the bytes go one piece at a time, with pauses
    commit_pause_s: float = 0.0  # a destination that has the bytes and is slow to say so
    quarantine_s: float = 30.0
    nixl_version: str = ""
    damage: bool = False  # of a byte at the source, where the transport lets it send other memory
    land_damage: bool = False  # of one that has arrived


class StandIn:
    """The engine: knows its versions, has nothing on its device."""

    def __init__(self, options: PeerOptions, layout: KVLayout) -> None:
        self.options = options
        self.window = options.window or (f"psrl:{options.version}",)
        self.layout = layout
        self.landings: list[tuple[int, str]] = []
        self.flushed: list[Prefix] = []
        self.sessions_left: list[str] = []

    def tag_of(self, version: str) -> str:
        tag = f"psrl:{version}"
        if tag not in self.window:
            raise TransferError(f"version {version!r} was never installed here")
        return tag

    def digests(self, prefix: Prefix, tag: str) -> bytes:
        salt = compose_salt(tag, prefix.cache_salt)
        pages = page_digests(
            prefix.tokens, self.options.page_tokens, extra_key=prefix.extra_key, cache_salt=salt
        )
        return b"".join(page[:KEY_BYTES] for page in pages)

    def flush(self, prefix: Prefix, tag: str, deadline: Deadline) -> None:
        self.flushed.append(prefix)

    def salt(self, pool: str, tag: str) -> bytes:
        return pool_salt(self.layout, pool, f"{self.options.instance_id}{tag}")

    def fingerprint(self, tag: str) -> str:
        return self.options.fingerprint

    def left(self, session: str) -> None:
        self.sessions_left.append(session)

    def windows(self) -> Mapping[str, int]:
        return dict(self.options.windows)

    def status(self) -> dict[str, Any]:
        return {
            "version": self.options.version,
            "tag": self.window[0],
            "window": list(self.window),
            "http_url": "",
        }

    def salts_for(self, tag: str, fingerprint: str) -> Callable[[str], bytes]:
        if tag not in self.window:
            raise PeerRefused(f"{tag} is not among the versions in use here: {', '.join(self.window)}")
        if fingerprint and self.options.fingerprint and fingerprint != self.options.fingerprint:
            raise PeerRefused(f"{tag} names other weights here")
        return lambda pool: self.salt(pool, tag)

    def require_worth(self, missing_tokens: int, missing_bytes: int, transport: str) -> None:
        if missing_tokens < self.options.least_tokens:
            raise PeerRefused(f"{missing_tokens} tokens are computed faster than moved")

    def landed(self, size_bytes: int, seconds: float, transport: str, outcome: str) -> None:
        self.landings.append((size_bytes, outcome))


class Peer:
    def __init__(self, options: PeerOptions) -> None:
        self.options = options
        self.pace_s = options.pace_s
        pools = [PoolLayout("kv", options.page_bytes)]
        pools += [PoolLayout(name, options.page_bytes // 2) for name, _ in options.windows]
        rank = f"tp{options.rank}/{options.ranks}"
        self.layout = KVLayout(options.model, "bf16", options.page_tokens, "0-1", rank, tuple(pools))
        arena = Arena(options.slots, options.page_bytes * options.chunk_pages)
        self.store = KVStore(
            self.layout,
            arena,
            LowerTiers(landing_s=options.move_s),
            policy="LRU",
            dead_rank=lambda tag: None,
            stats=StoreStats(),
        )
        self.engine = StandIn(options, self.layout)
        settings = WorkerSettings(
            instance_id=options.instance_id,
            incarnation=uuid.uuid4().hex,
            namespace=options.namespace,
            rank=options.rank,
            ranks=options.ranks,
            host=options.host,
            port=options.port,
            channel=options.channel,
            move_s=options.move_s,
            moves_at_once=options.moves_at_once,
            pin_s=options.pin_s,
            chunk_tokens=options.chunk_pages * options.page_tokens,
            heartbeat_s=options.heartbeat_s,
            takes_unversioned=options.takes_unversioned,
            controller=ControllerAddress(*options.controller) if options.controller else None,
        )
        quarantine.QUARANTINE_S = options.quarantine_s
        self.worker = MoveWorker(settings, self.store, self.engine, Signer(options.secret.encode()))
        self._misbehave()

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self.worker.close()
        self.store.close()

    @property
    def command(self) -> str:
        return self.worker.command_address

    @property
    def data(self) -> str:
        return self.worker.data_address

    def prefix(self, tokens: Sequence[int], version: str | None = None, salt: str | None = None) -> Prefix:
        return Prefix(tuple(tokens), version or self.options.version, salt)

    def compute(self, tokens: Sequence[int], version: str | None = None, salt: str | None = None) -> int:
        """As if the engine had computed and offloaded it; returns pages that are there."""
        prefix = self.prefix(tokens, version, salt)
        tag = self.engine.tag_of(prefix.version)
        digests = self.engine.digests(prefix, tag)
        for pool in self.layout.pools:
            keys = salted(digests, self.engine.salt(pool.name, tag))
            with self.store.dram.reserve(pool.name, tag, keys, 0, b"") as room:
                for write in room.writes:
                    view = self.store.dram.payload(write)
                    for page in range(write.pages):
                        name = key_at(digests, write.source + page)
                        view[page * pool.page_bytes : (page + 1) * pool.page_bytes] = content(name, pool)
                self.store.commit(room)
        return count(digests)

    def verified(self, tokens: Sequence[int], version: str | None = None, salt: str | None = None) -> int:
        """How many pages of a prompt are here, having checked every byte of them."""
        prefix = self.prefix(tokens, version, salt)
        tag = self.engine.tag_of(prefix.version)
        digests = self.engine.digests(prefix, tag)
        pages = 0
        for pool in self.layout.pools:
            keys = salted(digests, self.engine.salt(pool.name, tag))
            with self.store.dram.lease(keys) as lease:
                at = 0
                for piece in lease.pieces:
                    view = self.store.dram.payload(piece)
                    for page in range(piece.pages):
                        name = key_at(digests, at)
                        here = view[page * pool.page_bytes : (page + 1) * pool.page_bytes]
                        assert bytes(here) == content(name, pool), f"page {at} of {pool.name} is wrong"
                        at += 1
                if pool.name == "kv":
                    pages = at
        return pages

    def is_idle(self) -> bool:
        status = self.worker.status()
        moves, pins = status["moves"], status["pins"]
        return (
            not any(moves[name] for name in ("running_out", "waiting_out", "running_in")) and not pins["held"]
        )

    def held(self) -> int:
        """Chunks that something keeps."""
        return self.store.dram.busy_chunks()

    def state(self) -> dict[str, Any]:
        """What must be as before once all is over."""
        status = self.worker.status()
        return {
            "moves": status["moves"],
            "pins": status["pins"]["held"],
            "held": self.held(),
            "wrong": self.store.check_integrity(),
            "threads": threading.active_count(),
            "descriptors": len(os.listdir("/proc/self/fd")),
            "transports": status["transports"],
        }

    def forget_all(self) -> int:
        return self.store.dram.clear()

    def set_pace(self, seconds: float) -> None:
        """For a peer that began with one."""
        self.pace_s = seconds

    def _misbehave(self) -> None:
        options = self.options
        for name, transport in self.worker._transports.usable.items():
            one: Any = transport
            if options.send_pause_s or options.damage:
                one.send = _slow_or_wrong(one.send, options)
            if options.land_damage:
                one.receive = _wrong_landing(one.receive)
            if options.land_pause_s:
                one.receive = _slow_landing(one.receive, lambda: options.land_pause_s)
            if options.pace_s:
                self._set_pace(name, one)
            if options.nixl_version and name == "nixl":
                one._version = options.nixl_version
                offer = msgspec.msgpack.decode(one._offer, type=nixl.NixlOffer)
                one._offer = msgspec.msgpack.encode(
                    msgspec.structs.replace(offer, version=options.nixl_version)
                )
        if options.commit_pause_s:
            arrivals: Any = self.worker._landing._arrivals
            arrivals._commit = _after(lambda: options.commit_pause_s, arrivals._commit)

    def _set_pace(self, name: str, transport: Any) -> None:
        if name == "cma":
            transport.receive = _slow_landing(transport.receive, lambda: self.pace_s)
        elif name == "tcp":
            transport.send = _paced(transport.send, lambda: self.pace_s)
        else:
            nixl._MOST_BYTES = 1
            transport._write = _after(lambda: self.pace_s, transport._write)


def _after(pause_s: Callable[[], float], call: Callable[..., Any]) -> Callable[..., Any]:
    def later(*args: Any) -> Any:
        time.sleep(pause_s())
        return call(*args)

    return later


def _paced(send: Callable[..., Any], pause_s: Callable[[], float]) -> Callable[..., Any]:
    def slow(link: Any, way: Any, pieces: Any, places: Any, read: Any, deadline: Deadline) -> None:
        def later(index: int) -> None:
            time.sleep(pause_s())
            if read is not None:
                read(index)

        send(link, way, pieces, places, later, deadline)

    return slow


def _slow_or_wrong(send: Callable[..., Any], options: PeerOptions) -> Callable[..., Any]:
    def other(link: Any, way: Any, pieces: Any, places: Any, read: Any, deadline: Deadline) -> None:
        if options.damage:
            pieces = [memoryview(bytearray(piece)) for piece in pieces]
            pieces[len(pieces) // 2][7] ^= 1
        send(link, way, pieces, places, read, deadline)
        time.sleep(options.send_pause_s)
        if options.damage:
            other.kept = pieces  # type: ignore[attr-defined]  # cma reads them later

    return other


def _slow_landing(receive: Callable[..., Any], pause_s: Callable[[], float]) -> Callable[..., Any]:
    def other(link: Any, offer: bytes, pieces: Any, landed: Any, deadline: Deadline) -> None:
        def later(index: int) -> None:
            landed(index)
            time.sleep(pause_s())

        receive(link, offer, pieces, later, deadline)

    return other


def _wrong_landing(receive: Callable[..., Any]) -> Callable[..., Any]:
    def other(link: Any, offer: bytes, pieces: Any, landed: Any, deadline: Deadline) -> None:
        def wrong(index: int) -> None:
            if index == len(pieces) // 2:
                pieces[index][7] ^= 1
            landed(index)

        receive(link, offer, pieces, wrong, deadline)

    return other


def content(name: bytes, pool: PoolLayout) -> bytes:
    seed = int.from_bytes(hashlib.blake2b(name + pool.name.encode(), digest_size=8).digest(), "big")
    return np.random.default_rng(seed).bytes(pool.page_bytes)


def answer(peer: Peer, question: list[Any]) -> Any:
    """``[name of a method, its arguments …]``"""
    name, *args = question
    return getattr(peer, name)(*args)


def main() -> None:
    given = json.loads(sys.argv[1])
    for name in ("window", "windows", "controller"):
        if given.get(name):
            given[name] = tuple(tuple(one) if isinstance(one, list) else one for one in given[name])
    with Peer(replace(PeerOptions(), **given)) as peer:
        print(json.dumps({"command": peer.command, "data": peer.data}), flush=True)
        for line in sys.stdin:
            print(json.dumps(answer(peer, json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
