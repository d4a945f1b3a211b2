"""What a move worker asks of the engine it runs in."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from psrl_sglang.transfer import messages as wire
from psrl_sglang.transfer.landing import LandingRules
from psrl_sglang.transfer.link import Deadline, TransferError, clipped


@dataclass(frozen=True, slots=True)
class Prefix:
    """A prompt as a request of that version, salt and extra key would have it."""

    tokens: tuple[int, ...]
    version: str
    cache_salt: str | None = None
    extra_key: str | None = None
    session: str = ""

    @classmethod
    def of(
        cls, tokens: list[int] | None, configs: dict[str, Any] | None, usual_version: str | None = None
    ) -> Prefix:
        """From a message's fields; ``usual_version`` stands in for one that is not named. Raises `TransferError`
        for what is missing or not what it should be."""
        configs = configs or {}
        version = configs.get(wire.VERSION_KEY, usual_version)
        if isinstance(version, int) and not isinstance(version, bool):
            version = str(version)  # as PSRL's trainer counts them
        if not isinstance(version, str) or not version:
            raise TransferError(
                clipped(
                    f"request_configs[{wire.VERSION_KEY!r}] is {version!r}; it must name the weight version"
                )
            )
        if not tokens or not all(0 <= token < 1 << 31 for token in tokens):
            raise TransferError("tokens must be a list of token ids from 0 to 2147483647, and not empty")
        texts = {key: configs.get(key) for key in (wire.SALT_KEY, wire.EXTRA_KEY, wire.SESSION_KEY)}
        for key, text in texts.items():
            if text is not None and not isinstance(text, str):
                raise TransferError(clipped(f"request_configs[{key!r}] is {text!r}; it must be a string"))
        salt, extra, session = texts.values()
        return cls(tuple(tokens), version, salt or None, extra or None, session or "")


class EngineSide(LandingRules, Protocol):
    """Called on the worker's threads; each call may take as long as the deadline it is given, else no time."""

    def tag_of(self, version: str) -> str:
        """The tag of KV that ``version`` computed. Raises `TransferError` where there can be none."""
        ...

    def digests(self, prefix: Prefix, tag: str) -> bytes:
        """The names of the whole pages of a prompt, 16 bytes each."""
        ...

    def flush(self, prefix: Prefix, tag: str, deadline: Deadline) -> None:
        """Bring to DRAM what of a prompt only the device has. What could not be brought in time is not there."""
        ...

    def salt(self, pool: str, tag: str) -> bytes: ...

    def fingerprint(self, tag: str) -> str:
        """What must be equal at both ends for ``tag`` to be the same KV."""
        ...

    def windows(self) -> Mapping[str, int]:
        """Pools that keep windows, and the pages of one."""
        ...

    def left(self, session: str) -> None:
        """The KV of a session went to another engine, which will go on with it."""
        ...

    def status(self) -> dict[str, Any]:
        """``version``, ``tag`` and ``window`` as `WorkerStatus` has them, and ``http_url``."""
        ...
