"""A look-up that asks the holders themselves, which know to the page what they could serve or send."""

from __future__ import annotations

from collections.abc import Sequence

from psrl_sglang.controller.lookup import Held
from psrl_sglang.controller.models import Lookup
from psrl_sglang.controller.orders import Orders
from psrl_sglang.controller.registry import Registry, Worker
from psrl_sglang.transfer import messages as wire
from psrl_sglang.transfer.client import event_id, merge_counts, request_configs, worker_timeout_s

_MOST_ASKED = 32


async def ask_holders(
    registry: Registry, orders: Orders, body: Lookup, found: Sequence[Held]
) -> tuple[list[Held], dict[str, str]]:
    """``found`` with the holders' own figures, and what went wrong by instance.

    Each is asked about the version of the question, else about the one it is on. What cannot be asked about,
    and a holder that does not answer, keeps the figure that was reported.
    """
    asked: list[tuple[Held, list[Worker]]] = []
    asks: list[tuple[Worker, wire.Message]] = []
    kept: list[Held] = []
    for held in found:
        ranks = registry.ranks(held.instance_id)
        version = body.version or _current_version(ranks, held.tag)
        if version is None or len(asked) >= _MOST_ASKED:
            kept.append(held)
            continue
        configs = request_configs(
            version,
            cache_salt=body.cache_salt,
            extra_key=body.extra_key,
            timeout_s=worker_timeout_s(body.timeout_s),
        )
        message = wire.LookupWorkerMsg(event_id("Lookup"), body.tokens, configs)
        asked.append((held, ranks))
        asks += [(rank, message) for rank in ranks]
    answers = iter(await orders.ask_each(asks, body.timeout_s))
    problems: dict[str, str] = {}
    for held, ranks in asked:
        result = merge_counts([next(answers) for _ in ranks])
        if not result.ok:
            problems[held.instance_id] = result.reason
            kept.append(held)
        elif result.num_tokens:
            kept.append(Held(held.instance_id, held.tag, held.location, result.num_tokens))
    return sorted(kept, key=lambda held: -held.num_tokens), problems


def _current_version(ranks: Sequence[Worker], tag: str) -> str | None:
    status = ranks[0].status if ranks else None
    return status.version if status is not None and status.tag == tag else None
