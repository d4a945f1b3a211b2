"""What a gateway is told: PSRL's routing settings, read as PSRL files write them, and some of our own.

A section of PSRL holds much that the gateway does not have; only `psrl.gateway`, which is ours, is complete here.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

COORDINATION = "psrl.rollout_coordination"
ROUTING = f"{COORDINATION}.routing_strategy"
CACHE_AWARE = f"{ROUTING}.cache_aware_policy"
KV_TRANSFER = f"{ROUTING}.kv_transfer"
PARTIAL_ROLLOUT = f"{COORDINATION}.partial_rollout"
LMCACHE = "psrl.lmcache"
SGLANG = "psrl.sglang"
GATEWAY = "psrl.gateway"

Method = Literal[
    "random",
    "round_robin",
    "request_num_balance",
    "throughput_optimal",
    "throughput_optimal_with_budget",
    "cache_aware",
    "cache_aware_v1",
]


def _setting(default: Any, expects: str, meaning: str, **constraints: Any) -> Any:
    """A field whose error text and documentation both come from `expects` and `meaning`."""
    return Field(default=default, description=meaning, json_schema_extra={"expects": expects}, **constraints)


def _switch(default: bool, meaning: str) -> Any:
    return _setting(default, "true or false", meaning)


def _count(default: int, meaning: str, least: int = 1) -> Any:
    return _setting(default, f"a whole number >= {least}", meaning, ge=least)


def _seconds(default: float, meaning: str) -> Any:
    return _setting(default, "a number of seconds > 0", meaning, gt=0)


def _amount(default: float, meaning: str, **constraints: Any) -> Any:
    return _setting(default, "a number >= 0", meaning, ge=0, **constraints)


def clean_url(url: str) -> str:
    """An `http://host:port` without a slash at its end. Raises ``ValueError``."""
    url = url.rstrip("/")
    scheme, found, rest = url.partition("://")
    if scheme not in ("http", "https") or not found or not rest or "@" in rest or not rest.isprintable():
        raise ValueError("is no URL such as http://10.0.0.7:30000")
    if any(mark in rest for mark in " ?#"):
        raise ValueError("is no URL such as http://10.0.0.7:30000")
    return url


Url = Annotated[str, AfterValidator(clean_url)]


class _Section(BaseModel):
    model_config = ConfigDict(
        frozen=True, extra="ignore", strict=True, allow_inf_nan=False, hide_input_in_errors=True
    )

    @classmethod
    def expects(cls, name: str) -> str:
        extra = cls.model_fields[name].json_schema_extra
        return str(extra["expects"]) if isinstance(extra, dict) else "valid"


class RoutingSettings(_Section):
    method: Method = _setting(
        "request_num_balance",
        "one of random, round_robin, request_num_balance, throughput_optimal, throughput_optimal_with_budget, "
        "cache_aware, cache_aware_v1",
        "How a worker is chosen among those that may serve a request.",
    )
    cost_model_path: str | None = _setting(
        None, "a path, or null", "Cost model (JSON) of the `throughput_optimal` methods."
    )
    delta_throughput_threshold: float = _amount(
        0.5, "A worker whose gain is below this share of an idle worker's gets nothing more."
    )
    request_budget: int = _count(1024, "Tokens that an answer is taken to need (`…_with_budget`).")
    check_interval_in_ms: int = _count(500, "Queued requests are tried again at least this often.")
    candidate_sort_indicator: Literal["version", "reserve_capability"] = _setting(
        "version",
        "version or reserve_capability",
        "Whether candidates are tried by version (newest first for new requests, else oldest first).",
    )
    enable_group_sticky: bool = _switch(False, "Requests of one `x-prompt-id` go to one worker.")
    enable_trajectory_sticky: bool = _switch(False, "Later turns of a session go to the worker of the first.")
    max_concurrent_seqs_per_instance: int = _count(
        1024, "Most requests under way on a worker; more wait here. 0 = no limit.", least=0
    )


class CacheAwareSettings(_Section):
    cache_threshold: float = _setting(
        0.0, "a number from 0 to 1", "Share of the prompt that must be known for it to count.", ge=0, le=1
    )
    gpu_overlap_weight: float = _amount(1.0, "Weight of what a worker lately computed.")
    lmcache_overlap_weight: float = _amount(
        0.0, "Weight of what the controller knows to be in a worker's DRAM or beyond."
    )
    balance_abs_threshold: int = _count(16, "Load counts instead from this difference on", least=0)
    balance_rel_threshold: float = _amount(1.5, "and if it is more than so many times the least load.")


class TransferSettings(_Section):
    enable: bool = _switch(False, "Move the KV of a request that goes to another worker than its last turn.")
    transfer_mode: Literal["async", "sync", "pin_sync"] = _setting(
        "async", "one of async, sync, pin_sync", "Whether the request waits for its move, and pins first."
    )
    transfer_timeout_ms: int = _setting(
        5000, "a whole number of milliseconds > 0", "Deadline of a move, its waiting included.", gt=0
    )
    stats_log_interval_s: float = _setting(
        30.0, "a number of seconds >= 0 (0 = off)", "Interval between log lines about moves.", ge=0
    )


class PartialRolloutSettings(_Section):
    enable: bool = _switch(True, "Continue a `/generate` that the engine aborted; the client sees one reply.")


class LMCacheSettings(_Section):
    controller_host: str | None = _setting(None, "a host name or address, or null", "Host of the controller.")
    controller_base_port: int = _setting(
        9000, "a whole number from 1 to 65535", "HTTP port of the controller.", ge=1, le=65535
    )


class SGLangSettings(_Section):
    secret_file: str | None = _setting(
        None, "a path, or null", "File with the secret of the fleet's move workers."
    )


class GatewaySettings(_Section):
    """Ours alone."""

    workers: list[Url] = _setting([], "a list of URLs such as http://10.0.0.7:30000", "Engines.")
    controller: Url | None = _setting(None, "a URL, or null", "HTTP address of the controller.")
    max_body_bytes: int = _count(64 << 20, "Largest request body; above it 413.")
    max_queued_requests: int = _count(4096, "Most requests that wait here for a worker; above it 503.", least=0)
    queue_timeout_s: float = _seconds(120.0, "Longest wait for a worker; after it 503 with the reason.")
    retries: int = _count(
        2, "How often a request that reached a worker and got no reply is sent again.", least=0
    )
    connect_timeout_s: float = _seconds(5.0, "Longest wait for a connection to a worker.")
    reply_timeout_s: float = _seconds(3600.0, "Longest silence of a worker that has a request.")
    health_interval_s: float = _seconds(
        2.0, "Interval at which workers are asked whether, and at what version."
    )
    health_timeout_s: float = _seconds(5.0, "Longest wait for that answer.")
    controller_poll_s: float = _seconds(1.0, "Interval at which the controller is asked who is there.")
    drain_timeout_s: float = _seconds(30.0, "How long what runs may take to end after SIGTERM.")
    max_loopbacks: int = _count(64, "Most times that one request is continued.", least=0)
    loopback_timeout_s: float = _seconds(3600.0, "Time since its arrival in which a request is continued.")
    max_concurrent_per_source: int = _count(8, "Most moves out of one worker at a time.")
    max_sessions: int = _count(100_000, "Most sessions, and prompt groups, that are remembered.")
    hung_turns_per_session: int = _count(8, "Most turns that wait for a hung session; above it 429.")
    hang_timeout_s: float = _seconds(600.0, "Longest wait of a turn for its hung session.")
    lookup_timeout_ms: int = _count(50, "Longest wait for the controller's answer about a prompt.")


class Settings(BaseModel):
    """Everything, valid together."""

    model_config = ConfigDict(frozen=True)

    routing: RoutingSettings = Field(default_factory=RoutingSettings)
    cache_aware: CacheAwareSettings = Field(default_factory=CacheAwareSettings)
    transfer: TransferSettings = Field(default_factory=TransferSettings)
    partial_rollout: PartialRolloutSettings = Field(default_factory=PartialRolloutSettings)
    lmcache: LMCacheSettings = Field(default_factory=LMCacheSettings)
    sglang: SGLangSettings = Field(default_factory=SGLangSettings)
    gateway: GatewaySettings = Field(default_factory=GatewaySettings)

    @property
    def controller_url(self) -> str | None:
        """The controller's address where one is named."""
        if self.gateway.controller is not None or self.lmcache.controller_host is None:
            return self.gateway.controller
        host = self.lmcache.controller_host
        host = f"[{host}]" if ":" in host else host
        return f"http://{host}:{self.lmcache.controller_base_port}"


SECTIONS: dict[str, tuple[str, type[_Section]]] = {
    ROUTING: ("routing", RoutingSettings),
    CACHE_AWARE: ("cache_aware", CacheAwareSettings),
    KV_TRANSFER: ("transfer", TransferSettings),
    PARTIAL_ROLLOUT: ("partial_rollout", PartialRolloutSettings),
    LMCACHE: ("lmcache", LMCacheSettings),
    SGLANG: ("sglang", SGLangSettings),
    GATEWAY: ("gateway", GatewaySettings),
}
