"""Tells the caller which versions are behind a reply: ``meta_info["psrl"]``.

The scheduler adds the value through the output streamer's own extension point; the tokenizer process lifts it
out of SGLang's per-token "customized info", which would otherwise accumulate it once per chunk.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from psrl_sglang.engine.tree import VersionedTree

_KEY = "psrl"


def after_build_info(result: dict[str, list[Any]], self: Any, reqs: list[Any]) -> dict[str, list[Any]]:
    """After ``SchedulerOutputStreamer.build_additional_customized_info``: one entry per request."""
    tree = self.tree_cache
    if not isinstance(tree, VersionedTree):
        return result
    return {**result, _KEY: [tree.versions.describe_request(req) for req in reqs]}


def around_update_meta_info(
    original: Callable[..., None],
    self: Any,
    meta_info: dict[str, Any],
    state: Any,
    customized_info: dict[str, list[Any]],
    index: int,
    finish_reason: Any,
) -> None:
    """Around ``TokenizerManager.update_request_meta_info``."""
    ours = customized_info.get(_KEY)
    if ours is not None:
        meta_info[_KEY] = ours[index]
        note = getattr(state.obj, "_psrl_note", None)
        if note is not None and ours[index]:
            note.oldest_version = str(ours[index].get("oldest_version") or "")
            name = ours[index].get("installed_version")
            if name == meta_info.get(
                "weight_version"
            ):  # SGLang's goes on saying the old name for unnamed weights
                note.weight_version = str(name)
        customized_info = {key: values for key, values in customized_info.items() if key != _KEY}
    original(self, meta_info, state, customized_info, index, finish_reason)
