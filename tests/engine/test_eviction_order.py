"""What gives way first when the pool is full, what a retired version leaves, and what a pin holds."""

import pytest

pytest.importorskip("sglang")

from offline_tree import CORES, OfflineEngine

from psrl_sglang.engine.pins import PinRefused


@pytest.fixture(params=[(core, page) for core in CORES for page in (1, 4)], ids=str)
def make(request):
    """Engines of each tree core and page size; their books are checked at the end."""
    core, page_size = request.param
    made = []

    def engine(**options):
        made.append(OfflineEngine(**{"core": core, "page_size": page_size, **options}))
        return made[-1]

    yield engine
    for each in made:
        each.check_books()


def text(number, length=16):
    return [number * 1000 + position for position in range(length)]


def fill(engine, versions, per_version=1):
    """One prompt of 16 tokens per version and turn, under that version."""
    for version in versions:
        if engine.ledger.current.version != version:
            engine.trainer.update(version)
        for number in range(per_version):
            engine.run(text(int(version) * 10 + number))


def left(engine):
    """Device tokens by version."""
    return {
        engine.ledger.tag_for(tag).version: entry.device_tokens
        for tag, entry in engine.tree.tags.usage().items()
    }


def drain(engine):
    """The versions in the order in which the pool gives up their last token."""
    order, before = [], left(engine)
    while before:
        engine.evict(engine.page_size)
        after = left(engine)
        order += [version for version in before if version not in after]
        before = after
    return order


def watch_evicted_leaves(engine, monkeypatch):
    """Every leaf the tree core is told to evict, after a check that nothing locks it."""
    core, seen = engine.tree.tree_core, []
    original = core.evict_device_leaf

    def evict_device_leaf(node_id, *args):
        taken = core.inc_lock_ref(node_id)
        core.dec_lock_ref(node_id, taken.to_dec_params())
        assert taken.delta > 0, "a locked node was to be evicted"
        seen.append(node_id)
        return original(node_id, *args)

    monkeypatch.setattr(core, "evict_device_leaf", evict_device_leaf)
    return seen


@pytest.fixture(params=[1, 4])
def make_psrl(request):
    """Engines with the eviction policy psrl, which SGLang's Python tree core takes."""
    return lambda **options: OfflineEngine(core="python", policy="psrl", page_size=request.param, **options)


def test_versions_outside_the_window_go_first_oldest_installation_first(make_psrl):
    engine = make_psrl(lag=1, version="0")
    fill(engine, ["3", "1", "2", "4"])
    assert drain(engine)[:2] == ["3", "1"]


def test_roll_back_makes_a_version_the_last_to_go(make_psrl):
    engine = make_psrl()
    fill(engine, ["1", "2", "3"])
    engine.trainer.update("1")
    assert drain(engine) == ["2", "3", "1"]


@pytest.mark.parametrize(("policy", "survivor"), [("LRU", 10), ("FIFO", 11)])
def test_inside_the_window_the_cache_policy_decides(make_psrl, policy, survivor):
    engine = make_psrl(psrl={"lmcache": {"cache_policy": policy}})
    fill(engine, ["1"], per_version=2)
    engine.touch(text(10))
    engine.evict(16)
    assert [number for number in (10, 11) if engine.resident(text(number))] == [survivor]


def test_inside_the_window_age_and_not_version_decides(make_psrl):
    engine = make_psrl(lag=1)
    fill(engine, ["1", "2"])
    engine.touch(text(10), "1~")
    engine.evict(16)
    assert left(engine) == {"1": 16}


def test_dead_version_goes_before_a_live_one_that_is_used_least(make_psrl):
    engine = make_psrl()
    fill(engine, ["1"])
    engine.trainer.update("2")
    engine.run(text(20))
    engine.touch(text(10), "1")
    engine.evict(16)
    assert left(engine) == {"2": 16}


@pytest.mark.parametrize("page_size", [1, 4])
def test_rust_core_by_priority_evicts_the_oldest_version_first(page_size):
    engine = OfflineEngine(core="rust", policy="priority", page_size=page_size)
    fill(engine, ["1", "2", "3"], per_version=2)
    for version in "123":
        for number in range(2):
            engine.touch(text(int(version) * 10 + number), version)
    engine.touch(text(10), "1")
    assert drain(engine) == ["1", "2", "3"]


def test_retired_version_leaves_nothing_and_others_stay(make, monkeypatch):
    engine = make()
    fill(engine, ["1", "2"], per_version=3)
    evicted = watch_evicted_leaves(engine, monkeypatch)
    assert engine.tree.retire("1") == (48, 0)
    assert left(engine) == {"2": 48}
    assert evicted
    assert engine.tree.retire("1") == (0, 0)


def test_retired_version_leaves_no_shared_prefix(make):
    """A prefix that several texts share is an inner node, also after some of its branches were evicted."""
    engine = make()
    stem = text(1, 8)
    for number in (2, 3, 4):
        engine.run(stem + text(number, 8))
    engine.evict(16)
    assert engine.tree.check_integrity() == []
    assert sum(left(engine).values()) == 16
    engine.evict(8)
    assert left(engine) == {"1": 8}
    assert engine.tree.retire("1") == (8, 0)
    assert left(engine) == {}


def test_retired_version_keeps_what_a_request_holds_until_it_ends(make, monkeypatch):
    engine = make()
    stem = text(1, 8)
    engine.run(stem + text(2, 8))
    engine.run(stem + text(3, 8))
    req = engine.request([*stem, *text(2, 8), 5, 5])
    assert engine.admit(req)
    watch_evicted_leaves(engine, monkeypatch)
    engine.trainer.update("2")
    assert engine.tree.retire("1") == (8, 0)
    assert left(engine) == {"1": 16}
    engine.generate(req, [1])
    engine.finish(req)
    kept = 18 // engine.page_size * engine.page_size
    assert left(engine) == {"1": kept}
    assert engine.tree.retire("1") == (kept, 0)


def test_retired_version_keeps_what_is_pinned_until_it_is_unpinned(make, monkeypatch):
    engine = make()
    engine.run(text(1))
    engine.run(text(2))
    watch_evicted_leaves(engine, monkeypatch)
    pin, dropped = engine.tree.pins.pin("pin", "owner", engine.key(text(1, 8)))
    assert (pin.tokens, pin.tag, dropped) == (8, "1", [])
    engine.trainer.update("2")
    assert engine.tree.retire("1") == (24, 0)
    assert (left(engine), engine.resident(text(1), "1")) == ({"1": 8}, 8)
    assert engine.tree.retire("1") == (0, 0)
    engine.tree.pins.unpin("pin")
    assert engine.tree.retire("1") == (8, 0)


def test_pressure_never_evicts_what_is_pinned(make, monkeypatch):
    engine = make(slots=128)
    engine.run(text(1))
    engine.tree.pins.pin("pin", "owner", engine.key(text(1)))
    watch_evicted_leaves(engine, monkeypatch)
    for number in range(2, 20):
        engine.run(text(number, 32))
    assert engine.resident(text(1)) == 16
    assert engine.tree.check_integrity() == []
    engine.tree.pins.unpin("pin")
    engine.evict(128)
    assert engine.resident(text(1)) == 0


def test_retiring_the_dead_keeps_the_window(make):
    engine = make(lag=1)
    fill(engine, ["1", "2", "3"])
    assert engine.tree.retire_dead() == ["1~"]
    assert left(engine) == {"2": 16, "3": 16}
    assert engine.tree.retire_dead() == []


def pinned(engine):
    return [pin["pin_id"] for pin in engine.tree.pins.list()]


def test_over_budget_the_oldest_pin_gives_way(make):
    engine = make(psrl={"sglang": {"pin_budget_tokens": 32}})
    for number in (1, 2, 3):
        engine.run(text(number))
    for number in (1, 2):
        engine.tree.pins.pin(f"pin-{number}", "owner", engine.key(text(number)))
    _, dropped = engine.tree.pins.pin("pin-3", "other", engine.key(text(3)))
    assert [pin.pin_id for pin in dropped] == ["pin-1"]
    assert (pinned(engine), engine.tree.pins.tokens) == (["pin-2", "pin-3"], 32)
    assert engine.tree.pins.of_owner("other") == ["pin-3"]
    assert engine.tree.protected_size() == 32
    for name in ("pin-2", "pin-3"):
        engine.tree.pins.unpin(name)


def test_pin_above_the_whole_budget_is_refused_and_drops_nothing(make):
    engine = make(psrl={"sglang": {"pin_budget_tokens": 16}})
    engine.run(text(1))
    engine.run(text(2, 32))
    engine.tree.pins.pin("pin", "owner", engine.key(text(1)))
    with pytest.raises(PinRefused, match="the prefix holds 32 tokens on the device, the pin budget is 16"):
        engine.tree.pins.pin("large", "owner", engine.key(text(2, 32)))
    with pytest.raises(PinRefused, match="in use"):
        engine.tree.pins.pin("pin", "owner", engine.key(text(1)))
    assert pinned(engine) == ["pin"]
    engine.tree.pins.unpin("pin")
    with pytest.raises(KeyError):
        engine.tree.pins.unpin("pin")


def test_pin_of_nothing_takes_no_budget(make):
    engine = make()
    assert engine.tree.pins.pin("pin", "owner", engine.key(text(1))) == (None, [])
    assert pinned(engine) == []


def test_budget_is_the_smallest_of_half_the_pool_the_tokens_and_the_blocks(make):
    assert make(slots=64).tree.pins.budget_tokens == 32
    few_blocks = make(psrl={"lmcache": {"gpu_pin_block_budget": 3}})
    assert few_blocks.tree.pins.budget_tokens == 3 * few_blocks.page_size


def test_reset_of_the_tree_forgets_pins_and_versions(make):
    engine = make()
    engine.run(text(1))
    engine.tree.pins.pin("pin", "owner", engine.key(text(1)))
    engine.tree.reset()
    engine.allocator.clear()
    assert (pinned(engine), left(engine)) == ([], {})
    assert engine.run(text(1)) == 0
    engine.tree.pins.pin("pin", "owner", engine.key(text(1)))
    engine.tree.pins.unpin("pin")
