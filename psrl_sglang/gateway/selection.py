"""Which worker gets a request: version first, then stickiness, then the policy."""

from __future__ import annotations

from psrl_sglang.gateway.call import Call
from psrl_sglang.gateway.fleet import Fleet, Worker
from psrl_sglang.gateway.holders import Holders
from psrl_sglang.gateway.policies import Policy
from psrl_sglang.gateway.settings import RoutingSettings


class Selector:
    def __init__(self, fleet: Fleet, holders: Holders, policy: Policy, settings: RoutingSettings) -> None:
        self._fleet = fleet
        self._holders = holders
        self._policy = policy
        self._settings = settings
        self._most = settings.max_concurrent_seqs_per_instance

    def has_room(self, tag: str | None) -> bool:
        """Whether a worker that may serve requests of this tag could take one more."""
        return any(self._has_room(worker) for worker in self._eligible(tag))

    def pick(self, call: Call) -> Worker | None:
        """A worker that may serve the request and has room for it, or None: it has to wait."""
        eligible = self._eligible(call.tag)
        eligible = [worker for worker in eligible if worker.url not in call.tried] or eligible
        if not eligible:
            return None
        if tied := self._tied(call, eligible):
            return tied if self._has_room(tied) else None
        workers = [worker for worker in eligible if self._has_room(worker)]
        if call.preferred in workers:
            return call.preferred
        for group in self._groups(call, workers):
            chosen = self._policy.choose(call, group)
            if chosen is not None:
                return chosen
        return None

    def taken(self, call: Call, worker: Worker) -> None:
        """The request goes to ``worker``, and a new one never to older weights than that has."""
        if call.is_new:
            call.tag = worker.version
        self._policy.served(call, worker)
        if self._settings.enable_group_sticky:
            self._holders.tie(call.prompt_id, worker)

    def why_not(self, call: Call) -> str:
        """Why `pick` finds none, in words."""
        workers = self._fleet.workers()
        if not workers:
            return "there is no worker; name one with --worker or POST /workers"
        up = [worker for worker in workers if worker.takes_requests]
        if not up:
            reasons = dict.fromkeys(worker.trouble or "draining" for worker in workers)
            return f"none of {len(workers)} workers takes requests: {'; '.join(reasons)}"
        eligible = self._eligible(call.tag)
        if not eligible:
            there = sorted({worker.version or "not known yet" for worker in up})
            return f"no worker has version {call.tag} or a newer one; there is {', '.join(there)}"
        if not any(self._has_room(worker) for worker in eligible):
            return f"each of {len(eligible)} workers has {self._most} requests under way"
        return "one more request would not add throughput on any worker, or its own worker is full"

    def _eligible(self, tag: str | None) -> list[Worker]:
        order = self._fleet.order
        workers = [worker for worker in self._fleet.workers() if worker.takes_requests]
        if tag is None:
            return workers
        return [
            worker
            for worker in workers
            if worker.version is not None and order.is_at_least(worker.version, tag)
        ]

    def _tied(self, call: Call, eligible: list[Worker]) -> Worker | None:
        """The one worker that the request waits for, if it is one that may serve it."""
        settings = self._settings
        if call.is_sticky or settings.enable_trajectory_sticky:
            holder = self._holders.holder(call.session)
            if holder in eligible:
                return holder
        if settings.enable_group_sticky and call.prompt_id:
            url = self._holders.group(call.prompt_id)
            return next((worker for worker in eligible if worker.url == url), None)
        return None

    def _groups(self, call: Call, workers: list[Worker]) -> list[list[Worker]]:
        """In the order to try them: newest version first for a new request, else the oldest that will do."""
        if not workers:
            return []
        if self._settings.candidate_sort_indicator != "version":
            return [workers]
        versions = {worker.version for worker in workers}
        if len(versions) == 1:
            return [workers]
        known = [version for version in versions if version is not None]
        ordered: list[str | None] = [*self._fleet.order.ordered(known, newest_first=call.is_new)]
        if None in versions:
            ordered.append(None)
        return [[worker for worker in workers if worker.version == version] for version in ordered]

    def _has_room(self, worker: Worker) -> bool:
        return not self._most or worker.in_flight < self._most
