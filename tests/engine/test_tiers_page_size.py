"""A server whose page size is what SGLang chooses: the user writes settings, and nothing else."""

import pytest
from support import prompt
from tier_support import NEW_TOKENS, assert_hit, assert_nothing_held, chunk_files, settle, with_disk

from psrl_sglang.lab.servers import Server

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def disk(tmp_path_factory):
    return tmp_path_factory.mktemp("disk")


@pytest.fixture(scope="module")
def server(zygote, models, disk, tmp_path_factory):
    server = Server(
        models[1],
        args=("--max-total-tokens", "4096", "--context-length", "4096", "--weight-version", "1"),
        psrl_config=with_disk(disk, chunks=64),
        env={"OMP_NUM_THREADS": "1"},
        log_path=tmp_path_factory.mktemp("log") / "server.log",
        zygote=zygote,
    )
    yield server
    server.stop(grace_s=0.0)


@pytest.mark.parametrize("tokens", [300, 513])
def test_without_a_page_size_kv_comes_back_from_dram(server, disk, tokens):
    assert server.get("/server_info").json()["page_size"] == 1
    asked = prompt(tokens, tokens)
    server.generate(asked, NEW_TOKENS)
    expected = server.generate(asked, NEW_TOKENS)
    settle(server)
    server.overwrite_pool()
    assert_hit(server, asked, expected, "host", tokens - 1)
    assert_nothing_held(server)
    assert chunk_files(disk)
