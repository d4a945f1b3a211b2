"""The trainer's side of the demo: what slime and verl call around a weight update, against a running engine.

    /pause_generation {mode}  ->  /flush_cache until it succeeds  ->  /update_weights_from_disk  ->
    /continue_generation

Only a trainer that relies on flushing calls `/flush_cache`. Where it does not succeed in time, and where the
update answers 400, the failure is counted and the trainer recovers as SGLang's message says: it retracts what
runs and does the step again. Without that the engine would go on with old KV under new weights.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

MODES = ("in_place", "retract", "abort")
# Frameworks try for a minute; what has not worked after this long on a paused engine never will.
FLUSH_DEADLINE_S = 2.0
_FLUSH_RETRY_S = 0.2
_CALL_TIMEOUT_S = 60.0


class TrainerError(Exception):
    """A weight update could not be completed even after retracting what ran."""


@dataclass
class Trainer:
    """Installs versions 2, 3, ... on one engine that started with version 1.

    Version N has the weights of `models[(N - 1) % len(models)]`. `is_paused` is true from the moment the engine
    has acknowledged a pause until it is told to go on.
    """

    client: httpx.AsyncClient
    models: Sequence[Path]
    flush: bool
    version: int = 1
    is_paused: bool = False
    syncs: Counter[str] = field(default_factory=Counter)
    failed_flushes: int = 0
    failed_updates: int = 0
    update_s: list[float] = field(default_factory=list)

    async def sync(self, mode: str, *, on_installed: Any) -> None:
        """Bring the next version onto the engine; `on_installed(gave_back_kv)` is called before it goes on."""
        began_s = time.perf_counter()
        await self._pause(mode)
        self.is_paused = True
        installed = await self._install()
        if not installed:
            await self._pause("retract")
            if not await self._install():
                raise TrainerError(f"version {self.version + 1} was refused after everything was retracted")
        self.version += 1
        self.syncs[mode] += 1
        on_installed(mode == "retract" or not installed)
        # Requests are let in before the reply to this call arrives.
        self.is_paused = False
        await self._post("/continue_generation", {})
        self.update_s.append(time.perf_counter() - began_s)

    async def _pause(self, mode: str) -> None:
        await self._post("/pause_generation", {"mode": mode})

    async def _install(self) -> bool:
        """Flush if that is how this trainer works, and update; counts what fails."""
        if self.flush and not await self._flush():
            self.failed_flushes += 1
        version = self.version + 1
        body = {
            "model_path": str(self.models[(version - 1) % len(self.models)]),
            "weight_version": str(version),
            "flush_cache": self.flush,
        }
        reply = await self.client.post("/update_weights_from_disk", json=body, timeout=_CALL_TIMEOUT_S)
        if reply.status_code == httpx.codes.OK:
            return True
        if reply.status_code != httpx.codes.BAD_REQUEST:
            raise TrainerError(f"/update_weights_from_disk answered {reply.status_code}: {reply.text[:500]}")
        self.failed_updates += 1
        return False

    async def _flush(self) -> bool:
        deadline_s = time.monotonic() + FLUSH_DEADLINE_S
        while True:
            reply = await self.client.post("/flush_cache", timeout=_CALL_TIMEOUT_S)
            if reply.status_code == httpx.codes.OK:
                return True
            if time.monotonic() > deadline_s:
                return False
            await asyncio.sleep(_FLUSH_RETRY_S)

    async def _post(self, path: str, body: dict[str, Any]) -> None:
        reply = await self.client.post(path, json=body, timeout=_CALL_TIMEOUT_S)
        if reply.status_code != httpx.codes.OK:
            raise TrainerError(f"{path} answered {reply.status_code}: {reply.text[:500]}")
