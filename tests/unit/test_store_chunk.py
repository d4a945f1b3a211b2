"""The form of a chunk on disk and on the wire: whatever is damaged is refused, and nothing else."""

import random
import struct
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from store_support import LAYOUT, PAGE_BYTES, cut, image, keys_of

from psrl_sglang.keys import KEY_BYTES, key_at
from psrl_sglang.store.chunk import (
    BLOCK_BYTES,
    BadChunk,
    ChunkHeader,
    Found,
    check_holds,
    check_pages,
    checksums,
    decode_header,
    encode_header,
    header_bytes,
    padded,
)
from psrl_sglang.store.directory import read_header

TEXT = st.text(max_size=40)
PAGES = st.integers(1, 300)


@st.composite
def headers(draw: st.DrawFn) -> ChunkHeader:
    pages = draw(PAGES)
    bytes_of = random.Random(draw(st.integers(0, 1 << 32))).randbytes
    return ChunkHeader(
        layout=draw(st.binary(min_size=16, max_size=16)),
        pool=draw(TEXT),
        tag=draw(TEXT),
        start=draw(st.integers(0, 1 << 40)),
        parent=draw(st.sampled_from([b"", b"\1" * KEY_BYTES])),
        page_bytes=draw(st.integers(1, 1 << 40)),
        keys=bytes_of(pages * KEY_BYTES),
        sums=bytes_of(pages * 8),
    )


HEADER = ChunkHeader(
    layout=LAYOUT.digest,
    pool="kv",
    tag="1",
    start=4,
    parent=key_at(keys_of(4), 3),
    page_bytes=4096,
    keys=cut(keys_of(8), 4),
    sums=bytes(range(32)),
)


def with_sum(body: bytes, *, length: int | None = None) -> bytes:
    """A header block around any body, with the right checksum."""
    block = struct.pack("<8sI", b"PSRLKV01", len(body) if length is None else length) + body
    block += struct.pack("<Q", xxhash.xxh3_64_intdigest(block))
    return block.ljust(padded(len(block)), b"\0")


@given(headers())
def test_a_header_comes_back_as_it_was(header: ChunkHeader) -> None:
    block = encode_header(header)
    assert len(block) % BLOCK_BYTES == 0
    assert header_bytes(block[:BLOCK_BYTES]) == len(block)
    assert decode_header(block) == header
    assert decode_header(bytearray(block) + b"pages") == header
    assert header.name == header.keys[-KEY_BYTES:]


@settings(max_examples=40)
@given(headers(), st.data())
def test_a_flipped_byte_is_refused(header: ChunkHeader, data: st.DataObject) -> None:
    block = bytearray(encode_header(header))
    meaning = 12 + struct.unpack_from("<I", block, 8)[0] + 8  # what is behind that are zeros nobody reads
    at = data.draw(st.integers(0, meaning - 1))
    block[at] ^= data.draw(st.integers(1, 255))
    with pytest.raises(BadChunk):
        decode_header(block)


def test_every_flipped_bit_of_one_header_is_refused() -> None:
    block = encode_header(HEADER)
    meaning = 12 + struct.unpack_from("<I", block, 8)[0] + 8
    for bit in range(meaning * 8):
        damaged = bytearray(block)
        damaged[bit // 8] ^= 1 << bit % 8
        with pytest.raises(BadChunk):
            decode_header(damaged)


@given(st.binary(max_size=200), st.integers(0, 3))
def test_garbage_is_refused(garbage: bytes, kind: int) -> None:
    block = {
        0: garbage,
        1: b"PSRLKV01" + garbage,
        2: b"PSRLKV01" + struct.pack("<I", len(garbage)) + garbage.ljust(BLOCK_BYTES, b"\0"),
        3: with_sum(garbage),
    }[kind]
    with pytest.raises(BadChunk):
        decode_header(block)


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(1 << 63), (1 << 64) - 1)
    | st.binary(max_size=20)
    | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=9),
    max_leaves=12,
)


@given(st.lists(JSON, max_size=10) | JSON)
def test_what_is_well_formed_but_no_header_is_refused(value: Any) -> None:
    with pytest.raises(BadChunk):
        decode_header(with_sum(msgspec.msgpack.encode(value)))


@pytest.mark.parametrize(
    "changes",
    [
        {"keys": b""},
        {"keys": HEADER.keys[:-1]},
        {"sums": HEADER.sums[:-1]},
        {"sums": HEADER.sums + bytes(8)},
        {"page_bytes": 0},
        {"page_bytes": -4096},
        {"start": -1},
        {"parent": b"short"},
        {"keys": HEADER.keys[:KEY_BYTES] * 4},
    ],
    ids=lambda changes: "-".join(changes),
)
def test_a_header_that_contradicts_itself_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(BadChunk):
        decode_header(encode_header(msgspec.structs.replace(HEADER, **changes)))


def test_deeply_nested_garbage_is_refused() -> None:
    body = msgspec.msgpack.encode(HEADER)
    nested = bytes([0x90 | 9]) + body[1:] + b"\x91" * 100_000 + b"\xc0"
    with pytest.raises(BadChunk):
        decode_header(with_sum(nested))


@pytest.mark.parametrize(
    "block",
    [
        b"PSRLKV01" + struct.pack("<I", 0xFFFFFFFF),
        b"PSRLKV01" + struct.pack("<I", (1 << 24) - 100),
        with_sum(b"\x98\xc6\xff\xff\xff\xff" + bytes(64)),  # bytes said to be 4 GiB long
        with_sum(b"\xdd\xff\xff\xff\xff" + bytes(64)),  # an array of as many
    ],
    ids=["huge", "large", "bytes", "array"],
)
def test_a_length_that_lies_allocates_nothing(block: bytes, tmp_path: Path) -> None:
    file = tmp_path / "x.kv"
    file.write_bytes(block.ljust(BLOCK_BYTES, b"\1"))
    tracemalloc.start()
    try:
        for read in (lambda: decode_header(block.ljust(BLOCK_BYTES, b"\1")), lambda: read_header(file)):
            with pytest.raises(BadChunk):
                read()
        assert tracemalloc.get_traced_memory()[1] < 40 << 20
    finally:
        tracemalloc.stop()


def test_the_bytes_are_what_they_were_when_the_first_files_were_written() -> None:
    """If this fails, older files are refused or, worse, misread: raise `SCHEMA` and the magic, then the vector."""
    block = encode_header(HEADER)
    assert len(block) == BLOCK_BYTES
    end = 12 + struct.unpack_from("<I", block, 8)[0] + 8
    assert block[:end].hex() == (
        "5053524c4b5630319200000098c410678a708e809e6a3669efa96a00b3a268a26b76a13104c410ab5dd0fc2beca0d2a6"
        "e7e429f0a0170bcd1000c440bc45099a67b0d66577f6083130286e2a8238a2d0000df0bc09fa81d1d882f2c439bded06"
        "3b5c0b22ca874853001e8e84de9606085b39653ed54ad65965560e3ec420000102030405060708090a0b0c0d0e0f1011"
        "12131415161718191a1b1c1d1e1fc16daf4af6d506e9"
    )
    assert not any(block[end:])
    assert checksums(b"abcdefgh", 4).hex() == "9098a8536fa997644d4558a595c363a9"


# ---- pages against a header ----


def chunk() -> tuple[ChunkHeader, list[bytes]]:
    one = image(keys_of(8), 4, 8)
    size = PAGE_BYTES["kv"]
    return one.header(), [bytes(one.payload[at : at + size]) for at in range(0, len(one.payload), size)]


def test_pages_are_checked_one_by_one() -> None:
    header, pages = chunk()
    check_pages(header, 0, pages)
    check_pages(header, 2, pages[2:])
    with pytest.raises(BadChunk, match="page 3"):
        check_pages(header, 2, [pages[2], pages[2]])
    with pytest.raises(BadChunk, match="page 0"):
        check_pages(header, 0, pages[1:])
    damaged = bytes([pages[1][0] ^ 1]) + pages[1][1:]
    with pytest.raises(BadChunk, match="page 1"):
        check_pages(header, 0, [pages[0], damaged])


@pytest.mark.parametrize(
    "ask",
    [
        lambda header: (bytes(16), "kv", 0, header.keys, 4096),
        lambda header: (header.layout, "swa", 0, header.keys, 4096),
        lambda header: (header.layout, "kv", 0, header.keys, 2048),
        lambda header: (header.layout, "kv", 1, header.keys, 4096),
        lambda header: (header.layout, "kv", 0, header.keys + bytes(KEY_BYTES), 4096),
        lambda header: (header.layout, "kv", 0, header.keys[KEY_BYTES:], 4096),
    ],
    ids=["layout", "pool", "page size", "shifted", "longer", "other"],
)
def test_a_chunk_with_other_pages_than_asked_for_is_refused(
    ask: Callable[[ChunkHeader], tuple[Any, ...]],
) -> None:
    header, _ = chunk()
    check_holds(header, header.layout, "kv", Found(header.name, 1, cut(header.keys, 1, 3)), 4096)
    layout, pool, first, keys, page_bytes = ask(header)
    with pytest.raises(BadChunk):
        check_holds(header, layout, pool, Found(header.name, first, keys), page_bytes)


@given(st.integers(0, 8), st.integers(0, 8))
def test_a_part_of_a_chunk_is_the_chunk_of_that_part(first: int, end: int) -> None:
    keys = keys_of(8)
    first, end = min(first, end), max(first, end)
    part = image(keys).until(end).behind(first)
    if first < end:
        assert part == replace(image(keys, first, end), payload=part.payload)
    assert part.payload == image(keys, first, end).payload
    assert (part.pages, part.start) == (end - first, first)
