"""What a method declares of a run's settings: its memory and its recipe, for tables of stored runs.

A table names the settings that are not its method's defaults. Importing a method imports torch,
which takes seconds, so literal declarations are read from the source of a built-in method. A method
that computes them, or comes from elsewhere, is imported.
"""

from __future__ import annotations

import ast
import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache, partial
from importlib.util import find_spec
from inspect import getattr_static
from pathlib import Path
from typing import Any

from gcbench.core import schedule
from gcbench.core.errors import GcbenchError
from gcbench.core.values import canonical
from gcbench.results.settings import DEFAULTS

ATTRIBUTES = ("memory", "memory_options", "recipe", "has_momentum")


@dataclass(frozen=True)
class Declared:
    """The settings that a method declares."""

    memory: str = "none"
    memory_options: Mapping[str, Any] = field(default_factory=dict)
    recipe: Mapping[str, Any] = field(default_factory=dict)

    def default(self, key: str) -> Any:
        """Return the value that a run with this method has without the flag of a setting."""
        return self.recipe.get(key, DEFAULTS.get(key))


def of_method(config: Mapping[str, Any]) -> Declared | None:
    """Return what the method of a stored config declares; None if the method is not known here.

    Fields that change by step have the values of the last step.
    """
    return _reader(str(config.get("compressor")))(config)


class Methods:
    """What the methods of several configs declare: each method's class is read once."""

    def __init__(self) -> None:
        self.readers: dict[str, Reader] = {}
        """By the method's name."""

    def of(self, config: Mapping[str, Any]) -> Declared | None:
        """Return as `of_method`."""
        name = str(config.get("compressor"))
        if name not in self.readers:
            self.readers[name] = _reader(name)
        return self.readers[name](config)


Reader = Callable[[Mapping[str, Any]], Declared | None]
"""Returns what a method declares with the fields of a stored config."""


def _reader(name: str) -> Reader:
    """Return the reader of a method; its class is loaded only if its source is not literal."""
    loaded = f"gcbench.compressors.{name}" in sys.modules
    literal = None if loaded else _literals(name)
    if literal is not None:
        constant = Declared(**{key: literal[key] for key in ATTRIBUTES[:3] if key in literal})
        return lambda config: constant

    from gcbench.core import registry
    from gcbench.core.compressor import Compressor

    try:
        cls: Any = registry.compressor_class(name) if name in registry.compressors() else None
    except GcbenchError:
        cls = None
    if cls is None:
        return lambda config: None
    values = {key: getattr_static(cls, key) for key in ATTRIBUTES[:3]}
    methods = {key: value for key, value in values.items() if hasattr(value, "__get__")}
    if registry.fields(cls).keys() & values.keys() or any(
        value is not getattr_static(Compressor, key) for key, value in methods.items()
    ):
        computed = cache(partial(_computed, name))
        return lambda config: computed(canonical(config.get("options") or {}), config.get("steps"))
    constant = Declared(**{key: value for key, value in values.items() if key not in methods})
    return lambda config: constant


def _computed(name: str, options: str, steps: Any) -> Declared | None:
    from gcbench.core import registry

    try:
        fields = {key: schedule.normalize(key, value) for key, value in json.loads(options).items()}
        last = schedule.last(schedule.starts(fields), steps)
        method = registry.compressor(name, **schedule.at(fields, last))
    except (GcbenchError, TypeError, AttributeError):
        return None
    return Declared(method.memory, dict(method.memory_options), dict(method.recipe))


@cache
def has_momentum(memory: str) -> bool:
    """Return whether a memory applies the momentum in place of the optimizer.

    Raises:
        UsageError: there is no such memory here.
    """
    literals = _literals(f"memories.{memory}")
    if literals is None:
        literals = _literals(memory)
    if literals is not None:
        return bool(literals.get("has_momentum"))
    from gcbench.core import registry

    return registry.memory_class(memory).has_momentum


@cache
def _literals(name: str) -> Mapping[str, Any] | None:
    """Return the `ATTRIBUTES` that the classes of a built-in method or memory assign as literals.

    None: there is no such file, one of them is computed, or a base class may assign it.
    """
    if name not in _built_in():
        return None
    tree = ast.parse(_built_in()[name].read_text())
    if any(_is_of_a_method(node) for node in tree.body):
        return None
    literals: dict[str, Any] = {}
    for node in (node for cls in tree.body if isinstance(cls, ast.ClassDef) for node in cls.body):
        if isinstance(node, ast.FunctionDef) and node.name in ATTRIBUTES:
            return None
        target: ast.expr | None = node.target if isinstance(node, ast.AnnAssign) else None
        if isinstance(node, ast.Assign) and len(node.targets) == 1:
            target = node.targets[0]
        if isinstance(target, ast.Name) and target.id in ATTRIBUTES:
            value = getattr(node, "value", None)
            if isinstance(value, ast.Name):  # a class in this file, which has the method's name
                literals[target.id] = name
                continue
            try:
                literals[target.id] = ast.literal_eval(value) if value else None
            except ValueError:
                return None
    return literals


@cache
def _built_in() -> dict[str, Path]:
    """Return the files of the built-in methods and memories by their dotted names."""
    spec = find_spec("gcbench.compressors")
    folders = None if spec is None else spec.submodule_search_locations
    assert folders, "the package is installed"
    paths = Path(folders[0]).rglob("*.py")
    return {".".join(path.relative_to(folders[0]).with_suffix("").parts): path for path in paths}


def _is_of_a_method(node: ast.stmt) -> bool:
    """Return whether a statement imports another method, from which a class may inherit."""
    return isinstance(node, ast.ImportFrom) and str(node.module).startswith("gcbench.compressors")
