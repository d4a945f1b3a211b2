"""Killed writers, and files that are damaged, foreign, in the wrong place or gone: what the disk tier serves is
right, and all else is a miss."""

import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from store_support import (
    CHUNK_PAGES,
    FILE_BYTES,
    LAYOUT,
    image,
    keys_of,
    kv_files,
    make_disk,
    pages_on,
    read_one,
    wanted,
    write_all,
)
from store_writer import SEQUENCES, TAGS, tokens_of

from psrl_sglang.keys import key_at
from psrl_sglang.store.chunk import BadChunk
from psrl_sglang.store.directory import disk_bytes, read_header

KILLS = 50


# ---- killed in the middle ----


def test_a_writer_killed_at_any_moment_leaves_no_torn_page(tmp_path: Path) -> None:
    budget_bytes = 200_000 + 20 * FILE_BYTES
    path, choose = tmp_path / "kv", random.Random(0)
    script = Path(__file__).with_name("store_writer.py")
    command = [sys.executable, str(script), str(path), str(budget_bytes)]
    served = torn = 0
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
    ) as writer:
        assert writer.stdin is not None
        assert writer.stdout is not None
        for _ in range(KILLS):
            writer.stdin.write("start\n")
            assert writer.stdout.readline() == "writes\n"
            time.sleep(choose.uniform(0.0, 0.01))
            writer.stdin.write("kill\n")
            assert writer.stdout.readline() == "dead\n"
            torn += len(list(path.rglob("*.tmp-*")))
            assert disk_bytes(path) <= budget_bytes
            disk = make_disk(path, budget_bytes=budget_bytes)
            assert disk.directory.path.name == "0"
            assert disk.check_integrity() == []
            assert len(kv_files(path)) == len(list(disk.index.chunks())), "what is there is indexed or deleted"
            assert not list(path.rglob("*.tmp-*"))
            for number in range(SEQUENCES):
                for tag in TAGS:
                    served += pages_on(disk, keys_of(tokens_of(number), tag=tag), tag=tag)  # each is compared
            assert disk._stats.total("checksum_failures") == 0
            assert disk._stats.total("misses_late") == 0
            disk.close()
        writer.stdin.close()
    assert served > KILLS
    assert torn, "no writer was killed in the middle of a file"


# ---- damaged files ----


def flip(at: int) -> Callable[[Path], None]:
    def damage(file: Path) -> None:
        with open(file, "r+b") as stream:
            stream.seek(at)
            byte = stream.read(1)[0]
            stream.seek(at)
            stream.write(bytes([byte ^ 0x10]))

    return damage


def resize(size_bytes: int) -> Callable[[Path], None]:
    return lambda file: os.truncate(file, size_bytes)


DAMAGE = {
    "magic": flip(0),
    "header length": flip(9),
    "header": flip(40),
    "header checksum": lambda file: flip(12 + int.from_bytes(file.read_bytes()[8:12], "little"))(file),
    "first page": flip(4096),
    "last byte": flip(FILE_BYTES - 1),
    "empty": resize(0),
    "cut in the header": resize(100),
    "cut behind the header": resize(4096),
    "cut in the pages": resize(FILE_BYTES - 1),
    "too long": resize(FILE_BYTES + 4096),
    "zeros": lambda file: file.write_bytes(bytes(FILE_BYTES)),
    "foreign": lambda file: file.write_bytes(random.Random(0).randbytes(FILE_BYTES)),
    "gone": lambda file: file.unlink(),
}


@pytest.mark.parametrize("when", ["while it runs", "before a restart"])
@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE.keys())
def test_a_damaged_file_is_a_miss_and_is_deleted(
    tmp_path: Path, damage: Callable[[Path], None], when: str, request: pytest.FixtureRequest
) -> None:
    disk = make_disk(tmp_path)
    keys, other = keys_of(12), keys_of([7] * 4)
    write_all(disk, keys)
    write_all(disk, other)
    file = disk.directory.file("1", key_at(keys, 7))
    damage(file)
    if when == "before a restart":
        disk.close()
        disk = make_disk(tmp_path)
        assert file.exists() == (damage in (DAMAGE["first page"], DAMAGE["last byte"])), (
            "pages are not read yet"
        )
    is_harmless = "too long" in request.node.callspec.id and when == "while it runs"
    assert pages_on(disk, keys) == (12 if is_harmless else 4)
    if not is_harmless:
        assert not file.exists()
        assert pages_on(disk, keys) == 4
        stats = disk._stats
        found_out = [stats.total(name) for name in ("checksum_failures", "bad_files", "misses_late")]
        assert sum(found_out) == (0 if "gone-before" in request.node.callspec.id else 1)
        assert disk.check_integrity() == []
        assert disk.write(image(keys, 4, 8))
    assert pages_on(disk, keys) == 12
    assert pages_on(disk, other) == 4
    disk.close()


def test_files_in_one_anothers_place_are_not_served(tmp_path: Path) -> None:
    disk = make_disk(tmp_path)
    one, other = keys_of([1] * 4), keys_of([2] * 4)
    write_all(disk, one)
    write_all(disk, other)
    files = [disk.directory.file("1", key_at(keys, 3)) for keys in (one, other)]
    shutil.copyfile(files[0], files[1])
    assert pages_on(disk, other) == 0
    assert pages_on(disk, one) == 4
    stray = disk.directory.path / "0123456789abcdef" / files[0].parent.name / files[0].name
    stray.parent.mkdir(parents=True)
    shutil.copyfile(files[0], stray)
    renamed = files[0].with_name("ff" * 16 + ".kv")
    shutil.copyfile(files[0], renamed)
    with pytest.raises(BadChunk, match="named"):
        read_header(renamed)
    other_layout = replace(LAYOUT, model="other")
    foreign = make_disk(tmp_path, layout=other_layout)
    write_all(foreign, keys_of(4, layout=other_layout), layout=other_layout)
    (file,) = kv_files(foreign.directory.path)
    shutil.copytree(file.parents[1], disk.directory.path / file.parents[1].name, dirs_exist_ok=True)
    foreign.clear()
    foreign.close()
    disk.close()
    again = make_disk(tmp_path)
    assert kv_files(tmp_path) == [files[0]]
    assert pages_on(again, one) == 4
    assert again._stats.total("bad_files") == 3
    assert again.check_integrity() == []
    again.close()


def test_files_of_other_makes_stay_and_count(tmp_path: Path) -> None:
    disk = make_disk(tmp_path)
    write_all(disk, keys_of(4))
    disk.close()
    foreign = disk.directory.path / "notes.txt"
    foreign.write_bytes(b"x" * 50_000)
    again = make_disk(tmp_path, budget_bytes=disk_bytes(tmp_path) + FILE_BYTES)
    for n in range(5):
        again.write(image(keys_of([n])))
        assert disk_bytes(tmp_path) <= again.used_bytes <= again.budget_bytes
    assert foreign.stat().st_size == 50_000
    again.close()


def test_row_19_an_index_entry_without_its_file_is_one_miss(tmp_path: Path) -> None:
    """LMCache#1690: the index said hit, and the read failed for ever."""
    disk = make_disk(tmp_path)
    keys = keys_of(4)
    write_all(disk, keys)
    (found,) = disk.find(wanted(keys))
    for file in kv_files(tmp_path):
        file.unlink()
    assert not read_one(disk, found, wanted(keys))
    assert disk.find(wanted(keys)) == [], "the next look-up knows"
    assert not read_one(disk, found, wanted(keys))
    assert disk._stats.total("misses_late", tier="disk") == 2
    assert disk._stats.total("errors") == 0
    assert disk.check_integrity() == []
    disk.close()


def test_what_was_evicted_and_written_anew_under_its_name_is_not_taken_for_damaged(tmp_path: Path) -> None:
    disk = make_disk(tmp_path)
    keys = keys_of(4)
    assert disk.write(image(keys))
    (stale,) = disk.find(wanted(keys, start=2))
    disk.clear()
    assert disk.write(image(keys, 0, 2))
    assert disk.write(image(keys, 2, 4)), "the same name, two pages less"
    assert not read_one(disk, stale, wanted(keys, start=2))
    assert pages_on(disk, keys) == 4
    assert disk._stats.total("bad_files") == 0
    disk.close()


def test_lmcache_9_removal_from_outside_leaves_no_bytes_counted(tmp_path: Path) -> None:
    """LMCache#4546: files were deleted behind its back, the books kept them, and every later put was dropped."""
    disk = make_disk(tmp_path, budget_bytes=60_000 + 8 * FILE_BYTES)
    empty_bytes = disk.used_bytes
    for turn in range(12):
        keys = keys_of([turn] * 8)
        assert all(write_all(disk, keys)), "every put lands"
        if turn % 2:
            for folder in disk.directory.path.iterdir():
                if folder.is_dir():
                    shutil.rmtree(folder)
            assert pages_on(disk, keys) == 0
        else:
            assert pages_on(disk, keys) == 8
    disk.clear()
    assert disk.used_bytes == empty_bytes
    assert disk._stats.total("errors") == 0
    disk.close()


def test_a_folder_that_was_removed_from_outside_is_made_again(tmp_path: Path) -> None:
    disk = make_disk(tmp_path)
    names = [key_at(keys_of([n]), 0) for n in range(600)]
    first, second = next((0, n) for n in range(1, 600) if names[n][0] == names[0][0])
    assert disk.write(image(keys_of([first])))
    shutil.rmtree(disk.directory.file("1", names[first]).parents[1])
    assert disk.write(image(keys_of([second])))
    assert pages_on(disk, keys_of([second])) == 1
    assert disk._stats.total("errors") == 0
    disk.close()


def test_lmcache_6_interleaved_sessions_never_get_each_others_pages(tmp_path: Path) -> None:
    """LMCache#4385: contamination between requests that were paged to disk."""
    disk = make_disk(tmp_path, budget_bytes=60_000 + 12 * FILE_BYTES)
    choose = random.Random(1)
    sessions: dict[int, list[int]] = {session: [session] for session in range(6)}
    read = 0
    for turn in range(150):
        tokens = sessions[turn % 6]
        tokens += [choose.choice([0, 1])] * choose.randint(1, 3)
        keys = keys_of(tokens)
        for first in range(0, len(tokens), CHUNK_PAGES):
            disk.write(image(keys, first, min(first + CHUNK_PAGES, len(tokens))))
        read += sum(pages_on(disk, keys_of(sessions[session])) for session in range(6))
        if len(tokens) > 20:
            sessions[turn % 6] = tokens[: choose.randint(1, 9)]
    assert read > 500
    disk.close()
