"""Arguments of a server as SGLang settled them, where the record itself keeps what the user gave."""

from __future__ import annotations

from typing import Any


class Resolved:
    """Reads of resolved arguments: what SGLang declared last, else what was given, else the default. The record has
    None for whatever SGLang chose by itself, such as the page size."""

    def __init__(self, server_args: Any) -> None:
        from sglang.srt.arg_groups.overrides import resolution_result

        server_args.resolve_once()
        self._record = server_args
        self._read = resolution_result

    def __getattr__(self, name: str) -> Any:
        return self._read(self._record, name)
