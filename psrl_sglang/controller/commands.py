"""The routes that LMCache's controller has, with its fields; what ours say beyond them is added."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from fastapi import FastAPI

from psrl_sglang.controller import models
from psrl_sglang.controller.core import Core
from psrl_sglang.controller.exact import ask_holders
from psrl_sglang.controller.jobs import Outcome
from psrl_sglang.controller.lookup import Held, TooMuch, lookup
from psrl_sglang.controller.orders import MoveOrder, Refusal
from psrl_sglang.controller.registry import ALL_INSTANCES
from psrl_sglang.transfer import messages as wire
from psrl_sglang.transfer.client import DRAM_LOCATION, event_id, merge_counts, request_configs, worker_timeout_s

_NOT_HERE = "KV is moved and kept as it is; compression is not built"
_NO_ANSWER = -1


def add_command_routes(app: FastAPI, core: Core) -> None:
    @app.post("/query_instance")
    async def query_instance(body: models.QueryInstance) -> dict[str, Any]:
        found = core.registry.instance_at(body.ip)
        if found is None:
            raise Refusal(404, f"ip: no worker has registered from {body.ip}; /instances lists all")
        return {"event_id": event_id("QueryInst"), "res": found}

    @app.post("/lookup")
    async def lookup_(body: models.Lookup) -> dict[str, Any]:
        return await _lookup(core, body)

    @app.post("/move")
    async def move(body: models.Move) -> dict[str, Any]:
        plan = core.orders.plan(_order(body))
        event = core.jobs.start(plan)
        if not body.wait:
            return {"event_id": event, "num_tokens": 0, "status": "running"}
        outcome = await core.jobs.wait(event)
        if outcome.result is None:
            raise Refusal(outcome.status, outcome.problem, outcome.ranks)
        return _move_view(outcome)

    @app.post("/check_finish")
    async def check_finish(body: models.CheckFinish) -> dict[str, Any]:
        outcome = core.jobs.look(body.event_id)
        if outcome is None:
            raise Refusal(404, f"event_id: no move {body.event_id!r} is remembered")
        view = {"status": outcome.state, "reason": outcome.problem}
        return view | (_move_view(outcome) if outcome.result is not None else {"event_id": outcome.event_id})

    @app.post("/pin")
    async def pin(body: models.Pin) -> dict[str, Any]:
        return await _pin(core, body, wire.PinWorkerMsg, "Pin")

    @app.post("/unpin")
    async def unpin(body: models.Pin) -> dict[str, Any]:
        return await _pin(core, body, wire.UnpinWorkerMsg, "Unpin")

    @app.post("/clear")
    async def clear(body: models.Clear) -> dict[str, Any]:
        ranks, event = core.orders.ranks(body.instance_id), event_id("Clear")
        message = wire.ClearWorkerMsg(event, body.location)
        answers = await core.orders.command(ranks, message, body.timeout_s)
        return {"event_id": event, "num_tokens": merge_counts(answers).num_tokens}

    @app.post("/health")
    async def health(body: models.Health) -> dict[str, Any]:
        """A rank that does not answer has the code -1, and its problem is told."""
        ranks, event = core.orders.ranks(body.instance_id), event_id("health")
        answers = await core.orders.ask(ranks, wire.HealthWorkerMsg(event), body.timeout_s)
        told = list(zip(ranks, answers, strict=True))
        return {
            "event_id": event,
            "error_codes": {
                rank.worker_id: answer.reply.error_code if answer.kind == "ok" else _NO_ANSWER
                for rank, answer in told
            },
            "problems": {rank.worker_id: answer.problem for rank, answer in told if answer.problem},
        }

    @app.post("/compress")
    async def compress() -> None:
        raise Refusal(501, _NOT_HERE)

    @app.post("/decompress")
    async def decompress() -> None:
        raise Refusal(501, _NOT_HERE)

    @app.post("/query_worker_info")
    async def query_worker_info(body: models.QueryWorkerInfo) -> dict[str, Any]:
        every = body.instance_id == ALL_INSTANCES
        workers = list(core.registry.workers()) if every else core.registry.ranks(body.instance_id)
        wanted = None if not body.worker_ids else set(body.worker_ids)
        kept = [worker for worker in workers if wanted is None or worker.worker_id in wanted]
        return {"event_id": event_id("QueryWorkerInfo"), "worker_infos": [core.worker(one) for one in kept]}


def _order(body: models.Move) -> MoveOrder:
    source, source_location = body.old_position or (None, DRAM_LOCATION)
    return MoveOrder(
        source=source,
        destination=body.new_position[0],
        tokens=body.tokens,
        copy=bool(body.should_copy),
        source_location=source_location,
        destination_location=body.new_position[1],
        version=body.version,
        cache_salt=body.cache_salt,
        extra_key=body.extra_key,
        session=body.session,
        timeout_s=body.timeout_s,
    )


def _move_view(outcome: Outcome) -> dict[str, Any]:
    result = outcome.result
    assert result is not None
    view = {name: value for name, value in asdict(result).items() if name != "ok"}
    return {"event_id": outcome.event_id, **view, "ranks": [asdict(rank) for rank in outcome.ranks]}


async def _pin(core: Core, body: models.Pin, kind: type[Any], name: str) -> dict[str, Any]:
    ranks, event = core.orders.ranks(body.instance_id), event_id(name)
    status = ranks[0].status
    version = body.version if body.version is not None or status is None else status.version
    configs = None
    if version is not None:
        configs = request_configs(
            version,
            cache_salt=body.cache_salt,
            extra_key=body.extra_key,
            timeout_s=worker_timeout_s(body.timeout_s),
        )
    message = kind(event, body.location, body.tokens, configs)
    answers = await core.orders.command(ranks, message, body.timeout_s)
    return {"event_id": event, "num_tokens": merge_counts(answers).num_tokens, "version": version}


async def _lookup(core: Core, body: models.Lookup) -> dict[str, Any]:
    """``layout_info`` has the best of each instance; ``held`` tells tags apart."""
    salts = {"cache_salt": body.cache_salt, "extra_key": body.extra_key}
    try:
        found = await lookup(core.registry, body.tokens, version=body.version, **salts)
    except TooMuch as error:
        raise Refusal(422, f"tokens: {error}") from error
    problems: dict[str, str] = {}
    if body.exact:
        found, problems = await ask_holders(core.registry, core.orders, body, found)
    best: dict[str, Held] = {}
    for held in found:
        known = best.get(held.instance_id)
        if known is None or held.num_tokens > known.num_tokens:
            best[held.instance_id] = held
    return {
        "event_id": event_id("Lookup"),
        "layout_info": {one.instance_id: (one.location, one.num_tokens) for one in best.values()},
        "held": [asdict(held) for held in found],
        **({"problems": problems} if problems else {}),
    }
