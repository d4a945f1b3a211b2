"""Who may ask."""

from __future__ import annotations

import hmac
from collections.abc import Mapping

OPEN_PATHS = frozenset({"/health", "/healthz"})
_AUTHORIZATION = "authorization"


class Guard:
    """With an empty token everybody may ask, and a client's own ``Authorization`` goes on to the workers."""

    def __init__(self, token: str) -> None:
        self._expected = f"Bearer {token}".encode() if token else b""

    @property
    def consumed(self) -> frozenset[str]:
        """Headers that end here."""
        return frozenset({_AUTHORIZATION}) if self._expected else frozenset()

    def lets_in(self, path: str, headers: Mapping[str, str]) -> bool:
        if not self._expected or path in OPEN_PATHS:
            return True
        given = headers.get(_AUTHORIZATION, "").encode("utf-8", "surrogateescape")
        return hmac.compare_digest(given, self._expected)
