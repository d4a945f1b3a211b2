"""Moves, as the engine sees them: what a move worker asks of tree, linker and ledger."""

from __future__ import annotations

import hashlib
import socket
import threading
from array import array
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.utils import get_storage_hash_str
from sglang.srt.runtime_context import get_parallel

from psrl_sglang.config import PsrlConfig
from psrl_sglang.engine.activation import refuse
from psrl_sglang.engine.command_types import PsrlCommand
from psrl_sglang.engine.estimates import Line, LoadOrRecompute
from psrl_sglang.engine.exports import Exports
from psrl_sglang.engine.identity import RunIdentity
from psrl_sglang.engine.leaving import Leaving
from psrl_sglang.keys import KEY_BYTES, count, page_keys
from psrl_sglang.namespace import VersionLedger, compose_salt
from psrl_sglang.transfer.auth import Signer, read_secret
from psrl_sglang.transfer.engine_side import Prefix
from psrl_sglang.transfer.landing import salted
from psrl_sglang.transfer.link import Deadline, PeerRefused, TransferError
from psrl_sglang.transfer.reports import ControllerAddress
from psrl_sglang.transfer.worker import MoveWorker, WorkerSettings

if TYPE_CHECKING:
    from sglang.srt.managers.scheduler import Scheduler

    from psrl_sglang.engine.linker import PsrlLinker
    from psrl_sglang.engine.tree import VersionedTree

_NO_SALT = bytes(KEY_BYTES)
_DEFAULT_VERSION = "default"


class MoveChoice:
    """Move or recompute: at the destination, which knows what both cost it. Until it does, everything is moved."""

    def __init__(self, policy: str | int, choice: LoadOrRecompute) -> None:
        self.policy = policy
        self._choice = choice
        self._lines: dict[str, Line] = {}
        self._lock = threading.Lock()

    def observe(self, transport: str, size_bytes: int, seconds: float) -> None:
        with self._lock:
            self._lines.setdefault(transport, Line()).observe(size_bytes, seconds)

    def require_worth(self, tokens: int, size_bytes: int, transport: str) -> None:
        """Raises `PeerRefused` where computing ``tokens`` takes less time than moving and loading them."""
        if isinstance(self.policy, int):
            if tokens < self.policy:
                raise PeerRefused(f"{tokens} tokens are fewer than psrl.sglang.move_policy, {self.policy}")
            return
        if self.policy == "never":
            raise PeerRefused("the destination takes no moves (psrl.sglang.move_policy: never)")
        with self._lock:
            line = self._lines.get(transport)
            move_s = line.predict(size_bytes) if line is not None and line.is_known else None
        costs = self._choice.predict(tokens, size_bytes)
        if self.policy == "auto" and move_s is not None and costs is not None:
            compute_s, load_s = costs
            if move_s + load_s >= compute_s:
                raise PeerRefused(
                    f"{tokens} tokens are computed in {compute_s * 1e3:.1f} ms there, "
                    f"moved and loaded in {(move_s + load_s) * 1e3:.1f} ms"
                )

    def status(self) -> dict[str, Any]:
        with self._lock:
            known = {name: line for name, line in self._lines.items() if line.is_known}
            return {
                "policy": self.policy,
                "bytes_per_s": {name: 1 / line.per_unit for name, line in known.items() if line.per_unit > 0},
                "fixed_s": {name: line.fixed for name, line in known.items()},
            }


class EngineMoves:
    """The `EngineSide` of one rank, and the worker it serves. Opened and closed on the scheduler thread."""

    def __init__(
        self,
        tree: VersionedTree,
        linker: PsrlLinker,
        *,
        ledger: VersionLedger,
        identity: RunIdentity,
        config: PsrlConfig,
        rank: int,
        ranks: int,
    ) -> None:
        self._page_tokens = tree.page_size
        self._is_bigram = tree.tree_core.is_eagle
        self._linker = linker
        self._ledger = ledger
        self._identity = identity
        self._config = config
        self._rank, self._ranks = rank, ranks
        self._http_url = ""
        self.exports = Exports(linker)
        self._leaving = Leaving()
        self._addresses: list[dict[str, str]] = []
        self.choice = MoveChoice(config.sglang.move_policy, linker.choice)
        self.worker: MoveWorker | None = None

    def open(self, scheduler: Scheduler) -> None:
        """Start the worker. Ends the process where a port is taken or the secret cannot be read."""
        config = self._config
        server: Any = scheduler.server_args
        lmcache, ours = config.lmcache, config.sglang
        self._http_url = f"http://{_dialled(server.host)}:{server.port}"
        controller = None
        if lmcache.controller_host is not None:
            ports = (lmcache.controller_pull_port, lmcache.controller_reply_port)
            controller = ControllerAddress(lmcache.controller_host, *ports)
        settings = WorkerSettings(
            instance_id=ours.instance_id or f"{socket.gethostname()}:{server.port}",
            incarnation=self._identity.instance,
            namespace=ours.namespace,
            rank=self._rank,
            ranks=self._ranks,
            host=ours.move_host,
            port=ours.move_port and ours.move_port + 2 * self._rank,
            channel=lmcache.p2p_transfer_channel,
            move_s=config.kv_transfer.transfer_timeout_ms / 1000,
            moves_at_once=ours.moves_at_once,
            pin_s=ours.pin_lease_s,
            chunk_tokens=lmcache.chunk_size,
            heartbeat_s=ours.heartbeat_s,
            controller=controller,
            takes_unversioned=ours.unversioned_moves == "current",
        )
        try:
            signer = Signer(read_secret(ours.secret_file))
        except ValueError as error:
            refuse(f"psrl.sglang.secret_file: {error}")
        try:
            self.exports.open(scheduler)
            self._leaving.open()
            self.worker = MoveWorker(settings, self._linker.store, self, signer)
        except OSError as error:
            refuse(
                f"psrl.sglang.move_host {ours.move_host!r}, move_port {ours.move_port}: {error}; "
                "choose an address of this machine and free ports, or 0 for any"
            )
        except TypeError as error:
            refuse(
                f"psrl.lmcache.enable_p2p: {error}; start without it, or without the option that replaces it"
            )

        self._addresses = self._of_all_ranks(
            {"command_address": self.worker.command_address, "data_address": self.worker.data_address}
        )

    def close(self) -> None:
        if self.worker is not None:
            self.worker.close()
        self._leaving.close()
        self.exports.close()

    def shown(self) -> dict[str, Any] | None:
        """What a status shows: of this rank's worker, and where those of all ranks are. None before ``open``."""
        if self.worker is None:
            return None
        ledger = self._ledger
        tags = [tag for text in ledger.window() if (tag := ledger.tag_for(text)) is not None]
        more = {
            "ranks": self._addresses,
            "left_address": self._leaving.address,
            "versions": [tag.version for tag in tags if not tag.epoch],
        }
        return self.worker.status() | self.status() | more | {"move_or_recompute": self.choice.status()}

    def _of_all_ranks(self, mine: dict[str, str]) -> list[dict[str, str]]:
        group = get_parallel().world_group
        if self._ranks == 1 or group.world_size == 1:
            return [mine]
        every: list[Any] = [None] * group.world_size
        torch.distributed.all_gather_object(every, mine, group=group.cpu_group)
        return every

    def status(self) -> dict[str, Any]:
        """As `WorkerStatus` has it. On any thread."""
        ledger = self._ledger
        return {
            "version": ledger.current.label,
            "tag": str(ledger.current),
            "window": list(ledger.window()),
            "http_url": self._http_url,
        }

    # ---- EngineSide, on the worker's threads ----

    def tag_of(self, version: str) -> str:
        if version == _DEFAULT_VERSION:
            version = f"{version}@{self._identity.fingerprint or self._identity.instance}"
        text = self._ledger.named(version)
        if text is None:
            raise TransferError(
                f"version {version!r} was never installed here under that name; "
                f"in use: {', '.join(self._ledger.window())}"
            )
        return text

    def digests(self, prefix: Prefix, tag: str) -> bytes:
        salt = compose_salt(tag, prefix.cache_salt)
        key = RadixKey(array("q", prefix.tokens), prefix.extra_key, cache_salt=salt)
        key, _ = key.maybe_to_bigram_view(self._is_bigram)
        key = key.page_aligned(self._page_tokens)
        if not len(key):
            return b""
        return page_keys(list(get_storage_hash_str(key, page_size=self._page_tokens)), _NO_SALT)

    def flush(self, prefix: Prefix, tag: str, deadline: Deadline) -> None:
        digests = self.digests(prefix, tag)
        if not digests or (self._ranks == 1 and self._is_in_dram(digests, tag)):
            return
        command = PsrlCommand(
            operation="export",
            tokens=list(prefix.tokens),
            extra_key=prefix.extra_key,
            cache_salt=compose_salt(tag, prefix.cache_salt),
            grant=hashlib.blake2b(digests, digest_size=16).hexdigest(),
        )
        self.exports.bring(command, deadline)

    def _is_in_dram(self, digests: bytes, tag: str) -> bool:
        store = self._linker.store
        first = store.layout.pools[0].name
        here = sum(piece.pages for piece in store.dram.match(salted(digests, self.salt(first, tag))))
        return here == count(digests) and not self.windows()

    def salt(self, pool: str, tag: str) -> bytes:
        return self._linker.salt(pool, tag)

    def fingerprint(self, tag: str) -> str:
        return self._identity.origin(tag, self._ledger.window())

    def left(self, session: str) -> None:
        self._leaving.tell(session)

    def windows(self) -> Mapping[str, int]:
        return self._linker.windows

    def salts_for(self, tag: str, fingerprint: str) -> Callable[[str], bytes]:
        window = self._ledger.window()
        if self._ledger.is_suspended:
            raise PeerRefused("the destination's weights are being updated")
        if tag not in window:
            raise PeerRefused(
                f"version {tag} is not in use at the destination, which serves {', '.join(window)}"
            )
        mine = self.fingerprint(tag)
        if fingerprint != mine:
            raise PeerRefused(
                f"version {tag} may be other weights at the destination (from {mine!r}) than at the source (from "
                f"{fingerprint!r}): they started from different checkpoints, or have a lag and had other versions. "
                "If they are of one run, give both its psrl.sglang.namespace"
            )
        return lambda pool: self.salt(pool, tag)

    def require_worth(self, missing_tokens: int, missing_bytes: int, transport: str) -> None:
        self.choice.require_worth(missing_tokens, missing_bytes, transport)

    def landed(self, size_bytes: int, seconds: float, transport: str, outcome: str) -> None:
        stats = self._linker.store.stats
        stats.add("moves", direction="in", outcome=outcome, transport=transport)
        if outcome == "landed":
            stats.add("move_bytes", size_bytes, direction="in")
            stats.add("move_seconds", seconds, direction="in")
            self.choice.observe(transport, size_bytes, seconds)


def _dialled(host: str) -> str:
    """An address others can dial, of one that a server listens on."""
    return socket.gethostname() if host in ("0.0.0.0", "::") else host
