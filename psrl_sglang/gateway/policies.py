"""How one worker is chosen among those that may have a request now.

A policy sees only workers that are up, of an acceptable version, and not full. None means: not now, queue it.
"""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Sequence

from psrl_sglang.gateway.call import Call
from psrl_sglang.gateway.cost_model import CostModel
from psrl_sglang.gateway.fleet import Worker
from psrl_sglang.gateway.holders import Holders
from psrl_sglang.gateway.prefixes import BLOCK_BYTES, PrefixIndex, prompt_blocks
from psrl_sglang.gateway.settings import CacheAwareSettings, Settings

_BYTES_PER_TOKEN = 5


class Policy(ABC):
    @abstractmethod
    def choose(self, call: Call, workers: Sequence[Worker]) -> Worker | None:
        """One of ``workers``, of which there is at least one, or None. Changes nothing but its own turn."""

    def served(self, call: Call, worker: Worker) -> None:  # noqa: B027 - most have nothing to remember
        """``worker`` has taken the request."""


class Random(Policy):
    def choose(self, call: Call, workers: Sequence[Worker]) -> Worker | None:
        return random.choice(workers)


class RoundRobin(Policy):
    """By the order of joining, whoever is missing from a round being skipped."""

    def __init__(self) -> None:
        self._last = -1

    def choose(self, call: Call, workers: Sequence[Worker]) -> Worker | None:
        behind = [worker for worker in workers if worker.index > self._last]
        chosen = min(behind or workers, key=lambda worker: worker.index)
        self._last = chosen.index
        return chosen


class RequestNumBalance(Policy):
    def choose(self, call: Call, workers: Sequence[Worker]) -> Worker | None:
        return shortest_queue(workers)


class ThroughputOptimal(Policy):
    """Where one more request adds most tokens a second, by the cost model; nowhere if it adds too little."""

    def __init__(self, model: CostModel, threshold: float, budget_tokens: int) -> None:
        self._model = model
        self._threshold = threshold
        self._budget_tokens = budget_tokens

    def choose(self, call: Call, workers: Sequence[Worker]) -> Worker | None:
        tokens = call.estimated_tokens() + self._budget_tokens
        gains = []
        for worker in workers:
            cost = self._model.of(worker.tp)
            gain = cost.gain(worker.in_flight, worker.tokens, tokens)
            if worker.in_flight == 0 or gain >= self._threshold * cost.gain(0, 0, tokens):
                gains.append((-gain, worker.in_flight, worker.index, worker))
        return min(gains)[3] if gains else None


class CacheAware(Policy):
    """Where most of the prompt is, unless load is too uneven. What is where is this gateway's own knowledge, and
    the controller's where it was asked."""

    def __init__(self, settings: CacheAwareSettings, holders: Holders, *, by_session: bool) -> None:
        self._settings = settings
        self._holders = holders
        self._by_session = by_session
        self._prefixes = PrefixIndex()

    def choose(self, call: Call, workers: Sequence[Worker]) -> Worker | None:
        if self._is_uneven(workers):
            return shortest_queue(workers)
        holder = self._holders.holder(call.session) if self._by_session else None
        if holder in workers:
            return holder
        if call.blocks is None:
            call.blocks = prompt_blocks(call.body)
        settings = self._settings
        on_device = self._prefixes.overlap(call.blocks)
        least = settings.cache_threshold * len(call.blocks)
        scores: dict[str, float] = {}
        for worker in workers:
            known = on_device.get((worker.index, worker.generation), 0)
            score = settings.gpu_overlap_weight * known if known >= least else 0.0
            off_device = call.off_device.get(worker.url, 0) * _BYTES_PER_TOKEN / BLOCK_BYTES
            scores[worker.url] = score + settings.lmcache_overlap_weight * off_device
        best = max(scores.values())
        return shortest_queue([worker for worker in workers if scores[worker.url] == best])

    def served(self, call: Call, worker: Worker) -> None:
        if call.blocks is None:
            call.blocks = prompt_blocks(call.body)
        self._prefixes.add(call.blocks, (worker.index, worker.generation))

    def _is_uneven(self, workers: Sequence[Worker]) -> bool:
        loads = [worker.in_flight for worker in workers]
        most, least = max(loads), min(loads)
        settings = self._settings
        return (
            most - least > settings.balance_abs_threshold
            and most - least > settings.balance_rel_threshold * least
        )


def shortest_queue(workers: Sequence[Worker]) -> Worker:
    """Fewest requests under way; the one that joined first among equals."""
    return min(workers, key=lambda worker: (worker.in_flight, worker.index))


def make_policy(settings: Settings, holders: Holders) -> Policy:
    """Raises ``ValueError`` for a cost model that cannot be used."""
    routing = settings.routing
    match routing.method:
        case "random":
            return Random()
        case "round_robin":
            return RoundRobin()
        case "request_num_balance":
            return RequestNumBalance()
        case "cache_aware" | "cache_aware_v1":
            by_session = routing.method == "cache_aware"
            return CacheAware(settings.cache_aware, holders, by_session=by_session)
        case "throughput_optimal" | "throughput_optimal_with_budget":
            with_budget = routing.method == "throughput_optimal_with_budget"
            return ThroughputOptimal(
                CostModel.read(routing.cost_model_path or ""),
                routing.delta_throughput_threshold,
                routing.request_budget if with_budget else 0,
            )
