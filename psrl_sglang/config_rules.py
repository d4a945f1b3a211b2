"""Rules that join several settings."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, NamedTuple

from psrl_sglang.config_problem import KV_TRANSFER, LMCACHE, SGLANG, Problem, shown

if TYPE_CHECKING:
    from psrl_sglang.config_schema import PsrlConfig


class _Rule(NamedTuple):
    fields: tuple[str, ...]
    check: Callable[[PsrlConfig], Iterator[Problem]]


def broken_rules(config: PsrlConfig, unusable: frozenset[str] = frozenset()) -> list[Problem]:
    """Every rule that the settings break. Rules about a dotted path in `unusable` are skipped, because such
    a setting has a problem of its own and stands at its default here."""
    found: list[Problem] = []
    for rule in _RULES:
        if unusable.isdisjoint(rule.fields):
            found.extend(rule.check(config))
    return found


def _one_answer_to_a_weight_change(config: PsrlConfig) -> Iterator[Problem]:
    keeps, clears = config.lmcache.multi_version_kv, config.lmcache.clear_on_weight_update
    if keeps == clears:
        yield Problem(
            f"{LMCACHE}.multi_version_kv",
            keeps,
            f"exactly one of {LMCACHE}.multi_version_kv and {LMCACHE}.clear_on_weight_update must be true, "
            f"both are {shown(keeps)}",
            "for versioned KV set `multi_version_kv: true` and `clear_on_weight_update: false`; "
            "to drop KV at each weight update set them the other way round",
        )


def _p2p_needs_lmcache(config: PsrlConfig) -> Iterator[Problem]:
    if config.lmcache.enable_p2p and not config.lmcache.enable:
        yield Problem(
            f"{LMCACHE}.enable_p2p",
            True,
            f"requires {LMCACHE}.enable: true",
            "set `enable_p2p: false`, or `enable: true`",
        )


def _p2p_needs_versions(config: PsrlConfig) -> Iterator[Problem]:
    lmcache = config.lmcache
    if lmcache.enable_p2p and (not lmcache.multi_version_kv or lmcache.clear_on_weight_update):
        yield Problem(
            f"{LMCACHE}.enable_p2p",
            True,
            f"requires {LMCACHE}.multi_version_kv: true and {LMCACHE}.clear_on_weight_update: false, "
            "since only a version tag keeps KV of other weights out after a move",
            "set `enable_p2p: false`, or `multi_version_kv: true` and `clear_on_weight_update: false`",
        )


def _disk_needs_a_path(config: PsrlConfig) -> Iterator[Problem]:
    if config.lmcache.enable and config.lmcache.backend == "disk" and config.lmcache.disk_path is None:
        yield Problem(
            f"{LMCACHE}.disk_path",
            None,
            f"is required when {LMCACHE}.backend is disk",
            "set `disk_path` to a directory on a local disk, or `backend: cpu`",
        )


def _remote_needs_a_url(config: PsrlConfig) -> Iterator[Problem]:
    if config.lmcache.enable and config.lmcache.backend == "remote" and config.lmcache.remote_url is None:
        yield Problem(
            f"{LMCACHE}.remote_url",
            None,
            f"is required when {LMCACHE}.backend is remote",
            "set `remote_url`, for example `redis://host:6379`, or `backend: cpu`",
        )


def _tiers_need_the_python_core(config: PsrlConfig) -> Iterator[Problem]:
    if config.lmcache.enable and config.sglang.tree_core == "rust":
        yield Problem(
            f"{SGLANG}.tree_core",
            "rust",
            f"does not show the nodes that {LMCACHE}.enable: true offloads",
            "set `tree_core: python`, or `enable: false`",
        )


def _no_lmcache_file(config: PsrlConfig) -> Iterator[Problem]:
    if config.lmcache.config_file is not None:
        yield Problem(
            f"{LMCACHE}.config_file",
            config.lmcache.config_file,
            "an LMCache file would replace settings that are checked here, so it is not read",
            f"set `config_file: null` and write the fields under {LMCACHE}",
        )


def _distinct_ports(config: PsrlConfig) -> Iterator[Problem]:
    lmcache = config.lmcache
    first_user: dict[int, str] = {}
    for name in _PORTS:
        port = getattr(lmcache, name)
        if port in first_user:
            yield Problem(
                f"{LMCACHE}.{name}",
                port,
                f"is the same port as {LMCACHE}.{first_user[port]}",
                f"give {', '.join(_PORTS)} three different ports",
            )
        first_user.setdefault(port, name)


def _transfer_needs_p2p(config: PsrlConfig) -> Iterator[Problem]:
    if not config.kv_transfer.enable:
        return
    for name in ("enable", "enable_p2p"):
        if not getattr(config.lmcache, name):
            yield Problem(
                f"{KV_TRANSFER}.enable",
                True,
                f"requires {LMCACHE}.{name}: true",
                f"set `kv_transfer.enable: false`, or `{LMCACHE}.{name}: true`",
            )


def _lag_needs_versions(config: PsrlConfig) -> Iterator[Problem]:
    if config.sglang.max_version_lag > 0 and not config.lmcache.multi_version_kv:
        yield Problem(
            f"{SGLANG}.max_version_lag",
            config.sglang.max_version_lag,
            f"requires {LMCACHE}.multi_version_kv: true, since without it no older KV is kept",
            "set `max_version_lag: 0`, or `multi_version_kv: true` and `clear_on_weight_update: false`",
        )


def _longest_lease_covers_the_usual(config: PsrlConfig) -> Iterator[Problem]:
    usual_s, longest_s = config.sglang.pin_lease_s, config.sglang.pin_max_lease_s
    if longest_s < usual_s:
        yield Problem(
            f"{SGLANG}.pin_max_lease_s",
            longest_s,
            f"must be at least {SGLANG}.pin_lease_s, which is {shown(usual_s)}",
            f"set `pin_max_lease_s` to {shown(usual_s)} or more, or lower `pin_lease_s`",
        )


def _lmcache(*names: str) -> tuple[str, ...]:
    return tuple(f"{LMCACHE}.{name}" for name in names)


_PORTS = ("controller_base_port", "controller_pull_port", "controller_reply_port")
_VERSIONING = _lmcache("multi_version_kv", "clear_on_weight_update")
_RULES: tuple[_Rule, ...] = (
    _Rule(_VERSIONING, _one_answer_to_a_weight_change),
    _Rule(_lmcache("enable_p2p", "enable"), _p2p_needs_lmcache),
    _Rule((*_lmcache("enable_p2p"), *_VERSIONING), _p2p_needs_versions),
    _Rule(_lmcache("enable", "backend", "disk_path"), _disk_needs_a_path),
    _Rule(_lmcache("enable", "backend", "remote_url"), _remote_needs_a_url),
    _Rule((f"{SGLANG}.tree_core", *_lmcache("enable")), _tiers_need_the_python_core),
    _Rule(_lmcache("config_file"), _no_lmcache_file),
    _Rule(_lmcache(*_PORTS), _distinct_ports),
    _Rule((f"{KV_TRANSFER}.enable", *_lmcache("enable", "enable_p2p")), _transfer_needs_p2p),
    _Rule((f"{SGLANG}.max_version_lag", *_lmcache("multi_version_kv")), _lag_needs_versions),
    _Rule((f"{SGLANG}.pin_lease_s", f"{SGLANG}.pin_max_lease_s"), _longest_lease_covers_the_usual),
)
