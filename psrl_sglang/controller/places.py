"""What one worker holds in one location, as its reports tell it: operations in order, and whole sets.

An operation carries a number. A worker tells those of one tag after those of another, so numbers need not come in
order, but within a tag they do: an admit that comes late there must not bring back what was evicted since, and is
not believed; a late evict is. A number that stays away means that reports were lost. Either is mended by a full
sync, which builds a second set beside the first and replaces it when every batch is there. What happens meanwhile
goes to both sets, and over the batches, which may be older.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field

from psrl_sglang.controller.holders import HolderIndex
from psrl_sglang.transfer.messages import KVOpEvent, OpType

_MAX_TAGS = 4096
_MAX_BATCHES = 1 << 20
_MAX_MISSING_LISTED = 1000
_MAX_TOUCHED = 1 << 20
_MOST_MISSING = 1 << 16
_PATIENCE_S = 2.0
OTHER_TAGS = "(others)"


class Order:
    """Which numbers came. ``late`` is by tag; ``missing`` are those before the highest that have not come yet."""

    def __init__(self) -> None:
        self._last: OrderedDict[str, int] = OrderedDict()
        self._highest: int | None = None
        self.missing: set[int] = set()
        self.missing_since_s = 0.0

    def take(self, number: int, tag: str, now_s: float) -> tuple[bool, str]:
        """Whether it is late, and what is wrong with that or with what did not come before it."""
        trouble = ""
        last = self._last.get(tag)
        is_late = last is not None and number <= last
        if is_late:
            trouble = f"report {number} came after report {last}"
        else:
            self._last[tag] = number
            self._last.move_to_end(tag)
            if len(self._last) > _MAX_TAGS:
                self._last.popitem(last=False)
        if self._highest is None:
            self._highest = number
        elif number > self._highest:
            skipped = range(self._highest + 1, number)
            if len(skipped) + len(self.missing) > _MOST_MISSING:
                self.missing.clear()
                trouble = f"{len(skipped)} reports before report {number} were lost"
            elif skipped:
                self.missing_since_s = self.missing_since_s if self.missing else now_s
                self.missing.update(skipped)
            self._highest = number
        else:
            self.missing.discard(number)
        return is_late, trouble

    def lost(self, now_s: float) -> str:
        """What has stayed away for too long to come still, as text; it is not told again."""
        if not self.missing or now_s - self.missing_since_s < _PATIENCE_S:
            return ""
        first, last, count = min(self.missing), max(self.missing), len(self.missing)
        self.missing.clear()
        return f"{count} reports from {first} to {last} were lost"


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
        self._order = Order()

    @property
    def chunks(self) -> int:
        return self._index.count(self._number)

    def forget_order(self) -> None:
        """The worker may number its operations anew."""
        self._order = Order()

    def lost(self, now_s: float) -> str:
        """Which reports must be taken for lost, empty if none."""
        return self._order.lost(now_s)

    def apply(self, operations: Iterable[KVOpEvent], tag: str, now_s: float) -> str:
        """Returns why the whole set should be asked for, empty when nothing is known to be wrong."""
        trouble = ""
        for operation in operations:
            is_late, problem = self._order.take(operation.seq_num, tag, now_s)
            trouble = problem or trouble
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
