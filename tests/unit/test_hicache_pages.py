"""A page in a host pool of HiCache has one image, the linker's, and one identity, whatever the host layout."""

import itertools
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")
np = pytest.importorskip("numpy")
pytest.importorskip("sglang")

from hicache_support import MODEL, PAGE, Opened, entry, hashes, slots_of, storage_config  # noqa: E402
from sglang.srt.mem_cache.hicache_storage import PoolName  # noqa: E402
from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost  # noqa: E402
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType  # noqa: E402

from psrl_sglang.engine.copier import DirectCopier  # noqa: E402
from psrl_sglang.engine.geometry import build_pool_group, kv_layout, pool_geometry  # noqa: E402
from psrl_sglang.engine.hicache_pages import HostCopier, host_layout, host_pools  # noqa: E402
from psrl_sglang.store.arena import Arena  # noqa: E402

NO_DRAFT = SimpleNamespace(mtp_draft_device_pools=(), sidecar_draft_device_pools=())
KNOWN = ("layer_first", "page_first", "page_first_direct")


@pytest.mark.parametrize(
    ("kind", "layout"),
    [
        *itertools.product(("mha", "mla"), KNOWN),
        ("asymmetric", "page_first"),
        ("asymmetric", "page_first_direct"),
    ],
)
def test_a_host_page_has_the_linkers_image_whatever_the_host_layout(kind, layout):
    one = entry(kind, layout)
    (pool,) = host_pools([one])
    group = build_pool_group(one.device_pool, NO_DRAFT, PAGE, {ComponentType.FULL})
    geometry = {str(e.name): pool_geometry(e, group.num_layers) for e in group.entries}
    assert pool.page_bytes == geometry["kv"].page_bytes

    arena = Arena(2, 8 * pool.page_bytes)
    buffers = (
        one.device_pool.kv_buffer if kind == "mla" else [*one.device_pool.k_buffer, *one.device_pool.v_buffer]
    )
    for buffer in buffers:
        buffer.copy_(torch.randn(buffer.shape))
    device_pages, host_pages = [5, 0, 17], [2, 9, 1]
    _copy_to_host(one, device_pages, host_pages)
    offsets = np.array([0, 3, 1], dtype=np.int64) * pool.page_bytes
    DirectCopier(arena, list(geometry.values())).to_arena(geometry["kv"], torch.tensor(device_pages), offsets)
    linkers = arena.memory.copy()
    arena.memory[:] = 0
    copier = HostCopier(arena.memory, pool)
    copier.to_arena(np.array(host_pages), offsets)
    assert np.array_equal(arena.memory, linkers)

    kept = [buffer.clone() for buffer in _host_buffers(one.host_pool)]
    for buffer in _host_buffers(one.host_pool):
        buffer.zero_()
    copier.to_host(np.array(host_pages), offsets)
    slots = slots_of(host_pages)
    for buffer, before in zip(_host_buffers(one.host_pool), kept, strict=True):
        assert torch.equal(_rows_of(buffer, layout, slots), _rows_of(before, layout, slots))
        assert torch.count_nonzero(buffer) == torch.count_nonzero(_rows_of(before, layout, slots))


def _host_buffers(host):
    return [host.kv_buffer] if isinstance(host, MLATokenToKVPoolHost) else [host.k_buffer, host.v_buffer]


def _rows_of(buffer, layout, slots):
    """[layers, slots, ...] of a host buffer, read as SGLang's kernels do."""
    if layout == "layer_first":
        return buffer[:, slots]
    if layout == "page_first":
        return buffer[slots].transpose(0, 1)
    return buffer[slots // PAGE, :, slots % PAGE].transpose(0, 1)


def _copy_to_host(one, device_pages, host_pages):
    device, slots = slots_of(device_pages), slots_of(host_pages)
    is_mla = isinstance(one.host_pool, MLATokenToKVPoolHost)
    sources = [one.device_pool.kv_buffer] if is_mla else [one.device_pool.k_buffer, one.device_pool.v_buffer]
    for buffer, layers in zip(_host_buffers(one.host_pool), sources, strict=True):
        for layer, source in enumerate(layers):
            if one.host_pool.layout == "layer_first":
                buffer[layer, slots] = source[device]
            elif one.host_pool.layout == "page_first":
                buffer[slots, layer] = source[device]
            else:
                buffer[slots // PAGE, layer, slots % PAGE] = source[device]


@pytest.mark.parametrize("kind", ["mha", "mla"])
def test_engines_with_and_without_hicache_agree_on_the_identity_of_a_page(kind):
    config = storage_config()
    texts = set()
    for layout in KNOWN:
        one = entry(kind, layout)
        texts.add(host_layout(host_pools([one]), [one], config, replicated=kind == "mla", model=MODEL).text)
    group = build_pool_group(one.device_pool, NO_DRAFT, PAGE, {ComponentType.FULL})
    pools = {str(e.name): pool_geometry(e, group.num_layers) for e in group.entries}
    assert texts == {kv_layout(group, pools, model_config=MODEL, rank=0, ranks=1).text}


def test_an_unknown_host_layout_is_stored_flat_and_kept_apart():
    other = Opened(entry(layout="page_head"))
    expected = other.fill_many([3, 4])
    other.storage.tags.note(hashes(1, 0, 1)[0], "1")
    assert other.storage.batch_set_v1(hashes(1, 0, 2), slots_of([3, 4])) == [True, True]
    assert other.storage.batch_get_v1(hashes(1, 0, 2), slots_of([8, 7])) == [True, True]
    other.assert_reads([8, 7], expected)
    assert other.store.layout.form == "hicache/kv:MHATokenToKVPoolHost/page_head"
    assert other.store.layout.digest != Opened().store.layout.digest


def test_ranks_and_pipeline_stages_and_pools_do_not_share():
    one, swa = entry(), entry(name=PoolName.SWA)
    pools = host_pools([one])

    def digest(pools=pools, entries=(one,), replicated=False, **changes):
        config = storage_config(**changes)
        return host_layout(pools, entries, config, replicated=replicated, model=MODEL).digest

    others = [
        digest(tp_rank=1, tp_size=2),
        digest(tp_size=2),
        digest(attn_cp_rank=1, attn_cp_size=2),
        digest(replicated=True),
        digest(host_pools([swa, one]), (swa, one)),
    ]
    assert len({digest(), *others}) == 6
    assert [pool.name for pool in host_pools([swa, one])] == ["kv", "swa"]
