"""What each worker lately computed, as far as this gateway sent it there: prompts by blocks of their bytes.

The blocks are of the JSON text behind the prompt's own field, so nothing is parsed. A chain of hashes names a
block together with all before it. It is a guess, good for a choice and never for a promise.
"""

from __future__ import annotations

from collections import OrderedDict

import xxhash

BLOCK_BYTES = 512
_MOST_BLOCKS = 256
Owner = tuple[int, int]
"""A worker's index, and how often it was lost."""

_FIELDS = (b'"input_ids"', b'"messages"', b'"prompt"', b'"text"')


def prompt_blocks(body: bytes) -> tuple[int, ...]:
    """The names of the whole blocks of a prompt, of at most the first 128 KiB."""
    start = next((at for at in (body.find(field) for field in _FIELDS) if at >= 0), -1)
    if start < 0:
        return ()
    view = memoryview(body)[start : start + _MOST_BLOCKS * BLOCK_BYTES]
    chain, names = xxhash.xxh3_64(), []
    for block in range(len(view) // BLOCK_BYTES):
        chain.update(view[block * BLOCK_BYTES : (block + 1) * BLOCK_BYTES])
        names.append(chain.intdigest())
    return tuple(names)


class PrefixIndex:
    """Bounded: the blocks that were used longest ago are forgotten first. An owner that has lost all it had is
    another owner afterwards."""

    def __init__(self, most_blocks: int = 200_000) -> None:
        self._most = most_blocks
        self._owners: OrderedDict[int, set[Owner]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._owners)

    def add(self, blocks: tuple[int, ...], owner: Owner) -> None:
        for name in blocks:
            self._owners.setdefault(name, set()).add(owner)
            self._owners.move_to_end(name)
        while len(self._owners) > self._most:
            self._owners.popitem(last=False)

    def overlap(self, blocks: tuple[int, ...]) -> dict[Owner, int]:
        """By owner, how many of the first blocks it has without a gap."""
        found: dict[Owner, int] = {}
        still: set[Owner] | None = None
        for count, name in enumerate(blocks):
            here = self._owners.get(name)
            if here is None:
                break
            still = set(here) if still is None else still & here
            if not still:
                break
            found.update(dict.fromkeys(still, count + 1))
        return found
