"""The registry and its index against simple models: any order of events ends where it must."""

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from registry_support import DRAM, holders, operations, presence, sync, told

from psrl_sglang.controller.holders import HolderIndex
from psrl_sglang.controller.registry import Limits, Registry
from psrl_sglang.transfer import messages as wire

KEYS = st.integers(0, 5)


class IndexAgainstSets(RuleBasedStateMachine):
    """`HolderIndex` beside one set for each number."""

    def __init__(self) -> None:
        super().__init__()
        self.index = HolderIndex(10_000)
        self.sets: dict[int, set[int]] = {}
        self.sweep = iter(())

    @rule()
    def new(self):
        self.sets[self.index.new_number()] = set()

    @precondition(lambda self: self.sets)
    @rule(data=st.data(), keys=st.lists(KEYS))
    def add(self, data, keys):
        number = data.draw(st.sampled_from(sorted(self.sets)))
        assert self.index.add(number, keys) == len(set(keys) - self.sets[number])
        self.sets[number] |= set(keys)

    @precondition(lambda self: self.sets)
    @rule(data=st.data(), keys=st.lists(KEYS))
    def discard(self, data, keys):
        number = data.draw(st.sampled_from(sorted(self.sets)))
        assert self.index.discard(number, keys) == len(set(keys) & self.sets[number])
        self.sets[number] -= set(keys)

    @rule()
    def many_share(self):
        for _ in range(40):
            number = self.index.new_number()
            self.index.add(number, [0, 1])
            self.sets[number] = {0, 1}

    @precondition(lambda self: self.sets)
    @rule(data=st.data())
    def forget(self, data):
        number = data.draw(st.sampled_from(sorted(self.sets)))
        self.index.forget(number)
        del self.sets[number]

    @rule()
    def sweep_some(self):
        if next(self.sweep, "done") == "done":
            self.sweep = self.index.sweep()

    @invariant()
    def same(self):
        assert len(self.index) == sum(map(len, self.sets.values()))
        for key in range(6):
            living = {number for number in self.index.holders(key) if number in self.sets}
            assert living == {number for number, keys in self.sets.items() if key in keys}
        assert all(self.index.count(number) == len(keys) for number, keys in self.sets.items())

    def teardown(self):
        for _ in self.sweep:
            pass
        for _ in self.index.sweep():
            pass
        assert not self.index.needs_sweep
        for key in range(6):
            assert set(self.index.holders(key)) <= set(self.sets)


TestIndexAgainstSets = IndexAgainstSets.TestCase
TestIndexAgainstSets.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)

STEP = st.tuples(st.sampled_from(["admit", "evict"]), st.integers(0, 7))


@settings(max_examples=300, deadline=None)
@given(
    st.lists(STEP, max_size=40),
    st.lists(st.integers(0, 40), min_size=2, max_size=2).map(sorted),
    st.integers(1, 3),
    st.randoms(use_true_random=False),
)
def test_a_full_sync_amid_reports_ends_with_exactly_what_the_worker_holds(steps, points, batch_keys, random):
    """The worker takes its snapshot at some time after the start was accepted, and goes on reporting between
    the batches."""
    registry = Registry(Limits())
    registry.register(presence(psrl=told()))
    start, snapshot_at = (min(point, len(steps)) for point in points)
    held: set[int] = set()
    batches: list[list[int]] | None = None
    sent: set[int] = set()

    def send_batch():
        left = [at for at in range(len(batches)) if at not in sent]
        if left:
            at = random.choice(left)
            sent.add(at)
            registry.sync_batch(wire.FullSyncBatchMsg("A", 0, DRAM, "s", at, batches[at], "1"))

    for seq in range(len(steps) + 1):
        if seq == start:
            count = 20
            assert registry.start_sync(wire.FullSyncStartMsg("A", 0, DRAM, "s", 100, count)).accepted
        if seq == snapshot_at:
            keys = sorted(held)
            batches = [list(keys[at : at + batch_keys]) for at in range(0, 20 * batch_keys, batch_keys)]
        if seq == len(steps):
            break
        kind, key = steps[seq]
        (held.add if kind == "admit" else held.discard)(key)
        registry.apply(operations((kind, key, seq)))
        if batches is not None and random.random() < 0.6:
            send_batch()
    while len(sent) < 20:
        send_batch()
    registry.end_sync(wire.FullSyncEndMsg("A", 0, DRAM, "s", len(held)))
    assert {key for key in range(8) if holders(registry, key)} == held
    assert len(registry.index) == len(held)


@settings(max_examples=300, deadline=None)
@given(st.lists(STEP, max_size=12), st.randoms(use_true_random=False))
def test_reports_in_any_order_never_claim_what_the_worker_does_not_hold(steps, random):
    """In whatever order they come, as long as none is lost; what is missing then is asked for."""
    registry = Registry(Limits())
    registry.register(presence(psrl=told()))
    sync(registry, [[]])
    held: set[int] = set()
    for kind, key in steps:
        (held.add if kind == "admit" else held.discard)(key)
    numbered = [(kind, key, seq) for seq, (kind, key) in enumerate(steps)]
    random.shuffle(numbered)
    # The first to come sets where counting begins, so that one is in its place.
    numbered.sort(key=lambda entry: entry[2] != 0)
    for entry in numbered:
        registry.apply(operations(entry))
    claimed = {key for key in range(8) if holders(registry, key)}
    assert claimed <= held
    if claimed != held:
        assert registry.heartbeat(presence(wire.HeartbeatMsg, psrl=told()))


def test_dropping_a_worker_costs_nothing_and_sweeping_yields():
    index = HolderIndex(1_000_000)
    numbers = [index.new_number() for _ in range(3)]
    for number in numbers:
        index.add(number, range(50_000))
    index.forget(numbers[0])
    assert len(index) == 100_000
    assert sum(1 for _ in index.sweep()) >= 2
    assert all(numbers[0] not in index.holders(key) for key in itertools.islice(range(50_000), 0, None, 997))
