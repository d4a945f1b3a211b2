"""Which engines of a controller could move KV to each other, how, and why the others could not."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations
from typing import Any

from psrl_sglang.doctor.result import CheckResult, State, fail, ok, skip, warn
from psrl_sglang.transfer.handshake import Party, require_same_kind
from psrl_sglang.transfer.link import PeerRefused

_MOST_PAIRS = 32
_ORDER = ("cma", "nixl", "tcp")


def check_pairs(instances: Sequence[Mapping[str, Any]]) -> list[CheckResult]:
    """One result for each pair; beyond so many only those that are not well, and a count."""
    ours = [one for one in instances if one.get("layout")]
    results = [skip(f"moves of {name}", "not a worker of ours") for name in _names(instances, ours)]
    found = [_pair(one, other) for one, other in combinations(ours, 2)]
    if len(found) <= _MOST_PAIRS:
        return results + found
    bad = [result for result in found if result.state is not State.OK]
    count = ok("moves", f"{len(found) - len(bad)} of {len(found)} pairs could move")
    rest = [warn("moves", f"{len(bad) - _MOST_PAIRS} more pairs that are not well")]
    return [*results, count, *bad[:_MOST_PAIRS], *(rest if len(bad) > _MOST_PAIRS else [])]


def _names(instances: Sequence[Mapping[str, Any]], ours: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    known = {one["instance_id"] for one in ours}
    return (one["instance_id"] for one in instances if one["instance_id"] not in known)


def _pair(one: Mapping[str, Any], other: Mapping[str, Any]) -> CheckResult:
    name = f"{one['instance_id']} and {other['instance_id']}"
    try:
        require_same_kind(_party(one), _party(other))
    except PeerRefused as refusal:
        text = (
            str(refusal)
            .replace("the source", one["instance_id"])
            .replace("the destination", other["instance_id"])
        )
        return fail(name, text, "one model, dtype, page size, TP size and namespace on both")
    if one.get("ranks") != other.get("ranks"):
        return fail(name, f"{one.get('ranks')} ranks and {other.get('ranks')}", "the same --tp-size on both")
    transport, why = _transport(one, other)
    if not transport:
        return fail(
            name, f"no transport in common: {_listed(one)} and {_listed(other)}", "p2p_transfer_channel: auto"
        )
    how = f"by {transport}{why}"
    if one.get("tag") == other.get("tag"):
        return ok(name, f"{how}; both on version {one.get('version')}")
    common = [tag for tag in one.get("window", ()) if tag in other.get("window", ())]
    versions = f"versions {one.get('version')} and {other.get('version')}"
    if common:
        return warn(name, f"{how}; {versions}: only KV of {', '.join(common)} is of use to both")
    text = f"{how}, but {versions}: neither has any use for the other's KV"
    if "#" in str(one.get("version")) or "#" in str(other.get("version")):
        return warn(name, text, "updates without weight_version get a name that no other engine has: name them")
    return warn(name, text, "right while one of them is being updated")


def _party(one: Mapping[str, Any]) -> Party:
    return Party(one["instance_id"], one["instance_id"], one["layout"], one.get("namespace", ""))


def _transport(one: Mapping[str, Any], other: Mapping[str, Any]) -> tuple[str, str]:
    """The way that would be taken, and what it hangs on."""
    common = [
        name for name in _ORDER if name in one.get("transports", ()) and name in other.get("transports", ())
    ]
    are_together = _ip(one) == _ip(other)
    if not are_together:
        common = [name for name in common if name != "cma"]
    if not common:
        return "", ""
    theirs = [side.get("nixl_version") for side in (one, other)]
    if common[0] == "nixl":
        if None in theirs:
            return "nixl", " if both have one version of it, else by tcp"
        if theirs[0] != theirs[1]:
            return "tcp", f": NIXL {theirs[0]} and {theirs[1]} do not understand each other"
    if common[0] == "cma":
        return "cma", " if they are in one PID namespace"
    return common[0], "" if are_together or common[0] != "tcp" else ": no NIXL on both, hence no RDMA"


def _ip(one: Mapping[str, Any]) -> Any:
    workers = one.get("workers") or [{}]
    return workers[0].get("ip")


def _listed(one: Mapping[str, Any]) -> str:
    return ", ".join(one.get("transports", ())) or "none"
