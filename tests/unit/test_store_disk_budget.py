"""The disk tier never takes more than its budget, and what goes to make room goes in the right order."""

import os
from dataclasses import replace
from pathlib import Path

import pytest
from store_support import (
    CHUNK_PAGES,
    FILE_BYTES,
    LAYOUT,
    check_disk,
    image,
    keys_of,
    make_disk,
    pages_on,
    read_one,
    wanted,
    write_all,
)

from psrl_sglang.keys import KVLayout
from psrl_sglang.store.directory import disk_bytes


def test_lmcache_10_the_directory_never_takes_more_than_the_budget(tmp_path: Path) -> None:
    """LMCache#4725: a limit that limited nothing."""
    disk = make_disk(tmp_path, budget_bytes=40_000 + 6 * FILE_BYTES)
    for n in range(60):
        keys = keys_of([n] * 7, tag=str(n % 9))
        write_all(disk, keys, tag=str(n % 9))
        check_disk(disk, tmp_path)
    assert disk_bytes(tmp_path) > disk.budget_bytes - 3 * FILE_BYTES, "and uses it"
    disk.close()
    smaller = make_disk(tmp_path, budget_bytes=40_000 + 2 * FILE_BYTES)
    check_disk(smaller, tmp_path)
    assert pages_on(smaller, keys_of([59] * 7, tag=str(59 % 9)), tag=str(59 % 9)) == 7, "the newest is left"
    smaller.close()


def test_a_chunk_larger_than_the_budget_pushes_nothing_out(tmp_path: Path) -> None:
    disk = make_disk(tmp_path, budget_bytes=60_000 + FILE_BYTES)
    keys = keys_of(4)
    assert disk.write(image(keys))
    assert not disk.write(image(keys_of([1] * 40)))
    assert disk._stats.total("rejected", tier="disk", reason="full") == 40
    assert pages_on(disk, keys) == 4
    disk.close()


@pytest.mark.parametrize("policy", ["LRU", "FIFO"])
def test_a_sequence_larger_than_the_budget_keeps_its_head(tmp_path: Path, policy: str) -> None:
    disk = make_disk(tmp_path, budget_bytes=60_000 + 3 * FILE_BYTES, policy=policy)
    keys = keys_of(40)
    results = write_all(disk, keys)
    assert not all(results)
    assert pages_on(disk, keys) == len(disk.index) == CHUNK_PAGES * results.index(False)
    disk.close()


def test_a_chunk_without_what_it_continues_is_not_taken_unless_its_pool_has_windows(tmp_path: Path) -> None:
    disk = make_disk(tmp_path)
    keys, window = keys_of(8), keys_of(8, pool="swa")
    assert not disk.write(image(keys, 4, 8))
    assert disk._stats.total("rejected", tier="disk", reason="headless") == 4
    assert all(write_all(disk, keys))
    assert disk.write(image(window, 4, 8, pool_number=1))
    want = wanted(window, pool="swa", start=4)
    assert read_one(disk, disk.find(want)[0], want, 2048)
    assert pages_on(disk, keys) == 8
    check_disk(disk, tmp_path)
    disk.close()


def test_dead_tags_go_first_also_after_a_restart(tmp_path: Path) -> None:
    dead: dict[str, int] = {}
    budget_bytes = 60_000 + 4 * FILE_BYTES
    disk = make_disk(tmp_path, budget_bytes=budget_bytes, dead_rank=dead.get)
    for tag in ("new", "old", "older"):
        assert all(write_all(disk, keys_of(4, tag=tag), tag=tag))
    dead.update(old=2, older=1)
    disk.close()
    again = make_disk(tmp_path, budget_bytes=budget_bytes, dead_rank=dead.get)
    gone = []
    for n in range(8):
        assert again.write(image(keys_of([n] * 4, tag="fresh"), tag="fresh"))
        gone += [tag for tag in ("new", "old", "older") if tag not in again.status()["pages_by_tag"]]
    assert list(dict.fromkeys(gone)) == ["older", "old", "new"]
    check_disk(again, tmp_path)
    again.close()


def test_what_other_layouts_left_goes_first_the_longest_unused_before_the_rest(tmp_path: Path) -> None:
    other = [replace(LAYOUT, model=f"other-{n}") for n in range(3)]
    for n, layout in enumerate(other):
        disk = make_disk(tmp_path, layout=layout)
        assert disk.write(image(keys_of(4, layout=layout), layout=layout))
        disk.close()
        os.utime(disk.directory.path / "LOCK", (1e9 - [20, 30, 10][n],) * 2)
    mine = make_disk(tmp_path, budget_bytes=disk_bytes(tmp_path) + FILE_BYTES + 40_000)
    gone: list[str] = []
    for n in range(12):
        assert mine.write(image(keys_of([n] * 4)))
        check_disk(mine, tmp_path)
        gone += [f"{n}" for n, one in enumerate(other) if not _base(tmp_path, one).exists()]
    assert list(dict.fromkeys(gone)) == ["1", "0", "2"]
    assert mine._stats.total("evicted_bytes", reason="other layout") > 3 * FILE_BYTES
    mine.close()


def _base(path: Path, layout: KVLayout) -> Path:
    return path / "psrl-kv" / layout.digest.hex()
