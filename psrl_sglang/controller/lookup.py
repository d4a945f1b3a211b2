"""Who holds the longest prefix of a prompt, as far as workers have reported: exact to their chunks.

Chunk keys are hashes of SGLang's pages, so the controller computes the keys a prompt would have under a tag
and asks the index. A chunk is any run of pages up to the chunk size that its worker told, named by its last
page, so the prefix goes on for as long as the next named page is within one chunk of the last.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from psrl_sglang.controller.registry import Key, Registry, Worker
from psrl_sglang.namespace import Tag, compose_salt
from psrl_sglang.pagehash import chunk_key, page_digests
from psrl_sglang.transfer.messages import WorkerStatus

_MOST_HASHED_TOKENS = 1 << 23  # over all tags of one question: about half a second
_TOKENS_HASHED_HERE = 1 << 15  # more than these go to a thread


class TooMuch(ValueError):
    """The question would take too long; the text says what to leave out."""


@dataclass(frozen=True, slots=True)
class Held:
    """All ranks of ``instance_id`` hold the first ``num_tokens``; ``location``: where rank 0 has the first."""

    instance_id: str
    tag: str
    location: str
    num_tokens: int


class _Keys(NamedTuple):
    tag: str
    page_tokens: int


def same_version(tag: str, version: str) -> bool:
    """Whether ``tag`` is of that version: its name, its name with the epoch, or the tag itself."""
    bare = tag.partition(":")[2] or tag
    bare = bare.removesuffix("~")
    name = str(Tag(version))
    head, mark, epoch = version.rpartition("#")
    return (
        version == tag
        or name in (bare, bare.partition("#")[0])
        or (bool(mark) and f"{Tag(head)}#{epoch}" == bare)
    )


def live_tags(status: WorkerStatus) -> list[str]:
    """The current tag first."""
    return list(dict.fromkeys((status.tag, *status.window)))


async def lookup(
    registry: Registry,
    tokens: Sequence[int],
    *,
    version: str | None = None,
    cache_salt: str | None = None,
    extra_key: str | None = None,
) -> list[Held]:
    """The longest prefix that each instance holds under each tag it may serve, or under those of ``version``.

    Instances with nothing of it, or whose workers are not ours, are left out. Raises `TooMuch`.
    """
    wanted: dict[_Keys, dict[Key, Worker]] = {}
    for worker in registry.workers():
        if worker.status is None or worker.status.page_tokens < 1:
            continue
        for tag in _tags(worker, version):
            keys = _Keys(tag, worker.status.page_tokens)
            wanted.setdefault(keys, {})[worker.key] = worker
    if len(wanted) * len(tokens) > _MOST_HASHED_TOKENS:
        raise TooMuch(
            f"{len(tokens)} tokens under {len(wanted)} tags are too many to hash; name a `version`, or send fewer"
        )
    found: list[Held] = []
    for keys, workers in wanted.items():
        salt = compose_salt(keys.tag, cache_salt)
        if len(wanted) * len(tokens) > _TOKENS_HASHED_HERE:
            chunks = await asyncio.to_thread(_chunk_keys, tokens, keys.page_tokens, extra_key, salt)
        else:
            chunks = _chunk_keys(tokens, keys.page_tokens, extra_key, salt)
        found += _of_instances(registry, keys, _prefixes(registry, chunks, workers))
    return sorted(found, key=lambda held: -held.num_tokens)


def _tags(worker: Worker, version: str | None) -> Iterable[str]:
    status = worker.status
    if status is None:
        return ()
    if version is None:
        return live_tags(status)
    held = (tag for place in worker.places.values() for tag in place.tags.chunks)
    known = dict.fromkeys((*live_tags(status), *status.pages_by_tag, *held))
    return [tag for tag in known if same_version(tag, version)]


def _chunk_keys(tokens: Sequence[int], page_tokens: int, extra_key: str | None, salt: str) -> list[int]:
    return [
        chunk_key(digest) for digest in page_digests(tokens, page_tokens, extra_key=extra_key, cache_salt=salt)
    ]


def _prefixes(registry: Registry, chunks: list[int], workers: dict[Key, Worker]) -> dict[Key, tuple[int, str]]:
    """(pages, location of the first) of the unbroken prefix of each worker that has any."""
    reach = {key: _chunk_pages(worker.status) for key, worker in workers.items() if worker.status is not None}
    furthest = max(reach.values(), default=0)
    prefixes: dict[Key, tuple[int, str]] = {}
    last = 0
    for pages, chunk in enumerate(chunks, 1):
        if pages - last > furthest:
            break
        for place in registry.holders(chunk):
            have, location = prefixes.get(place.worker, (0, place.location))
            if pages - have <= reach.get(place.worker, 0):
                prefixes[place.worker] = (pages, location)
                last = pages
    return prefixes


def _chunk_pages(status: WorkerStatus) -> int:
    return max(1, -(-status.chunk_tokens // status.page_tokens))


def _of_instances(registry: Registry, keys: _Keys, prefixes: dict[Key, tuple[int, str]]) -> list[Held]:
    """What every rank has: the minimum."""
    found = []
    for instance_id in dict.fromkeys(instance_id for instance_id, _ in prefixes):
        ranks = registry.ranks(instance_id)
        expected = max((worker.status.ranks for worker in ranks if worker.status is not None), default=1)
        pages = min(prefixes.get(worker.key, (0, ""))[0] for worker in ranks)
        if pages and len(ranks) >= expected:
            location = prefixes[ranks[0].key][1]
            found.append(Held(instance_id, keys.tag, location, pages * keys.page_tokens))
    return found
