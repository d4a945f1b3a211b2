"""Two tensor-parallel ranks with tiers: what one rank has lost, fails or is late with, both decide alike."""

import pytest
from fault_plugin import Faults
from support import NAMED, Running, assert_books_hold, assert_same, prompt, status, wait_until
from tier_support import (
    NEW_TOKENS,
    assert_hit,
    assert_nothing_held,
    cached_from,
    settle,
    stored,
    tier_status,
    tiers,
    with_disk,
)

from psrl_sglang.lab.models import make_model
from psrl_sglang.lab.servers import ServerError

pytestmark = pytest.mark.engine
POOL_TOKENS = 1024


@pytest.fixture(scope="module")
def faults(tmp_path_factory):
    return Faults(tmp_path_factory.mktemp("faults"))


@pytest.fixture(scope="module")
def start(server_factory, faults, tmp_path_factory):
    options = {"namespace": "run", "read_ahead_timeout_s": 30.0, "decode_checkpoint_tokens": 16}
    behind = with_disk(tmp_path_factory.mktemp("disk"), chunks=128, save_unfull_chunk=True, sglang=options)
    args = (*NAMED, "--tp-size", "2", "--max-total-tokens", str(POOL_TOKENS))
    # SGLang checks, where it can, that the ranks decide alike.
    env = {"SGLANG_CPU_OMP_THREADS_BIND": "0|1", "SGLANG_ENABLE_RANK_CONSENSUS_CHECKER": "1"}
    env |= faults.env
    return lambda settings=behind, model=None: server_factory(model, args=args, psrl_config=settings, env=env)


@pytest.fixture(scope="module")
def shared(start):
    return start()


@pytest.fixture
def server(shared, faults):
    yield shared
    faults.set()
    unlock(shared)
    assert_nothing_held(shared)
    assert_books_hold(shared)


def in_dram_only(server, seed, length=601):
    asked = prompt(seed, length)
    answer = stored(server, asked)
    server.overwrite_pool()
    return asked, answer


def unlock(server):
    """Until what was offloaded is acknowledged by both ranks; the status tells the queues of the first one."""
    wait_until(lambda: status(server)["device"]["locked_tokens"] == 0, "nothing is locked")


def test_what_one_rank_has_lost_is_loaded_by_neither(start, faults):
    server = start(tiers(chunks=128))
    asked, answer = in_dram_only(server, 700)
    faults.set(rank=1, forget_from=16)
    assert_hit(server, asked, answer, "host", 256)
    faults.set()
    assert_nothing_held(server)
    server.stop(grace_s=0.0)


def test_a_load_that_fails_on_one_rank_is_a_503_on_both_and_the_next_one_is_answered(server, faults):
    asked, answer = in_dram_only(server, 701)
    faults.set(rank=1, fail_layer=2)
    with pytest.raises(ServerError, match="503"):
        server.generate(asked, NEW_TOKENS)
    faults.set()
    again = server.generate(asked, NEW_TOKENS)
    assert again.cached_tokens == 592
    assert_same(again, answer)


def test_what_one_rank_loses_between_look_up_and_load_is_computed_by_both(server, faults):
    asked, answer = in_dram_only(server, 702)
    faults.set(rank=1, forget_at_load=True)
    again = server.generate(asked, NEW_TOKENS)
    assert again.cached_tokens == 0
    assert_same(again, answer)


def test_running_decodes_are_saved_alike_by_ranks_of_different_speed(server, faults):
    asked = prompt(730, 65)
    faults.set(rank=1, offload_s=0.4)
    whole = [*asked, *server.generate(asked, 55).output_ids]
    faults.set()
    unlock(server)
    assert_books_hold(server)
    server.overwrite_pool()
    again = server.generate(whole, NEW_TOKENS)
    assert cached_from(again)["host"] == 112
    assert_same(server.generate(whole, NEW_TOKENS), again)


def test_row_18_ranks_of_different_speed_decide_alike(server, faults):
    known = [in_dram_only(server, seed, 321) for seed in range(710, 716)]
    faults.set(rank=1, layer_s=0.02, offload_s=0.1, read_s=0.1, forget_from=0)
    read = faults.seen("reads")
    running = [Running(server, asked, NEW_TOKENS) for asked, _ in known for _ in range(2)]
    answers = [request.result() for request in running]
    for (_, answer), one, other in zip(known, answers[::2], answers[1::2], strict=True):
        assert one.output_ids == other.output_ids == answer.output_ids
    assert faults.seen("reads") > read


def test_a_restart_finds_the_disks_of_both_ranks(shared, start, faults):
    asked, answer = in_dram_only(shared, 720)
    settle(shared)
    shared.stop(grace_s=10.0)
    faults.set(rank=0, read_s=0.05)
    second = start()
    wait_until(lambda: tier_status(second)["tiers"]["disk"]["index_loaded"], "the index is there")
    assert_hit(second, asked, answer, "storage")
    assert_nothing_held(second)
    assert_books_hold(second)


def test_ranks_that_keep_the_same_kv_share_their_disk(start, tmp_path):
    """Latent KV is the same on every rank, and so are its files."""
    options = {"sglang": {"namespace": "run", "read_ahead_timeout_s": 30.0}, "save_unfull_chunk": True}
    settings, model = (
        with_disk(tmp_path / "disk", **options),
        make_model(tmp_path / "mla", seed=1, preset="mla"),
    )
    server = start(settings, model)
    asked, _ = in_dram_only(server, 740)
    device = server.generate(asked, NEW_TOKENS)
    assert cached_from(device)["host"] == 592
    settle(server)
    server.stop(grace_s=10.0)
    second = start(settings, model)
    wait_until(lambda: tier_status(second)["tiers"]["disk"]["index_loaded"], "the index is there")
    assert_hit(second, asked, device, "storage")
    assert_nothing_held(second)
    assert_books_hold(second)
    second.stop(grace_s=0.0)
