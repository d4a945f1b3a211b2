"""What is known of a weight update while it is under way."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class UpdateWatch:
    """What the update under way has told us so far. One per tree, scheduler thread only."""

    in_single: bool = False
    named: bool = False
    session_version: str | None = None
    session_failed: bool = False
