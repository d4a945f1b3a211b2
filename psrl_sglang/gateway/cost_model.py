"""How long one decoding step of an engine takes: PSRL's cost model, fitted per parallel layout.

    {"TP1_PP1": {"attn_latency_b": s, "attn_latency_k": s/token, "other_latency_b": s, "other_latency_k": s/request,
                 "other_threshold": s}, "TP2_PP1": {…}}

A step with ``n`` requests of ``t`` tokens takes ``attn_b + attn_k * t + max(threshold, other_b + other_k * n)``.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Self

_NAMES = ("attn_latency_b", "attn_latency_k", "other_latency_b", "other_latency_k", "other_threshold")


@dataclass(frozen=True, slots=True)
class StepCost:
    attn_latency_b: float
    attn_latency_k: float
    other_latency_b: float
    other_latency_k: float
    other_threshold: float

    def step_s(self, requests: int, tokens: int) -> float:
        other_s = max(self.other_threshold, self.other_latency_b + self.other_latency_k * requests)
        return self.attn_latency_b + self.attn_latency_k * tokens + other_s

    def throughput(self, requests: int, tokens: int) -> float:
        """Tokens a second of ``requests`` that hold ``tokens`` together."""
        return requests / self.step_s(requests, tokens) if requests else 0.0

    def gain(self, requests: int, tokens: int, more_tokens: int) -> float:
        """Tokens a second that one more request of so many tokens adds."""
        after = self.throughput(requests + 1, tokens + more_tokens)
        return after - self.throughput(requests, tokens)


@dataclass(frozen=True, slots=True)
class CostModel:
    """Costs by layout, ``TP<n>_PP<n>``; a layout that is not there costs as the first one."""

    by_layout: dict[str, StepCost]

    @classmethod
    def read(cls, path: str) -> Self:
        """Raises ``ValueError`` with what is wrong with the file."""
        try:
            data = json.loads(Path(path).read_text(encoding="utf-8"))
        except OSError as error:
            raise ValueError(f"cannot be read: {error.strerror or error}") from error
        except ValueError as error:
            raise ValueError(f"is not JSON: {error}") from error
        if not isinstance(data, dict) or not data:
            raise ValueError("holds no layout such as TP1_PP1")
        return cls({layout: _cost(layout, values) for layout, values in data.items()})

    def of(self, tp: int) -> StepCost:
        return self.by_layout.get(f"TP{tp}_PP1") or next(iter(self.by_layout.values()))


def _cost(layout: str, values: object) -> StepCost:
    if not isinstance(values, dict):
        raise ValueError(f"{layout} is not a mapping of {', '.join(_NAMES)}")
    for name in _NAMES:
        value = values.get(name)
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise ValueError(f"{layout}.{name} is {value!r}, and must be a number")
    cost = StepCost(*(float(values[name]) for name in _NAMES))
    if cost.step_s(1, 0) <= 0:
        raise ValueError(f"{layout}: a step would take {cost.step_s(1, 0)} s")
    return cost
