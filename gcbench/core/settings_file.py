"""YAML files of settings: configs, suites and clusters.

Mappings, lists and scalars of YAML 1.2, of limited size and depth. Aliases are refused, because a
few lines of them can expand to billions of entries.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

from gcbench.core import files
from gcbench.core.errors import UsageError

LARGEST = 1_000_000
"""Maximum number of characters of a file."""
DEEPEST = 20
"""Maximum nesting depth of lists and mappings."""


class Loader(yaml.SafeLoader):
    """YAML with the scalars of version 1.2: `yes` is a string, `2e-4` a number.

    PyYAML implements version 1.1, in which `yes` is true, `010` is eight and `1:30` is ninety.
    """

    _depth = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        """Return the next node; raise YAMLError for an alias or too deep a nesting."""
        if self.check_event(yaml.AliasEvent):
            event = self.peek_event()  # type: ignore[no-untyped-call]
            raise yaml.YAMLError(
                f"the alias *{event.anchor}{event.start_mark}: aliases are not allowed; write the "
                "value again"
            )
        self._depth += 1
        if self._depth > DEEPEST:
            mark = self.peek_event().start_mark  # type: ignore[no-untyped-call]
            raise yaml.YAMLError(f"more than {DEEPEST} levels{mark}; settings have at most 4")
        node = super().compose_node(parent, index)
        self._depth -= 1
        return node

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Return a mapping; raise YAMLError if a key is repeated or not a scalar."""
        seen = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                kind = "list" if isinstance(key, yaml.SequenceNode) else "mapping"
                raise yaml.YAMLError(f"a {kind} as a key{key.start_mark}: give a name or a number")
            if key.value in seen:
                raise yaml.YAMLError(f"the key {key.value!r} is repeated{key.start_mark}")
            seen.add(key.value)
        return super().construct_mapping(node, deep)


_SCALARS = (
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("bool", r"true|True|TRUE|false|False|FALSE", [*"tTfF"]),
    ("int", r"[-+]?(0|[1-9][0-9]*)", [*"-+0123456789"]),
    ("float", r"[-+]?(\.[0-9]+|(0|[1-9][0-9]*)(\.[0-9]*)?)([eE][-+]?[0-9]+)?", [*"-+.0123456789"]),
    ("float", r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)", [*"-+."]),
)
_TAGS = ("null", "bool", "int", "float", "str", "seq", "map")
Loader.yaml_implicit_resolvers = {}
for _tag, _pattern, _first in _SCALARS:
    Loader.add_implicit_resolver(
        f"tag:yaml.org,2002:{_tag}", re.compile(f"(?:{_pattern})$"), _first
    )
Loader.yaml_constructors = {  # other types (dates, sets, binary data) are errors
    tag: make
    for tag, make in yaml.SafeLoader.yaml_constructors.items()
    if tag is None or tag.removeprefix("tag:yaml.org,2002:") in _TAGS
}


def parse(text: str) -> Any:
    """Return the value of a YAML text.

    Raises:
        ValueError: it is not YAML, or not accepted by `Loader`.
    """
    try:
        return yaml.load(text, Loader)
    except RecursionError:
        raise ValueError(f"more than {DEEPEST} levels; settings have at most 4") from None
    except (yaml.YAMLError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(" ".join(str(error).split())) from None


def read(path: Path, flag: str = "--config", example: str = "steps: 100") -> dict[str, Any]:
    """Return the mapping in a YAML file; empty for an empty file.

    Raises:
        UsageError: the file does not exist, is not a regular file or is too large, or its content
            is not YAML or not a mapping with string keys. The message starts with `flag` and shows
            `example`.
    """
    try:
        text = files.read_text(path)
        if len(text) > LARGEST:
            raise UsageError(
                f"{flag} {path}: {len(text)} characters; settings have at most {LARGEST}"
            )
        settings = parse(text)
    except OSError as error:
        raise UsageError(f"{flag} {path}: {error.strerror}") from None
    except ValueError as error:
        raise UsageError(f"{flag} {path} is not valid YAML: {error}") from None
    if settings is None:
        return {}
    if not isinstance(settings, dict):
        raise UsageError(
            f"{flag} {path} contains a {type(settings).__name__}: expected a mapping, e.g. "
            f"`{example}`"
        )
    if wrong := [key for key in settings if not isinstance(key, str)]:
        raise UsageError(f"{flag} {path}: key {wrong[0]!r}: expected a name, e.g. `{example}`")
    return settings
