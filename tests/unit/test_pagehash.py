"""The controller hashes prompts as the engines' SGLang does."""

from array import array

from hypothesis import given
from hypothesis import strategies as st
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.utils import get_storage_hash_str

from psrl_sglang.pagehash import page_digests

PAGE = 4
SALTS = st.none() | st.text(max_size=8)


@given(st.lists(st.integers(0, 2**31 - 1), max_size=40), SALTS, SALTS)
def test_pages_hash_as_sglang_hashes_them(tokens, extra_key, cache_salt):
    whole = tokens[: len(tokens) // PAGE * PAGE]
    key = RadixKey(array("q", whole), extra_key=extra_key, cache_salt=cache_salt)
    theirs = [bytes.fromhex(one) for one in get_storage_hash_str(key, page_size=PAGE)] if whole else []
    assert page_digests(tokens, PAGE, extra_key=extra_key, cache_salt=cache_salt) == theirs
