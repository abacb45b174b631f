"""Makes the configs of a grid from flags and a YAML file."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, get_origin

from gcbench.core import registry, settings_file
from gcbench.core.errors import GcbenchError, UsageError, unknown
from gcbench.core.values import items_of
from gcbench.results.settings import DEFAULTS, Settings
from gcbench.training import limits
from gcbench.training.configuration import READERS, Config

SEQUENCES = tuple(
    name for name, f in Settings.model_fields.items() if get_origin(f.annotation) in (list, tuple)
)
"""Settings whose value is itself a list; on the command line its items are joined by slashes."""
_STAGE = re.compile(r"([0-9]+):(.+)")
"""One stage of a schedule: the step from which a value holds, and the value."""
NESTED = {"options": "compressor", "task_options": "task", "memory_options": "memory"}
"""Settings that are mappings of fields, and whose fields they are."""


def _scalar(text: str) -> Any:
    """Return the scalar that YAML reads in a text; the text itself if it is not YAML.

    A last colon, which makes a mapping in YAML, belongs to the text.
    """
    try:
        return text if text.endswith(":") else settings_file.parse(text)
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
        result = {int(stage[1]): _scalar(stage[2]) for stage in stages if stage}
        if len(result) < len(stages):
            raise UsageError(f"{text}: a step occurs twice; give each stage another step")
        return result
    if "/" in text and all(part.strip() for part in text.split("/")):
        parts = [_scalar(part) for part in text.split("/")]
        if all(isinstance(part, int | float) for part in parts):
            return tuple(parts)
    return _scalar(text)


def pairs(flag: str, items: Iterable[str] | None) -> dict[str, Any]:
    """Return the settings in items such as clip=2.0, by name; `flag` is for errors.

    Raises:
        UsageError: an item has no =, a value is empty, or a name occurs twice.
    """
    result: dict[str, Any] = {}
    for item in items or ():
        name, equals, text = item.partition("=")
        if not (name and equals):
            raise UsageError(f"{flag} {item!r}: expected NAME=VALUE, such as {flag} clip=2.0")
        if name in result:
            raise UsageError(f"{flag} {name} occurs twice; for a grid write {name}=1,2")
        items_of(f"{flag} {name}", text)  # refuses empty ones
        result[name] = value(text)
    return result


def flag(key: str, text: str) -> Any:
    """Return the value of a setting's flag; commas separate alternatives, also of sequences.

    In a YAML file the list of a sequence is one alternative.

    Raises:
        UsageError: an alternative is empty.
    """
    items_of("--" + key.replace("_", "-"), text)  # refuses empty ones
    result = value(text)
    if key in SEQUENCES and isinstance(result, list):
        return [each if isinstance(each, tuple) else (each,) for each in result]
    return result


def choices(key: str, value: Any) -> list[Any]:
    """Return the alternatives of one setting: those of a list, or a single value.

    Raises:
        UsageError: an empty list, or a tuple for a setting that takes one value.
    """
    if key in SEQUENCES:
        nested = isinstance(value, list) and any(isinstance(v, list | tuple) for v in value)
        alternatives = value if nested else [value]
        alternatives = [[] if v is None else v for v in alternatives]
        return [[v] if not isinstance(v, list | tuple) else list(v) for v in alternatives]
    if isinstance(value, tuple):
        raise UsageError(f"{key}: expected one value, not {'/'.join(map(str, value))}")
    if not isinstance(value, list):
        return [value]
    if not value:
        raise UsageError(f"{key}: the list is empty; give at least one value")
    return value


def _product(settings: Mapping[str, Any]) -> list[dict[str, Any]]:
    lists = [choices(key, value) for key, value in settings.items()]
    return [
        dict(zip(settings, combination, strict=True)) for combination in itertools.product(*lists)
    ]


def _size(*settings: Mapping[str, Any]) -> int:
    """Return the number of points of the grid, including equal ones."""
    return math.prod(len(choices(key, values)) for each in settings for key, values in each.items())


def method(spec: str) -> tuple[str, dict[str, Any]]:
    """Return the name and the fields in a spec such as topk:ratio=0.05 or ./mine.py:levels=4.

    A file is registered as a compressor under the file's name. A field may be a schedule:
    topk:ratio=0:0.25/100:0.01.

    Raises:
        UsageError: no such file, or a field without a value.
    """
    start, *rest = spec.split(":")
    fields: list[str] = []
    for piece in rest:  # colons of a schedule belong to the previous field
        if "=" in piece or not fields:
            fields.append(piece)
        else:
            fields[-1] += f":{piece}"
    return registry.add_file(start.strip()), pairs(f"{start}:", fields)


Fields = dict[str, Any]


def without_effect(names: Iterable[str], configs: Sequence[Config]) -> list[str]:
    """Return a sentence for each setting that has no effect.

    These are the settings in `names` that are changed and that no config uses, and all settings,
    also those that a method declares, that begin after a run's last step. They are allowed: the
    command that repeats a run gives all settings that differ from defaults.
    """
    sentences = []
    for key in sorted(READERS.keys() & set(names)):
        reader, users = READERS[key]
        values = list(dict.fromkeys(getattr(config, reader) for config in configs))
        stored = [config.model_dump(mode="json")[key] for config in configs]
        if not set(values) & set(users) and any(value != DEFAULTS[key] for value in stored):
            sentences.append(
                f"{key} has no effect with {reader} {' or '.join(values)}, only with "
                f"{' or '.join(users)}"
            )
    return [*sentences, *dict.fromkeys(late for one in configs for late in _too_late(one))]


def _too_late(config: Config) -> Iterator[str]:
    """Yield a sentence for each setting that begins after the last step."""
    steps = f"the {config.steps:,} steps of the run"
    if config.steps and config.start_step >= config.steps and config.compressor != "none":
        yield (
            f"{config.compressor} never compresses: start_step={config.start_step} is not below "
            f"{steps}"
        )
    if config.schedule == "step":
        late = [mark for mark in config.schedule_steps if mark >= max(1, config.steps)]
        if late:
            marks = "/".join(f"{mark:g}" for mark in late)
            yield f"schedule_steps {marks}: not below {steps}"
    for field, each in config.options.items():
        if isinstance(each, Mapping) and (late := [s for s in each if s >= max(1, config.steps)]):
            starts = ", ".join(map(str, late))
            yield f"{field}: its value from step {starts} is not used in {steps}"


def expand(flags: Mapping[str, Any], file: Path | None) -> list[Config]:
    """Return the configs of the grid, in the order of the lists, without duplicates.

    `flags` are settings by name, with values as `value` returns them; they override those of the
    YAML file. A compressor may have fields, `topk:ratio=0.05`; compressors and memories may be
    files, `./mine.py`. A field in `options` is set on those compressors of the grid that have it,
    one in `task_options` on the tasks, one in `memory_options` on the memories.

    Raises:
        UsageError: see `Config.make`; or a field that no compressor (task, memory) of the grid has.
    """
    settings = settings_file.read(file) if file else {}
    nested: dict[str, Fields] = {}
    below: dict[str, Fields] = {}  # the file's fields
    for key in NESTED:
        below[key] = settings.pop(key, None) or {}
        if not isinstance(below[key], dict):
            raise UsageError(f"{key}: expected a mapping of fields, not {below[key]!r}")
        nested[key] = {**below[key], **flags.get(key, {})}
    settings = {**settings, **{k: v for k, v in flags.items() if k not in NESTED}}
    above = flags.get("options", {})
    methods = _methods(settings, above if "compressor" in flags else below["options"])
    if "compressor" not in flags:
        for _, fields in methods.values():
            for field in fields.keys() & above.keys():
                del fields[field]
    if "memory" in settings:
        names = choices("memory", settings["memory"])
        settings["memory"] = [
            one if one is None else registry.add_file(str(one), "memory") for one in names
        ]
    limits.check_grid(_size(settings, *nested.values()))
    points: list[tuple[Fields, Fields]] = []  # with the fields in the compressor's spec
    for point in _product(settings):
        name, fields = methods[point["compressor"]] if methods else ("", {})
        points.append(({**point, "compressor": name} if methods else point, fields))
    for key, fields in nested.items():
        _check_owned(key, fields, dict(_owner(key, point) for point, _ in points))
    configs: dict[str, Config] = {}
    for point, brought in points:
        alternatives = [
            _product({k: v for k, v in fields.items() if k in _owner(key, point)[1]})
            for key, fields in nested.items()
        ]
        for combination in itertools.product(*alternatives):
            options = dict(zip(nested, combination, strict=True))
            options["options"] = {**options["options"], **brought}
            config = Config.make({**point, **options})
            configs.setdefault(config.hash, config)
    return list(configs.values())


def _methods(settings: Fields, options: Fields) -> dict[str, tuple[str, Fields]]:
    """Return the names and fields of the compressors of a grid, by their specs.

    `options`: the fields that came with them, from the flags or from the file.
    """
    if "compressor" not in settings:
        return {}
    chosen = choices("compressor", settings["compressor"])
    if None in chosen:
        raise UsageError("compressor null: expected a name; `gcbench list compressors` lists them")
    specs = settings["compressor"] = list(map(str, chosen))
    methods = {spec: method(spec) for spec in specs}
    for spec, (_, fields) in methods.items():
        if twice := sorted(fields.keys() & options.keys()):
            raise UsageError(
                f"{spec}: the field {twice[0]} is also among the options (--set); give it once"
            )
    return methods


def _owner(key: str, point: Fields) -> tuple[str, Mapping[str, Any]]:
    """Return the name of a point's compressor (task, memory) and the fields that it has."""
    if key == "task_options":
        name = str(point.get("task", "digits"))
        return name, registry.fields(registry.task_class(name))
    name = str(point.get("compressor", "terngrad"))
    if key == "options":
        return name, registry.fields(registry.compressor_class(name))
    memory = point.get("memory")
    if memory in (None, "auto"):
        memory = registry.compressor_class(name).memory
    return str(memory), registry.fields(registry.memory_class(str(memory)))


def _check_owned(key: str, fields: Fields, owners: Mapping[str, Mapping[str, Any]]) -> None:
    """Raise UsageError for a field that none of the grid's compressors (tasks, memories) has."""
    kind = NESTED[key]
    for field in sorted(fields):
        if any(field in each for each in owners.values()):
            continue
        here = ", ".join(sorted(owners) if kind == "memory" else owners)
        every = {name for each in owners.values() for name in each}
        if kind == "memory":
            memories = {}
            for name in registry.memories():
                with suppress(GcbenchError):  # a plug-in that cannot be loaded is not recommended
                    memories[name] = registry.fields(registry.memory_class(name))
            if having := sorted(name for name, each in memories.items() if field in each):
                raise UsageError(
                    f"memory {here} has no field {field!r}; {' and '.join(having)} do: "
                    "--memory NAME"
                )
            every = {name for each in memories.values() for name in each}
        raise unknown(f"field of {kind} {here}:", field, sorted(every))
