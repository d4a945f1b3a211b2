"""Continuing a `/generate` that the engine broke off: the same request once more, with what was said so far behind
its prompt. Several replies become the one that the client asked for.

Nothing here waits or sends.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

_DEFAULT_NEW_TOKENS = 128  # SGLang's own, where the request does not say
_NOT_TOKENS = (
    "text",
    "input_embeds",
    "image_data",
    "video_data",
    "audio_data",
    "session_params",
    "bootstrap_room",
)
_GRAMMARS = ("json_schema", "regex", "ebnf", "structural_tag")
_JOINED = (
    "output_token_logprobs",
    "output_top_logprobs",
    "output_token_ids_logprobs",
    "output_token_sampling_mask",
    "output_token_sampling_logprobs",
)
_COUNTED = (
    "output_token_logprobs_length",
    "output_token_sampling_mask_length",
    "reasoning_tokens",
    "e2e_latency",
)
_OF_THE_FIRST = ("prompt_tokens", "cached_tokens", "cached_tokens_details")


class NotContinued(Exception):
    """The request is of a kind whose answer cannot be taken up again; the text is one word, for a counter."""


def is_abort(reply: Any) -> bool:
    """Whether the engine ended this reply for a reason of its own, and the request itself was in order."""
    meta = reply.get("meta_info") if isinstance(reply, dict) else None
    reason = meta.get("finish_reason") if isinstance(meta, dict) else None
    return isinstance(reason, dict) and reason.get("type") == "abort" and reason.get("status_code") is None


class Continuation:
    """What an answer is made of so far. ``legs`` counts the replies that were broken off."""

    def __init__(self, body: bytes) -> None:
        """Raises `NotContinued`."""
        self._request = _request(body)
        self._prompt: list[int] = self._request["input_ids"]
        self._sampling: dict[str, Any] = dict(self._request.get("sampling_params") or {})
        self._joined: dict[str, list[Any]] = {}
        self._counted: dict[str, float] = {}
        self._first: dict[str, Any] = {}
        self._top: dict[str, Any] = {}
        self._spans: list[dict[str, Any]] = []
        self._psrl: dict[str, Any] = {}
        self._text = ""
        self.output_ids: list[int] = []
        self.legs = 0
        self.progressed = False

    @property
    def rid(self) -> str | None:
        rid = self._request.get("rid")
        return rid if isinstance(rid, str) else None

    @property
    def is_complete(self) -> bool:
        """Every token that was asked for is there."""
        wanted = self._new_tokens()
        return wanted is not None and len(self.output_ids) >= wanted

    @property
    def last_version(self) -> str | None:
        """Of the weights that made the last of it."""
        return self._spans[-1]["version"] if self._spans else None

    def take(self, reply: dict[str, Any]) -> None:
        """A whole reply that was broken off."""
        meta = reply["meta_info"]
        new_ids = reply.get("output_ids") or []
        self.progressed = bool(new_ids)
        base = len(self.output_ids)
        if not self.legs:
            self._first = {
                name: value
                for name, value in meta.items()
                if name.startswith("input_") or name in _OF_THE_FIRST
            }
            self._top = {name: reply[name] for name in ("prompt_token_ids",) if name in reply}
        elif "prompt_tokens" not in self._first:
            # The first was aborted before it ran.
            self._first |= {name: meta[name] for name in _OF_THE_FIRST if name in meta}
            if "prompt_tokens" in self._first:
                self._first["prompt_tokens"] -= base
        self._spans = _spans(self._spans, base, meta, len(new_ids))
        self._psrl = _merged_psrl(self._psrl, meta.get("psrl"))
        for name in _JOINED:
            if meta.get(name) is not None:
                self._joined.setdefault(name, []).extend(meta[name])
        for name in _COUNTED:
            if isinstance(meta.get(name), int | float):
                self._counted[name] = self._counted.get(name, 0) + meta[name]
        self.output_ids.extend(new_ids)
        self._text += reply.get("text") or ""
        self.legs += 1

    def next_body(self) -> bytes:
        """The request for the rest."""
        if not self.output_ids:
            return msgspec.json.encode(self._request)
        sampling = dict(self._sampling)
        wanted = self._new_tokens()
        if wanted is not None:
            sampling["max_new_tokens"] = wanted - len(self.output_ids)
        if isinstance(least := sampling.get("min_new_tokens"), int):
            sampling["min_new_tokens"] = max(0, least - len(self.output_ids))
        request = {**self._request, "input_ids": [*self._prompt, *self.output_ids], "sampling_params": sampling}
        if self._request.get("logprob_start_len") is not None:
            request["logprob_start_len"] = -1  # those of the prompt came with the first reply
        return msgspec.json.encode(request)

    def joined(self, reply: dict[str, Any]) -> dict[str, Any]:
        """The reply as if it had been the only one."""
        if not self.legs:
            return reply
        meta = dict(reply["meta_info"])
        ids = reply.get("output_ids") or []
        base = len(self.output_ids)
        for name in _JOINED:
            if name in meta or name in self._joined:
                meta[name] = [*self._joined.get(name, ()), *(meta.get(name) or ())]
        self._shift(meta, base, len(ids))
        whole = {**reply, **self._top, "output_ids": [*self.output_ids, *ids], "meta_info": meta}
        if reply.get("text") is not None or self._text:
            whole["text"] = self._text + (reply.get("text") or "")
        return whole

    def joined_delta(self, reply: dict[str, Any], told: int) -> dict[str, Any]:
        """The same of an event that has only what is new; ``told`` tokens of this leg were in earlier ones."""
        if not self.legs:
            return reply
        meta = dict(reply["meta_info"])
        count = told + len(reply.get("output_ids") or ())
        for name in _COUNTED:
            if name.endswith("_length"):
                meta.pop(name, None)
        self._shift(meta, len(self.output_ids), count)
        return {**reply, **self._top, "meta_info": meta}

    def end(self, *, as_delta: bool) -> dict[str, Any]:
        """What there is, as the one reply: complete if it is, else aborted. ``as_delta``: it was told already."""
        reason: dict[str, Any] = {"type": "length", "length": len(self.output_ids)}
        if not self.is_complete:
            reason = {"type": "abort", "message": "Aborted, and not continued"}
        last = {"text": "", "output_ids": [], "meta_info": {"finish_reason": reason}}
        return self.joined_delta(last, 0) if as_delta else self.joined(last)

    def _new_tokens(self) -> int | None:
        """How many were asked for; None for as many as fit."""
        return self._sampling.get("max_new_tokens", _DEFAULT_NEW_TOKENS)

    def _shift(self, meta: dict[str, Any], base: int, count: int) -> None:
        meta.update(self._first)
        for name, value in self._counted.items():
            meta[name] = value + (meta.get(name) or 0)
        meta["completion_tokens"] = base + count
        meta["weight_versions"] = _spans(self._spans, base, meta, count)
        if meta["weight_versions"]:
            meta["weight_version"] = meta["weight_versions"][-1]["version"]
        if psrl := _merged_psrl(self._psrl, meta.get("psrl")):
            meta["psrl"] = psrl
        reason = meta.get("finish_reason")
        if isinstance(reason, dict) and reason.get("type") == "length":
            meta["finish_reason"] = {**reason, "length": base + count}


def merged_parts(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """One reply of events that each tell what is new."""
    if len(parts) == 1:
        return parts[0]
    last = parts[-1]
    meta = dict(last["meta_info"])
    for name in _JOINED:
        values = [part["meta_info"][name] for part in parts if part["meta_info"].get(name) is not None]
        if values:
            meta[name] = [entry for value in values for entry in value]
    ids = [token for part in parts for token in part.get("output_ids") or ()]
    return {
        **last,
        "text": "".join(part.get("text") or "" for part in parts),
        "output_ids": ids,
        "meta_info": meta,
    }


def _request(body: bytes) -> dict[str, Any]:
    try:
        request = msgspec.json.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise NotContinued("malformed") from error
    if not isinstance(request, dict):
        raise NotContinued("malformed")
    ids, sampling = request.get("input_ids"), request.get("sampling_params") or {}
    if any(request.get(name) is not None for name in _NOT_TOKENS) or not isinstance(ids, list):
        raise NotContinued("not_tokens")
    if not ids or not all(type(token) is int for token in ids) or not isinstance(sampling, dict):
        raise NotContinued("batch")
    if (sampling.get("n") or 1) != 1 or sampling.get("beam_width"):
        raise NotContinued("several_answers")
    if any(sampling.get(name) is not None for name in _GRAMMARS):
        raise NotContinued("grammar")
    if request.get("return_hidden_states"):
        raise NotContinued("hidden_states")
    wanted = sampling.get("max_new_tokens", _DEFAULT_NEW_TOKENS)
    if wanted is not None and type(wanted) is not int:
        raise NotContinued("malformed")
    return request


def _spans(
    before: list[dict[str, Any]], base: int, meta: Mapping[str, Any], count: int
) -> list[dict[str, Any]]:
    """Which version made which of all tokens."""
    told = meta.get("weight_versions")
    if not told and meta.get("weight_version") is not None:
        told = [{"version": meta["weight_version"], "start": 0, "end": count}]
    spans = [dict(span) for span in before]
    for span in told or ():
        start, end = base + span["start"], base + span["end"]
        if end <= start and spans:
            continue
        if spans and (spans[-1]["version"] == span["version"] or spans[-1]["end"] <= spans[-1]["start"]):
            spans[-1] = {"version": span["version"], "start": spans[-1]["start"], "end": end}
        else:
            spans.append({"version": span["version"], "start": start, "end": end})
    return spans


def _merged_psrl(before: dict[str, Any], told: Any) -> dict[str, Any]:
    """The oldest version of all legs is that of the first which names one; of figures the worst counts."""
    if not isinstance(told, dict):
        return before
    merged = {**told, **before}
    for name, value in told.items():
        if isinstance(value, bool | int | float) and isinstance(before.get(name), bool | int | float):
            merged[name] = max(value, before[name])
    return merged
