"""The compressor and memory that the user of a hook chose, as objects, and as words to compare."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Mapping
from typing import Any

import gcbench
from gcbench import _version
from gcbench.core import memory as memories
from gcbench.core import registry
from gcbench.core.compressor import Compressor
from gcbench.core.errors import UsageError
from gcbench.core.memory import Memory

FREE = ("gcbench", "code of compressor", "between code of compressor", "check_every", "step")
"""Names of what may differ between the job that saved a state and the one that loads it."""


def compressor(name: str | Compressor, options: Mapping[str, Any]) -> Compressor:
    """Return the compressor of this name or file with these fields, or the one that is given.

    Raises:
        UsageError: an unknown name, file or field, or fields beside a compressor.
    """
    if isinstance(name, str):
        return gcbench.get_compressor(name, **options)
    if options:
        raise UsageError(
            f"fields {', '.join(options)} came beside {name!r}, whose fields are set already. "
            "Set them there, or give the compressor by its name"
        )
    return name


def memory(name: str | None, options: Mapping[str, Any] | None, method: Compressor) -> Memory:
    """Return the memory of this name or file with these fields; for None that of `method`.

    Fields of that one that are not given are as the method sets them, whoever names it.

    Raises:
        UsageError: an unknown name or field, error feedback around a code that may diverge, or a
            mask where every element is sent.
    """
    if name is None:
        carried, made = method.memory, memories.of(method, options)
    else:
        carried = registry.add_file(name, "memory")
        memories.check_legal(carried, method)
        own = method.memory_options if carried == method.memory else {}
        made = memories.make(carried, {**own, **(options or {})})
    memories.check_masking(carried, made, method)
    return made


def told(method: Compressor, collective: str, carried: Memory) -> dict[str, Any]:
    """Return what all ranks must have in common about an exchange: words by their names, JSON."""
    return {
        "gcbench": _version.__version__,
        "compressor": f"{type(method).__module__}.{registry.call(method)}",
        "code of compressor": _code(type(method)),
        "collective": collective,
        "memory": f"{type(carried).__module__}.{registry.call(carried)}",
    }


def check_state(state: Mapping[str, Any], rank: int, size: int, now: Mapping[str, Any]) -> None:
    """Raise UsageError if a state that was saved is of another rank or another configuration."""
    place = state["rank"], state["world_size"]
    if place != (rank, size):
        raise UsageError(
            f"the state is that of rank {place[0]} of {place[1]}, and this is rank "
            f"{rank} of {size}: every rank saves and loads its own. To go on "
            "with another number of ranks, register a hook without a state; residuals are then lost"
        )
    different = [
        f"{name}: {state['told'].get(name)!r} then, {value!r} now"
        for name, value in now.items()
        if name not in FREE and state["told"].get(name) != value
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
