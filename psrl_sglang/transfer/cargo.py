"""What a move takes along: the pages of a prefix that the store has, in every pool, leased where they lie."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

from psrl_sglang.keys import KEY_BYTES, count, key_at
from psrl_sglang.store.chunk import Wanted
from psrl_sglang.store.dram import Lease
from psrl_sglang.store.index import Chunk
from psrl_sglang.store.store import KVStore
from psrl_sglang.store.windows import lease_everywhere, worth_reading
from psrl_sglang.transfer.exchange import Run, salted
from psrl_sglang.transfer.link import Deadline
from psrl_sglang.transfer.sending import Cargo

_STEP_S = 0.002
_READ_SHARE = 0.5  # of the time that is left: the other half is for the way


def read_ahead(
    store: KVStore, wanted: Sequence[Wanted], windows: Mapping[str, int], deadline: Deadline
) -> None:
    """Bring what only disk and the remote store have to DRAM, as far as there is time."""
    fetch = store.fetch(worth_reading(store, wanted, windows), seconds=max(0.0, deadline.left_s * _READ_SHARE))
    if fetch is not None:
        while not fetch.is_over:
            time.sleep(_STEP_S)
        fetch.release()


def load(
    store: KVStore,
    tag: str,
    digests: bytes,
    salt: Callable[[str], bytes],
    *,
    fingerprint: Callable[[], str],
    windows: Mapping[str, int],
    deadline: Deadline,
) -> Cargo:
    """Lease what the store has of a prefix (``digests``, 16 bytes a page). ``windows``: pools of which the last so
    many pages before an end are enough. What other pools have behind the end of the first stays here. The cargo has
    no runs if there is nothing of the first pool. ``fingerprint`` is asked once all is leased, so that it holds for
    all that is in it."""
    wanted = [Wanted(pool.name, tag, salted(digests, salt(pool.name)), 0) for pool in store.layout.pools]
    if store.has_lower_tiers:
        read_ahead(store, wanted, windows, deadline)
    runs: list[Run] = []
    places: list[int] = []
    chunks: list[Chunk] = []
    leases: list[Lease] = []
    end = count(digests)
    for one in wanted:
        keys = one.keys[: end * KEY_BYTES]
        if one.pool in windows:
            _, held = lease_everywhere(store.dram, keys, seconds=float("inf"))
        else:
            held = [store.dram.lease(keys)]
        leases += held
        page_of = {key_at(keys, page): page for page in range(count(keys))}
        for piece in (piece for lease in held for piece in lease.pieces):
            first = page_of[key_at(piece.keys, 0)]
            begin = first * KEY_BYTES
            before = digests[begin - KEY_BYTES : begin] if first else b""
            runs.append(Run(one.pool, first, before, digests[begin : begin + piece.pages * KEY_BYTES]))
            places.append(int(store.dram.offsets([piece])[0]))
            chunks.append(piece.chunk)
        if one is wanted[0]:
            end = sum(lease.pages for lease in held)
    return Cargo(tag, fingerprint(), runs, places, chunks, leases)
