"""Commands into the scheduler: look-up, pins, retirement, status, self-check.

A command is an ordinary control request of SGLang's: it travels the same sockets, is broadcast to all ranks of
a scheduler group and is handled by each at the same step, idle, busy or paused. The leader's reply goes back
to the HTTP worker that asked.
"""

from __future__ import annotations

import logging
from array import array
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec
from sglang.srt.mem_cache.radix_cache import RadixKey

from psrl_sglang.engine.command_types import PsrlCommand, PsrlReply
from psrl_sglang.engine.pins import PinRefused
from psrl_sglang.engine.updates import tree_of
from psrl_sglang.namespace import compose_salt

if TYPE_CHECKING:
    from sglang.srt.managers.scheduler import Scheduler

    from psrl_sglang.engine.tree import VersionedTree

logger = logging.getLogger(__name__)

_MOST_NAMED = 16  # of versions, in an error


class CommandRefused(ValueError):
    """A command that cannot be carried out; ``status`` is the HTTP status for it."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class CommandHandler:
    """Executes commands on one rank's scheduler thread."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._operations: dict[str, Callable[[VersionedTree, PsrlCommand], dict[str, Any]]] = {
            "status": self._status,
            "lookup": self._lookup,
            "pin": self._pin,
            "unpin": self._unpin,
            "retire": self._retire,
            "check": self._check,
            "moves": self._moves,
        }

    def __call__(self, command: PsrlCommand) -> PsrlReply | None:
        if command.operation == "export":  # of this engine's own move workers, who wait elsewhere
            self._export(tree_of(self._scheduler), command)
            return None
        try:
            body = self._operations[command.operation](tree_of(self._scheduler), command)
        except CommandRefused as refused:
            return self._reply(refused.status, {"error": str(refused)})
        except (ValueError, OverflowError, TypeError, LookupError) as error:
            # What a command gets wrong must not end the scheduler that serves everybody.
            logger.exception("psrl: command %s failed", command.operation)
            return self._reply(400, {"error": f"{command.operation}: {error!r}"})
        return self._reply(200, body)

    @staticmethod
    def _reply(status: int, body: dict[str, Any]) -> PsrlReply:
        return PsrlReply(status=status, body=msgspec.json.encode(body).decode())

    def _status(self, tree: VersionedTree, command: PsrlCommand) -> dict[str, Any]:
        ledger, pinned = tree.versions.ledger, tree.pins.tokens_by_tag()
        versions = []
        usage = tree.tags.usage()
        window = ledger.window()
        for text in sorted({*usage, *window}, key=ledger.order_of, reverse=True):
            tag, entry = ledger.tag_for(text), usage.get(text)
            versions.append(
                {
                    "tag": text,
                    "version": tag.label if tag is not None else text,
                    "lag": ledger.lag_of(text),
                    "device_tokens": entry.device_tokens if entry else 0,
                    "evictable_tokens": entry.evictable_tokens if entry else 0,
                    "host_tokens": entry.host_tokens if entry else 0,
                    "pinned_tokens": pinned.get(text, 0),
                }
            )
        return {
            "version": ledger.current.label,
            "tag": str(ledger.current),
            "max_version_lag": ledger.max_version_lag,
            "window": [tag.label for text in window if (tag := ledger.tag_for(text)) is not None],
            "updating": ledger.is_suspended,
            "versions": versions,
            "requests": {
                "running": len(self._scheduler.running_batch.reqs),
                "waiting": len(self._scheduler.waiting_queue),
                "crossing": tree.versions.crossing(),
                "paused": self._scheduler._engine_paused,
            },
            "device": {
                "evictable_tokens": tree.evictable_size(),
                "locked_tokens": tree.protected_size(),
                "capacity_tokens": self._scheduler.max_total_num_tokens,
            },
            "pins": {
                "budget_tokens": tree.pins.budget_tokens,
                "tokens": tree.pins.tokens,
                "held": tree.pins.list(),
            },
            "counters": tree.versions.metrics.snapshot(),
            "tiers": tree.tier_status(),
            "moves": tree.move_status(),
            "tree": type(tree).__name__,
            "tree_core": type(tree.tree_core).__name__,
        }

    def _lookup(self, tree: VersionedTree, command: PsrlCommand) -> dict[str, Any]:
        best = {"tokens": 0, "version": None, "lag": None}
        for text in self._tags(tree, command):
            resident, _, _ = tree.tree_core.match_full_device_prefix(self._key(command, text))
            if best["version"] is None or resident > best["tokens"]:
                tag = tree.versions.ledger.tag_for(text)
                best = {
                    "tokens": resident,
                    "version": tag.label if tag is not None else text,
                    "lag": tree.versions.ledger.lag_of(text),
                }
        return best | {"asked_tokens": len(command.tokens)}

    def _pin(self, tree: VersionedTree, command: PsrlCommand) -> dict[str, Any]:
        def resident(tag: str) -> int:
            return tree.tree_core.match_full_device_prefix(self._key(command, tag))[0]

        text = max(self._tags(tree, command), key=resident)
        try:
            pin, dropped = tree.pins.pin(
                command.pin_id, command.owner, self._key(command, text), grant=command.grant
            )
        except PinRefused as refused:
            raise CommandRefused(409, str(refused)) from refused
        names = [gone.pin_id for gone in dropped]
        if pin is None:
            return {"pin_id": None, "tokens": 0, "dropped": names}
        return {
            "pin_id": pin.pin_id,
            "owner": pin.owner,
            "tokens": pin.tokens,
            "tag": pin.tag,
            "dropped": names,
        }

    def _unpin(self, tree: VersionedTree, command: PsrlCommand) -> dict[str, Any]:
        ids = [command.pin_id] if command.pin_id else tree.pins.of_owner(command.owner)
        if command.grant and not tree.pins.is_granted(command.pin_id, command.grant):
            return {"unpinned": [], "tokens": 0}
        try:
            released = [tree.pins.unpin(pin_id) for pin_id in ids]
        except KeyError:
            raise CommandRefused(
                404, f"pin_id {command.pin_id!r} holds no pin (released, expired or flushed)"
            ) from None
        return {"unpinned": [pin.pin_id for pin in released], "tokens": sum(pin.tokens for pin in released)}

    def _retire(self, tree: VersionedTree, command: PsrlCommand) -> dict[str, Any]:
        device = host = 0
        for text in self._tags(tree, command):
            freed = tree.retire(text)
            device, host = device + freed[0], host + freed[1]
        left = tree.tags.usage()
        kept = sum(left[text].device_tokens for text in self._tags(tree, command) if text in left)
        return {"version": command.version, "device_tokens": device, "host_tokens": host, "kept_tokens": kept}

    def _moves(self, tree: VersionedTree, command: PsrlCommand) -> dict[str, Any]:
        shown = tree.move_status()
        if shown is None:
            raise CommandRefused(404, "this engine moves no KV: psrl.lmcache.enable_p2p is false")
        return shown

    def _check(self, tree: VersionedTree, command: PsrlCommand) -> dict[str, Any]:
        if tree.tiers is not None:
            tree.tiers.settle()  # what is being offloaded is locked
        problems = tree.check_integrity()
        idle = self._scheduler.is_fully_idle()
        if idle and not len(tree.pins):
            try:
                tree.sanity_check()  # SGLang's own; it asserts that nothing is locked
            except AssertionError as error:
                problems.append(f"SGLang's tree check: {error}")
        return {"ok": not problems, "problems": problems, "idle": idle}

    @staticmethod
    def _export(tree: VersionedTree, command: PsrlCommand) -> None:
        tiers, moves = tree.tiers, tree.moves
        if tiers is None or moves is None:
            return
        try:
            key = RadixKey(array("q", command.tokens), command.extra_key, cache_salt=command.cache_salt)
            tiers.export(key)
        except (ValueError, TypeError, LookupError):
            logger.exception("psrl: KV for a move could not be offloaded")
        finally:
            moves.exports.done(command.grant)

    def _tags(self, tree: VersionedTree, command: PsrlCommand) -> tuple[str, ...]:
        """The tags a command speaks of; for no version the window a request would use."""
        ledger = tree.versions.ledger
        if command.version is None:
            return ledger.window()
        tags = ledger.tags_of_version(command.version)
        if not tags:
            known = ", ".join(map(repr, ledger.labels()[-_MOST_NAMED:]))
            raise CommandRefused(404, f"version {command.version!r} was never installed here; known: {known}")
        return tags

    @staticmethod
    def _key(command: PsrlCommand, tag: str) -> RadixKey:
        salt = compose_salt(tag, command.cache_salt or None)
        return RadixKey(array("q", command.tokens), command.extra_key or None, cache_salt=salt)
