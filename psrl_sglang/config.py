"""Loading the settings, with every problem reported at once.

Text becomes plain data (`config_text`), our sections are found in it and their interpolations resolved
(`config_source`), each section is checked field by field (`config_schema`), and the rules that join fields
run over whatever was valid (`config_rules`). A caller gets a `PsrlConfig` that holds, or a `ConfigError` with
everything there is to mend.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Any

from pydantic import ValidationError

from psrl_sglang.config_problem import KV_TRANSFER, LMCACHE, SGLANG, ConfigError, Problem, shown
from psrl_sglang.config_rules import broken_rules
from psrl_sglang.config_schema import (
    SECTIONS,
    KVTransferSettings,
    LMCacheSettings,
    LoadPolicy,
    PsrlConfig,
    SGLangSettings,
)
from psrl_sglang.config_source import Sections, nearest, read_sections
from psrl_sglang.config_text import UnreadableSource, read_data

__all__ = [
    "KV_TRANSFER",
    "LMCACHE",
    "SECTIONS",
    "SGLANG",
    "ConfigError",
    "KVTransferSettings",
    "LMCacheSettings",
    "LoadPolicy",
    "Problem",
    "PsrlConfig",
    "SGLangSettings",
    "load_config",
]

_FIELD_CUTOFF = 0.6  # only a suggestion depends on it


def load_config(source: str | os.PathLike[str] | Mapping[str, Any]) -> PsrlConfig:
    """Read settings from a YAML or JSON file, an inline JSON object (a string from `{` on) or a mapping.

    A file written for PSRL is read as it is; what is not ours in it is ignored. Raises `ConfigError` with every
    problem found.
    """
    name = _name(source)
    try:
        data, problems = read_data(source)
    except UnreadableSource as unreadable:
        raise ConfigError([unreadable.problem], name) from unreadable
    sections = read_sections(data, name)
    problems += sections.problems
    parts = {path: _check_section(sections, path, problems) for path in SECTIONS}
    draft = PsrlConfig.model_construct(
        lmcache=parts[LMCACHE], kv_transfer=parts[KV_TRANSFER], sglang=parts[SGLANG]
    )
    problems += broken_rules(draft, frozenset(sections.unreadable))
    if problems:
        raise ConfigError(problems, name)
    return draft


def _name(source: object) -> str:
    if isinstance(source, str) and source.lstrip().startswith("{"):
        return "inline JSON"
    return "the settings" if isinstance(source, Mapping) else str(source)


def _check_section(sections: Sections, path: str, problems: list[Problem]) -> Any:
    """The section with its valid values, and defaults in place of the rest, each of which gets a problem."""
    schema = SECTIONS[path]
    if path in sections.unreadable:
        sections.unreadable |= {f"{path}.{name}" for name in schema.model_fields}
    values: dict[str, object] = {}
    for name, value in sections.values[path].items():
        if name in schema.model_fields:
            values[name] = value
            continue
        problem, meant = _unknown_field(path, name, value)
        problems.append(problem)
        if meant is not None and meant not in sections.values[path]:
            sections.unreadable.add(f"{path}.{meant}")
    try:
        return schema.model_validate(values)
    except ValidationError as error:
        refused = {str(detail["loc"][0]): None for detail in error.errors(include_context=False)}
    for name in refused:
        problems.append(_bad_value(path, name, values[name]))
        sections.unreadable.add(f"{path}.{name}")
    return schema.model_validate({name: value for name, value in values.items() if name not in refused})


def _unknown_field(path: str, name: str, value: object) -> tuple[Problem, str | None]:
    known = list(SECTIONS[path].model_fields)
    owner = next((other for other, schema in SECTIONS.items() if name in schema.model_fields), None)
    meant = nearest(name, known, _FIELD_CUTOFF)
    if owner is not None:
        remedy = f"move it to {owner}"
    elif meant is not None:
        remedy = f"did you mean `{meant}`?"
    else:
        remedy = f"remove it; the settings here are {_listed(known)}"
    return Problem(f"{path}.{name}", value, "is not a setting", remedy), meant


def _bad_value(path: str, name: str, value: object) -> Problem:
    schema = SECTIONS[path]
    expects = schema.expects(name)
    default = shown(schema.model_fields[name].default)
    if expects == "true or false" and isinstance(value, str):
        remedy = f"write `{name}: true` or `{name}: false`, without quotes"
    elif isinstance(value, str) and _is_number(value) and "number" in expects:
        remedy = f"write the number without quotes: `{name}: {value}`"
    else:
        remedy = f"set it to {expects}, or leave it out for the default {default}"
    return Problem(f"{path}.{name}", value, f"must be {expects}, got {_got(value)}", remedy)


def _got(value: object) -> str:
    kinds: dict[type, str] = {str: "the string ", bool: "the boolean ", dict: "a mapping ", list: "a list "}
    return f"{kinds.get(type(value), '')}{shown(value)}"


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _listed(names: Iterable[str]) -> str:
    return ", ".join(names)
