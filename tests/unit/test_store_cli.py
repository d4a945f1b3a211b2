"""`store ls`, `verify`, `gc` and `bench store`, on directories that the disk tier itself has written."""

from __future__ import annotations

import json
import os
import shutil
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from psrl_sglang.cli import app
from psrl_sglang.keys import KEY_BYTES, KVLayout, PoolLayout, key_at
from psrl_sglang.store import bench, bench_io, survey
from psrl_sglang.store.chunk import ChunkImage
from psrl_sglang.store.disk import DiskTier
from psrl_sglang.store.stats import StoreStats

PAGE_BYTES = 4096
PAGES = 2
LAYOUT = KVLayout("tiny", "bfloat16", 16, "0-3", "tp0/1", (PoolLayout("kv", PAGE_BYTES),))
OTHER = KVLayout("small", "bfloat16", 16, "0-3", "tp0/1", (PoolLayout("kv", PAGE_BYTES),))
CHUNK_BYTES = 4096 + PAGES * PAGE_BYTES
NOW_S = time.time()
HOUR_S = 3600


@pytest.fixture
def run():
    runner = CliRunner(env={"COLUMNS": "160", "TERM": "dumb", "NO_COLOR": "1"})
    return lambda *arguments: runner.invoke(app, ["store", *map(str, arguments)])


def open_tier(disk_path: Path, layout: KVLayout = LAYOUT) -> DiskTier:
    tier = DiskTier(
        disk_path,
        layout,
        budget_bytes=1 << 40,
        policy="LRU",
        dead_rank=lambda tag: None,
        stats=StoreStats(),
    )
    tier.load_index()
    return tier


def write(tier: DiskTier, tag: str, *hours_ago: float) -> list[Path]:
    """One sequence, a chunk for each time of its last use; returns the files."""
    keys = os.urandom(len(hours_ago) * PAGES * KEY_BYTES)
    files = []
    for number, hours in enumerate(hours_ago):
        start = number * PAGES
        own = keys[start * KEY_BYTES : (start + PAGES) * KEY_BYTES]
        image = ChunkImage(
            layout=tier._layout.digest,
            pool="kv",
            tag=tag,
            start=start,
            parent=key_at(keys, start - 1) if start else b"",
            page_bytes=PAGE_BYTES,
            keys=own,
            payload=memoryview(os.urandom(PAGES * PAGE_BYTES)),
        )
        assert tier.write(image)
        file = tier.directory.file(tag, image.name)
        os.utime(file, (NOW_S - hours * HOUR_S,) * 2)
        files.append(file)
    return files


@pytest.fixture
def disk_path(tmp_path):
    return tmp_path / "disk"


@pytest.fixture
def idle(disk_path):
    """Files of an engine that has ended: tag "1" is old, tag "2" new."""
    tier = open_tier(disk_path)
    files = {"1": write(tier, "1", 50, 40), "2": write(tier, "2", 3)}
    tier.close()
    return files


@pytest.fixture
def busy(disk_path):
    """An engine at work, of another layout."""
    tier = open_tier(disk_path, OTHER)
    yield tier, write(tier, "1", 100)
    tier.close()


def damage(file: Path, at: int) -> None:
    with file.open("r+b") as opened:
        opened.seek(at)
        byte = opened.read(1)
        opened.seek(at)
        opened.write(bytes([byte[0] ^ 1]))


class TestLs:
    def test_json_has_every_directory_and_tag(self, run, disk_path, idle, busy):
        result = run("ls", disk_path, "--json")
        assert result.exit_code == 0
        listed = json.loads(result.stdout)
        directories = {entry["digest"]: entry for entry in listed["directories"]}
        assert set(directories) == {LAYOUT.digest.hex(), OTHER.digest.hex()}
        mine, theirs = directories[LAYOUT.digest.hex()], directories[OTHER.digest.hex()]
        assert (mine["layout"], mine["number"], mine["in_use"]) == (LAYOUT.text, 0, False)
        assert theirs["in_use"]
        newest, oldest = mine["tags"]
        assert (newest["tag"], newest["chunks"], newest["pages"]) == ("2", 1, PAGES)
        assert (oldest["tag"], oldest["chunks"], oldest["pages"]) == ("1", 2, 2 * PAGES)
        assert oldest["bytes"] == 2 * CHUNK_BYTES
        assert oldest["oldest_use_s"] == pytest.approx(NOW_S - 50 * HOUR_S, abs=1)
        assert oldest["newest_use_s"] == pytest.approx(NOW_S - 40 * HOUR_S, abs=1)
        assert listed["bytes"] == 4 * CHUNK_BYTES

    def test_table_says_who_is_in_use_and_what_is_no_chunk(self, run, disk_path, idle, busy):
        damage(idle["2"][0], 0)
        result = run("ls", disk_path)
        assert result.exit_code == 0
        for said in (
            f"{LAYOUT.digest.hex()[:12]}/0, idle",
            f"{OTHER.digest.hex()[:12]}/0, in use",
            "model=tiny",
            "1 files are no whole chunks: psrl-sglang store verify",
            "48.0 KiB in 2 engine directories",
        ):
            assert said in result.stdout

    def test_looking_does_not_count_as_a_use(self, run, disk_path, idle):
        lock = disk_path / "psrl-kv" / LAYOUT.digest.hex() / "0" / "LOCK"
        os.utime(lock, (1000, 1000))
        run("ls", disk_path)
        assert lock.stat().st_mtime == 1000

    @pytest.mark.parametrize(
        ("below", "said"), [("", "no psrl-kv in it; give the directory that"), ("absent", "no psrl-kv in it")]
    )
    def test_path_without_kv_is_refused(self, run, tmp_path, below, said):
        for command in ("ls", "verify", "gc"):
            extra = ["--layout", "0"] if command == "gc" else []
            result = run(command, tmp_path / below, *extra)
            assert result.exit_code == 2
            assert str(tmp_path / below) in result.stderr
            assert said in result.stderr

    def test_folder_itself_instead_of_its_parent_is_told(self, run, disk_path, idle):
        result = run("ls", disk_path / "psrl-kv")
        assert result.exit_code == 2
        assert "give its parent" in result.stderr


class TestVerify:
    def test_sound_files_are_counted(self, run, disk_path, idle, busy):
        result = run("verify", disk_path)
        assert result.exit_code == 0
        assert result.stderr == ""
        assert "4 chunks read, 48.0 KiB; 0 bad files" in result.stdout

    def test_every_bad_file_is_named_with_the_reason(self, run, disk_path, idle):
        (head, tail), (other,) = idle["1"], idle["2"]
        damage(head, CHUNK_BYTES - 1)
        os.truncate(tail, CHUNK_BYTES - 100)
        left = other.with_name(other.name + ".tmp-1")
        left.write_bytes(b"half")
        moved = shutil.copy(other, head.parent)
        result = run("verify", disk_path)
        assert result.exit_code == 1
        for said in (
            f"{head}: checksum of page 1 differs\n",
            f"{tail}: {CHUNK_BYTES - 100} bytes long, not {CHUNK_BYTES}\n",
            f"{left}: left by a write that did not end\n",
            f"{moved}: of tag '2', but not in its folder\n",
        ):
            assert said in result.stderr
        assert "4 bad files" in result.stdout
        assert all(Path(file).exists() for file in (head, tail, left, moved))

    def test_delete_removes_bad_files_of_idle_directories_only(self, run, disk_path, idle, busy):
        bad, (_, (in_use,)) = idle["2"][0], busy
        damage(bad, CHUNK_BYTES - 1)
        damage(in_use, CHUNK_BYTES - 1)
        result = run("verify", disk_path, "--delete")
        assert result.exit_code == 1
        assert f"{bad}: checksum of page 1 differs; deleted" in result.stderr
        assert (
            f"{in_use}: checksum of page 1 differs; kept: a running engine has the directory" in result.stderr
        )
        assert not bad.exists()
        assert in_use.exists()
        assert run("verify", disk_path).exit_code == 1  # the engine's
        busy[0].close()
        assert run("verify", disk_path, "--delete").exit_code == 1
        assert run("verify", disk_path).exit_code == 0

    def test_write_under_way_is_not_a_bad_file(self, run, disk_path, busy):
        _, (file,) = busy
        file.with_name(file.name + ".tmp-1").write_bytes(b"half")
        assert run("verify", disk_path).exit_code == 0

    def test_file_that_cannot_be_read_is_kept(self, run, disk_path, idle, monkeypatch):
        def fail(*_):
            raise OSError(5, "Input/output error")

        monkeypatch.setattr(survey.os, "preadv", fail)
        result = run("verify", disk_path, "--delete")
        assert result.exit_code == 1
        assert result.stderr.count("cannot be read: Input/output error; kept") == 3
        assert idle["2"][0].exists()

    def test_file_that_is_replaced_meanwhile_is_not_judged(self, disk_path, idle):
        (directory,) = survey.directories(disk_path)
        chunks, _ = survey.survey(directory)
        chunk = next(chunk for chunk in chunks if chunk.path == idle["2"][0])
        chunk.path.unlink()
        assert survey.verify(chunk) is None
        chunk.path.write_bytes(b"another")
        assert survey.verify(chunk) is None


class TestGc:
    def test_says_what_it_would_delete_and_deletes_nothing(self, run, disk_path, idle):
        result = run("gc", disk_path, "--keep-tag", "2")
        assert result.exit_code == 0
        assert "2 chunks, 24.0 KiB, would be deleted; --yes deletes them" in result.stdout
        assert all(file.exists() for files in idle.values() for file in files)

    def test_tags_that_are_not_kept_go(self, run, disk_path, idle):
        result = run("gc", disk_path, "--keep-tag", "2", "--keep-tag", "3", "--yes")
        assert result.exit_code == 0
        assert "2 chunks deleted, 24.0 KiB" in result.stdout
        assert not idle["1"][0].parent.exists()
        assert idle["2"][0].exists()

    def test_what_was_not_used_for_long_goes(self, run, disk_path, idle):
        assert "0 chunks" in run("gc", disk_path, "--older-than", "60").stdout
        assert run("gc", disk_path, "--older-than", "24", "--yes").exit_code == 0
        assert not any(file.exists() for file in idle["1"])
        assert idle["2"][0].exists()

    def test_head_that_newer_chunks_continue_stays(self, run, disk_path, idle):
        head, tail = idle["1"]
        assert "0 chunks" in run("gc", disk_path, "--older-than", "45").stdout
        run("gc", disk_path, "--to-size-gb", 2 * CHUNK_BYTES / survey.GIB, "--yes")
        assert head.exists()
        assert not tail.exists()

    def test_down_to_a_size_the_longest_unused_go(self, run, disk_path, idle):
        result = run("gc", disk_path, "--to-size-gb", CHUNK_BYTES / survey.GIB, "--yes")
        assert result.exit_code == 0
        assert idle["2"][0].exists()
        assert survey.total_bytes(disk_path) == CHUNK_BYTES
        assert "0 chunks deleted" in run("gc", disk_path, "--to-size-gb", 1, "--yes").stdout

    def test_options_must_all_fit(self, run, disk_path, idle):
        result = run(
            "gc", disk_path, "--keep-tag", "1", "--older-than", "24", "--layout", LAYOUT.digest.hex()[:6]
        )
        assert "0 chunks" in result.stdout

    def test_only_one_layout_and_its_folders_go(self, run, disk_path, idle):
        tier = open_tier(disk_path, OTHER)
        (kept,) = write(tier, "1", 100)
        tier.close()
        result = run("gc", disk_path, "--layout", LAYOUT.digest.hex()[:8], "--yes")
        assert result.exit_code == 0
        assert not (disk_path / "psrl-kv" / LAYOUT.digest.hex()).exists()
        assert kept.exists()

    def test_files_of_other_makes_stay(self, run, disk_path, idle):
        note = disk_path / "psrl-kv" / LAYOUT.digest.hex() / "0" / "note.txt"
        note.write_text("mine")
        assert run("gc", disk_path, "--older-than", "0", "--yes").exit_code == 0
        assert note.exists()

    def test_directory_in_use_is_left_alone(self, run, disk_path, idle, busy):
        _, (in_use,) = busy
        result = run("gc", disk_path, "--older-than", "1", "--yes")
        assert result.exit_code == 0
        assert f"{OTHER.digest.hex()[:12]}/0: a running engine has it; left alone" in result.stdout
        assert in_use.exists()
        assert not any(file.exists() for files in idle.values() for file in files)

    def test_size_that_cannot_be_reached_is_a_problem(self, run, disk_path, idle, busy):
        result = run("gc", disk_path, "--to-size-gb", "0", "--yes")
        assert result.exit_code == 1
        assert "12.0 KiB too much are left" in result.stderr

    def test_engine_that_starts_meanwhile_keeps_its_files(self, run, disk_path, idle, monkeypatch):
        engines = []
        delete = survey.delete

        def engine_first(*arguments):
            engines.append(open_tier(disk_path))
            return delete(*arguments)

        monkeypatch.setattr(survey, "delete", engine_first)
        result = run("gc", disk_path, "--older-than", "0", "--yes")
        assert result.exit_code == 1
        assert "an engine has taken it meanwhile" in result.stderr
        assert idle["2"][0].exists()
        (engine,) = engines
        assert engine.check_integrity() == []
        engine.close()

    def test_file_that_cannot_be_deleted_is_a_problem(self, run, disk_path, idle, monkeypatch):
        def fail(self, missing_ok=False):
            raise PermissionError(1, "Operation not permitted")

        monkeypatch.setattr(Path, "unlink", fail)
        result = run("gc", disk_path, "--keep-tag", "1", "--yes")
        assert result.exit_code == 1
        assert f"{idle['2'][0]}: cannot be deleted: Operation not permitted" in result.stderr

    def test_engine_finds_what_was_left(self, run, disk_path, idle):
        run("gc", disk_path, "--keep-tag", "1", "--yes")
        tier = open_tier(disk_path)
        assert tier.status()["pages_by_tag"] == {"1": 2 * PAGES}
        assert tier.check_integrity() == []
        tier.close()

    def test_without_a_choice_it_is_refused(self, run, disk_path, idle):
        result = run("gc", disk_path, "--yes")
        assert result.exit_code == 2
        assert "say what to delete" in result.stderr
        assert idle["1"][0].exists()

    @pytest.mark.parametrize(("digits", "said"), [("zz", "no layout begins with 'zz'"), ("", "layouts begin")])
    def test_layout_that_is_not_one_is_refused(self, run, disk_path, idle, busy, digits, said):
        result = run("gc", disk_path, "--layout", digits)
        assert result.exit_code == 2
        assert said in result.stderr
        assert LAYOUT.digest.hex()[:12] in result.stderr


class TestBench:
    ARGUMENTS = ("--size-gb", "0.02", "--chunk-mb", "1", "--threads", "2")

    @pytest.fixture
    def run_bench(self, tmp_path, monkeypatch):
        index_figures = bench.index_figures
        monkeypatch.setattr(bench, "index_figures", lambda: index_figures(pages=20_000))
        monkeypatch.setattr(bench, "_TURNS", 1)
        monkeypatch.setattr(bench_io, "_DISK_TURNS", 1)
        runner = CliRunner(env={"COLUMNS": "160", "TERM": "dumb", "NO_COLOR": "1"})
        return lambda *extra: runner.invoke(
            app, ["bench", "store", *self.ARGUMENTS, "--path", str(tmp_path), *map(str, extra)]
        )

    @pytest.mark.parametrize("has_fio", [True, False])
    def test_json_has_every_figure_and_nothing_is_left(self, run_bench, tmp_path, monkeypatch, has_fio):
        if not has_fio:
            monkeypatch.setattr(bench_io.shutil, "which", lambda _: None)
        elif shutil.which("fio") is None:
            pytest.skip("fio is not installed")
        result = run_bench("--json")
        assert result.exit_code == 0, result.output
        report = json.loads(result.stdout)
        assert report["options"]["threads"] == 2
        figures = {figure["name"]: figure for figure in report["figures"]}
        assert list(figures) == [
            "index, a page",
            "look-up of 64k tokens",
            "pool to arena, 1 thread",
            "arena to pool, 1 thread",
            "disk write, 1 thread",
            "disk read, 2 threads",
        ]
        del figures["index, a page"]  # may reuse memory that a test before has freed
        assert all(figure["value"] > 0 for figure in figures.values())
        assert (figures["disk read, 2 threads"]["baseline_name"].split(" ")[0] == "fio") == has_fio
        assert list(tmp_path.iterdir()) == []

    def test_table_has_ratio_and_target(self, run_bench):
        result = run_bench()
        assert result.exit_code == 0
        for said in ("gather + memcpy", ">= 0.8", "<= 200", "ratio"):
            assert said in result.stdout

    @pytest.mark.parametrize(
        ("extra", "said"),
        [
            (("--chunk-mb", "0.3"), "no multiple of a page"),
            (("--threads", "500"), "too few for 500 threads"),
            (("--size-gb", "1000000"), "take less"),
            (("--path", "/nonexistent"), "is not a directory"),
            (("--remote-url", "ftp://host"), "unknown remote store"),
        ],
    )
    def test_what_cannot_be_measured_is_told_with_status_2(self, run_bench, extra, said):
        result = run_bench(*extra)
        assert result.exit_code == 2
        assert said.lower() in result.stderr.lower()
