"""What can be wrong with a setting, and how it is told to the user.

A `Problem` is one finding about one setting. A `ConfigError` carries all findings of one load, so a user
mends a file in one pass. The dotted paths of our sections live here because every finding starts with one.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass

LMCACHE = "psrl.lmcache"
KV_TRANSFER = "psrl.rollout_coordination.routing_strategy.kv_transfer"
SGLANG = "psrl.sglang"

_SHOWN_CHARS = 120
_URL_CREDENTIALS = re.compile(r"(?<=://)[^/\s]+(?=@)")


@dataclass(frozen=True, slots=True)
class Problem:
    """One setting that cannot be used: where it is, what it holds, what is wrong, what to do about it."""

    field: str
    value: object
    message: str
    remedy: str

    def __str__(self) -> str:
        return (
            f"{self.field}\n"
            f"    value:   {shown(self.value)}\n"
            f"    wrong:   {without_credentials(self.message)}\n"
            f"    remedy:  {self.remedy}"
        )


class ConfigError(ValueError):
    """Settings were refused; `problems` holds every reason, and `str()` is a report fit for a terminal."""

    def __init__(self, problems: Sequence[Problem], source: str = "the settings") -> None:
        self.problems: tuple[Problem, ...] = tuple(problems)
        self.source = source
        count = len(self.problems)
        head = f"{count} problem{'' if count == 1 else 's'} in {source}:"
        super().__init__("\n\n".join([head, *(f"  {problem}" for problem in self.problems)]))


def shown(value: object) -> str:
    """The value as YAML users write it: on one line, of bounded length, without credentials in URLs."""
    try:
        text = json.dumps(value, default=repr, ensure_ascii=False)
    except (TypeError, ValueError):
        text = f"a {type(value).__name__} that cannot be shown"
    text = without_credentials(text)
    return text if len(text) <= _SHOWN_CHARS else text[: _SHOWN_CHARS - 1] + "…"


def joined(path: str, key: str) -> str:
    """The dotted path of `key` under `path`, where an empty path is the root."""
    return f"{path}.{key}" if path else key


def without_credentials(text: str) -> str:
    """The text with `user:password` of any URL in it masked."""
    return _URL_CREDENTIALS.sub("***", text)
