"""The other side of the offline engine: changes the weights, and knows what they truly are."""

from __future__ import annotations

from itertools import count
from types import SimpleNamespace
from typing import Any

from psrl_sglang.engine import updates
from psrl_sglang.engine.tree import VersionedTree

# What the model is made of at one moment: equal means equal values.
Weights = tuple[str, Any]


class Trainer:
    """Stands in for SGLang's updater behind psrl's own hooks. ``installed``: every complete state, in order."""

    def __init__(self, tree: VersionedTree, version: str, *, lag: int) -> None:
        self._lag = lag
        self._unnamed = count()
        self._scheduler = SimpleNamespace(tree_cache=tree)
        self._updater = SimpleNamespace(scheduler=self._scheduler, _session=None)
        self._session_version: str | None = None
        self._session_failed = False
        self.installed: list[Weights] = []
        self.weights: Weights = ("none", None)
        self._install(("version", version))

    @property
    def in_session(self) -> bool:
        return self._updater._session is not None

    @property
    def half_written(self) -> bool:
        return self.weights[0] == "half written"

    def may_serve(self, computed_by: Weights) -> bool:
        if self.half_written:
            return computed_by == self.weights
        return computed_by in self.installed[-1 - self._lag :]

    def update(self, version: str | None, *, success: bool = True) -> None:
        """``update_weights_from_disk``. A failure leaves unknown weights behind."""

        def original(updater: Any, recv_req: Any) -> Any:
            named = success and version is not None
            self._install(("version", version) if named else ("unnamed", next(self._unnamed)))
            if success:
                self._name(version)
            return SimpleNamespace(success=success)

        updates.around_single_update(original, self._updater, None)

    def name(self, version: str) -> None:
        """``/update_weight_version``: what was written by other means has a name now."""
        self._install(("version", version))
        self._name(version)

    def begin(self, *, rdma: bool = False) -> None:
        """With ``rdma`` the weights are written from outside until the end, and SGLang hears nothing of it."""

        def original(updater: Any, recv_req: Any) -> Any:
            updater._session = object()
            self._session_version, self._session_failed = None, False
            return SimpleNamespace(success=True)

        updates.around_session_begin(original, self._updater, None)
        if rdma:
            self._write_half()

    def piece(self, version: str | None = None, *, success: bool = True) -> None:
        """One bucket of a session, by tensor or distributed."""

        def original(updater: Any, recv_req: Any) -> Any:
            self._write_half()
            if success:
                self._session_version = version or self._session_version
                self._name(version)
            self._session_failed |= not success
            return SimpleNamespace(success=success)

        updates.around_session_piece(original, self._updater, None)

    def _write_half(self) -> None:
        self.weights = ("half written", next(self._unnamed))

    def end(self) -> None:
        def original(updater: Any, recv_req: Any) -> Any:
            updater._session = None
            return SimpleNamespace(success=True)

        named = self._session_version is not None and not self._session_failed
        self._install(("version", self._session_version) if named else ("unnamed", next(self._unnamed)))
        updates.around_session_end(original, self._updater, None)

    def _name(self, version: str | None) -> None:
        updates.on_version_named(lambda *args, **kwargs: None, self._scheduler, version)

    def _install(self, weights: Weights) -> None:
        if weights != self.weights:
            self.installed.append(weights)
        self.weights = weights
