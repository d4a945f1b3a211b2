"""One streamed request of the demo: sent, timed, and read for what the engine says of its weights and cache."""

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx


class RequestFailed(Exception):
    """The engine answered a request with something other than tokens."""


@dataclass
class Leg:
    """One request. A turn has one, and one more for each time it was aborted and sent again.

    `resumes_session_after_sync` marks the first one of its session whose history is of an earlier version.
    `sent_under` is the version that the client expects it to be admitted under: the current one, or the next
    one while the engine is paused for an update.
    """

    prompt: tuple[int, ...]
    output_limit: int
    sent_under: int
    resumes_session_after_sync: bool = False
    output_ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    meta: Mapping[str, Any] = field(default_factory=dict)
    first_token_at_s: float | None = None
    worker: str = ""  # the engine that answered, where a gateway says so
    # Set at an update: it took place while this request ran, and its KV was given back for version N.
    in_flight_at_update: bool = False
    recomputed_under: int = 0

    @property
    def has_output_left(self) -> int:
        """Tokens still to come, of a request that has begun to answer; else 0."""
        return self.output_limit - len(self.output_ids) if self.output_ids else 0

    @property
    def is_aborted(self) -> bool:
        return (self.meta.get("finish_reason") or {}).get("type") == "abort"

    @property
    def cached_tokens(self) -> int:
        return self.meta["cached_tokens"]

    def cached_from(self, source: str) -> int:
        """Of the cached tokens those from `source`: device, host (DRAM) or storage (behind DRAM)."""
        return (self.meta.get("cached_tokens_details") or {}).get(source, 0)

    @property
    def first_version(self) -> int:
        """The version that sampled the first token."""
        spans = self.meta.get("weight_versions")
        return int(spans[0]["version"]) if spans else self.version

    @property
    def version(self) -> int:
        """The version that sampled the last token."""
        return int(self.meta["weight_version"])

    @property
    def crossed(self) -> bool:
        """Whether more than one version may be behind its tokens, or behind its KV outside the cache."""
        spans = self.meta.get("weight_versions") or ()
        engine_says = (self.meta.get("psrl") or {}).get("crossed_versions", False)
        return self.in_flight_at_update or engine_says or len(spans) > 1

    def kv_versions(self, *, retracted_prompt_is_reused: bool) -> list[int]:
        """Under which version the KV of each token of prompt and output was computed.

        The forward that samples an output token computes the KV of the token before it. A retracted request's
        output is computed again; its prompt is too, unless the engine finds the old one in its cache.
        """
        sampled = [int(self.meta["weight_version"])] * len(self.output_ids)
        for span in self.meta.get("weight_versions") or ():
            for i in range(span["start"], min(span["end"], len(sampled))):
                sampled[i] = int(span["version"])
        output = [max(version, self.recomputed_under) for version in [*sampled[1:], self.version]]
        floor = 0 if retracted_prompt_is_reused else self.recomputed_under
        first = sampled[0] if sampled else self.version
        return [max(first, floor)] * len(self.prompt) + output


async def send(
    client: httpx.AsyncClient,
    leg: Leg,
    *,
    on_chunk: Any,
    timeout_s: float,
    headers: Mapping[str, str] | None = None,
) -> None:
    """Stream `leg` to its end, greedily; `on_chunk(is_first)` is called after each chunk is taken.

    Raises RequestFailed when the engine answers with an error, httpx errors when it does not answer.
    """
    sampling = {"temperature": 0, "max_new_tokens": leg.output_limit, "ignore_eos": True}
    body = {
        "input_ids": leg.prompt,
        "sampling_params": sampling,
        "return_logprob": True,
        "stream": True,
    }
    async with client.stream("POST", "/generate", json=body, timeout=timeout_s, headers=headers) as reply:
        leg.worker = reply.headers.get("x-psrl-worker", "")
        if reply.status_code != httpx.codes.OK:
            text = (await reply.aread()).decode(errors="replace")
            raise RequestFailed(f"/generate answered {reply.status_code}: {text[:500]}")
        async for line in reply.aiter_lines():
            if line.startswith("data: {"):
                _take(leg, json.loads(line.removeprefix("data: ")), on_chunk)
    if leg.meta.get("finish_reason") is None:
        raise RequestFailed(f"the answer ended after {len(leg.output_ids)} of {leg.output_limit} tokens")


def _take(leg: Leg, chunk: Mapping[str, Any], on_chunk: Any) -> None:
    if "meta_info" not in chunk:
        raise RequestFailed(f"/generate answered {json.dumps(chunk)[:500]}")
    leg.meta = chunk["meta_info"]
    leg.output_ids = tuple(chunk["output_ids"])
    leg.logprobs = tuple(entry[0] for entry in leg.meta.get("output_token_logprobs") or ())
    is_first = leg.first_token_at_s is None and bool(leg.output_ids)
    if is_first:
        leg.first_token_at_s = time.perf_counter()
    on_chunk(is_first)


def concatenated(legs: Sequence[Leg]) -> tuple[int, ...]:
    """What a turn generated over all its legs."""
    return tuple(token for leg in legs for token in leg.output_ids)
