"""The parts of a controller, and what they know put into plain data for HTTP and the page."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from psrl_sglang.controller.events import Feed
from psrl_sglang.controller.inbox import Inbox, move_view
from psrl_sglang.controller.jobs import MoveJobs
from psrl_sglang.controller.metrics import Metrics
from psrl_sglang.controller.orders import Orders
from psrl_sglang.controller.recent import Holder, Moves, Sessions
from psrl_sglang.controller.registry import Registry, Worker

_SHOWN_SESSIONS = 100


@dataclass(frozen=True, slots=True)
class Core:
    """Shared by the HTTP routes and the service that runs them, all on one event loop."""

    registry: Registry
    sessions: Sessions
    moves: Moves
    feed: Feed
    metrics: Metrics
    inbox: Inbox
    orders: Orders
    jobs: MoveJobs
    stopping: asyncio.Event = field(default_factory=asyncio.Event)
    started_s: float = field(default_factory=time.time)

    def instances(self) -> list[dict[str, Any]]:
        return [self.instance(instance_id) for instance_id in sorted(self.registry.instance_ids)]

    def instance(self, instance_id: str) -> dict[str, Any]:
        """One instance: what its first rank says of itself, and sums over all ranks."""
        ranks = self.registry.ranks(instance_id)
        states = {self.registry.state(worker) for worker in ranks}
        told = [worker.status for worker in ranks if worker.status is not None]
        view: dict[str, Any] = {
            "instance_id": instance_id,
            "state": "late" if "late" in states else "live",
            "ranks": len(ranks),
            "chunks": sum(worker.chunks for worker in ranks),
            "workers": [self.worker(worker) for worker in ranks],
        }
        if not told:
            return view
        first = told[0]
        expected = max(status.ranks for status in told)
        if len(ranks) < expected:
            view["state"] = "incomplete"
        return view | {
            "expected_ranks": expected,
            "version": first.version,
            "tag": first.tag,
            "versions_differ": any(status.tag != first.tag for status in told),
            "window": first.window,
            "namespace": first.namespace,
            "layout": first.layout,
            "page_tokens": first.page_tokens,
            "chunk_tokens": first.chunk_tokens,
            "transports": first.transports,
            "http_url": first.http_url,
            "pages_by_tag": first.pages_by_tag,
            "tiers": _tiers(status.tiers for status in told),
            "moves_running": sum(status.moves_running for status in told),
            "moves_waiting": sum(status.moves_waiting for status in told),
        }

    def worker(self, worker: Worker) -> dict[str, Any]:
        """LMCache's fields of a worker, and ours."""
        return {
            "instance_id": worker.instance_id,
            "worker_id": worker.worker_id,
            "ip": worker.ip,
            "port": worker.port,
            "peer_init_url": worker.peer_init_url,
            "registration_time": worker.registered_s,
            "last_heartbeat_time": worker.heard_s,
            "state": self.registry.state(worker),
            "chunks": {location: place.chunks for location, place in worker.places.items()},
            "syncing": any(place.sync is not None for place in worker.places.values()),
            "sync_wanted": worker.sync_reason,
        }

    def session(self, session: str, holder: Holder) -> dict[str, Any]:
        return {
            "session": session,
            "instance_id": holder.instance_id,
            "tokens": holder.tokens,
            "tag": holder.tag,
            "time_s": holder.time_s,
            "is_registered": bool(self.registry.ranks(holder.instance_id)),
        }

    def latest_sessions(self) -> list[dict[str, Any]]:
        latest = self.sessions.latest(_SHOWN_SESSIONS)
        return [self.session(session, holder) for session, holder in latest]

    def latest_moves(self, most: int) -> list[dict[str, Any]]:
        return [move_view(move) for move in self.moves.latest(most)]

    def totals(self) -> dict[str, Any]:
        states = [self.registry.state(worker) for worker in self.registry.workers()]
        return {
            "uptime_s": round(time.time() - self.started_s, 1),
            "instances": len(self.registry.instance_ids),
            "workers": {"live": states.count("live"), "late": states.count("late")},
            "chunks": len(self.registry.index),
            "sessions": len(self.sessions),
            "moves": self.moves.number,
            "moves_running": self.jobs.running,
            "watchers": self.feed.watchers,
            "lease_s": self.registry.limits.lease_s,
        }

    def snapshot(self) -> dict[str, Any]:
        """What the page shows beside moves."""
        return {
            "totals": self.totals(),
            "instances": self.instances(),
            "sessions": self.latest_sessions(),
        }


def _tiers(all_ranks: Iterable[dict[str, tuple[int, int]]]) -> dict[str, dict[str, int]]:
    tiers: dict[str, dict[str, int]] = {}
    for of_rank in all_ranks:
        for tier, (used, budget) in of_rank.items():
            total = tiers.setdefault(tier, {"used_bytes": 0, "budget_bytes": 0})
            total["used_bytes"] += used
            total["budget_bytes"] += budget
    return tiers
