"""From a file, an inline JSON object or a mapping to plain data, with every duplicate key found on the way.

YAML is read as Hydra reads it for PSRL: YAML 1.1, numbers like `1e3` are numbers, dates are strings.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import yaml

from psrl_sglang.config_problem import Problem, joined

_MAX_YAML_NODES = 100_000  # after aliases are expanded; PSRL's whole composed configuration has about 2,000


class UnreadableSource(Exception):
    """Nothing can be read from the source; `problem` says why."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem.message)
        self.problem = problem


def read_data(source: str | os.PathLike[str] | Mapping[str, object]) -> tuple[object, list[Problem]]:
    """The data in `source` and a problem per duplicate key. Raises `UnreadableSource` if there is none."""
    if isinstance(source, Mapping):
        return source, []
    if isinstance(source, str) and source.lstrip().startswith("{"):
        return _parse_json(source, "inline JSON")
    try:
        text = Path(source).read_text(encoding="utf-8-sig")
    except (OSError, ValueError) as error:
        raise UnreadableSource(
            Problem("file", str(source), f"cannot be read: {error}", "give the path of a readable UTF-8 file")
        ) from error
    parse = _parse_json if Path(source).suffix == ".json" else _parse_yaml
    return parse(text, str(source))


def _parse_json(text: str, name: str) -> tuple[object, list[Problem]]:
    try:
        data = json.loads(text, object_pairs_hook=_JsonObject)
    except (ValueError, RecursionError) as error:
        raise UnreadableSource(
            Problem("file", name, f"is not JSON: {error}", "mend the JSON at that place")
        ) from error
    return data, list(_json_duplicates(data, ""))


class _JsonObject(dict[str, object]):
    """A JSON object that remembers which keys it was given twice."""

    def __init__(self, pairs: list[tuple[str, object]]) -> None:
        super().__init__(pairs)
        seen: set[str] = set()
        self.duplicates = [key for key, _ in pairs if key in seen or seen.add(key)]


def _json_duplicates(data: object, path: str) -> Iterator[Problem]:
    if isinstance(data, _JsonObject):
        for key in data.duplicates:
            yield _duplicate(joined(path, key), data[key], "in its object")
        for key, value in data.items():
            yield from _json_duplicates(value, joined(path, key))
    elif isinstance(data, list):
        for index, value in enumerate(data):
            yield from _json_duplicates(value, f"{path}[{index}]")


class _Loader(yaml.SafeLoader):
    """Safe YAML with the implicit types of OmegaConf, which Hydra and so PSRL use."""


_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag != "tag:yaml.org,2002:timestamp"]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(?:[0-9][0-9_]*(?:\.[0-9_]*)?|\.[0-9][0-9_]*)[eE][-+]?[0-9]+$"),
    list("-+0123456789."),
)


def _parse_yaml(text: str, name: str) -> tuple[object, list[Problem]]:
    try:
        loader = _Loader(text)
        try:
            node = loader.get_single_node()
            problems = list(_NodeWalk().duplicates(node, "", ())) if node is not None else []
            return (loader.construct_document(node) if node is not None else None), problems
        finally:
            loader.dispose()
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise UnreadableSource(
            Problem("file", name, f"is not YAML: {_on_one_line(error)}", "mend the YAML at that place")
        ) from error


class _NodeWalk:
    """One pass over a YAML tree, with aliases expanded; refuses trees that would not end or not fit."""

    def __init__(self) -> None:
        self._visited = 0

    def duplicates(self, node: yaml.Node, path: str, parents: tuple[yaml.Node, ...]) -> Iterator[Problem]:
        self._visited += 1
        if node in parents:
            raise yaml.YAMLError(f"an alias that contains itself\n{node.start_mark}")
        if self._visited > _MAX_YAML_NODES:
            raise yaml.YAMLError(f"more than {_MAX_YAML_NODES} nodes once aliases are expanded")
        parents = (*parents, node)
        if isinstance(node, yaml.SequenceNode):
            for index, item in enumerate(node.value):
                yield from self.duplicates(item, f"{path}[{index}]", parents)
        elif isinstance(node, yaml.MappingNode):
            first_line: dict[tuple[str, str], int] = {}
            for key, value in node.value:
                here = joined(path, key.value) if isinstance(key, yaml.ScalarNode) else path
                if isinstance(key, yaml.ScalarNode) and key.tag != "tag:yaml.org,2002:merge":
                    identity, line = (key.tag, key.value), key.start_mark.line + 1
                    if identity in first_line:
                        text = value.value if isinstance(value, yaml.ScalarNode) else f"a {value.id}"
                        yield _duplicate(here, text, f"on lines {first_line[identity]} and {line}")
                    first_line.setdefault(identity, line)
                yield from self.duplicates(value, here, parents)


def _duplicate(path: str, value: object, where: str) -> Problem:
    return Problem(path, value, f"is written more than once: {where}", "keep one of them")


def _on_one_line(error: Exception) -> str:
    return " ".join(str(error).split())
