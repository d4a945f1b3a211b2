"""The disk tier: what was written is found, also by the next process, and never takes more than its budget."""

import os
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from store_support import (
    CHUNK_PAGES,
    FILE_BYTES,
    LAYOUT,
    check_disk,
    cut,
    image,
    keys_of,
    kv_files,
    make_disk,
    pages_on,
    payload_of,
    wanted,
    write_all,
)

from psrl_sglang.keys import KVLayout, PoolLayout, count, key_at
from psrl_sglang.store.arena import Arena

ODD_LAYOUT = replace(LAYOUT, pools=(PoolLayout("kv", 100),))  # nothing is aligned for O_DIRECT


# ---- what was written is found ----


@pytest.mark.parametrize("layout", [LAYOUT, ODD_LAYOUT], ids=["aligned", "odd"])
@pytest.mark.parametrize("direct_io", [True, False])
def test_what_was_written_reads_back_to_the_page(tmp_path: Path, layout: KVLayout, direct_io: bool) -> None:
    disk = make_disk(tmp_path, layout=layout, direct_io=direct_io)
    size = layout.pools[0].page_bytes
    keys = keys_of(10, layout=layout)
    assert write_all(disk, keys, layout=layout) == [True] * 3
    for pages in range(13):
        asked = keys_of(pages, layout=layout)
        assert pages_on(disk, asked, page_bytes=size) == min(pages, 10)
    assert pages_on(disk, keys_of([*range(6), "else"], layout=layout), page_bytes=size) == 6
    tail = disk.find(wanted(keys, start=5))
    assert [(found.first, found.pages) for found in tail] == [(1, 3), (0, 2)]
    check_disk(disk, tmp_path)
    assert disk._stats.total("errors") == 0
    disk.close()


def takes_direct(path: Path) -> bool:
    try:
        os.close(os.open(path / "probe", os.O_CREAT | os.O_RDWR | os.O_DIRECT))
    except OSError:
        return False
    return True


@pytest.mark.parametrize("page_bytes", [4096, 100])
def test_aligned_pages_go_past_the_page_cache(
    tmp_path: Path, page_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout = replace(LAYOUT, pools=(PoolLayout("kv", page_bytes),))
    arena = Arena(2, CHUNK_PAGES * page_bytes)
    keys = keys_of(CHUNK_PAGES, layout=layout)
    arena.view(0, 0, arena.slot_bytes)[:] = payload_of(keys, page_bytes)
    disk = make_disk(tmp_path, layout=layout)
    flags: list[int] = []
    open_file = os.open

    def record(path: Any, how: int, *args: Any, **options: Any) -> int:
        if ".kv" in str(path):
            flags.append(how & os.O_DIRECT)
        return open_file(path, how, *args, **options)

    monkeypatch.setattr(os, "open", record)
    assert disk.write(replace(image(keys, layout=layout), payload=arena.view(0, 0, arena.slot_bytes)))
    (found,) = disk.find(wanted(keys))
    into = [arena.view(1, page * page_bytes, page_bytes) for page in range(CHUNK_PAGES)]
    assert disk.read(found, wanted(keys), into)
    assert bytes(arena.view(1, 0, arena.slot_bytes)) == payload_of(keys, page_bytes)
    is_direct = page_bytes == 4096 and takes_direct(tmp_path)
    assert [bool(flag) for flag in flags][-2:] == [is_direct] * 2
    disk.close()


def test_a_restart_finds_everything_and_the_order_of_use(tmp_path: Path) -> None:
    disk = make_disk(tmp_path)
    sequences = [keys_of([n] * 8, tag=tag) for n, tag in enumerate("1122")]
    for keys, tag in zip(sequences, "1122", strict=True):
        assert all(write_all(disk, keys, tag=tag))
    ages = {0: 40, 1: 10, 2: 30, 3: 20}
    for file in kv_files(tmp_path):
        (n,) = (n for n, keys in enumerate(sequences) if file.stem in (key.hex() for key in _all(keys)))
        os.utime(file, (1e9 - ages[n], 1e9 - ages[n]))
    assert pages_on(disk, sequences[0]) == 8
    disk.close()

    again = make_disk(tmp_path)
    assert again.status()["pages_by_tag"] == {"1": 16, "2": 16}
    check_disk(again, tmp_path)
    left = []
    while len(again.index):
        victim = again.index.victim()
        assert victim is not None
        left.append(next(n for n, keys in enumerate(sequences) if victim.keys in keys))
        again._evict(victim, "full")
    assert left == [2, 2, 3, 3, 1, 1, 0, 0]
    assert kv_files(tmp_path) == []
    again.close()


def _all(keys: bytes) -> list[bytes]:
    return [key_at(keys, page) for page in range(count(keys))]


def test_fifo_goes_by_age_also_after_a_restart(tmp_path: Path) -> None:
    disk = make_disk(tmp_path, policy="FIFO")
    for n in range(3):
        disk.write(image(keys_of([n])))
    for age, n in enumerate((2, 1, 0)):
        os.utime(disk.directory.file("1", keys_of([n])), (1e9 + age, 1e9 + age))
    assert pages_on(disk, keys_of([2])) == 1
    disk.close()
    again = make_disk(tmp_path, policy="FIFO")
    assert again.index.victim().keys == keys_of([2])  # type: ignore[union-attr]
    again.close()


def test_a_grown_chunk_replaces_the_shorter_one(tmp_path: Path) -> None:
    disk = make_disk(tmp_path)
    keys = keys_of(5)
    for pages in (1, 3, 4):
        assert disk.write(image(keys, 0, pages))
        assert len(kv_files(tmp_path)) == 1
        assert pages_on(disk, keys) == pages
    assert disk.write(image(keys, 0, 2)), "it is here already"
    assert disk.write(image(keys, 4, 5))
    assert len(kv_files(tmp_path)) == 2
    check_disk(disk, tmp_path)
    disk.close()


def test_a_branch_stores_only_what_is_its_own_and_survives_its_trunk(tmp_path: Path) -> None:
    disk = make_disk(tmp_path)
    one, other = keys_of([0, 0, 1]), keys_of([0, 0, 2, 2])
    assert disk.write(image(one))
    assert disk.write(image(other))
    assert disk.write(image(keys_of([0, 0, 1, 1]))), "the trunk grows"
    assert sorted(chunk.pages for chunk in disk.index.chunks()) == [2, 4]
    for keys in (one, other, keys_of([0, 0, 1, 1])):
        assert pages_on(disk, keys) == count(keys)
    (trunk,) = (chunk for chunk in disk.index.chunks() if not chunk.start)
    assert trunk.children == 1, "so that the branch goes first"
    disk.close()
    again = make_disk(tmp_path)
    assert pages_on(again, other) == 4
    check_disk(again, tmp_path)
    again.close()


def test_a_lost_head_can_be_written_again_before_its_tail(tmp_path: Path) -> None:
    disk = make_disk(tmp_path)
    keys = keys_of([0, 0, 1, 1])
    disk.write(image(keys_of([0, 0, 2, 2])))
    disk.write(image(keys))  # its own part begins in the middle
    disk.directory.file("1", key_at(keys_of([0, 0, 2, 2]), 3)).unlink()
    assert pages_on(disk, keys) == 0
    assert disk.write(image(keys))
    assert pages_on(disk, keys) == 4
    assert disk.write(image(keys_of([0, 0, 2, 2])))
    assert pages_on(disk, keys_of([0, 0, 2, 2])) == 4
    check_disk(disk, tmp_path)
    disk.close()


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(st.lists(st.sampled_from([0, 0, 1]), min_size=1, max_size=9), min_size=1, max_size=12),
    st.integers(2, 12),
)
def test_whatever_is_written_in_whatever_order(
    tmp_path_factory: Any, sequences: list[list[int]], files: int
) -> None:
    path = tmp_path_factory.mktemp("disk")
    disk = make_disk(path, budget_bytes=60_000 + files * FILE_BYTES)
    for tokens in sequences:
        keys = keys_of(tokens)
        for first in range(0, len(tokens), CHUNK_PAGES):
            part = image(keys, first, min(first + CHUNK_PAGES, len(tokens)))
            if disk.write(part):
                assert pages_on(disk, cut(keys, 0, first + part.pages)) == first + part.pages
        check_disk(disk, path)
    best = {tuple(tokens): pages_on(disk, keys_of(tokens)) for tokens in sequences}
    disk.close()
    again = make_disk(path, budget_bytes=disk.budget_bytes)
    assert {tokens: pages_on(again, keys_of(tokens)) for tokens in best} == best
    reachable = {key for tokens in best for key in _all(keys_of(tokens)) if key in again.index}
    assert sum(chunk.pages for chunk in again.index.chunks()) == len(reachable)
    check_disk(again, path)
    again.clear()
    assert kv_files(path) == []
    assert list(again.directory.path.iterdir()) == [again.directory.path / "LOCK"]
    again.close()


def test_row_16_files_are_spread_over_folders_and_a_look_up_asks_the_index_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """sglang#28653: one flat directory, scanned for every look-up."""
    disk = make_disk(tmp_path)
    keys = keys_of(400)
    assert all(write_all(disk, keys))
    folders = {file.parent for file in kv_files(tmp_path)}
    assert len(folders) > 10
    assert max(len(list(folder.iterdir())) for folder in folders) < 30

    def refuse(*_: Any, **__: Any) -> Any:
        raise AssertionError("a look-up asked the file system")

    with monkeypatch.context() as patch:
        for name in ("stat", "lstat", "scandir", "listdir", "open", "access"):
            patch.setattr(os, name, refuse)
        found = disk.find(wanted(keys))
    assert sum(one.pages for one in found) == 400
    disk.close()


def test_several_tags_are_dropped_one_by_one(tmp_path: Path) -> None:
    disk = make_disk(tmp_path)
    empty_bytes = disk.used_bytes
    for tag in "123":
        write_all(disk, keys_of(6, tag=tag), tag=tag)
    assert disk.drop_tag("2") == 6
    assert disk.drop_tag("none") == 0
    assert [pages_on(disk, keys_of(6, tag=tag), tag=tag) for tag in "123"] == [6, 0, 6]
    assert len(kv_files(tmp_path)) == 4
    assert disk.clear() == 12
    assert disk.used_bytes == empty_bytes
    check_disk(disk, tmp_path)
    disk.close()


@pytest.mark.parametrize("drop", ["clear", "drop_tag"])
def test_what_is_dropped_while_the_index_loads_does_not_come_back(
    tmp_path: Path, drop: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = make_disk(tmp_path)
    write_all(disk, keys_of(4))
    disk.close()
    again = make_disk(tmp_path, load=False)
    monkeypatch.setattr(
        "psrl_sglang.store.disk.remove_empty_folders",  # at the end of the walk
        lambda _path: again.clear() if drop == "clear" else again.drop_tag("1"),
    )
    again.load_index()
    assert kv_files(tmp_path) == []
    assert len(again.index) == 0
    check_disk(again, tmp_path)
    again.close()


def test_what_is_dropped_while_it_is_written_does_not_land(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = make_disk(tmp_path)
    write = disk._files.write

    def write_late(*args: Any) -> int:
        size_bytes = write(*args)
        disk.clear()
        return size_bytes

    monkeypatch.setattr(disk._files, "write", write_late)
    assert not disk.write(image(keys_of(4)))
    assert list(disk.directory.path.iterdir()) == [disk.directory.path / "LOCK"]
    check_disk(disk, tmp_path)
    disk.close()


def test_pages_that_are_being_written_are_not_written_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = make_disk(tmp_path)
    write, meanwhile = disk._files.write, []

    def write_late(*args: Any) -> int:
        meanwhile.append(disk.write(image(keys_of(4))) or disk.write(image(keys_of([0, 1, 2, 9]))))
        return write(*args)

    monkeypatch.setattr(disk._files, "write", write_late)
    assert disk.write(image(keys_of(4)))
    assert meanwhile == [False]
    assert disk._stats.total("rejected", tier="disk", reason="busy") == 8
    assert pages_on(disk, keys_of(4)) == 4
    check_disk(disk, tmp_path)
    disk.close()


def test_writers_of_the_same_pages_leave_one_file(tmp_path: Path) -> None:
    disk = make_disk(tmp_path)
    keys = keys_of(16)
    parts = [image(keys, first, first + CHUNK_PAGES) for first in range(0, 16, CHUNK_PAGES)] * 8
    threads = [threading.Thread(target=disk.write, args=(part,)) for part in parts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert pages_on(disk, keys) == 16
    assert len(kv_files(tmp_path)) == 4
    check_disk(disk, tmp_path)
    disk.close()
