"""From plain data to the values of our three sections, with interpolations resolved.

A PSRL file holds much that is not ours. It is ignored, except that interpolations may point into it and that
a name which looks like one of our sections, or sits in the wrong place, is a problem rather than ignored.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import GrammarParseError, MissingMandatoryValue, OmegaConfBaseException

from psrl_sglang.config_problem import KV_TRANSFER, LMCACHE, SGLANG, Problem, joined, shown
from psrl_sglang.config_schema import SGLangSettings

_SECTION_PATHS = {path.rpartition(".")[2]: path for path in (LMCACHE, KV_TRANSFER, SGLANG)}
_CONTENT = ("lmcache", "sglang", "rollout_coordination")
_SECTION_CUTOFF = 0.8  # no key of PSRL's own files comes this near to one of our names


@dataclass
class Sections:
    """The raw values per section path, the dotted paths that could not be read, and every problem met."""

    values: dict[str, dict[str, object]] = field(
        default_factory=lambda: {path: {} for path in _SECTION_PATHS.values()}
    )
    unreadable: set[str] = field(default_factory=set)
    problems: list[Problem] = field(default_factory=list)


def read_sections(data: object, name: str) -> Sections:
    """Find our sections in `data`, which came from the source called `name`."""
    found = Sections()
    if isinstance(data, DictConfig):
        data = OmegaConf.to_container(data, resolve=False)
    if not isinstance(data, Mapping):
        found.problems.append(
            Problem("file", name, f"holds {_kind(data)}, not a mapping", "write the settings under `psrl:`")
        )
        return found
    if "psrl" in data:
        _check_names(found, data, "", ("psrl",))
    elif _is_content(data):
        _check_names(found, data, "", ("psrl",), elsewhere=())
        data = {**data, "psrl": dict(data)}  # so that `${psrl.…}` works in such a file as well
    else:
        _check_names(found, data, "", ("psrl", *_CONTENT))
        if not found.problems:
            found.problems.append(_no_section(data, name))
        return found
    root = OmegaConf.create(_interpolable(data), flags={"allow_objects": True})
    _read_content(found, root)
    return found


def nearest(name: str, known: Iterable[str], cutoff: float) -> str | None:
    """The known name that `name` most likely means: other case, hyphens, swapped letters, or few edits."""
    folded = {_fold(one): one for one in known}
    name = _fold(name)
    swapped = [one for one in folded if sorted(one) == sorted(name)]
    matches = [name] if name in folded else swapped or difflib.get_close_matches(name, folded, 1, cutoff)
    return folded[matches[0]] if matches else None


def _fold(name: str) -> str:
    return name.lower().replace("-", "_")


def _is_content(data: Mapping[Any, Any]) -> bool:
    return not data or any(name in data for name in _CONTENT)


def _no_section(data: Mapping[Any, Any], name: str) -> Problem:
    remedy = "write the settings under `psrl:`"
    if "defaults" in data:
        remedy += "; a Hydra file with `defaults:` must be composed first, give the composed file"
    return Problem("psrl", None, f"there is no `psrl:` section in {name}", remedy)


def _read_content(found: Sections, root: DictConfig) -> None:
    psrl = _mapping(found, root, "psrl", "psrl")
    if psrl is None:
        return
    _check_names(found, psrl, "psrl", _CONTENT)
    _read_section(found, psrl, LMCACHE)
    _read_section(found, psrl, SGLANG)
    _check_stray_fields(found, psrl)
    _check_old_place(found, psrl)
    coordination = _mapping(found, psrl, "rollout_coordination", "psrl.rollout_coordination")
    if coordination is None:
        return
    _check_names(found, coordination, "psrl.rollout_coordination", ("routing_strategy",))
    path = "psrl.rollout_coordination.routing_strategy"
    routing = _mapping(found, coordination, "routing_strategy", path)
    if routing is None:
        return
    _check_names(found, routing, path, ("kv_transfer",))
    _read_section(found, routing, KV_TRANSFER)


def _read_section(found: Sections, parent: DictConfig, path: str) -> None:
    section = _mapping(found, parent, path.rpartition(".")[2], path)
    if section is None:
        found.unreadable.add(path)
        return
    raw: Any = OmegaConf.to_container(section, resolve=False)
    for key in raw:
        name = str(key)
        try:
            value = section[key]
        except OmegaConfBaseException as error:
            found.unreadable.add(f"{path}.{name}")
            found.problems.append(_unresolved(f"{path}.{name}", raw[key], error))
            continue
        if isinstance(value, _Malformed):
            found.unreadable.add(f"{path}.{name}")
            found.problems.append(_unresolved(f"{path}.{name}", value.text, value.error))
            continue
        if isinstance(value, DictConfig | ListConfig):
            value = OmegaConf.to_container(value, resolve=False)
        found.values[path][name] = value


def _mapping(found: Sections, parent: DictConfig, key: str, path: str) -> DictConfig | None:
    """The mapping under `key`; an absent or empty one reads as empty, and None means a problem was noted."""
    try:
        value = parent.get(key)
    except OmegaConfBaseException as error:
        found.problems.append(_unresolved(path, None, error))
        return None
    if value is None:
        return OmegaConf.create({})
    if isinstance(value, DictConfig):
        return value
    shown_value = OmegaConf.to_container(value) if isinstance(value, ListConfig) else value
    if isinstance(value, _Malformed):
        found.problems.append(_unresolved(path, value.text, value.error))
    else:
        found.problems.append(
            Problem(
                path,
                shown_value,
                f"is {_kind(shown_value)}, not a mapping",
                f"write settings under `{path}:`",
            )
        )
    return None


def _check_names(
    found: Sections,
    mapping: Mapping[Any, Any],
    path: str,
    here: tuple[str, ...],
    elsewhere: Iterable[str] = tuple(_SECTION_PATHS),
) -> None:
    """Refuse keys that are nearly a name expected `here`, or are a section whose place is `elsewhere`."""
    raw: Any = OmegaConf.to_container(mapping, resolve=False) if isinstance(mapping, DictConfig) else mapping
    for key, value in ((str(key), value) for key, value in raw.items()):
        meant = None if key in here else nearest(key, dict.fromkeys([*here, *elsewhere]), _SECTION_CUTOFF)
        if meant is None:
            continue
        target = _SECTION_PATHS.get(meant) or (f"{path}.{meant}" if path else _full_path(meant))
        said = f"is not read here, its place is {target}" if key == meant else f"is not a section, {target} is"
        found.problems.append(Problem(joined(path, key), value, said, f"write `{target}`, or remove it"))


def _check_stray_fields(found: Sections, psrl: DictConfig) -> None:
    """Refuse a setting of ours that was written one level too high, where it would be ignored."""
    raw: Any = OmegaConf.to_container(psrl, resolve=False)
    for name in SGLangSettings.model_fields:
        if name in raw and name != "namespace":
            target = f"{SGLANG}.{name}"
            said = f"is not read here, its place is {target}"
            found.problems.append(Problem(f"psrl.{name}", raw[name], said, f"write `{target}`, or remove it"))


def _full_path(name: str) -> str:
    return name if name == "psrl" else f"psrl.{name}"


def _check_old_place(found: Sections, psrl: DictConfig) -> None:
    """Older PSRL files hold `psrl.routing_strategy`; our section is not read from there."""
    try:
        old = psrl.get("routing_strategy")
    except OmegaConfBaseException:
        return  # not ours, so a failing interpolation in it does not matter
    if isinstance(old, DictConfig):
        _check_names(found, old, "psrl.routing_strategy", ())


class _Malformed:
    """Stands for a string with an interpolation that cannot be parsed, so that only its reader minds."""

    __slots__ = ("error", "text")  # not a dataclass: OmegaConf would look inside

    def __init__(self, text: str, error: Exception) -> None:
        self.text = text
        self.error = error

    def __repr__(self) -> str:
        return self.text


def _interpolable(value: Any) -> Any:
    """A copy that OmegaConf accepts whatever the foreign parts of a file hold."""
    if isinstance(value, DictConfig | ListConfig):
        value = OmegaConf.to_container(value, resolve=False)
    if isinstance(value, Mapping):
        return {
            key if isinstance(key, str | int | float | bool) else str(key): _interpolable(item)
            for key, item in value.items()
        }
    if isinstance(value, list | tuple):
        return [_interpolable(item) for item in value]
    if isinstance(value, str) and "${" in value:
        try:
            OmegaConf.create({"value": value})
        except GrammarParseError as error:
            return _Malformed(value, error)
    return value


def _unresolved(path: str, value: object, error: Exception) -> Problem:
    if isinstance(error, MissingMandatoryValue):
        return Problem(
            path, "???", "is marked as mandatory and was not filled in", "give it a value, or remove it"
        )
    reason = str(error).partition("\n")[0]
    return Problem(
        path, value, f"cannot be resolved: {reason}", "define what it refers to, or write the value itself"
    )


def _kind(value: object) -> str:
    if value is None:
        return "nothing"
    if isinstance(value, list | tuple):
        return "a list"
    return shown(value)
