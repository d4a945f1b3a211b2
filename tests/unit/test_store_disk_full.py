"""A file system that is full, read-only or broken: the disk tier goes on reading, gives up nothing in vain, and
writes again when it can."""

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from store_support import (
    FILE_BYTES,
    image,
    keys_of,
    kv_files,
    make_disk,
    pages_on,
    wait_until,
    wanted,
    write_all,
)

from psrl_sglang.keys import key_at
from psrl_sglang.store import disk as disk_module
from psrl_sglang.store.directory import disk_bytes
from psrl_sglang.store.disk import DiskTier


@pytest.fixture(autouse=True)
def short_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_module, "_PAUSE_AFTER_ERROR_S", 0.05)


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """A file system of 8 MiB."""
    path = tmp_path / "small"
    path.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=8m", "psrl-test", str(path)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        pytest.fail(f"this test mounts a small file system, for which it must be root: {done.stderr.strip()}")
    yield path
    while os.path.ismount(path):  # a test may have mounted it over itself
        subprocess.run(["umount", "--lazy", str(path)], check=True)


def mount(*args: str) -> None:
    subprocess.run(["mount", *args], check=True, capture_output=True)


def writes_again(disk: DiskTier) -> None:
    wait_until(lambda: not disk.status()["writes_paused"])


def test_row_16_a_full_disk_is_a_miss_and_recovers(small: Path) -> None:
    """sglang#28653: ENOSPC, for good; LMCache#4991: a store that failed stayed visible."""
    (small / "other").write_bytes(b"x" * (4 << 20))
    disk = make_disk(small, budget_bytes=1 << 30)
    written, refused = [], None
    for n in range(1000):
        keys = keys_of([n] * 40)
        if not disk.write(image(keys)):
            refused = keys
            break
        written.append(keys)
    assert refused is not None
    assert disk._stats.total("errors", direction="write", reason="ENOSPC") == 1
    assert disk.status()["writes_paused"]
    assert not disk.write(image(keys_of([2000]))), "it does not try again at once"
    assert pages_on(disk, refused) == 0
    assert not list(small.rglob("*.tmp-*"))
    assert [pages_on(disk, keys) for keys in written[-20:]] == [40] * 20, "reads go on"
    assert disk.check_integrity() == []

    with open(small / "other", "ab") as other:
        other.write(b"x" * disk_free(small))
    writes_again(disk)
    for _ in range(10):
        if disk.write(image(refused)):
            break
        writes_again(disk)
    assert pages_on(disk, refused) == 40, "it gave way to others and goes on with less"
    (small / "other").unlink()
    writes_again(disk)
    assert all(disk.write(image(keys_of([n] * 40))) for n in range(3000, 3010))
    assert disk.check_integrity() == []
    disk.close()
    again = make_disk(small)
    assert pages_on(again, refused) == 40
    again.close()


def disk_free(path: Path) -> int:
    stat = os.statvfs(path)
    return stat.f_bavail * stat.f_bsize


def test_on_a_read_only_disk_reads_go_on_and_writes_come_back(small: Path) -> None:
    disk = make_disk(small, budget_bytes=60_000 + 4 * FILE_BYTES)
    sequences = [keys_of([n] * 4) for n in range(30)]
    assert all(disk.write(image(keys)) for keys in sequences[:14])
    kept = [keys for keys in sequences[:14] if disk.find(wanted(keys))]
    assert 3 < len(kept) < 14, "the budget is used up"
    mount("--bind", str(small), str(small))  # over itself: the files below stay open for writing
    mount("-o", "remount,bind,ro", str(small))
    for keys in sequences[14:]:
        assert not disk.write(image(keys))
        writes_again(disk)
    assert [pages_on(disk, keys) for keys in kept] == [4] * len(kept), "nothing was given up in vain"
    assert disk.drop_tag("none") == 0
    disk.clear()
    assert disk._stats.total("errors", direction="delete", reason="EROFS") > 0
    assert [pages_on(disk, keys) for keys in kept] == [0] * len(kept), "what is dropped is dropped"
    assert disk.used_bytes >= disk_bytes(small), "but counts until it can be deleted"

    subprocess.run(["umount", str(small)], check=True)
    writes_again(disk)
    assert all(disk.write(image(keys)) for keys in sequences[14:18])
    assert len(kv_files(small)) == len(list(disk.index.chunks()))
    assert disk.check_integrity() == []
    assert disk_bytes(small) <= disk.budget_bytes
    disk.close()


def test_on_a_read_only_disk_with_room_a_write_is_an_error(small: Path) -> None:
    disk = make_disk(small)
    mount("--bind", str(small), str(small))
    mount("-o", "remount,bind,ro", str(small))
    assert not disk.write(image(keys_of(4)))
    assert disk._stats.total("errors", direction="write", reason="EROFS") == 1
    assert disk.status()["writes_paused"]
    subprocess.run(["umount", str(small)], check=True)
    writes_again(disk)
    assert disk.write(image(keys_of(4)))
    assert pages_on(disk, keys_of(4)) == 4
    disk.close()


def test_a_file_that_cannot_be_deleted_stops_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = make_disk(tmp_path, budget_bytes=80_000 + 4 * FILE_BYTES)
    assert disk.write(image(keys_of([0] * 4)))
    stuck = disk.directory.file("1", key_at(keys_of([0] * 4), 3))
    unlink = Path.unlink

    def refuse(path: Path, missing_ok: bool = False) -> None:
        if path == stuck:
            raise PermissionError(1, "Operation not permitted", str(path))
        unlink(path, missing_ok=missing_ok)

    monkeypatch.setattr(Path, "unlink", refuse)
    landed = 0
    for n in range(1, 12):
        landed += disk.write(image(keys_of([n] * 4)))
        writes_again(disk)
        assert disk_bytes(tmp_path) <= disk.used_bytes <= disk.budget_bytes
    assert landed >= 9
    monkeypatch.undo()
    disk.clear()
    disk.write(image(keys_of([99])))
    assert not stuck.exists()
    assert disk.check_integrity() == []
    disk.close()


def test_a_broken_disk_is_asked_for_a_chunk_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = make_disk(tmp_path)
    keys = keys_of(8)
    write_all(disk, keys)

    def fail(*_: object) -> None:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", fail)
        assert pages_on(disk, keys) == 0
    assert disk._stats.total("errors", direction="read", reason="EIO") == 1
    assert pages_on(disk, keys) == 0
    assert disk.write(image(keys, 0, 4))
    assert pages_on(disk, keys) == 8
    disk.close()


def test_a_file_system_that_refuses_direct_io_late_is_used_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = make_disk(tmp_path)
    write = os.pwritev

    def refuse(file: int, parts: list[memoryview], offset: int) -> int:
        if disk._files.direct_io:
            raise OSError(22, "Invalid argument")
        return write(file, parts, offset)

    monkeypatch.setattr(os, "pwritev", refuse)
    assert not disk.write(image(keys_of(4)))
    writes_again(disk)
    assert disk.write(image(keys_of(4)))
    assert pages_on(disk, keys_of(4)) == 4
    disk.close()
