"""Workers as the controller knows them: who registers there joins, who is gone from there leaves."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from psrl_sglang.gateway.call import Call
from psrl_sglang.gateway.fleet import Fleet, MoveAddresses, Worker
from psrl_sglang.gateway.settings import clean_url
from psrl_sglang.gateway.upstream import NoReply, Upstream, WorkerUnreachable

logger = logging.getLogger(__name__)

_TIMEOUT_S = 5.0


class Membership:
    """``upstream`` is one of the controller's own, with its token. A controller that is silent changes nothing."""

    def __init__(self, fleet: Fleet, upstream: Upstream, url: str, *, interval_s: float) -> None:
        self._fleet = fleet
        self._upstream = upstream
        self._url = url
        self._interval_s = interval_s
        self.trouble = ""

    async def run(self) -> None:
        while True:
            await self._round()
            await asyncio.sleep(self._interval_s)

    async def look_up(self, call: Call, timeout_s: float) -> None:
        """What of the prompt the workers have off the device, as the controller knows; nothing if it is late."""
        fields = call.fields
        if fields.problem or call.off_device:
            return
        body = {"tokens": fields.tokens, "cache_salt": fields.cache_salt, "extra_key": fields.extra_key}
        try:
            status, told = await self._upstream.ask("POST", f"{self._url}/lookup", timeout_s, body)
        except (NoReply, WorkerUnreachable):
            return
        held = told.get("layout_info") if status == 200 and isinstance(told, dict) else None
        if isinstance(held, dict):
            named = {worker.instance_id: worker.url for worker in self._fleet.workers() if worker.instance_id}
            call.off_device = {named[name]: int(at[1]) for name, at in held.items() if name in named}

    async def _round(self) -> None:
        try:
            status, told = await self._upstream.ask("GET", f"{self._url}/instances", _TIMEOUT_S)
            if status != 200:
                raise NoReply(f"/instances answered {status}")
            self._apply([one for one in told["instances"] if one.get("http_url")])
            for worker in self._fleet.workers():
                if worker.instance_id and worker.addresses is None and worker.is_up:
                    await self._learn_addresses(worker)
        except (NoReply, WorkerUnreachable, KeyError, TypeError, AttributeError) as error:
            if not self.trouble:
                logger.warning("the controller at %s does not answer as one: %s", self._url, error)
            self.trouble = str(error)
        else:
            self.trouble = ""

    def _apply(self, instances: list[dict[str, Any]]) -> None:
        there: set[str] = set()
        for one in instances:
            try:
                url = clean_url(str(one["http_url"]))
            except ValueError:
                continue
            there.add(url)
            worker = self._fleet.get(url)
            if worker is None:
                worker = self._fleet.add(url, "controller")
                if one.get("version"):
                    self._fleet.restore(worker, str(one["version"]))
            elif worker.is_removed and worker.origin == "controller":
                self._fleet.resume(worker)
            worker.instance_id = str(one["instance_id"])
        for worker in self._fleet.workers():
            if worker.origin == "controller" and worker.url not in there and not worker.is_removed:
                logger.info("worker %s has left the controller", worker.url)
                self._fleet.remove(worker)

    async def _learn_addresses(self, worker: Worker) -> None:
        body = {"instance_id": worker.instance_id}
        status, told = await self._upstream.ask("POST", f"{self._url}/query_worker_info", _TIMEOUT_S, body)
        infos = told.get("worker_infos") if status == 200 and isinstance(told, dict) else None
        if not infos:
            return
        ranks = sorted(infos, key=lambda info: info["worker_id"])
        if all(rank.get("peer_init_url") for rank in ranks):
            worker.addresses = MoveAddresses(
                tuple(f"{rank['ip']}:{rank['port']}" for rank in ranks),
                tuple(str(rank["peer_init_url"]) for rank in ranks),
            )
