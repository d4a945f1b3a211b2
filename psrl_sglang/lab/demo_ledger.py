"""What a client can know of the KV behind its replies: the stale-token rule, the same for every engine.

SGLang says with each reply how many leading prompt tokens came from the cache and which weights sampled which
output token. A ledger of pages keeps, for every prefix this client has sent or received, the weight version
under which the engine last computed it. A prompt token served from the cache is **stale** when the page it is
in was computed with older weights than those the request was admitted under.

The rule errs towards too few: a page that nobody here computed is not counted; a page counts as computed again
as soon as a reply reports it uncached; after a flush nothing is known. One page is one version: the oldest
among its tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Reuse:
    """Of one admitted prompt: cached tokens of older weights, and tokens computed that had been before."""

    stale_tokens: int
    repeated_tokens: int


@dataclass
class PageLedger:
    """Versions are numbered 1, 2, 3, ... in the order of installation."""

    page_tokens: int
    _versions: dict[int, int] = field(default_factory=dict)
    _ever: set[int] = field(default_factory=set)

    def reuse(self, prompt: Sequence[int], cached_tokens: int, version: int) -> Reuse:
        """What admitting `prompt` under `version` reused and repeated; changes nothing."""
        stale = repeated = 0
        for page, key in enumerate(self._keys(prompt)):
            if (page + 1) * self.page_tokens <= cached_tokens:
                stale += self.page_tokens if self._versions.get(key, version) < version else 0
            elif key in self._ever:
                repeated += self.page_tokens
        return Reuse(stale, repeated)

    def leading_tokens(self, prompt: Sequence[int], version: int) -> int:
        """How much of the start of `prompt` was computed under `version`, in whole pages."""
        pages = 0
        for key in self._keys(prompt):
            if self._versions.get(key) != version:
                break
            pages += 1
        return pages * self.page_tokens

    def record(self, sequence: Sequence[int], versions: Sequence[int], first_token: int) -> None:
        """The engine computed `sequence` from `first_token` on, token i with the weights `versions[i]`."""
        if len(versions) != len(sequence):
            raise ValueError(f"{len(versions)} versions for {len(sequence)} tokens")
        for page, key in enumerate(self._keys(sequence)):
            start, end = page * self.page_tokens, (page + 1) * self.page_tokens
            if end > first_token:
                self._versions[key] = min(versions[start:end])
                self._ever.add(key)

    def forget(self) -> None:
        """The engine flushed its cache."""
        self._versions.clear()

    def _keys(self, tokens: Sequence[int]) -> list[int]:
        """One key per full page, chained so that it stands for the whole prefix."""
        key, keys = 0, []
        for end in range(self.page_tokens, len(tokens) + 1, self.page_tokens):
            key = hash((key, *tokens[end - self.page_tokens : end]))
            keys.append(key)
        return keys
