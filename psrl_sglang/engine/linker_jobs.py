"""What the linker remembers of a look-up, a load and an offload between SGLang's calls."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch

from psrl_sglang.store.chunk import Wanted
from psrl_sglang.store.dram import Lease, Reservation


class Place(NamedTuple):
    """Where in its sequence the next transfer begins, which the transfer does not say: its tag, its first page,
    and SGLang's hash of the page before that (None at the start). ``most_pages``: how many of its pages may be
    stored."""

    tag: str
    start: int
    before: str | None
    most_pages: int


@dataclass(slots=True)
class LookedUp:
    """What the last look-up of a request asked for, and the leases on what it found."""

    wanted: list[Wanted]
    found_pages: int
    leases: list[Lease]
    windows: dict[str, int]  # pages of a pool that a prefix needs at its end, where it does not need all
    is_declined: bool = False


@dataclass(slots=True)
class Load:
    """The pages a request loads: where they lie, by pool, and the slots they go to."""

    leases: list[Lease] = field(default_factory=list)
    slots: list[tuple[str, torch.Tensor, np.ndarray]] = field(default_factory=list)

    def release(self) -> None:
        for lease in self.leases:
            lease.release()


@dataclass(slots=True)
class Offload:
    """What goes to DRAM in one piece. ``number`` counts them from 1."""

    number: int
    writes: list[tuple[str, torch.Tensor, Reservation]]
    is_whole: bool
    ready: list[Any]
