"""Bodies of the HTTP requests: LMCache's fields, and optional ones of ours. Bounds are part of the types."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, StringConstraints

from psrl_sglang.transfer.client import DRAM_LOCATION

MAX_TOKENS = 1_000_000
MAX_TIMEOUT_S = 600.0

Name = Annotated[str, StringConstraints(min_length=1, max_length=256)]
Text = Annotated[str, StringConstraints(max_length=1024)]
Version = Annotated[str, StringConstraints(min_length=1, max_length=256)]
Token = Annotated[int, Field(ge=0, lt=1 << 31, strict=True)]
Tokens = Annotated[list[Token], Field(min_length=1, max_length=MAX_TOKENS)]
Timeout = Annotated[float, Field(gt=0, le=MAX_TIMEOUT_S, allow_inf_nan=False)]
Position = tuple[Name, Name]


class Body(BaseModel):
    # LMCache's clients may send more than we read.
    model_config = ConfigDict(extra="ignore", hide_input_in_errors=True)


class _Salts(Body):
    version: Version | None = None
    cache_salt: Text | None = None
    extra_key: Text | None = None


class QueryInstance(Body):
    event_id: Text = ""
    ip: Name


class Lookup(_Salts):
    """``exact``: ask the holders, which know to the page, instead of trusting their reports."""

    tokens: Tokens
    exact: bool = False
    timeout_s: Timeout = 2.0


class Move(_Salts):
    """``old_position`` null: whoever holds ``session``. ``wait`` false: answer at once, with the event's id."""

    old_position: Position | None = None
    new_position: Position
    tokens: Tokens
    should_copy: bool | None = False
    session: Name | None = None
    timeout_s: Timeout = 5.0
    wait: bool = True


class Pin(_Salts):
    instance_id: Name
    location: Name = DRAM_LOCATION
    tokens: Tokens
    timeout_s: Timeout = 5.0


class Clear(Body):
    instance_id: Name
    location: Name = DRAM_LOCATION
    timeout_s: Timeout = 30.0


class Health(Body):
    instance_id: Name
    timeout_s: Timeout = 5.0


class CheckFinish(Body):
    event_id: Name


class QueryWorkerInfo(Body):
    instance_id: Name
    worker_ids: Annotated[list[int], Field(max_length=65536)] | None = None
