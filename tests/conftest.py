"""What all tests share: models made once, and real servers forked from one process that knows SGLang."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from psrl_sglang.lab.models import make_model
from psrl_sglang.lab.servers import Generation, Server
from psrl_sglang.lab.zygote import Zygote

settings.register_profile("any machine", deadline=None)
settings.load_profile("any machine")

ServerFactory = Callable[..., Server]

# A pool that a few prompts fill, in pages that divide them.
SMALL_POOL = ("--max-total-tokens", "8192", "--page-size", "16", "--context-length", "8192")


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """Two weight versions of the tiny model, by seed: 1 and 2."""
    directory = tmp_path_factory.mktemp("models")
    return {seed: make_model(directory / f"tiny-{seed}", seed=seed) for seed in (1, 2)}


@pytest.fixture(scope="session")
def zygote(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Zygote]:
    """A process with SGLang imported; a server started through it is up in seconds."""
    with Zygote(log_path=tmp_path_factory.mktemp("zygote") / "zygote.log") as process:
        yield process


@pytest.fixture(scope="session")
def fresh(
    zygote: Zygote, models: dict[int, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[..., Generation]]:
    """What an engine that never had other weights and never caches answers: `fresh(seed, prompt, tokens)`.

    One stock server per seed, without a radix cache, started when first asked.
    """
    logs = tmp_path_factory.mktemp("fresh")
    servers: dict[int, Server] = {}
    with ExitStack() as running:

        def answer(seed: int, input_ids: list[int], max_new_tokens: int) -> Generation:
            if seed not in servers:
                args = (*SMALL_POOL, "--disable-radix-cache")
                log_path = logs / f"seed-{seed}.log"
                servers[seed] = Server(models[seed], args=args, zygote=zygote, log_path=log_path)
                running.callback(servers[seed].stop, grace_s=0.0)
            return servers[seed].generate(input_ids, max_new_tokens)

        yield answer


@pytest.fixture(scope="module")
def server_factory(
    zygote: Zygote, models: dict[int, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServerFactory]:
    """Starts servers that end with the module at the latest: `server_factory(model=..., args=..., ...)`.

    The keywords are those of `Server`; by default the model of seed 1 on a small pool.
    """
    logs = tmp_path_factory.mktemp("servers")
    numbers = count()
    with ExitStack() as running:

        def start(model: str | Path | None = None, *, args: tuple[str, ...] = (), **options: Any) -> Server:
            options = {"zygote": zygote, "log_path": logs / f"server-{next(numbers)}.log", **options}
            server = Server(model or models[1], args=(*SMALL_POOL, *args), **options)
            # Nothing of a test needs a graceful end, which takes seconds.
            running.callback(server.stop, grace_s=0.0)
            return server

        yield start
