"""The storage behind HiCache on SGLang's own host pools: tags, disk, several pools, and what is refused."""

import json
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("sglang")

from hicache_support import Opened, after, entry, hashes, slots_of, storage_config, window  # noqa: E402
from sglang.srt.mem_cache.hicache_storage import PoolHitPolicy, PoolName, PoolTransfer  # noqa: E402

from psrl_sglang.engine.hicache_storage import PsrlHiCacheStorage  # noqa: E402
from psrl_sglang.engine.tagbook import TagBook  # noqa: E402
from psrl_sglang.engine.tier_start import select_route  # noqa: E402


@pytest.fixture
def opened():
    made = Opened()
    yield made
    made.storage.close()


# ---- one pool ---------------------------------------------------------------------------------------------------


def test_pages_come_back_where_sglang_wants_them(opened):
    storage = opened.storage
    storage.tags.note(hashes(1, 0, 1)[0], "1")
    expected = opened.fill_many([10, 3, 22])
    assert storage.batch_exists(hashes(1, 0, 3)) == 0
    assert storage.batch_set_v1(hashes(1, 0, 3), slots_of([10, 3, 22])) == [True] * 3
    more = opened.fill_many([4, 5])
    assert storage.batch_set_v1(hashes(1, 3, 5), slots_of([4, 5]), after(1, 3)) == [True] * 2
    assert storage.batch_exists(hashes(1, 0, 6)) == 5
    assert storage.batch_exists(hashes(1, 2, 6), after(1, 2)) == 3
    assert storage.batch_get_v1(hashes(1, 1, 6), slots_of([40, 41, 42, 43, 44]), after(1, 1)) == [True] * 4 + [
        False
    ]
    opened.assert_reads([40, 41, 42, 43], [*expected[1:], *more])
    assert opened.store.dram.index.chunk_of(opened.storage._keys("kv", hashes(1, 4, 5), "1")).start == 4
    stats = storage.get_stats()
    assert stats.backup_pgs == [3, 2]
    assert stats.prefetch_pgs == [4]
    assert storage.get_stats().backup_pgs == []
    assert opened.store.check_integrity() == []


def test_without_a_tag_nothing_is_found_read_or_stored_and_it_is_counted(opened):
    storage, keys = opened.storage, hashes(1, 0, 2)
    assert storage.batch_exists(keys) == 0
    assert storage.batch_set_v1(keys, slots_of([0, 1])) == [False, False]
    assert storage.batch_get_v1(keys, slots_of([0, 1])) == [False, False]
    assert storage.batch_exists_v2(keys, [window(PoolName.SWA, 1, 0, 2, [0, 1])]).kv_hit_pages == 0
    assert storage.get(keys[0]) is None
    assert storage.batch_get(keys) == [None, None]
    assert not storage.set(keys[0], torch.zeros(1))
    assert not storage.batch_set(keys, [torch.zeros(1)] * 2)
    assert not storage.exists(keys[0])
    assert opened.store.stats.total("untold_pages", call="write") == 5
    assert len(opened.store.dram.index) == 0


def test_the_same_hashes_under_another_tag_are_other_pages(opened):
    storage, keys = opened.storage, hashes(1, 0, 2)
    storage.tags.note(keys[0], "1")
    opened.fill_many([0, 1])
    storage.batch_set_v1(keys, slots_of([0, 1]))
    storage.tags.note(keys[0], "2")
    assert storage.batch_exists(keys) == 0
    storage.tags.note(keys[0], "1")
    assert storage.batch_exists(keys) == 2


def test_slots_that_are_no_whole_pages_are_neither_read_nor_written(opened):
    storage, keys = opened.storage, hashes(1, 0, 2)
    storage.tags.note(keys[0], "1")
    for slots in (slots_of([0]), slots_of([0, 1]) + 1, slots_of([0, 1]).flip(0), None):
        assert storage.batch_set_v1(keys, slots) == [False, False]
    assert opened.store.stats.total("errors", reason="host_pages") == 4


def test_retire_and_clear_also_take_what_waits_to_be_written(opened):
    storage = opened.storage
    for sequence, tag in ((1, "1"), (2, "2"), (3, "2")):
        storage.tags.note(hashes(sequence, 0, 1)[0], tag)
        opened.fill(sequence)
        assert storage.batch_set_v1(hashes(sequence, 0, 1), slots_of([sequence])) == [True]
    assert storage.drop_tag("2") == {"dram": 2}
    assert storage.batch_set_v1(hashes(2, 0, 1), slots_of([2])) == [False]
    assert storage.batch_exists(hashes(1, 0, 1)) == 1
    storage.clear()
    assert storage.batch_set_v1(hashes(1, 0, 1), slots_of([1])) == [False]
    assert opened.store.dram.pages_by_tag() == {}


def test_what_is_being_written_during_a_clear_does_not_land_behind_it(opened):
    storage, keys = opened.storage, hashes(1, 0, 2)
    storage.tags.note(keys[0], "1")
    reserve = opened.store.dram.reserve

    def clear_and_reserve(*args):
        room = reserve(*args)
        storage.clear()
        return room

    opened.store.dram.reserve = clear_and_reserve
    assert storage.batch_set_v1(keys, slots_of([0, 1])) == [False, False]
    assert opened.store.dram.pages_by_tag() == {}
    assert opened.store.check_integrity() == []


def test_what_finds_no_room_is_said_not_to_be_stored():
    opened = Opened(slots=2)
    keys = hashes(1, 0, 12)
    opened.storage.tags.note(keys[0], "1")
    opened.fill_many(range(12))
    stored = opened.storage.batch_set_v1(keys, slots_of(range(12)))
    assert stored == [True] * 8 + [False] * 4
    assert opened.storage.batch_exists(keys) == 8


# ---- disk -------------------------------------------------------------------------------------------------------


def test_a_sequence_on_disk_is_found_whole_and_read_through_a_small_dram(tmp_path):
    opened = Opened(disk_path=tmp_path)
    keys = hashes(1, 0, 24)
    opened.storage.tags.note(keys[0], "1")
    expected = opened.fill_many(range(24))
    assert opened.storage.batch_set_v1(keys, slots_of(range(24))) == [True] * 24
    opened.storage.close()

    again = Opened(entry(layout="page_first_direct"), slots=4, disk_path=tmp_path)
    again.storage.tags.note(keys[0], "1")
    assert again.storage.batch_exists([*keys, *hashes(1, 24, 26)]) == 24
    assert again.storage.batch_get_v1(keys, slots_of(range(30, 54))) == [True] * 24
    again.assert_reads(range(30, 54), expected)
    in_dram = sum(piece.pages for piece in again.store.dram.match(again.storage._keys("kv", keys, "1")))
    assert in_dram < 24
    assert again.storage.batch_exists(keys) == 24
    assert again.store.check_integrity() == []
    again.storage.close()


def test_a_torn_file_ends_what_is_read_and_is_not_found_again(tmp_path):
    opened = Opened(disk_path=tmp_path)
    keys = hashes(1, 0, 24)
    opened.storage.tags.note(keys[0], "1")
    expected = opened.fill_many(range(24))
    opened.storage.batch_set_v1(keys, slots_of(range(24)))
    assert opened.store.settle(5.0)
    opened.store.dram.clear()
    name = opened.storage._keys("kv", keys[15:16], "1").hex() + ".kv"
    (torn,) = tmp_path.rglob(name)
    written = bytearray(torn.read_bytes())
    written[4096] ^= 1
    torn.write_bytes(written)
    assert opened.storage.batch_exists(keys) == 24
    assert opened.storage.batch_get_v1(keys, slots_of(range(30, 54))) == [True] * 12 + [False] * 12
    opened.assert_reads(range(30, 42), expected[:12])
    assert opened.storage.batch_exists(keys) == 12
    opened.storage.close()


# ---- several pools ----------------------------------------------------------------------------------------------


@pytest.fixture(params=["dram", "disk"])
def with_window(request, tmp_path):
    """KV of pages 0 … 12, and of the window pool 3 … 6 and 8 … 10; in DRAM, or only on disk."""
    entries = (entry(), entry(name=PoolName.SWA, layers=1), entry(name=PoolName.DRAFT, layers=2))
    opened = Opened(*entries, disk_path=tmp_path)
    storage = opened.storage
    storage.tags.note(hashes(1, 0, 1)[0], "1")
    opened.kv = opened.fill_many(range(12))
    opened.swa = opened.fill_many(range(10), PoolName.SWA)
    assert all(storage.batch_set_v1(hashes(1, 0, 12), slots_of(range(12))))
    for first, last in ((3, 6), (8, 10)):
        transfer = window(PoolName.SWA, 1, first, last, range(first, last))
        assert storage.batch_set_v2([transfer], after(1, first)) == {"swa": [True] * (last - first)}
    if request.param == "disk":
        assert opened.store.settle(5.0)
        assert opened.store.dram.clear() == 17
    yield opened
    storage.close()


def test_a_window_pool_allows_exactly_the_lengths_whose_window_is_there(with_window):
    storage, keys = with_window.storage, hashes(1, 0, 14)
    for pages, lengths in ((1, [4, 5, 6, 9, 10]), (2, [5, 6, 10]), (3, [6]), (4, [])):
        query = PoolTransfer(name=PoolName.SWA, keys=keys[:pages], hit_policy=PoolHitPolicy.TRAILING_PAGES)
        found = storage.batch_exists_v2(keys, [query])
        assert found.restorable_prefix_pages == lengths, pages
        assert found.kv_hit_pages == max(lengths, default=0)
        assert found.extra_pool_hit_pages == {"kv": 12, "swa": max(lengths, default=0)}
    query = PoolTransfer(name=PoolName.SWA, keys=keys[:2], hit_policy=PoolHitPolicy.TRAILING_PAGES)
    behind = storage.batch_exists_v2(keys[7:], [query], after(1, 7))
    assert behind.restorable_prefix_pages == [3]


def test_a_window_is_read_with_its_kv(with_window):
    storage = with_window.storage
    assert storage.batch_get_v1(hashes(1, 0, 10), slots_of(range(20, 30))) == [True] * 10
    asked = window(PoolName.SWA, 1, 8, 10, [50, 51])
    absent = window(PoolName.SWA, 1, 6, 8, [52, 53])
    absent.name = PoolName.DRAFT
    assert storage.batch_get_v2([asked], after(1, 8)) == {"swa": [True, True]}
    assert storage.batch_get_v2([absent], after(1, 6)) == {"draft": [False, False]}
    with_window.assert_reads(range(20, 30), with_window.kv[:10])
    with_window.assert_reads([50, 51], with_window.swa[8:], PoolName.SWA)


def test_a_pool_that_needs_every_page_cuts_the_hit(with_window):
    storage, keys = with_window.storage, hashes(1, 0, 12)
    draft = PoolTransfer(name=PoolName.DRAFT, host_indices=slots_of(range(7)), keys=keys[:7])
    assert storage.batch_exists_v2(keys, [draft]).kv_hit_pages == 0
    with_window.fill_many(range(7), PoolName.DRAFT)
    assert storage.batch_set_v2([draft]) == {"draft": [True] * 7}
    found = storage.batch_exists_v2(keys, [draft])
    assert (found.kv_hit_pages, found.extra_pool_hit_pages) == (7, {"kv": 12, "draft": 7})
    with pytest.raises(ValueError, match="block_groups"):
        storage.batch_exists_v2(keys, [PoolTransfer(PoolName.DRAFT, hit_policy=PoolHitPolicy.BLOCK_GROUPS)])


# ---- life cycle -------------------------------------------------------------------------------------------------


def test_a_storage_that_nobody_opened_raises_and_so_misses():
    storage = PsrlHiCacheStorage(storage_config())
    for call in (lambda: storage.batch_exists(["00"]), storage.clear, lambda: storage.exists("00")):
        with pytest.raises(RuntimeError, match="--psrl-config"):
            call()
    storage.close()
    with pytest.raises(ValueError, match="interface_v1"):
        PsrlHiCacheStorage(storage_config(extra_config={}))


def test_what_the_user_set_for_hicaches_storage_is_kept():
    server_args = SimpleNamespace(
        enable_hierarchical_cache=True, hicache_storage_backend_extra_config='{"prefetch_threshold": 64}'
    )
    select_route(server_args)
    extra = json.loads(server_args.hicache_storage_backend_extra_config)
    assert server_args.hicache_storage_backend == "dynamic"
    assert (extra["prefetch_threshold"], extra["class_name"]) == (64, PsrlHiCacheStorage.__name__)
    assert extra["interface_v1"]
    assert extra["hicache_storage_pass_prefix_keys"]
    for given in ("@file.json", "[1]"):
        server_args.hicache_storage_backend = None
        server_args.hicache_storage_backend_extra_config = given
        with pytest.raises(SystemExit):
            select_route(server_args)


def test_where_all_ranks_have_the_same_each_writes_to_its_own_store():
    config = storage_config(is_mla_model=True, tp_rank=1, tp_size=2)
    assert not config.is_storage_writer
    assert PsrlHiCacheStorage(config).is_replicated
    assert config.is_storage_writer


def test_the_book_of_tags_is_bounded():
    book = TagBook(most=3)
    for number in range(3):
        book.note(f"h{number}", "1")
    book.note("h0", "2")
    book.note("h3", "1")
    assert [book.tag_of(f"h{number}") for number in range(4)] == ["2", None, "1", "1"]
    book.forget("1")
    assert len(book) == 1
    book.forget()
    assert book.tag_of("h0") is None
