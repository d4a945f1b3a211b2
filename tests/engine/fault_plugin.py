"""A plugin of SGLang that exists in tests only: it makes the tiers of a real server slow, failing or forgetful,
rank by rank, as a file says that the test rewrites while the server runs."""

from __future__ import annotations

import json
import os
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

_CONTROL = "PSRL_TEST_FAULTS"


class Faults:
    """The test's side. ``env`` is for the server; ``seen`` counts what the plugin has done."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        metadata = directory / "psrl_faults-1.dist-info"
        metadata.mkdir()
        (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: psrl-faults\nVersion: 1\n")
        (metadata / "entry_points.txt").write_text(
            "[sglang.srt.plugins]\npsrl_faults = fault_plugin:register\n"
        )
        paths = (str(directory), str(Path(__file__).parent), os.environ.get("PYTHONPATH", ""))
        self.env = {_CONTROL: str(directory), "PYTHONPATH": os.pathsep.join(paths)}
        self.set()

    def set(self, *, rank: int | None = None, **faults: Any) -> None:
        """Replace every fault; without a rank they are every rank's.

        ``layer_s``, ``offload_s``, ``read_s``: longest random delay of a layer of a load, of an offload, of a read
        from disk. ``fail_layer``: the layer at which loads fail. ``fail_offload``, ``fail_read``: all of them.
        ``land_s``: of each piece of KV that comes by cma.
        ``forget_from``: DRAM loses what is from this page on before each look-up, where ``forget_pool`` is named of
        that pool only; ``forget_at_load``: everything, between look-up and load.
        """
        staged = self.directory / "staged"
        staged.write_text(json.dumps({"all" if rank is None else str(rank): faults}))
        staged.rename(self.directory / "control")

    def seen(self, what: str) -> int:
        path = self.directory / what
        return path.stat().st_size if path.exists() else 0


def register() -> None:
    if _CONTROL not in os.environ:
        return
    from psrl_sglang.engine.linker import PsrlLinker

    directory = Path(os.environ[_CONTROL])
    from psrl_sglang.transfer.cma import CmaTransport

    opened, received = PsrlLinker.open, CmaTransport.receive

    def control(rank: str) -> dict[str, Any]:
        told = json.loads((directory / "control").read_text())
        return told.get(rank, told.get("all", {}))

    def note(what: str) -> None:
        with (directory / what).open("a") as file:
            file.write(".")

    def pause(longest_s: float) -> None:
        if longest_s:
            time.sleep(random.uniform(longest_s / 2, longest_s))

    def open_and_tap(linker: Any, store: Any, *args: Any, **kwargs: Any) -> None:
        rank = store.layout.rank.removeprefix("tp").split("/")[0]

        def before_layer(layer: int) -> None:
            told = control(rank)
            note("layers")
            pause(told.get("layer_s", 0))
            if told.get("fail_layer") == layer:
                raise OSError("injected into a load")

        def before_offload() -> None:
            told = control(rank)
            note("offloads")
            pause(told.get("offload_s", 0))
            if told.get("fail_offload"):
                raise OSError("injected into an offload")

        def lookup(rid: str, transfers: list[Any]) -> list[int]:
            page = control(rank).get("forget_from")
            if page is not None:
                index = store.dram.index
                pool = control(rank).get("forget_pool")
                chunks = [chunk for tag in index.tags() for chunk in index.of_tag(tag) if chunk.start >= page]
                chunks = [chunk for chunk in chunks if pool in (None, chunk.pool)]
                store.dram.drop(chunks, "test")
            return looked_up(rid, transfers)

        def load(rid: str, transfers: list[Any]) -> bool:
            if control(rank).get("forget_at_load"):
                linker.forget(rid)
                store.dram.clear()
            return loaded(rid, transfers)

        opened(linker, store, *args, **kwargs)
        looked_up, loaded = linker.lookup, linker.load
        linker.lookup, linker.load = lookup, load
        linker.before_layer, linker.before_offload = before_layer, before_offload
        if store.disk is not None:
            read = store.disk.read

            def slow_read(*args: Any) -> bool:
                note("reads")
                told = control(rank)
                pause(told.get("read_s", 0))
                return not told.get("fail_read") and read(*args)

            store.disk.read = slow_read

    def slow_receive(
        transport: Any, link: Any, offer: bytes, pieces: Any, landed: Callable[[int], None], deadline: Any
    ) -> None:
        def slowly(index: int) -> None:
            note("landed")
            pause(control("").get("land_s", 0))
            landed(index)

        received(transport, link, offer, pieces, slowly, deadline)

    CmaTransport.receive = slow_receive  # type: ignore[method-assign]
    PsrlLinker.open = open_and_tap
