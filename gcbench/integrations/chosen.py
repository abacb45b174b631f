"""The compressor and memory that the user of a hook chose, as objects, and as words to compare."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Mapping
from typing import Any

import gcbench
from gcbench import _version
from gcbench.core import memory as memories
from gcbench.core import registry, schedule, sealed
from gcbench.core.compressor import Compressor
from gcbench.core.errors import UsageError
from gcbench.core.memory import Memory

FREE = (
    *("gcbench", "code of compressor", "between code of compressor"),
    *("check_every", "on_nonfinite", "rates", "step"),
)
"""Names of what may differ between the job that saved a state and the one that loads it."""


Stages = Mapping[int, Compressor]
"""The compressor that holds from each step on; the first of them from step 0."""


def stages(name: str | Compressor, options: Mapping[str, Any]) -> Stages:
    """Return the compressor of this name or file with these fields, or the one that is given.

    A field may be a schedule: a mapping from steps to values, or its text, "0:0.25/100:0.01".

    Raises:
        UsageError: an unknown name, file, field or value, or fields beside a compressor.
    """
    if isinstance(name, str):
        parsed = {key: schedule.parsed(key, value) for key, value in options.items()}
        return {
            start: gcbench.get_compressor(name, **schedule.at(parsed, start))
            for start in schedule.starts(parsed)
        }
    if not isinstance(name, Compressor):
        raise UsageError(f"compressor={name!r:.60}: a name, a file or a Compressor is expected")
    if options:
        raise UsageError(
            f"fields {', '.join(options)} came beside {name!r}, whose fields are set already. "
            "Set them there, or give the compressor by its name"
        )
    return {0: name}


def at(methods: Stages, step: int) -> Compressor:
    """Return the compressor that holds at a step."""
    return methods[max(start for start in methods if start <= step)]


def memory(name: str | None, options: Mapping[str, Any] | None, methods: Stages) -> Memory:
    """Return the memory of this name or file with these fields; for None that of the method.

    Fields of that one that are not given are as the method sets them, whoever names it.

    Raises:
        UsageError: an unknown name or field, error feedback around a code that may diverge, or a
            mask where every element is sent.
    """
    method = methods[0]
    if name is None:
        carried, made = method.memory, memories.of(method, options)
    else:
        carried = registry.add_file(name, "memory")
        own = method.memory_options if carried == method.memory else {}
        made = memories.make(carried, {**own, **(options or {})})
    for each in methods.values():
        if name is not None:
            memories.check_legal(carried, each)
        memories.check_masking(carried, made, each)
    return made


def summary(methods: Stages, collective: str, carried: Memory) -> dict[str, Any]:
    """Return what all ranks must have in common about an exchange: words by their names, JSON."""
    kind = type(methods[0])
    calls = [registry.call(method) for method in methods.values()]
    by_step = [f"{start}:{call}" for start, call in zip(methods, calls, strict=True)]
    return {
        "gcbench": _version.__version__,
        "compressor": f"{kind.__module__}.{calls[0] if len(calls) == 1 else '/'.join(by_step)}",
        "code of compressor": _code(kind),
        "collective": collective,
        "memory": f"{type(carried).__module__}.{registry.call(carried)}",
    }


def check_settings(then: Any, now: Mapping[str, Any]) -> None:
    """Raise UsageError if a state was saved with other settings, `then`, than those of now."""
    different = [
        f"{name}: {sealed.entry(then, name)!r} then, {value!r} now"
        for name, value in now.items()
        if name not in FREE and sealed.entry(then, name) != value
    ]
    if different:
        raise UsageError(
            f"the state was saved by a hook with other settings. {'; '.join(different)}. Use "
            "those, or register a hook without a state; residuals are then lost"
        )


def _code(cls: type[Any]) -> str:
    """Return a digest of the source of the method's module; "" where the source is not found."""
    module = inspect.getmodule(cls)
    source = None if module is None else registry.executed(module)
    if source is None:
        try:
            source = inspect.getsource(module or cls).encode()
        except (OSError, TypeError):
            return ""
    return hashlib.sha256(source).hexdigest()[:12]
