"""The compressor, collective and memory of a hook, and how ranks compare them."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self

import gcbench
from gcbench import _version
from gcbench.core import memory as memories
from gcbench.core import registry, schedule, sealed
from gcbench.core.compressor import Compressor
from gcbench.core.errors import UsageError
from gcbench.core.exchange import check_legal
from gcbench.core.memory import Memory

UNSAVED = ("code of memory", "between code of memory")
"""Settings that ranks compare and states do not contain: those of earlier versions lack them."""
FREE = (
    *("gcbench", "code of compressor", "between code of compressor", *UNSAVED),
    *("check_every", "on_nonfinite", "rates", "step"),
)
"""Settings that may differ between the job that saved a state and the one that loads it."""

Stages = Mapping[int, Compressor]
"""Start step -> compressor, from step 0 on."""


@dataclass(frozen=True, kw_only=True)
class Scheme:
    """How gradients are exchanged."""

    compressor: Compressor
    """The compressor at step 0."""
    collective: str
    memory: Memory
    later: Stages = field(default_factory=dict)
    """Start step -> compressor, for later stages of a schedule."""

    @classmethod
    def of(
        cls,
        compressor: str | Compressor,
        options: Mapping[str, Any] | None,
        memory: str | None,
        memory_options: Mapping[str, Any] | None,
        *,
        collective: str | None = None,
    ) -> Self:
        """Return the scheme for the user's arguments.

        Raises:
            UsageError: an unknown name or field, not a compressor, or an illegal combination.
        """
        methods = stages(compressor, options or {})
        for method in methods.values():
            collective = check_legal(method, collective)
        return cls(
            compressor=methods[0],
            collective=collective or "",
            memory=_memory(memory, memory_options, methods),
            later={start: method for start, method in methods.items() if start},
        )

    @property
    def methods(self) -> Stages:
        """Start step -> compressor."""
        return {0: self.compressor, **self.later}

    def at(self, step: int) -> tuple[Compressor, str, Memory]:
        """Return compressor, collective and memory at a step."""
        start = max(start for start in self.methods if start <= step)
        return self.methods[start], self.collective, self.memory

    def summary(self) -> dict[str, Any]:
        """Return what all ranks must have in common, by a readable name; JSON."""
        kind = type(self.compressor)
        calls = [registry.call(method) for method in self.methods.values()]
        by_step = [f"{start}:{call}" for start, call in zip(self.methods, calls, strict=True)]
        return {
            "gcbench": _version.__version__,
            "compressor": f"{kind.__module__}.{calls[0] if len(calls) == 1 else '/'.join(by_step)}",
            "code of compressor": _code(kind),
            "collective": self.collective,
            "memory": f"{type(self.memory).__module__}.{registry.call(self.memory)}",
            "code of memory": _code(type(self.memory)),
        }


def stages(name: str | Compressor, options: Mapping[str, Any]) -> Stages:
    """Return the compressor with this name, or in this file, with these fields; or the given one.

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
        raise UsageError(f"compressor={name!r:.60}: expected a name, a file or a Compressor")
    if options:
        raise UsageError(
            f"fields {', '.join(options)} came beside {name!r}, whose fields are already set. "
            "Set them there, or pass the compressor's name"
        )
    return {0: name}


def _memory(name: str | None, options: Mapping[str, Any] | None, methods: Stages) -> Memory:
    """Return the memory with this name, or in this file; for None the method's default.

    Fields of the default memory that are not given have the method's values.
    """
    method, chosen = methods[0], name
    name = method.memory if name is None else registry.add_file(name, "memory")
    defaults = memories.defaults(name, [*methods.values()])
    if chosen is None:
        memory = memories.of(method, options)
    else:
        memory = memories.make(name, {**defaults, **(options or {})})
        for each in methods.values():
            memories.check_legal(name, each)
    for each in methods.values():
        memories.check_masking(name, memory, each)
        memories.check_shared(name, memory, each)
    return memory


def check_settings(saved: Any, current: Mapping[str, Any]) -> None:
    """Raise UsageError if a state was saved with other settings, except those in `FREE`."""
    different = [
        f"{name}: {sealed.entry(saved, name)!r} in the state, {value!r} now"
        for name, value in current.items()
        if name not in FREE and sealed.entry(saved, name) != value
    ]
    if different:
        raise UsageError(
            f"the state was saved by a hook with other settings. {'; '.join(different)}. Use "
            "those, or register a hook without a state, which loses the residuals"
        )


def _code(cls: type[Any]) -> str:
    """Return a digest of the source of a class's module; "" if there is no source."""
    module = inspect.getmodule(cls)
    source = None if module is None else registry.executed(module)
    if source is None:
        try:
            source = inspect.getsource(module or cls).encode()
        except (OSError, TypeError):
            return ""
    return hashlib.sha256(source).hexdigest()[:12]
