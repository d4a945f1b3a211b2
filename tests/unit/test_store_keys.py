"""The keys of pages: the same everywhere for the same KV, and never the same for KV that differs."""

import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import fields, replace
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from store_support import LAYOUT, hashes, keys_of

from psrl_sglang.keys import (
    KEY_BYTES,
    KVLayout,
    PoolLayout,
    common_pages,
    count,
    key_at,
    page_keys,
    pool_salt,
)

HASH = st.binary(min_size=32, max_size=32).map(bytes.hex)
SALT = st.binary(min_size=KEY_BYTES, max_size=KEY_BYTES)
# Runs that often have a beginning in common.
KEY_RUN = st.lists(st.sampled_from([bytes([n]) * KEY_BYTES for n in range(3)]), max_size=20).map(b"".join)

GOLDEN_LAYOUT = KVLayout(
    model="0123456789abcdef",
    dtype="float32",
    page_tokens=16,
    layers="0-3",
    rank="tp0/2",
    pools=(PoolLayout("kv", 32768), PoolLayout("swa", 4096)),
)


def test_one_key_is_what_it_was_when_the_first_files_were_written() -> None:
    """If this fails, all KV on disk and in remote stores is a miss: raise `SCHEMA`, then the vector."""
    assert GOLDEN_LAYOUT.text == (
        "schema=1 model=0123456789abcdef dtype=float32 page=16 layers=0-3 rank=tp0/2 form=page-first "
        "pools=kv=32768,swa=4096"
    )
    assert GOLDEN_LAYOUT.digest.hex() == "4c662b57f566a6eb9ac65f5b43f95fc4"
    salt = pool_salt(GOLDEN_LAYOUT, "kv", "run-1")
    assert salt.hex() == "9d9bd7e4c68645d738d67a44cdeb5479"
    page = "000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f"
    assert page_keys([page], salt).hex() == "9d9ad5e7c28343d030df704fc1e65a76"


def test_row_15_processes_with_other_seeds_make_the_same_keys() -> None:
    """LMCache#2136: hash() of None and of strings differs between processes, so nothing was ever found."""
    script = (
        "import sys; from store_support import keys_of; from test_store_keys import GOLDEN_LAYOUT as layout; "
        "sys.stdout.write(keys_of([None, 'a', 3], tag='1|x', layout=layout).hex())"
    )
    found = set()
    for seed in ("0", "1", "4242"):
        environment = {
            **os.environ,
            "PYTHONHASHSEED": seed,
            "PYTHONPATH": os.pathsep.join([os.path.dirname(__file__), os.getcwd()]),
        }
        done = subprocess.run(
            [sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True
        )
        found.add(done.stdout)
    assert found == {keys_of([None, "a", 3], tag="1|x", layout=GOLDEN_LAYOUT).hex()}


def test_layouts_that_differ_in_any_one_field_share_no_key() -> None:
    others = {
        "model": "other",
        "dtype": "float16",
        "page_tokens": 17,
        "layers": "0-4",
        "rank": "tp1/1",
        "form": "layer-first",
        "pools": (PoolLayout("kv", 4096), PoolLayout("swa", 2049)),
    }
    assert set(others) == {field.name for field in fields(KVLayout)}, "a new field must change the keys too"
    layouts = [LAYOUT, *(replace(LAYOUT, **{name: value}) for name, value in others.items())]
    layouts += [replace(LAYOUT, pools=LAYOUT.pools[:1]), replace(LAYOUT, pools=LAYOUT.pools[::-1])]
    runs = [page_keys(hashes(50), pool_salt(layout, "kv", "run")) for layout in layouts]
    check_disjoint(runs)


def test_pools_identities_and_tags_share_no_key() -> None:
    salts = [
        pool_salt(LAYOUT, pool, identity)
        for pool in ("kv", "swa")
        for identity in ("", "run", "run2", "weights")
    ]
    check_disjoint([page_keys(hashes(50), salt) for salt in salts])
    check_disjoint([page_keys(hashes(50, tag=tag), salts[0]) for tag in ("1", "2", "1~", "1|user")])


def check_disjoint(runs: Sequence[bytes]) -> None:
    sets = [{key_at(run, page) for page in range(count(run))} for run in runs]
    assert all(not one & other for one, other in combinations(sets, 2))
    assert all(len(one) == count(run) for one, run in zip(sets, runs, strict=True))


@given(st.lists(HASH, max_size=20), SALT)
def test_a_key_depends_on_its_own_hash_and_place_alone(chain: list[str], salt: bytes) -> None:
    keys = page_keys(chain, salt)
    assert count(keys) == len(chain)
    for page, hash_ in enumerate(chain):
        assert key_at(keys, page) == page_keys([hash_], salt)
    assert page_keys(chain[:7], salt) == keys[: 7 * KEY_BYTES]


@given(HASH, HASH, SALT)
def test_keys_differ_where_hashes_do(one: str, other: str, salt: bytes) -> None:
    head = 2 * KEY_BYTES  # hexadecimal digits
    assert (page_keys([one], salt) == page_keys([other], salt)) == (one[:head] == other[:head])


@given(KEY_RUN, KEY_RUN)
def test_common_pages_is_the_length_of_the_common_beginning(a: bytes, b: bytes) -> None:
    pages = common_pages(a, b)
    assert pages == common_pages(b, a) <= min(count(a), count(b))
    assert a[: pages * KEY_BYTES] == b[: pages * KEY_BYTES]
    if pages < min(count(a), count(b)):
        assert key_at(a, pages) != key_at(b, pages)


@pytest.mark.parametrize("byte", range(KEY_BYTES))
def test_common_pages_sees_every_byte_of_a_key(byte: int) -> None:
    keys = bytearray(4 * KEY_BYTES)
    keys[2 * KEY_BYTES + byte] = 1
    assert common_pages(bytes(keys), bytes(4 * KEY_BYTES)) == 2
    assert common_pages(bytes(keys), bytes(keys)) == 4
    assert common_pages(b"", bytes(keys)) == 0


def test_no_tokens_have_no_keys() -> None:
    assert page_keys([], bytes(KEY_BYTES)) == b""
    assert count(b"") == 0
