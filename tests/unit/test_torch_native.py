"""The mended attention equals plain attention, on ragged batches over scattered slots."""

import math
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from psrl_sglang.platforms import torch_native  # noqa: E402

DIM = 16
SLOTS = 4096
CONTEXT = 2048
TOLERANCE = 2e-6


class Pools:
    """A batch of requests whose KV lies in random slots, and whose window layer lies in other ones."""

    def __init__(self, lengths, *, heads, kv_heads, window, seed):
        random = torch.Generator().manual_seed(seed)

        def normal(*shape):
            return torch.randn(shape, generator=random)

        self.lengths, self.window = lengths, window
        self.heads, self.kv_heads = heads, kv_heads
        self.k, self.v = normal(SLOTS, kv_heads, DIM), normal(SLOTS, kv_heads, DIM)
        # Rows that no request uses point nowhere: reading one of them is an error.
        self.req_to_token = torch.full((8, CONTEXT), -(10**6), dtype=torch.int32)
        self.rows = torch.randperm(8, generator=random)[: len(lengths)]
        self.map = torch.randperm(SLOTS, generator=random)
        free = torch.randperm(SLOTS, generator=random)
        for row, length in zip(self.rows.tolist(), lengths, strict=True):
            self.req_to_token[row, :length] = free[:length]
            free = free[length:]
        self.query = normal(sum(lengths), heads, DIM)

    @property
    def backend(self):
        pool = SimpleNamespace(translate_loc_from_full_to_swa=lambda slots: self.map[slots])
        return SimpleNamespace(use_sliding_window_kv_pool=True, token_to_kv_pool=pool)

    def reference(self, i, query, prefix):
        """Attention of the last queries of request i in float64, by the definition."""
        length = self.lengths[i]
        slots = self.req_to_token[self.rows[i], :length].long()
        if self.window is not None:
            slots = self.map[slots]
        group = self.heads // self.kv_heads
        key, value = (t[slots].double().repeat_interleave(group, 1) for t in (self.k, self.v))
        scores = torch.einsum("qhd,khd->hqk", query.double(), key) / math.sqrt(DIM)
        position, keys = torch.arange(prefix, length)[:, None], torch.arange(length)[None]
        hidden = keys > position
        if self.window is not None:
            hidden |= keys < position - self.window
        return torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -math.inf).softmax(-1), value).float()


def never(*_, **__):
    raise AssertionError("the stock function was called")


def options(pools):
    return {
        "scaling": 1 / math.sqrt(DIM),
        "enable_gqa": pools.heads != pools.kv_heads,
        "sliding_window_size": pools.window,
    }


@pytest.mark.parametrize("window", [None, 0, 7, 100, 5000])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (8, 2)])
@pytest.mark.parametrize("seed", range(3))
def test_extend_attends_new_queries_to_prefix_and_each_other(heads, kv_heads, window, seed):
    random = torch.Generator().manual_seed(100 + seed)
    new = [1, 600, *torch.randint(1, 60, (3,), generator=random).tolist()]
    prefix = [0, 300, 0, *torch.randint(1, 700, (2,), generator=random).tolist()]
    lengths = [a + b for a, b in zip(prefix, new, strict=True)]
    pools = Pools(lengths, heads=heads, kv_heads=kv_heads, window=window, seed=seed)
    query = pools.query[: sum(new)]
    output = torch.full_like(query, math.nan)
    torch_native.extend(
        *(never, pools.backend, query, output, pools.k, pools.v, pools.req_to_token, pools.rows),
        *(torch.tensor(lengths), torch.tensor(prefix), torch.tensor(new)),
        causal=True,
        **options(pools),
    )
    start = 0
    for i, (old, count) in enumerate(zip(prefix, new, strict=True)):
        expected = pools.reference(i, query[start : start + count], old)
        torch.testing.assert_close(output[start : start + count], expected, rtol=0, atol=TOLERANCE)
        start += count


@pytest.mark.parametrize("window", [0, 7, 100, 5000])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (8, 2)])
def test_decode_of_a_window_layer_reads_its_window_in_its_own_pool(heads, kv_heads, window):
    lengths = [1, 5, 8, 101, 700]
    pools = Pools(lengths, heads=heads, kv_heads=kv_heads, window=window, seed=7)
    query = pools.query[: len(lengths)]
    output = torch.full_like(query, math.nan)
    torch_native.decode(
        *(never, pools.backend, query, output, pools.k, pools.v, pools.req_to_token, pools.rows),
        torch.tensor(lengths),
        **options(pools),
    )
    for i, length in enumerate(lengths):
        expected = pools.reference(i, query[i : i + 1], length - 1)
        torch.testing.assert_close(output[i : i + 1], expected, rtol=0, atol=TOLERANCE)


def test_window_over_a_single_pool_is_not_translated():
    pools = Pools([50], heads=4, kv_heads=4, window=9, seed=1)
    backend = SimpleNamespace(use_sliding_window_kv_pool=False)
    pools.map = torch.arange(SLOTS)
    output = torch.empty_like(pools.query[:1])
    torch_native.decode(
        *(never, backend, pools.query[:1], output, pools.k, pools.v, pools.req_to_token, pools.rows),
        torch.tensor([50]),
        **options(pools),
    )
    torch.testing.assert_close(output, pools.reference(0, pools.query[:1], 49), rtol=0, atol=TOLERANCE)


def test_what_is_not_mended_goes_to_the_stock_function():
    calls = []

    def stock(*args):
        calls.append(args)
        return "stock"

    some = torch.zeros(1)
    full = (*(object(), some, some, some, some, some, some, some),)
    assert torch_native.decode(stock, *full, None, 0.5, True, False, False, None) == "stock"
    assert torch_native.extend(stock, *full, some, some, None, 0.5, True, False, False, None) == "stock"
    assert torch_native.extend(stock, *full, some, some, some, 0.5, True, True, False, None) == "stock"
    assert [len(args) for args in calls] == [14, 16, 16]
