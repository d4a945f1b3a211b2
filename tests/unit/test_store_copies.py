"""Row copies against numpy, their bounds, and that they let other threads run."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from psrl_sglang.store import copies
from psrl_sglang.store.copies import PageCopier, copy_rows

ROOT = Path(__file__).parents[2]


def places(*values):
    return np.array(values, dtype=np.int64)


def random_bytes(size, seed=0):
    return np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8)


@pytest.fixture(params=[False, True], ids=["cached", "streamed"])
def streamed(request, monkeypatch):
    """Small copies as large ones are done, too."""
    if request.param:
        monkeypatch.setattr(copies, "_STREAMED_BYTES", 0)


@st.composite
def row_copies(draw):
    """Rows that fit, their destinations apart; bytes in front of both memories make any alignment."""
    row_bytes = draw(st.integers(1, 700))
    room = draw(st.integers(1, 12))
    sources = draw(st.lists(st.integers(0, room * row_bytes - row_bytes), min_size=0, max_size=room))
    slots = draw(st.permutations(range(room)))[: len(sources)]
    shift = draw(st.integers(0, row_bytes - 1))
    lead = draw(st.tuples(st.integers(0, 70), st.integers(0, 70)))
    return row_bytes, room, sources, [slot * row_bytes + shift for slot in slots], lead


class TestCopyRows:
    @given(case=row_copies(), is_streamed=st.booleans())
    def test_as_numpy_does(self, case, is_streamed):
        row_bytes, room, sources, destinations, (lead, other_lead) = case
        source = random_bytes(lead + room * row_bytes)[lead:]
        destination = random_bytes(other_lead + (room + 1) * row_bytes, seed=1)[other_lead:]
        expected = destination.copy()
        for to, at in zip(destinations, sources, strict=True):
            expected[to : to + row_bytes] = source[at : at + row_bytes]
        with pytest.MonkeyPatch.context() as patch:
            if is_streamed:
                patch.setattr(copies, "_STREAMED_BYTES", 0)
            copy_rows(destination, places(*destinations), source, places(*sources), row_bytes)
        assert np.array_equal(destination, expected)

    def test_source_may_be_read_only_and_offsets_any_view(self, streamed):
        source = np.frombuffer(bytes(range(64)), dtype=np.uint8)
        destination = np.zeros(64, dtype=np.uint8)
        offsets = places(0, 9, 16, 9)[::2]
        offsets.flags.writeable = False
        copy_rows(destination, offsets, source, offsets + 32, 16)
        assert destination[:32].tolist() == list(range(32, 64))
        assert not destination[32:].any()

    @pytest.mark.parametrize("wrong", [-1, 49, 1 << 62, -(1 << 62)])
    @pytest.mark.parametrize("side", ["source", "destination"])
    def test_row_outside_is_refused_before_anything_is_copied(self, side, wrong):
        memory, other = np.ones(64, dtype=np.uint8), np.zeros(64, dtype=np.uint8)
        good, bad = places(0, 16), places(0, wrong)
        to, source = (good, bad) if side == "source" else (bad, good)
        with pytest.raises(
            IndexError, match=rf"^{side} offset {wrong} \(number 1\) is outside: a row of 16 bytes in 64"
        ):
            copy_rows(other, to, memory, source, 16)
        assert not other.any()

    def test_row_longer_than_its_memory_is_refused(self):
        with pytest.raises(IndexError):
            copy_rows(np.zeros(8, dtype=np.uint8), places(0), np.zeros(64, dtype=np.uint8), places(0), 9)

    @pytest.mark.parametrize(
        ("changed", "said"),
        [
            ({"destination_offsets": places(0)}, "1 destination_offsets, but 2 source_offsets"),
            ({"source_offsets": np.zeros(2, dtype=np.int32)}, "source_offsets must be int64"),
            ({"source_offsets": np.zeros((2, 1), dtype=np.int64)}, "source_offsets must be int64 and 1-D"),
            ({"source": np.zeros(64, dtype=np.int8)}, "source must be uint8"),
            ({"source": np.zeros(128, dtype=np.uint8)[::2]}, "source must be uint8, 1-D and contiguous"),
            ({"destination": np.frombuffer(bytes(64), dtype=np.uint8)}, "destination is read-only"),
            ({"row_bytes": -1}, "rows of -1 bytes"),
        ],
    )
    def test_arrays_of_another_kind_are_refused(self, changed, said):
        arguments = {
            "destination": np.zeros(64, dtype=np.uint8),
            "destination_offsets": places(0, 16),
            "source": np.zeros(64, dtype=np.uint8),
            "source_offsets": places(0, 16),
            "row_bytes": 16,
        }
        with pytest.raises(ValueError, match=said):
            copy_rows(**{**arguments, **changed})

    @pytest.mark.parametrize("row_bytes", [0, 16])
    def test_nothing_to_copy(self, row_bytes):
        empty = np.empty(0, dtype=np.uint8)
        copy_rows(empty, places(), empty, places(), row_bytes)


@st.composite
def pools(draw):
    """Parts of different row sizes, some with gaps between their rows, and images with gaps between parts."""
    pages = draw(st.integers(1, 6))
    parts, end = [], 0
    for number in range(draw(st.integers(1, 4))):
        row_bytes, gap = draw(st.integers(1, 600)), draw(st.integers(0, 9))
        buffer = random_bytes(pages * (row_bytes + gap), seed=number).reshape(pages, -1)[:, :row_bytes]
        end += draw(st.integers(0, 9))
        parts.append((buffer, end))
        end += row_bytes
    rows = draw(st.lists(st.integers(0, pages - 1), unique=True))
    slots = draw(st.permutations(range(pages + 2)))[: len(rows)]
    return parts, end, pages, places(*rows), places(*(slot * end for slot in slots))


class TestPageCopier:
    @given(pool=pools(), is_streamed=st.booleans())
    def test_store_puts_every_part_in_its_place_and_nothing_else_changes(self, pool, is_streamed):
        parts, end, pages, rows, offsets = pool
        memory = random_bytes((pages + 2) * end, seed=99)
        expected = memory.copy()
        for row, offset in zip(rows, offsets, strict=True):
            for buffer, first in parts:
                expected[offset + first : offset + first + buffer.shape[1]] = buffer[row]
        with pytest.MonkeyPatch.context() as patch:
            if is_streamed:
                patch.setattr(copies, "_STREAMED_BYTES", 0)
            PageCopier(memory, parts).store(rows, offsets)
        assert np.array_equal(memory, expected)

    @given(pool=pools(), is_streamed=st.booleans())
    def test_load_brings_back_what_was_stored(self, pool, is_streamed):
        parts, end, pages, rows, offsets = pool
        before = [buffer.copy() for buffer, _ in parts]
        memory = np.zeros((pages + 2) * end, dtype=np.uint8)
        copier = PageCopier(memory, parts)
        with pytest.MonkeyPatch.context() as patch:
            if is_streamed:
                patch.setattr(copies, "_STREAMED_BYTES", 0)
            copier.store(rows, offsets)
            for buffer, _ in parts:
                buffer[rows] = 0
            copier.load(rows, offsets)
        for (buffer, _), old in zip(parts, before, strict=True):
            assert np.array_equal(buffer, old)

    @pytest.mark.parametrize("way", ["store", "load"])
    @pytest.mark.parametrize(
        ("rows", "offsets", "said"),
        [
            (places(0, 4), places(0, 48), r"page 4 \(number 1\) is outside: a pool of 4 pages"),
            (places(-1), places(0), r"page -1 "),
            (places(0), places(-1), r"offset -1 "),
            (places(0, 1), places(0, 145), r"offset 145 \(number 1\) is outside: an image of 48 bytes in 192"),
        ],
    )
    def test_place_outside_is_refused_before_anything_is_copied(self, way, rows, offsets, said):
        # The second buffer has a row less than the first, so the pool has 4 pages.
        parts = [(np.ones((5, 16), dtype=np.uint8), 0), (np.ones((4, 32), dtype=np.uint8), 16)]
        memory = np.zeros(192, dtype=np.uint8)
        with pytest.raises(IndexError, match=said):
            getattr(PageCopier(memory, parts), way)(rows, offsets)
        assert not memory.any()
        assert all(buffer.all() for buffer, _ in parts)

    @pytest.mark.parametrize(
        ("parts", "said"),
        [
            ([], "without parts"),
            ([(np.zeros(16, dtype=np.uint8), 0)], "a page a row"),
            ([(np.zeros((2, 16), dtype=np.uint16), 0)], "must be uint8"),
            ([(np.zeros((0, 16), dtype=np.uint8), 0)], "a page a row"),
            ([(np.zeros((2, 16), dtype=np.uint8)[:, ::2], 0)], "strides"),
            ([(np.zeros((2, 16), dtype=np.uint8), -1)], "byte -1"),
            ([(np.frombuffer(bytes(32), dtype=np.uint8).reshape(2, 16), 0)], "read-only"),
        ],
    )
    def test_buffers_of_another_kind_are_refused(self, parts, said):
        with pytest.raises(ValueError, match=said):
            PageCopier(np.zeros(64, dtype=np.uint8), parts)


def test_other_threads_run_during_a_copy():
    row_bytes = 1 << 20
    source, destination = np.ones(row_bytes, dtype=np.uint8), np.zeros(row_bytes, dtype=np.uint8)
    rows = np.zeros(10_000, dtype=np.int64)
    begun, ended = threading.Event(), threading.Event()

    def copy() -> None:
        begun.set()
        copy_rows(destination, rows, source, rows, row_bytes)
        ended.set()

    thread = threading.Thread(target=copy)
    before = sys.getswitchinterval()
    sys.setswitchinterval(3600)  # nobody has to give the GIL up, so only who lets go of it lets others run
    try:
        thread.start()
        begun.wait()
        ran_beside = not ended.is_set()
        turns = 0
        while not ended.is_set():
            turns += 1
            time.sleep(0)
    finally:
        sys.setswitchinterval(before)
        thread.join()
    assert ran_beside
    assert turns > 1


def test_works_without_a_place_for_compiled_code(tmp_path):
    """As for a user who may write neither beside the module nor in a home."""
    code = (
        "import numba.core.caching as caching\n"
        "def refuse(self): raise OSError(30, 'Read-only file system')\n"
        "caching._CacheLocator.ensure_cache_path = refuse\n"
        "import numpy as np\n"
        "from psrl_sglang.store.copies import _copy, copy_rows\n"
        "to = np.zeros(8, np.uint8)\n"
        "copy_rows(to, np.array([4]), np.arange(8, dtype=np.uint8), np.array([2]), 3)\n"
        "print(to.tolist(), _copy.stats.cache_path)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.strip() == "[0, 0, 0, 0, 2, 3, 4, 0] None"
