"""Each engine has a directory of its own, finds it again, and finds nothing in those of others."""

import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from store_support import FILE_BYTES, LAYOUT, keys_of, make_disk, pages_on, wanted, write_all

from psrl_sglang.keys import PoolLayout
from psrl_sglang.store import directory
from psrl_sglang.store.disk import DiskTier


@pytest.mark.parametrize(
    "changes",
    [
        {"model": "other"},
        {"dtype": "float8_e4m3fn"},
        {"page_tokens": 32},
        {"layers": "4-7"},
        {"rank": "tp0/2"},
        {"form": "layer-first"},
        {"pools": (PoolLayout("kv", 2048), PoolLayout("swa", 2048))},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_nothing_is_found_under_another_layout(tmp_path: Path, changes: dict[str, Any]) -> None:
    disk = make_disk(tmp_path)
    write_all(disk, keys_of(8))
    disk.close()
    layout = replace(LAYOUT, **changes)
    other = make_disk(tmp_path, layout=layout)
    assert other.find(wanted(keys_of(8, layout=layout))) == []
    assert other.find(wanted(keys_of(8))) == []
    assert other.find(wanted(keys_of(8, tag="2"), tag="2")) == []
    other.close()


def test_two_engines_of_one_layout_have_a_directory_each(tmp_path: Path) -> None:
    one, other = make_disk(tmp_path), make_disk(tmp_path)
    assert one.directory.path != other.directory.path
    assert all(write_all(one, keys_of(4)))
    assert pages_on(other, keys_of(4)) == 0
    assert all(write_all(other, keys_of([9] * 4)))
    one.clear()
    assert pages_on(other, keys_of([9] * 4)) == 4
    one.close()
    one.close()
    again = make_disk(tmp_path)
    assert again.directory.path == one.directory.path, "a restarted engine takes the first free one"
    again.close()
    other.close()


def test_ranks_that_restart_together_leave_each_other_what_they_had(tmp_path: Path) -> None:
    layouts = [replace(LAYOUT, rank=f"tp{rank}/2") for rank in range(2)]
    budget_bytes = 40_000 + 3 * FILE_BYTES  # of each; both together have more than that
    for _ in range(2):
        disks = [
            make_disk(tmp_path, layout=layout, load=False, budget_bytes=budget_bytes) for layout in layouts
        ]
        for disk, layout in zip(disks, layouts, strict=True):
            disk.load_index()
            assert all(write_all(disk, keys_of(8, layout=layout), layout=layout))
        for disk, layout in zip(disks, layouts, strict=True):
            assert pages_on(disk, keys_of(8, layout=layout)) == 8
            disk.close()


def test_an_engine_that_starts_while_another_looks_around_finds_its_own_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    layouts = [replace(LAYOUT, rank=f"tp{rank}/2") for rank in range(2)]
    for layout in layouts:
        make_disk(tmp_path, layout=layout).close()
    mine = make_disk(tmp_path, layout=layouts[0], load=False)
    lock = directory.lock_of
    started: list[DiskTier] = []
    starting = threading.Thread(
        target=lambda: started.append(make_disk(tmp_path, layout=layouts[1], load=False))
    )

    def lock_and_dwell(path: Path) -> int | None:
        held = lock(path)
        if threading.current_thread() is not starting:
            starting.start()
            starting.join(0.2)  # it waits until the look around is over
        return held

    monkeypatch.setattr(directory, "lock_of", lock_and_dwell)
    mine.load_index()
    starting.join()
    assert [disk.directory.path.name for disk in (mine, *started)] == ["0", "0"]
    for disk in (mine, *started):
        disk.close()
