"""What one worker holds in one location, as its reports tell it: operations in order, and whole sets.

An operation carries a number. One that comes late must not bring back what was evicted since, so a late admit
is not believed and a late evict is; a gap means that reports were lost. Either is mended by a full sync, which
builds a second set beside the first and replaces it when every batch is there. What happens meanwhile goes to
both sets, and over the batches, which may be older.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from psrl_sglang.controller.holders import HolderIndex
from psrl_sglang.transfer.messages import KVOpEvent, OpType

_MAX_TAGS = 4096
_MAX_BATCHES = 1 << 20
_MAX_MISSING_LISTED = 1000
_MAX_TOUCHED = 1 << 20
OTHER_TAGS = "(others)"


class TagCounts:
    """Chunks by tag, for people; of at most so many tags, what is more being lumped together."""

    def __init__(self) -> None:
        self.chunks: dict[str, int] = {}

    def change(self, tag: str, by: int) -> None:
        if tag not in self.chunks and len(self.chunks) >= _MAX_TAGS:
            tag = OTHER_TAGS
        left = self.chunks.get(tag, 0) + by
        if left > 0:
            self.chunks[tag] = left
        else:
            self.chunks.pop(tag, None)


@dataclass(slots=True)
class Sync:
    """A full sync under way. ``touched``: chunks that an operation since its start has decided on."""

    sync_id: str
    number: int
    batches: int
    deadline_s: float
    tags: TagCounts = field(default_factory=TagCounts)
    received: set[int] = field(default_factory=set)
    touched: set[int] = field(default_factory=set)
    has_ended: bool = False

    @property
    def is_complete(self) -> bool:
        return self.has_ended and len(self.received) >= self.batches

    @property
    def progress(self) -> float:
        return len(self.received) / self.batches if self.batches else 1.0

    def missing(self) -> list[int]:
        found = (batch for batch in range(self.batches) if batch not in self.received)
        return [batch for batch, _ in zip(found, range(_MAX_MISSING_LISTED), strict=False)]


class Place:
    """One location of one worker. ``owners`` gets its number of the index, while it has one that counts."""

    def __init__(
        self, worker: tuple[str, int], location: str, index: HolderIndex, owners: dict[int, Place]
    ) -> None:
        self.worker = worker
        self.location = location
        self._owners = owners
        self._number = index.new_number()
        owners[self._number] = self
        self.tags = TagCounts()
        self.sync: Sync | None = None
        self.last_sync_id = ""
        self._index = index
        self._last_seq: int | None = None

    @property
    def chunks(self) -> int:
        return self._index.count(self._number)

    def forget_order(self) -> None:
        """The worker may number its operations anew."""
        self._last_seq = None

    def apply(self, operations: Iterable[KVOpEvent], tag: str) -> str:
        """Returns why the whole set should be asked for, empty when the reports are whole."""
        trouble = ""
        for operation in operations:
            last = self._last_seq
            is_late = last is not None and operation.seq_num <= last
            if is_late:
                trouble = f"report {operation.seq_num} came after report {last}"
            else:
                if last is not None and operation.seq_num > last + 1:
                    trouble = f"reports {last + 1} to {operation.seq_num - 1} were lost"
                self._last_seq = operation.seq_num
            if operation.op_type is OpType.EVICT:
                self._evict(operation.key, tag)
            elif not is_late:
                self._admit(operation.key, tag)
        if self.sync is not None and len(self.sync.touched) > _MAX_TOUCHED:
            self.give_up_sync()
            trouble = "a full sync took too long for what else was reported"
        if self._index.is_full:
            trouble = "the controller's index is full"
        return trouble

    def _admit(self, key: int, tag: str) -> None:
        self.tags.change(tag, self._index.add(self._number, (key,)))
        if self.sync is not None:
            self.sync.touched.add(key)
            self.sync.tags.change(tag, self._index.add(self.sync.number, (key,)))

    def _evict(self, key: int, tag: str) -> None:
        self.tags.change(tag, -self._index.discard(self._number, (key,)))
        if self.sync is not None:
            self.sync.touched.add(key)
            self.sync.tags.change(tag, -self._index.discard(self.sync.number, (key,)))

    def start_sync(self, sync_id: str, batches: int, deadline_s: float) -> str:
        """Returns why it cannot, else an empty string. A second start gives the first up."""
        if not 0 <= batches <= _MAX_BATCHES:
            return f"batch_count is {batches}; at most {_MAX_BATCHES}"
        self.give_up_sync()
        self.forget_order()
        self.sync = Sync(sync_id, self._index.new_number(), batches, deadline_s)
        return ""

    def sync_batch(self, sync_id: str, batch: int, keys: list[int], tag: str, deadline_s: float) -> bool:
        """False: it belongs to no sync under way, or is there already."""
        sync = self.sync
        if sync is None or sync.sync_id != sync_id or batch in sync.received or not 0 <= batch < sync.batches:
            return False
        touched = sync.touched
        fresh = [key for key in keys if key not in touched] if touched else keys
        sync.tags.change(tag, self._index.add(sync.number, fresh))
        sync.received.add(batch)
        sync.deadline_s = deadline_s
        self._finish_sync()
        return True

    def end_sync(self, sync_id: str) -> bool:
        """False: no such sync is under way."""
        if self.sync is None or self.sync.sync_id != sync_id:
            return False
        self.sync.has_ended = True
        self._finish_sync()
        return True

    def _finish_sync(self) -> None:
        sync = self.sync
        if sync is not None and sync.is_complete:
            self._forget()
            self._number, self.tags, self.last_sync_id = sync.number, sync.tags, sync.sync_id
            self._owners[self._number] = self
            self.sync = None

    def give_up_sync(self) -> None:
        if self.sync is not None:
            self._index.forget(self.sync.number)
            self.sync = None

    def drop(self) -> None:
        """The worker holds nothing here any more; the place is not used again."""
        self.give_up_sync()
        self._forget()

    def _forget(self) -> None:
        del self._owners[self._number]
        self._index.forget(self._number)
