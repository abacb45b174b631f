"""Makes the configs of a grid from flags and a YAML file."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, get_origin

from gcbench.core import registry, settings_file
from gcbench.core.errors import UsageError, unknown
from gcbench.results.settings import SET_FLAGS, Settings
from gcbench.training import limits
from gcbench.training.configuration import Config

SEQUENCES = tuple(
    name for name, f in Settings.model_fields.items() if get_origin(f.annotation) in (list, tuple)
)
"""Settings whose value is itself a list; on the command line its items are joined by slashes."""
_STAGE = re.compile(r"([0-9]+):(.+)")
"""One stage of a schedule: the step from which a value holds, and the value."""
NESTED = tuple(SET_FLAGS)
"""Settings that are mappings of fields."""


def _scalar(text: str) -> Any:
    """Return the scalar that YAML reads in a text; the text itself where it is no YAML."""
    try:
        return settings_file.parse(text)
    except ValueError:
        return text


def value(text: str) -> Any:
    """Return the value of a flag: a scalar, a schedule, a tuple, or a list for a grid.

    Commas separate the items of a list, 1,2; slashes the stages of a schedule, 0:0.25/100:0.01, or
    the numbers of a tuple, 0.9/0.999.

    Raises:
        UsageError: a schedule has a step twice.
    """
    if "," in text:
        return [value(part.strip()) for part in text.split(",")]
    stages = [_STAGE.fullmatch(part.strip()) for part in text.split("/")]
    if all(stages):
        found = {int(stage[1]): _scalar(stage[2]) for stage in stages if stage}
        if len(found) < len(stages):
            raise UsageError(f"{text}: a step comes twice; give each stage a step of its own")
        return found
    if "/" in text and all(part.strip() for part in text.split("/")):
        parts = [_scalar(part) for part in text.split("/")]
        if all(isinstance(part, int | float) for part in parts):
            return tuple(parts)
    return _scalar(text)


def pairs(flag: str, words: Iterable[str] | None) -> dict[str, Any]:
    """Return the settings in words like clip=2.0, by name; `flag` is for the errors.

    Raises:
        UsageError: a word has no =, or a name comes twice.
    """
    found: dict[str, Any] = {}
    for word in words or ():
        name, equals, text = word.partition("=")
        if not (name and equals):
            raise UsageError(f"{flag} {word!r}: NAME=VALUE expected, e.g. {flag} clip=2.0")
        if name in found:
            raise UsageError(f"{flag} {name} came twice; for a grid write {name}=1,2")
        found[name] = value(text)
    return found


def read(path: Path, flag: str = "--config") -> dict[str, Any]:
    """Return the mapping in a YAML file; empty for an empty file.

    Raises:
        UsageError: no such file, no YAML, or no mapping; the message begins with `flag`.
    """
    return settings_file.read(path, flag, "steps: 100")


def choices(key: str, given: Any) -> list[Any]:
    """Return the alternatives of one setting: those of a list, or the one value that was given.

    Raises:
        UsageError: an empty list, or a tuple for a setting that takes one value.
    """
    if key in SEQUENCES:
        nested = isinstance(given, list) and any(isinstance(v, list | tuple) for v in given)
        alternatives = given if nested else [given]
        alternatives = [[] if v is None else v for v in alternatives]
        return [[v] if not isinstance(v, list | tuple) else list(v) for v in alternatives]
    if isinstance(given, tuple):
        raise UsageError(f"{key}: one value expected, not {'/'.join(map(str, given))}")
    if not isinstance(given, list):
        return [given]
    if not given:
        raise UsageError(f"{key}: an empty list; give at least one value")
    return given


def _product(settings: Mapping[str, Any]) -> list[dict[str, Any]]:
    lists = [choices(key, given) for key, given in settings.items()]
    return [
        dict(zip(settings, combination, strict=True)) for combination in itertools.product(*lists)
    ]


def _size(*settings: Mapping[str, Any]) -> int:
    """Return the number of points of the grid, equal ones counted each."""
    return math.prod(len(choices(key, own)) for each in settings for key, own in each.items())


def _memory(point: Mapping[str, Any]) -> str:
    """Return the memory of one point of the grid: the one it sets, or its method's own.

    Raises:
        UsageError: an unknown memory.
    """
    name = point.get("memory")
    if name in (None, "auto"):
        name = registry.compressor_class(str(point.get("compressor", "terngrad"))).memory
    registry.memory_class(name)  # raises UsageError for an unknown name
    return str(name)


def method(word: str) -> tuple[str, dict[str, Any]]:
    """Return the name and the fields in a word such as topk:ratio=0.05 or ./mine.py:levels=4.

    A file is registered as a compressor under the file's name. A field may be a schedule:
    topk:ratio=0:0.25/100:0.01.

    Raises:
        UsageError: no such file, or a field without a value.
    """
    start, *rest = word.split(":")
    words: list[str] = []
    for piece in rest:  # the colons of a schedule belong to the field before
        if "=" in piece or not words:
            words.append(piece)
        else:
            words[-1] += f":{piece}"
    return registry.add_file(start.strip()), pairs(f"{start}:", words)


def expand(flags: Mapping[str, Any], file: Path | None) -> list[Config]:
    """Return the configs of the grid, in the order of the lists, equal ones once.

    `flags` are settings by name, with values as `value` returns them; they override those of the
    YAML file. A compressor may have fields of its own, `topk:ratio=0.05`; compressors and memories
    may be files, `./mine.py`. A field in `options` is set on the compressors of the grid that have
    it, one in `task_options` on the tasks, one in `memory_options` on the memories.

    Raises:
        UsageError: see `Config.make`; or a field that no compressor (task, memory) of the grid has.
    """
    given = read(file) if file else {}
    for key in NESTED:
        own = given.get(key) or {}
        if not isinstance(own, dict):
            raise UsageError(f"{key}: a mapping of fields expected, not {own!r}")
        given[key] = {**own, **flags.get(key, {})}
    given = {**given, **{k: v for k, v in flags.items() if k not in NESTED}}
    fields = {
        "options": ("compressor", "terngrad", registry.compressor_class),
        "task_options": ("task", "digits", registry.task_class),
    }
    nested = {key: given.pop(key) for key in fields}
    methods: dict[str, tuple[str, dict[str, Any]]] = {}
    if "compressor" in given:
        words = [str(one) for one in choices("compressor", given["compressor"])]
        methods = {one: method(one) for one in words}
        given["compressor"] = words
        for one, (_, own) in methods.items():
            if twice := sorted(own.keys() & nested["options"].keys()):
                raise UsageError(f"{one}: the field {twice[0]} came by --set, too; give it once")

    if "memory" in given:
        names = choices("memory", given["memory"])
        given["memory"] = [
            one if one is None else registry.add_file(str(one), "memory") for one in names
        ]

    def points() -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
        """Yield the points of the grid, and the fields given with each point's compressor."""
        for point in _product(given):
            if not methods:
                yield point, {}
                continue
            name, own = methods[point["compressor"]]
            yield {**point, "compressor": name}, own

    for key, (owner, default, load) in fields.items():
        names = choices(owner, given.get(owner, default))
        if owner == "compressor":
            names = [methods[name][0] if name in methods else name for name in names]
        known = {str(name): registry.fields(load(str(name))) for name in names}
        for field in nested[key]:
            if not any(field in own for own in known.values()):
                every = sorted({name for own in known.values() for name in own})
                raise unknown(f"field of {owner} {', '.join(known)}:", field, every)
    carried = given.pop("memory_options")
    unused = set(carried)
    configs: dict[str, Config] = {}
    limits.check_grid(_size(given, carried, *nested.values()))
    for point, brought in points():
        inner = []
        for key, (owner, default, load) in fields.items():
            own = registry.fields(load(str(point.get(owner, default))))
            inner.append(_product({k: v for k, v in nested[key].items() if k in own}))
        own = registry.fields(registry.memory_class(_memory(point)))
        unused -= own.keys()
        inner.append(_product({k: v for k, v in carried.items() if k in own}))
        for options, task_options, memory_options in itertools.product(*inner):
            choice = {"options": {**options, **brought}, "task_options": task_options}
            made = Config.make({**point, **choice, "memory_options": memory_options})
            configs.setdefault(made.hash, made)
    if unused:
        field = min(unused)
        here = ", ".join(sorted({_memory(point) for point, _ in points()}))
        every_field = {
            name: registry.fields(registry.memory_class(name)) for name in registry.memories()
        }
        having = sorted(name for name, own in every_field.items() if field in own)
        if having:
            raise UsageError(
                f"memory {here} has no field {field!r}; {' and '.join(having)} do: --memory NAME"
            )
        every = sorted({name for own in every_field.values() for name in own})
        raise unknown(f"field of memory {here}:", field, every)
    return list(configs.values())
