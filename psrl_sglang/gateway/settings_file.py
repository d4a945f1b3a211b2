"""A settings file as a gateway reads it: leniently where it is PSRL's, strictly where it is ours.

What the gateway does not have is ignored; a wrong value of what it has is a `Problem`, all of them at once.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import ValidationError

from psrl_sglang.config_problem import ConfigError, Problem, shown
from psrl_sglang.config_source import nearest
from psrl_sglang.config_text import UnreadableSource, read_data
from psrl_sglang.gateway.cost_model import CostModel
from psrl_sglang.gateway.settings import GATEWAY, ROUTING, SECTIONS, Settings

_CONTENT = ("rollout_coordination", "gateway", "lmcache", "sglang")
_NAME_CUTOFF = 0.6  # only a suggestion depends on it


def load_settings(source: str | os.PathLike[str] | Mapping[str, Any]) -> Settings:
    """From a YAML or JSON file, an inline JSON object or a mapping. Raises `ConfigError` with every problem."""
    is_inline = isinstance(source, str) and source.lstrip().startswith("{")
    name = "inline JSON" if is_inline else "the settings" if isinstance(source, Mapping) else str(source)
    try:
        data, problems = read_data(source)
    except UnreadableSource as unreadable:
        raise ConfigError([unreadable.problem], name) from unreadable
    root = _root(data, name, problems)
    parts = {} if root is None else _sections(root, problems)
    _check_cost_model(parts, problems)
    if problems:
        raise ConfigError(problems, name)
    return Settings(**parts)


def _root(data: object, name: str, problems: list[Problem]) -> DictConfig | None:
    if isinstance(data, DictConfig):
        data = OmegaConf.to_container(data, resolve=False)
    if data is None:
        data = {}
    if not isinstance(data, Mapping):
        problems.append(Problem("file", name, "holds no mapping", "write the settings under `psrl:`"))
        return None
    if "psrl" not in data:
        if data and not any(part in data for part in _CONTENT):
            text = f"there is no `psrl:` section in {name}"
            problems.append(Problem("psrl", None, text, "write the settings under `psrl:`"))
            return None
        data = {**data, "psrl": dict(data)}
    try:
        return OmegaConf.create(_plain(data), flags={"allow_objects": True})
    except OmegaConfBaseException as error:
        reason = str(error).partition("\n")[0]
        problems.append(Problem("file", name, f"cannot be read: {reason}", "mend the interpolation"))
        return None


def _plain(value: Any) -> Any:
    """OmegaConf sees into the built-in types only."""
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value


def _sections(root: DictConfig, problems: list[Problem]) -> dict[str, Any]:
    parts: dict[str, Any] = {}
    for path, (name, schema) in SECTIONS.items():
        values, refused = _values(root, path, schema.model_fields, problems)
        if path == GATEWAY:
            problems.extend(_unknown(values, schema.model_fields))
        try:
            parts[name] = schema.model_validate(values)
        except ValidationError as error:
            for detail in error.errors(include_context=False):
                field = str(detail["loc"][0])
                if field not in refused:
                    refused.add(field)
                    problems.append(_bad_value(path, field, values[field], schema))
    return parts


def _values(
    root: DictConfig, path: str, fields: Mapping[str, Any], problems: list[Problem]
) -> tuple[dict[str, Any], set[str]]:
    section: Any = root
    for key in path.split("."):
        try:
            section = section.get(key)
        except OmegaConfBaseException as error:
            problems.append(_unresolved(path, error))
            return {}, set()
        if section is None:
            return {}, set()
        if not isinstance(section, DictConfig):
            problems.append(
                Problem(path, section, f"`{key}` is not a mapping", f"write settings under `{path}:`")
            )
            return {}, set()
    values: dict[str, Any] = {}
    refused: set[str] = set()
    for key in map(str, section):
        # A foreign field need not even resolve.
        if key not in fields and path != GATEWAY:
            continue
        try:
            value = section[key]
        except OmegaConfBaseException as error:
            problems.append(_unresolved(f"{path}.{key}", error))
            refused.add(key)
            continue
        values[key] = OmegaConf.to_container(value) if isinstance(value, DictConfig | ListConfig) else value
    return values, refused


def _unknown(values: Mapping[str, Any], fields: Mapping[str, Any]) -> list[Problem]:
    problems = []
    for name in values:
        if name not in fields:
            meant = nearest(name, list(fields), _NAME_CUTOFF)
            remedy = f"did you mean `{meant}`?" if meant else f"remove it; there are {', '.join(fields)}"
            problems.append(Problem(f"{GATEWAY}.{name}", values[name], "is not a setting", remedy))
    return problems


def _bad_value(path: str, field: str, value: object, schema: Any) -> Problem:
    expects, default = schema.expects(field), shown(schema.model_fields[field].default)
    remedy = f"set it to {expects}, or leave it out for the default {default}"
    return Problem(f"{path}.{field}", value, f"must be {expects}", remedy)


def _unresolved(path: str, error: Exception) -> Problem:
    reason = str(error).partition("\n")[0]
    return Problem(path, None, f"cannot be resolved: {reason}", "define what it refers to, or write the value")


def _check_cost_model(parts: Mapping[str, Any], problems: list[Problem]) -> None:
    routing = parts.get("routing")
    if routing is None or not routing.method.startswith("throughput_optimal"):
        return
    path = routing.cost_model_path
    if path is None:
        text = f"is needed by `method: {routing.method}`"
        remedy = "name a cost model, or choose another method, such as request_num_balance"
        problems.append(Problem(f"{ROUTING}.cost_model_path", None, text, remedy))
        return
    try:
        CostModel.read(path)
    except ValueError as error:
        problems.append(Problem(f"{ROUTING}.cost_model_path", path, str(error), "see docs/gateway.md"))
