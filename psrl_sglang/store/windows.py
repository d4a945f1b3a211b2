"""Pools that keep a part of a sequence only: a prefix can be restored where the last pages before its end are.

Sliding windows, for one, are stored at the ends of chunks, prompts and answers, so they lie here and there in
a sequence; a plain look-up, which takes a prefix, would find none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from psrl_sglang.keys import KEY_BYTES, count, key_at
from psrl_sglang.store.chunk import Wanted
from psrl_sglang.store.dram import DramTier, Lease
from psrl_sglang.store.store import KVStore


def complete_at(here: np.ndarray, window: int) -> np.ndarray:
    """For each length 0 … n: whether the last ``window`` pages up to it are all here."""
    missing = np.concatenate([[0], np.cumsum(~here)])
    lengths = np.arange(len(here) + 1)
    return missing[lengths] == missing[np.maximum(0, lengths - window)]


def lease_everywhere(dram: DramTier, keys: bytes, *, seconds: float) -> tuple[np.ndarray, list[Lease]]:
    """Protect every page that is in DRAM, wherever it is in the sequence; says which are."""
    here = np.zeros(count(keys), dtype=bool)
    leases: list[Lease] = []
    page = 0
    while page < len(here):
        if key_at(keys, page) in dram.index:
            lease = dram.lease(keys[page * KEY_BYTES :], seconds=seconds)
            here[page : page + lease.pages] = True
            leases.append(lease)
            page += lease.pages
        page += 1
    return here, leases


def worth_reading(store: KVStore, wanted: Sequence[Wanted], windows: Mapping[str, int]) -> list[Wanted]:
    """What of a look-up to ask the lower tiers for. ``windows``: the pools that need so many pages at the end only.

    Of the ends that DRAM and disk can restore together only the last one counts; nothing behind it is read, and
    of a window pool nothing before. Never an empty list, so that the ranks, whose tiers may differ, read all or
    none. What a remote store has is not known here, so with one everything is asked for as well.
    """
    if not windows:
        return list(wanted)
    end = _last_end(store, wanted, windows)
    narrowed = [_up_to(end, one, windows.get(one.pool, end)) for one in wanted]
    return narrowed if store.remote is None else [*wanted, *narrowed]


def _up_to(end: int, wanted: Wanted, pages: int) -> Wanted:
    begin = max(0, end - pages)
    return replace(wanted, keys=wanted.keys[begin * KEY_BYTES : end * KEY_BYTES], start=wanted.start + begin)


def _last_end(store: KVStore, wanted: Sequence[Wanted], windows: Mapping[str, int]) -> int:
    """The longest prefix, in pages, that DRAM and disk have enough of; 0 if there is none."""
    restorable = np.ones(count(wanted[0].keys) + 1, dtype=bool)
    for one in wanted:
        window = windows.get(one.pool)
        if window is None:
            restorable[_reach(store, one) + 1 :] = False
        else:
            pages = (replace(one, keys=key_at(one.keys, page)) for page in range(count(one.keys)))
            restorable &= complete_at(np.array([_is_here(store, page) for page in pages]), window)
    return int(np.flatnonzero(restorable)[-1])


def _reach(store: KVStore, wanted: Wanted) -> int:
    pages = sum(piece.pages for piece in store.dram.match(wanted.keys))
    if store.disk is not None:
        rest = replace(wanted, keys=wanted.keys[pages * KEY_BYTES :], start=wanted.start + pages)
        pages += sum(found.pages for found in store.disk.find(rest))
    return pages


def _is_here(store: KVStore, page: Wanted) -> bool:
    return page.keys in store.dram.index or (store.disk is not None and bool(store.disk.find(page)))
