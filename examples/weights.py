"""Weights that a trainer has in memory, sent to engines in pieces: as tensors, or by a process group."""

from __future__ import annotations

import asyncio
import base64
import socket
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from trainer import Http

GROUP_S = 60.0


def read_checkpoint(directory: Path) -> dict[str, Any]:
    from safetensors.torch import load_file

    parts = (load_file(file) for file in sorted(directory.glob("*.safetensors")))
    return {name: tensor for part in parts for name, tensor in part.items()}


def pieces(weights: Mapping[str, Any], count: int) -> Iterator[dict[str, Any]]:
    names = list(weights)
    step = -(-len(names) // count)
    for start in range(0, len(names), step):
        yield {name: weights[name] for name in names[start : start + step]}


async def send_as_tensors(
    http: Http, engines: Sequence[str], weights: Mapping[str, Any], *, count: int = 3, **more: Any
) -> None:
    """`/update_weights_from_tensor`, between the begin and the end of an update."""
    import torch.multiprocessing
    from sglang.srt.utils import MultiprocessingSerializer

    # The default hands file descriptors only to processes of the same family.
    torch.multiprocessing.set_sharing_strategy("file_system")
    for piece in pieces(weights, count):
        # Serialized for each engine: memory that is shared is taken once.
        await asyncio.gather(
            *(
                http.post(
                    f"{engine}/update_weights_from_tensor",
                    {
                        "serialized_named_tensors": [
                            base64.b64encode(MultiprocessingSerializer.serialize(list(piece.items()))).decode()
                        ],
                        **more,
                    },
                )
                for engine in engines
            )
        )


class UpdateGroup:
    """A process group of this process, rank 0, and one rank of each engine. Leave it with ``close``."""

    def __init__(self, http: Http, engines: Sequence[str], name: str, backend: str = "gloo") -> None:
        self._http = http
        self._engines = engines
        self._name = name
        self._backend = backend
        self._group: Any = None

    async def join(self) -> None:
        from sglang.srt.utils import init_custom_process_group

        with socket.create_server(("127.0.0.1", 0)) as probe:
            port = probe.getsockname()[1]
        world = 1 + len(self._engines)
        common = {
            "master_address": "127.0.0.1",
            "master_port": port,
            "world_size": world,
            "group_name": self._name,
            "backend": self._backend,
        }
        mine = asyncio.to_thread(
            init_custom_process_group,
            backend=self._backend,
            init_method=f"tcp://127.0.0.1:{port}",
            world_size=world,
            rank=0,
            group_name=self._name,
        )
        theirs = (
            self._http.post(f"{engine}/init_weights_update_group", {**common, "rank_offset": 1 + number})
            for number, engine in enumerate(self._engines)
        )
        async with asyncio.timeout(GROUP_S):
            self._group, *_ = await asyncio.gather(mine, *theirs)

    async def send(self, weights: Mapping[str, Any], *, count: int = 3, **more: Any) -> None:
        """`/update_weights_from_distributed`: names over HTTP, the tensors over the group."""
        for piece in pieces(weights, count):
            told = {
                "names": list(piece),
                "dtypes": [str(tensor.dtype).removeprefix("torch.") for tensor in piece.values()],
                "shapes": [list(tensor.shape) for tensor in piece.values()],
                "group_name": self._name,
                "flush_cache": False,
                **more,
            }
            asked = self._http.on_every(self._engines, "/update_weights_from_distributed", told)
            async with asyncio.timeout(GROUP_S):
                await asyncio.gather(asked, asyncio.to_thread(self._broadcast, list(piece.values())))

    async def close(self) -> None:
        import torch

        await self._http.on_every(self._engines, "/destroy_weights_update_group", {"group_name": self._name})
        torch.distributed.destroy_process_group(self._group)

    def _broadcast(self, tensors: Sequence[Any]) -> None:
        import torch

        for work in [
            torch.distributed.broadcast(tensor, 0, group=self._group, async_op=True) for tensor in tensors
        ]:
            work.wait()
