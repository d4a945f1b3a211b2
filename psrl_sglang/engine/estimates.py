"""Load or recompute: running estimates of what either costs, and the choice."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any

from psrl_sglang.config import LoadPolicy

_FORGET = 0.97  # weight of the past at each observation: the last thirty or so count
_LEAST_OBSERVATIONS = 5.0
_LEAST_SLOPE = 0.25


@dataclass(slots=True)
class Line:
    """Least squares of seconds ≈ fixed + per_unit · units, the past fading."""

    weight: float = 0.0
    units: float = 0.0
    seconds: float = 0.0
    units_squared: float = 0.0
    product: float = 0.0

    def observe(self, units: float, seconds: float) -> None:
        for name, value in (
            ("weight", 1.0),
            ("units", units),
            ("seconds", seconds),
            ("units_squared", units * units),
            ("product", units * seconds),
        ):
            setattr(self, name, getattr(self, name) * _FORGET + value)

    @property
    def is_known(self) -> bool:
        return self.weight >= _LEAST_OBSERVATIONS

    @property
    def per_unit(self) -> float:
        """Through the origin when all observations are alike. At least a quarter of the mean is taken to grow with
        the units: a fit of noise may say that nothing does, and that any load or prefill costs the same."""
        if not self.weight:
            return 0.0
        spread = self.units_squared - self.units**2 / self.weight
        if spread <= 1e-9 * self.units_squared:
            return self.seconds / self.units if self.units else 0.0
        slope = (self.product - self.units * self.seconds / self.weight) / spread
        mean = self.seconds / self.units
        return min(max(slope, _LEAST_SLOPE * mean), mean)  # a fixed part below zero would be noise too

    @property
    def fixed(self) -> float:
        return max(0.0, (self.seconds - self.per_unit * self.units) / self.weight) if self.weight else 0.0

    def predict(self, units: float) -> float:
        return self.fixed + self.per_unit * units


class LoadOrRecompute:
    """``prefill`` is observed by the scheduler for batches that loaded nothing, ``load`` by the loader thread.

    A request that reuses KV still computes its last token, so what recomputing costs is the slope of prefill
    alone; a load costs its fixed part too. Until both are known everything is loaded.
    """

    def __init__(self, policy: LoadPolicy, bytes_per_token: int) -> None:
        self.policy = policy
        self._bytes_per_token = bytes_per_token
        self._prefill = Line()
        self._load = Line()
        self._lock = threading.Lock()
        self.loaded = 0
        self.recomputed = 0

    def observe_prefill(self, tokens: int, seconds: float) -> None:
        with self._lock:
            self._prefill.observe(tokens, seconds)

    def observe_load(self, size_bytes: int, seconds: float) -> None:
        with self._lock:
            self._load.observe(size_bytes, seconds)

    def should_load(self, tokens: int) -> bool:
        """Whether ``tokens`` that the store has are worth loading."""
        if isinstance(self.policy, int):
            return tokens >= self.policy
        if self.policy != "auto":
            return self.policy == "always"
        with self._lock:
            if not (self._prefill.is_known and self._load.is_known):
                return True
            return self._load.predict(tokens * self._bytes_per_token) < self._prefill.per_unit * tokens

    def predict(self, tokens: int, size_bytes: int) -> tuple[float, float] | None:
        """Seconds to compute so many tokens, and to load so many bytes; None while unknown."""
        with self._lock:
            if not (self._prefill.is_known and self._load.is_known):
                return None
            return self._prefill.per_unit * tokens, self._load.predict(size_bytes)

    def status(self) -> dict[str, Any]:
        with self._lock:
            prefill, load = self._prefill, self._load
            return {
                "policy": self.policy,
                "prefill_tokens_per_s": _rate(prefill),
                "load_bytes_per_s": _rate(load),
                "load_fixed_s": load.fixed if load.is_known else None,
                "least_tokens_worth_loading": self._crossover(),
                "loaded": self.loaded,
                "recomputed": self.recomputed,
            }

    def _crossover(self) -> int | None:
        """From how many tokens on a load is the cheaper; None while unknown, or if it never is."""
        if not (self._prefill.is_known and self._load.is_known):
            return None
        gain = self._prefill.per_unit - self._load.per_unit * self._bytes_per_token
        return None if gain <= 0 else max(1, int(self._load.fixed / gain) + 1)


def _rate(line: Line) -> float | None:
    return 1 / line.per_unit if line.is_known and line.per_unit > 0 else None
