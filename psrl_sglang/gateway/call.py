"""One client's request on its way: what its headers say, and what has become of it. Its body is bytes.

The body is parsed only by those who need what is in it, and once.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from psrl_sglang.gateway.fields import Fields, read_fields

if TYPE_CHECKING:
    from psrl_sglang.gateway.fleet import Worker

SESSION_HEADERS = ("x-smg-routing-key", "x-psrl-session", "x-request-id-psrl-session")
ROUTING_KEY = "x-smg-routing-key"
SOURCE_HINT = "x-request-id-psrl-src"
VERSION_TAG = "x-version-tag"
NEW_VERSION = "-1"
GENERATE = "/generate"

# Headers about one connection, and those that are made anew for the next one.
CONNECTION_HEADERS = frozenset(
    {
        "connection",
        "keep-alive",
        "proxy-connection",
        "proxy-authenticate",
        "proxy-authorization",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
        "host",
        "content-length",
        "expect",
    }
)
_REPLACED = CONNECTION_HEADERS | {ROUTING_KEY}
_BYTES_PER_TOKEN = 5


@dataclass(slots=True, eq=False)
class Call:
    """``tag``: the oldest version that may serve it; None until the first worker was chosen for a new request.

    ``preferred``: the worker that had it before it was continued. ``tried``: workers that failed it.
    """

    path: str
    query: str
    body: bytes
    headers: list[tuple[str, str]]
    session: str
    tag: str | None
    is_sticky: bool
    prompt_id: str
    source_hint: str
    arrived_s: float
    queue_deadline_s: float
    preferred: Worker | None = None
    tried: set[str] = field(default_factory=set)
    off_device: Mapping[str, int] = field(default_factory=dict)
    blocks: tuple[int, ...] | None = None
    cost_tokens: int = 0
    _fields: Fields | None = None

    @property
    def is_new(self) -> bool:
        """It may be served by any version, and better by the newest."""
        return self.tag is None

    @property
    def fields(self) -> Fields:
        """What the body says. A body that is none of ours has no fields."""
        if self._fields is None:
            self._fields = read_fields(self.body)
            if not self.session and self._fields.routing_key:
                self.session = self._fields.routing_key
        return self._fields

    @property
    def target(self) -> str:
        return f"{self.path}?{self.query}" if self.query else self.path

    def restart_queue(self, timeout_s: float) -> None:
        """Its wait for a worker begins now."""
        self.queue_deadline_s = time.monotonic() + timeout_s

    def replace_body(self, body: bytes) -> None:
        """It goes on with another body."""
        self.body, self._fields, self.blocks = body, None, None

    def estimated_tokens(self) -> int:
        """From the length of the body, which is not parsed for that."""
        return len(self.body) // _BYTES_PER_TOKEN + 1

    def head(self, hint: str) -> list[tuple[str, str]]:
        """The headers to forward; ``hint`` is the worker that has the KV, where the engine should fetch it."""
        head = list(self.headers)
        if self.session:
            head.append((ROUTING_KEY, self.session))
        if hint:
            head.append((SOURCE_HINT, hint))
        return head


def read_call(
    path: str,
    query: str,
    body: bytes,
    headers: Mapping[str, str],
    queue_timeout_s: float,
    *,
    consumed: frozenset[str],
) -> Call:
    """``headers`` fold case and keep duplicates in ``items``. ``consumed`` are those that end here."""
    session = next((headers[name] for name in SESSION_HEADERS if headers.get(name)), "")
    tag = headers.get(VERSION_TAG, NEW_VERSION).strip()
    now_s = time.monotonic()
    dropped = _REPLACED | consumed | {SOURCE_HINT}
    return Call(
        path=path,
        query=query,
        body=body,
        headers=[(name, value) for name, value in headers.items() if name.lower() not in dropped],
        session=session,
        tag=None if tag in (NEW_VERSION, "") else tag,
        is_sticky=headers.get("x-is-sticky", "").lower() in ("1", "true"),
        prompt_id=headers.get("x-prompt-id", ""),
        source_hint=headers.get(SOURCE_HINT, ""),
        arrived_s=now_s,
        queue_deadline_s=now_s + queue_timeout_s,
    )
