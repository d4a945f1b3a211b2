"""What the tests on real servers share: prompts, comparison, requests that are under way, weight sessions."""

from __future__ import annotations

import base64
import json
import random
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import httpx

from psrl_sglang.lab.servers import Generation, Server

# One unit in the last place of a log-probability near -6 is 4.8e-7; KV of other weights differs by over 0.1.
NOISE = 1e-5
STRICT: dict[str, Any] = {"psrl": {"sglang": {"max_version_lag": 0}}}
NAMED = ("--weight-version", "1")


def prompt(seed: int, length: int = 600) -> list[int]:
    source = random.Random(seed)
    return [source.randrange(512) for _ in range(length)]


def difference(one: Generation, other: Generation) -> float:
    return max(abs(a - b) for a, b in zip(one.logprobs, other.logprobs, strict=True))


def assert_same(one: Generation, other: Generation) -> None:
    assert one.output_ids == other.output_ids
    assert difference(one, other) <= NOISE


def status(server: Server) -> dict[str, Any]:
    return server.get("/psrl/v1/status").raise_for_status().json()


def counters(server: Server) -> dict[str, Any]:
    return status(server)["counters"]


def resident(server: Server, tokens: list[int], version: str | None = None, **extra: Any) -> int:
    """Tokens of a prefix on the device; ``version`` None is what a request would use now."""
    reply = server.post("/psrl/v1/lookup", {"input_ids": tokens, "version": version, **extra})
    return reply.raise_for_status().json()["tokens"]


def assert_books_hold(server: Server) -> None:
    wait_until(lambda: idle(server), "the server becomes idle")
    check = server.get("/psrl/v1/check").raise_for_status().json()
    assert check == {"ok": True, "problems": [], "idle": True}


def idle(server: Server) -> bool:
    requests = status(server)["requests"]
    return requests["running"] == 0 and requests["waiting"] == 0


def wait_until(condition: Callable[[], bool], what: str, *, timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {timeout_s} s: {what}"
        time.sleep(0.02)


class Running:
    """A streamed request under way in a thread of its own; ``result`` joins it."""

    def __init__(self, server: Server, input_ids: list[int], max_new_tokens: int, **extra: Any) -> None:
        sampling = {"temperature": 0, "max_new_tokens": max_new_tokens, "ignore_eos": True}
        self._body = {
            "input_ids": input_ids,
            "sampling_params": sampling,
            "return_logprob": True,
            "stream": True,
            **extra,
        }
        self._url = f"{server.url}/generate"
        self._last: dict[str, Any] = {}
        self._error: Exception | None = None
        self._tokens = 0
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            with (
                httpx.Client(trust_env=False, timeout=300) as client,
                client.stream("POST", self._url, json=self._body) as reply,
            ):
                for line in reply.iter_lines():
                    if line.startswith("data: {"):
                        self._take(json.loads(line[len("data: ") :]))
        except httpx.HTTPError as error:
            self._error = error
        with self._changed:
            self._changed.notify_all()

    def _take(self, chunk: dict[str, Any]) -> None:
        with self._changed:
            self._last = chunk
            self._tokens = chunk.get("meta_info", {}).get("completion_tokens", self._tokens)
            self._changed.notify_all()

    def wait_tokens(self, count: int, *, timeout_s: float = 120.0) -> None:
        """Until ``count`` tokens have been streamed."""
        with self._changed:
            met = self._changed.wait_for(
                lambda: self._tokens >= count or not self._thread.is_alive(), timeout_s
            )
        assert met, f"only {self._tokens} of {count} tokens after {timeout_s} s"
        assert self._tokens >= count, f"ended early: {self._last} {self._error}"

    def result(self, *, timeout_s: float = 240.0) -> Generation:
        self._thread.join(timeout_s)
        assert not self._thread.is_alive(), f"still running after {timeout_s} s"
        assert self._error is None, self._error
        assert "output_ids" in self._last, self._last
        meta = self._last["meta_info"]
        return Generation(
            output_ids=tuple(self._last["output_ids"]),
            logprobs=tuple(entry[0] for entry in meta.get("output_token_logprobs") or ()),
            cached_tokens=meta.get("cached_tokens", 0),  # none when it was aborted while it waited
            meta_info=meta,
        )


def post_ok(server: Server, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
    reply = server.post(path, body)
    assert reply.status_code == 200, f"{path}: {reply.status_code} {reply.text[:500]}"
    return reply.json()


def send_piece(server: Server, names: Mapping[str, Any], *, ranks: int = 1, **extra: Any) -> None:
    """One ``/update_weights_from_tensor`` inside an open session."""
    import torch.multiprocessing
    from sglang.srt.utils import MultiprocessingSerializer

    # The default hands file descriptors only to processes of the same family.
    torch.multiprocessing.set_sharing_strategy("file_system")
    data = MultiprocessingSerializer.serialize(list(names.items()))
    payload = base64.b64encode(data).decode()
    post_ok(server, "/update_weights_from_tensor", {"serialized_named_tensors": [payload] * ranks, **extra})


def read_weights(model: Path) -> dict[str, Any]:
    from safetensors.torch import load_file

    return {
        name: tensor for file in sorted(model.glob("*.safetensors")) for name, tensor in load_file(file).items()
    }


def send_weights(server: Server, model: Path, *, pieces: int = 1, **extra: Any) -> None:
    """A whole begin/end session, as a trainer sends it."""
    weights = list(read_weights(model).items())
    step = -(-len(weights) // pieces)
    post_ok(server, "/begin_weight_update", {})
    for start in range(0, len(weights), step):
        send_piece(server, dict(weights[start : start + step]), **extra)
    post_ok(server, "/end_weight_update", {})
