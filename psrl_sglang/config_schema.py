"""The settings: names, types, defaults and ranges.

Three frozen sections, one per mapping of a PSRL file that concerns us. Types are strict: a quoted number or a
quoted boolean is an error, not a guess. Ranges are checked even in a section that is switched off; beyond
that, what a switched-off section says has no effect. Rules that join several settings are in `config_rules`.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from psrl_sglang.config_problem import KV_TRANSFER, LMCACHE, SGLANG, ConfigError
from psrl_sglang.config_rules import broken_rules


def _setting(default: Any, expects: str, meaning: str, **constraints: Any) -> Any:
    """A field whose error text and documentation both come from `expects` and `meaning`."""
    return Field(default=default, description=meaning, json_schema_extra={"expects": expects}, **constraints)


def _switch(default: bool, meaning: str) -> Any:
    return _setting(default, "true or false", meaning)


def _port(default: int, meaning: str) -> Any:
    return _setting(default, "a whole number from 1 to 65535", meaning, ge=1, le=65535)


def _plain_text(text: str) -> str:
    if "${" in text:
        raise ValueError("holds an interpolation that was not resolved")
    return text


def _upper(value: object) -> object:
    return value.upper() if isinstance(value, str) else value


Text = Annotated[str, AfterValidator(_plain_text)]
FilledText = Annotated[str, Field(min_length=1), AfterValidator(_plain_text)]
CachePolicy = Annotated[Literal["LRU", "FIFO"], BeforeValidator(_upper)]
LoadPolicy = Literal["auto", "always", "never"] | Annotated[int, Field(gt=0)]


class _Section(BaseModel):
    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, allow_inf_nan=False, hide_input_in_errors=True
    )

    @classmethod
    def expects(cls, name: str) -> str:
        """What the setting `name` may hold, in words that fit after "must be"."""
        extra = cls.model_fields[name].json_schema_extra
        return str(extra["expects"]) if isinstance(extra, dict) else "valid"


class LMCacheSettings(_Section):
    """`psrl.lmcache`: KV kept outside the device, and how cached KV meets a change of weights.

    `multi_version_kv` and `clear_on_weight_update` govern the device cache too, so they count even when
    `enable` is false.
    """

    enable: bool = _switch(False, "Keep KV outside the device (offload tiers).")
    backend: Literal["cpu", "disk", "remote"] = _setting(
        "cpu", "one of cpu, disk, remote", "The farthest tier that must be there."
    )
    offload_size_gb: float = _setting(
        100.0, "a number > 0", "Offload budget in GiB, summed over all TP ranks.", gt=0
    )
    chunk_size: int = _setting(256, "a whole number > 0", "Tokens per chunk of stored or moved KV.", gt=0)
    save_decode_cache: bool = _switch(True, "Also offload the KV of generated tokens.")
    save_unfull_chunk: bool = _switch(False, "Also offload a last chunk that is not full.")
    clear_on_weight_update: bool = _switch(False, "Drop all cached KV when the weights change.")
    multi_version_kv: bool = _switch(True, "Tag cached KV with the version of the weights that made it.")
    enable_async_loading: bool = _switch(True, "Load offloaded KV while the forward pass runs.")
    cache_policy: CachePolicy = _setting(
        "LRU", "LRU or FIFO (any case)", "What is evicted first within a version."
    )
    reserve_local_cpu_size: float = _setting(
        0.0, "a number >= 0", "GiB of host memory that offloading must leave free.", ge=0
    )
    config_file: FilledText | None = _setting(
        None, "null", "A full LMCache file that would replace these fields; refused."
    )
    disk_path: FilledText | None = _setting(
        None, "a path, or null", "Directory for KV on disk; required by `backend: disk`."
    )
    max_disk_size_gb: float = _setting(1000.0, "a number > 0", "Most GiB of KV on disk.", gt=0)
    remote_url: FilledText | None = _setting(
        None,
        "a URL such as redis://host:6379, or null",
        "Store for KV off this host; required by `backend: remote`.",
        pattern=r"^[A-Za-z][A-Za-z0-9+.-]*://\S+$",
    )
    enable_p2p: bool = _switch(False, "Let instances move KV directly to each other.")
    p2p_transfer_channel: Literal["auto", "nixl", "tcp", "cma"] = _setting(
        "nixl", "one of auto, nixl, tcp, cma", "Transport of such a move."
    )
    controller_host: FilledText | None = _setting(
        None, "a host name or address, or null", "Host of the controller."
    )
    controller_base_port: int = _port(9000, "HTTP port of the controller.")
    controller_pull_port: int = _port(8300, "Controller port for reports of workers.")
    controller_reply_port: int = _port(8400, "Controller port on which workers register and send heartbeats.")
    controller_health_timeout_s: float = _setting(
        3000.0, "a number of seconds > 0", "Longest wait for the controller to become healthy.", gt=0
    )
    gpu_pin_block_budget: int = _setting(
        0, "a whole number >= 0 (0 = no limit)", "Most device pages pinned at a time.", ge=0
    )


class KVTransferSettings(_Section):
    """`psrl.rollout_coordination.routing_strategy.kv_transfer`: moves of KV between instances."""

    enable: bool = _switch(False, "Move the KV of a request that is routed to another instance.")
    transfer_mode: Literal["async", "sync", "pin_sync"] = _setting(
        "async", "one of async, sync, pin_sync", "Whether the request waits for its move, and pins first."
    )
    transfer_timeout_ms: int = _setting(
        5000,
        "a whole number of milliseconds > 0",
        "Deadline of a move; after it the prompt is prefilled.",
        gt=0,
    )
    stats_log_interval_s: float = _setting(
        30.0, "a number of seconds >= 0 (0 = off)", "Interval between log lines about moves.", ge=0
    )


class SGLangSettings(_Section):
    """`psrl.sglang`: settings that PSRL does not have; a PSRL file may leave the section out."""

    max_version_lag: int = _setting(
        0,
        "a whole number from 0 to 1000 (0 = strict)",
        "How many weight versions back reused KV may be from.",
        ge=0,
        le=1000,
    )
    tree_core: Literal["python", "rust"] = _setting(
        "python", "python or rust", "Which prefix tree of SGLang is used."
    )
    load_policy: LoadPolicy = _setting(
        "auto",
        "auto, always, never, or a whole number of tokens > 0",
        "When offloaded KV is loaded rather than recomputed.",
    )
    decode_checkpoint_tokens: int = _setting(
        0, "a whole number of tokens >= 0 (0 = off)", "Offload running decodes every so many tokens.", ge=0
    )
    pin_lease_s: float = _setting(
        300.0, "a number of seconds > 0", "How long a pin lasts unless it is renewed or asks otherwise.", gt=0
    )
    pin_max_lease_s: float = _setting(
        3600.0, "a number of seconds > 0", "Longest lease a pin may ask for.", gt=0
    )
    pin_budget_tokens: int = _setting(
        0,
        "a whole number of tokens >= 0 (0 = no limit but half of the device pool)",
        "Most tokens pinned at a time.",
        ge=0,
    )
    namespace: Text = _setting(
        "",
        "a string without `|`",
        "Keeps the KV of unrelated runs apart in shared stores.",
        pattern=r"^[^|]*$",
    )
    pin_arena: bool = _switch(True, "Page-lock the DRAM tier for CUDA, where that is possible.")
    read_ahead_timeout_s: float = _setting(
        2.0, "a number of seconds > 0", "Longest wait of a request for its KV from disk or remote.", gt=0
    )
    remote_timeout_s: float = _setting(
        1.0, "a number of seconds > 0", "Longest wait for one answer of the remote store.", gt=0
    )
    remote_ttl_s: float = _setting(
        86400.0, "a number of seconds >= 0 (0 = for ever)", "How long KV stays in the remote store.", ge=0
    )
    command_timeout_s: float = _setting(
        10.0, "a number of seconds > 0", "Longest wait for a command to the scheduler.", gt=0
    )
    instance_id: Text = _setting(
        "",
        "a name, or empty for host:port of the server",
        "What the controller and other engines call this engine.",
        pattern=r"^[^\s@/]*$",
    )
    move_host: FilledText = _setting(
        "127.0.0.1",
        "a host name or address of this machine",
        "Where the move worker listens, and what it tells others to dial.",
    )
    move_port: int = _setting(
        0,
        "a whole number from 0 to 65535 (0 = any free ones)",
        "First port of the move workers: two for each rank.",
        ge=0,
        le=65535,
    )
    moves_at_once: int = _setting(
        4, "a whole number from 1 to 64", "Most moves out of one rank at a time.", ge=1, le=64
    )
    move_policy: LoadPolicy = _setting(
        "auto",
        "auto, always, never, or a whole number of tokens > 0",
        "When KV is taken from another engine rather than recomputed.",
    )
    unversioned_moves: Literal["refuse", "current"] = _setting(
        "refuse",
        "one of refuse, current",
        "What a move that names no version means: none, or the current one.",
    )
    secret_file: FilledText | None = _setting(
        None,
        "a path, or null",
        "File with the secret of the fleet's workers; PSRL_SECRET does as well.",
    )
    heartbeat_s: float = _setting(
        5.0, "a number of seconds > 0", "Interval of a move worker's reports to the controller.", gt=0
    )


class PsrlConfig(BaseModel):
    """All settings, valid together: an instance never breaks a rule of `config_rules`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    lmcache: LMCacheSettings = Field(default_factory=LMCacheSettings)
    kv_transfer: KVTransferSettings = Field(default_factory=KVTransferSettings)
    sglang: SGLangSettings = Field(default_factory=SGLangSettings)

    @model_validator(mode="after")
    def _obeys_rules(self) -> PsrlConfig:
        problems = broken_rules(self)
        if problems:
            raise ConfigError(problems)
        return self

    def to_json(self) -> str:
        """The settings in PSRL's layout on one line; `load_config` reads it back to an equal object."""
        routing = {"kv_transfer": self.kv_transfer.model_dump()}
        psrl = {
            "lmcache": self.lmcache.model_dump(),
            "rollout_coordination": {"routing_strategy": routing},
            "sglang": self.sglang.model_dump(),
        }
        return json.dumps({"psrl": psrl}, allow_nan=False)


SECTIONS: dict[str, type[_Section]] = {
    LMCACHE: LMCacheSettings,
    KV_TRANSFER: KVTransferSettings,
    SGLANG: SGLangSettings,
}
