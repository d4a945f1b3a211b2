"""What is learnt and done batch by batch: the speed of prefill, and checkpoints of running decodes."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from psrl_sglang.engine.updates import tree_of

_BEGAN = "psrl_began_s"


def around_run(original: Callable[..., Any], scheduler: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
    began_s = time.perf_counter()
    result = original(scheduler, batch, *args, **kwargs)
    if batch.hicache_consumer_index < 0:  # one that loaded nothing
        setattr(result, _BEGAN, began_s)  # the batch is copied before its result is processed
    return result


def after_result(outcome: Any, scheduler: Any, batch: Any, result: Any, *args: Any, **kwargs: Any) -> Any:
    tiers = tree_of(scheduler).tiers
    if tiers is not None:
        if batch.forward_mode.is_decode():
            tiers.checkpoint_decodes(batch.reqs)
        elif batch.forward_mode.is_extend() and (began_s := getattr(result, _BEGAN, None)) is not None:
            tiers.linker.choice.observe_prefill(batch.extend_num_tokens, time.perf_counter() - began_s)
    return outcome
