"""What the plugin remembers of one SGLang request."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

_ATTRIBUTE = "psrl_versions"


@dataclass(slots=True)
class RequestVersions:
    """The version side of one request, owned by the scheduler thread for as long as the request lives.

    ``tag`` is fixed while the request holds KV. ``cap`` is the number of leading tokens whose KV was computed
    entirely with the tag's weights; None while that is all of them. ``lag`` counts how many installed states
    the tag was behind when it was chosen.
    """

    user_salt: str | None
    tag: str | None = None
    cap: int | None = None
    lag: int = 0
    crossed: bool = False
    admitted: bool = False


def versions_of(req: Any) -> RequestVersions | None:
    """The state attached to a request; None for one that was never looked up."""
    return getattr(req, _ATTRIBUTE, None)


def attach_versions(req: Any, user_salt: str | None) -> RequestVersions:
    state = RequestVersions(user_salt)
    setattr(req, _ATTRIBUTE, state)
    return state
