"""A command into the scheduler and its reply, as they travel SGLang's sockets."""

from __future__ import annotations

import msgspec
from sglang.srt.managers import io_struct
from sglang.srt.managers.io_struct import BaseReq


class PsrlCommand(BaseReq, kw_only=True):
    """One operation. ``tokens``, ``extra_key`` and ``cache_salt`` name a prefix as ``/generate`` would;
    ``version`` is a version string or label, None for the current one. ``grant`` names one granting of a pin,
    so that the end of an old lease cannot end a newer pin of the same id."""

    operation: str
    tokens: list[int] = msgspec.field(default_factory=list)
    extra_key: str | None = None
    cache_salt: str | None = None
    version: str | None = None
    pin_id: str = ""
    owner: str = ""
    grant: str = ""


class PsrlReply(BaseReq, kw_only=True):
    """``status`` is an HTTP status; ``body`` is JSON."""

    status: int
    body: str


def register_wire_types() -> None:
    """Let this process decode the two types; needed in every process a command passes through."""
    io_struct.hook_custom_types(PsrlCommand, PsrlReply)
