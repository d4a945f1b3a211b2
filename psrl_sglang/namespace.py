"""The identity of cached KV: which weights computed it, and which of those weights may still be served.

Every cached entry lives under a *tag*, the text form of one installed state of the weights:

    [<namespace>:]<version>[#<epoch>][~]

``version`` is the caller's own, opaque string ("12", "step-12", a hash). An *epoch* is appended when the
weights changed and nobody named them (no version given, a failed load, a half-written update); it is unique
across processes and machines. ``~`` marks a tag of an engine that accepts a version lag: such a namespace may
hold KV *newer* than its name, so a strict engine must never match it. All parts are percent-encoded.

A tag reaches SGLang as the head of the request's ``cache_salt``: ``psrl:<tag>`` or ``psrl:<tag>|<user salt>``.
The salt is part of SGLang's radix-tree keys, of every storage hash and of its KV events, so the device tree,
HiCache and LMCache separate versions by construction.

No sglang import, no threads, no clock: the ledger is replicated on every rank and driven by the same requests.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from urllib.parse import quote

SALT_PREFIX = "psrl:"
_LAG_MARKER = "~"
# LMCache refuses salts of more than 128 characters; half of that is left to the user's own salt.
_MAX_PART_CHARACTERS = 56
_MAX_REMEMBERED_TAGS = 4096


def is_lagging(tag: str) -> bool:
    """Whether a tag's text is that of an engine that accepts a lag."""
    return tag.endswith(_LAG_MARKER)


def _encode(part: str) -> str:
    # quote() leaves "~" alone, which would let a version forge the lag marker.
    text = quote(part, safe="").replace("~", "%7E") or "%"
    if len(text) > _MAX_PART_CHARACTERS:
        return "sha256-" + hashlib.sha256(part.encode()).hexdigest()[:40]
    return text


@dataclass(frozen=True, slots=True)
class Tag:
    """One installed state of the weights. Equal tags mean equal weights.

    ``version`` and ``namespace`` are as the caller wrote them; ``epoch`` is "" for a named version.
    """

    version: str
    epoch: str = ""
    namespace: str = ""
    lagging: bool = False

    def __str__(self) -> str:
        head = f"{_encode(self.namespace)}:" if self.namespace else ""
        tail = f"#{self.epoch}" if self.epoch else ""
        return f"{head}{_encode(self.version)}{tail}{_LAG_MARKER if self.lagging else ''}"

    @property
    def label(self) -> str:
        """The short human form used in status, metrics and ``meta_info``: the version, with its epoch."""
        return f"{self.version}#{self.epoch}" if self.epoch else self.version


def compose_salt(tag: str, user_salt: str | None) -> str:
    """The ``cache_salt`` that carries ``tag``. ``user_salt`` must not carry a tag itself (see ``split_salt``)."""
    return f"{SALT_PREFIX}{tag}|{user_salt}" if user_salt else f"{SALT_PREFIX}{tag}"


def split_salt(salt: str | None) -> tuple[str | None, str | None]:
    """The (tag, user salt) inside a ``cache_salt``; (None, salt) when it carries no tag."""
    if salt is None or not salt.startswith(SALT_PREFIX):
        return None, salt or None
    tag, _, user_salt = salt[len(SALT_PREFIX) :].partition("|")
    return tag, user_salt or None


class VersionLedger:
    """Which weights this engine has installed, in which order, and which of them a lookup may use.

    Versions are opaque: their order is the order in which they were installed here. The *window* is the
    ``max_version_lag + 1`` most recently installed tags, newest first; installing an old version again puts it
    last, and on a strict engine its KV is usable again, because a strict namespace holds KV of exactly one
    version. On a lagging engine a namespace may also hold KV of the versions that followed, which after a
    roll-back may be older than the window allows, so a version installed again there gets a fresh epoch.

    Not thread-safe; owned by the scheduler thread of one rank.
    """

    def __init__(self, version: str, *, instance: str, namespace: str = "", max_version_lag: int = 0) -> None:
        """``instance`` must be the same on all ranks of an engine and differ between engines and restarts."""
        if max_version_lag < 0:
            raise ValueError(f"max_version_lag must be >= 0, got {max_version_lag}")
        self._namespace = namespace
        self._instance = instance
        self._max_version_lag = max_version_lag
        self._epochs = 0
        self._sequence = 0
        self._orders: dict[str, int] = {}
        self._tags: dict[str, Tag] = {}
        self._recent: tuple[str, ...] = ()  # newest last; swapped whole, because I/O threads ask for the window
        self._suspended = False
        # Never forgotten, unlike the tags: one string an update, and only on a lagging engine.
        self._named: set[str] = set()
        self._current = Tag(version)
        self.install(version)

    @property
    def current(self) -> Tag:
        """The state of the weights right now; new KV is computed with it."""
        return self._current

    @property
    def current_name(self) -> str:
        """What the caller named the weights that are installed; empty while they have no name of his."""
        current = self._current
        return current.version if not current.epoch or self._is_reinstalled(current) else ""

    @property
    def max_version_lag(self) -> int:
        return self._max_version_lag

    @property
    def is_strict(self) -> bool:
        return self._max_version_lag == 0

    @property
    def changes(self) -> int:
        """How many times the weights' identity has changed since start."""
        return self._sequence - 1

    def window(self) -> tuple[str, ...]:
        """Tags a lookup may use now, newest first. While weights are being rewritten: only the current one."""
        return (str(self._current),) if self._suspended else self._recent[::-1]

    def lag_of(self, tag: str) -> int | None:
        """How many installed states ``tag`` is behind; None when it is outside the window."""
        for lag, candidate in enumerate(self.window()):
            if candidate == tag:
                return lag
        return None

    def order_of(self, tag: str) -> int:
        """Grows with the time of installation; 0 for a tag this engine never installed or has forgotten."""
        return self._orders.get(tag, 0)

    def tag_for(self, text: str) -> Tag | None:
        """The installed state behind a tag's text, if this engine remembers it."""
        return self._tags.get(text)

    def named(self, version: str) -> str | None:
        """The tag other engines know ``version`` by, if it was installed here under that name. On any thread."""
        text = str(Tag(version, namespace=self._namespace, lagging=not self.is_strict))
        return text if text in self._orders else None

    def labels(self) -> list[str]:
        """What every remembered tag is called in status, the one installed first in front."""
        return [tag.label for tag in self._tags.values()]

    def tags_of_version(self, version: str) -> tuple[str, ...]:
        """Every remembered tag of a version, its epochs included; empty when it was never installed here."""
        return tuple(text for text, tag in self._tags.items() if version in (tag.version, tag.label))

    def install(self, version: str) -> bool:
        """The weights are now ``version``. False when they already were (same version, same weights)."""
        plain = Tag(version, namespace=self._namespace, lagging=not self.is_strict)
        if (
            self._sequence
            and not self._suspended
            and self._current.version == version
            and (not self._current.epoch or self._is_reinstalled(self._current))
        ):
            return False
        if not self.is_strict:
            if version in self._named:
                plain = self._with_epoch(plain, kind="r")
            self._named.add(version)
        self._set(plain)
        return True

    def install_unnamed(self) -> None:
        """The weights changed (or may have) and nobody named the result."""
        self._set(self._with_epoch(self._plain_current(), kind="e"))

    def suspend(self) -> None:
        """The weights are being rewritten piece by piece: until the next ``install*`` nothing computed now may
        be matched after the next piece. Each call opens a namespace of its own, outside the window."""
        tag = self._with_epoch(self._plain_current(), kind="t")
        self._forget_piece()
        self._suspended = True
        self._sequence += 1
        self._remember(tag)
        self._current = tag

    @property
    def is_suspended(self) -> bool:
        return self._suspended

    def _is_reinstalled(self, tag: Tag) -> bool:
        return tag.epoch.startswith("r")

    def _plain_current(self) -> Tag:
        return Tag(self._current.version, namespace=self._namespace, lagging=not self.is_strict)

    def _with_epoch(self, tag: Tag, *, kind: str) -> Tag:
        self._epochs += 1
        epoch = f"{kind}{self._epochs}-{self._instance}"
        return Tag(tag.version, epoch=epoch, namespace=tag.namespace, lagging=tag.lagging)

    def _set(self, tag: Tag) -> None:
        text = str(tag)
        self._forget_piece()
        self._suspended = False
        self._sequence += 1
        self._remember(tag)
        others = tuple(recent for recent in self._recent if recent != text)
        self._recent = (*others, text)[-(self._max_version_lag + 1) :]
        self._current = tag

    def _remember(self, tag: Tag) -> None:
        text = str(tag)
        self._orders.pop(text, None)
        self._orders[text] = self._sequence
        self._tags[text] = tag
        while len(self._orders) > _MAX_REMEMBERED_TAGS + len(self._recent):
            oldest = next(text for text in self._orders if text not in self._recent)
            del self._orders[oldest], self._tags[oldest]

    def _forget_piece(self) -> None:
        # A session may send a thousand pieces; only the tag of the last one is still written under.
        if self._suspended:
            text = str(self._current)
            self._orders.pop(text, None)
            self._tags.pop(text, None)
