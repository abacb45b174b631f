"""Checks of the types and ranges of the hooks' arguments."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from gcbench.core import sealed
from gcbench.core.errors import UsageError


def integer(name: str, value: Any, below: int = 2**63) -> int:
    """Return an integer from 0 to below - 1; UsageError for any other value, also for a bool."""
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise UsageError(f"{name}={value!r}: expected an integer of at least 0")
    if not 0 <= int(value) < below:
        raise UsageError(f"{name}={value!r}: expected at least 0 and below {below}")
    return int(value)


def number(name: str, value: Any, least: float = 0.0, *, finite: bool = False) -> float:
    """Return a number of at least `least`; UsageError for other values, also for NaN or a bool."""
    if isinstance(value, bool) or not hasattr(value, "__float__"):
        raise UsageError(f"{name}={value!r}: expected a number of at least {least:g}")
    if not float(value) >= least:
        raise UsageError(f"{name}={value!r}: expected at least {least:g}")
    if finite and math.isinf(value):
        raise UsageError(f"{name}={value!r}: expected a finite number")
    return float(value)


def flag(name: str, value: Any) -> bool:
    """Return a bool; UsageError for any other value."""
    if not isinstance(value, bool):
        raise UsageError(f"{name}={value!r}: expected True or False")
    return value


def choice(name: str, value: Any, allowed: tuple[str, ...]) -> str:
    """Return one of the allowed strings; UsageError for any other value."""
    if not isinstance(value, str) or value not in allowed:
        raise UsageError(f"{name}={value!r}: expected one of {', '.join(map(repr, allowed))}")
    return value


def text(name: str, value: Any) -> str:
    """Return a string; UsageError for any other value."""
    if not isinstance(value, str):
        raise UsageError(f"{name}={value!r}: expected a name")
    return value


def mapping(name: str, value: Any) -> Mapping[str, Any]:
    """Return a mapping with string keys; UsageError for any other value."""
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise UsageError(f"{name}={value!r}: expected a dict of fields by name")
    return value


def function(name: str, value: Any) -> Any:
    """Return a callable; UsageError for any other value."""
    if not callable(value):
        raise UsageError(f"{name}={value!r}: expected a function")
    return value


CHECKS: dict[str, Callable[[str, Any], Any]] = {
    "memory": text,
    "memory_options": mapping,
    "between_options": mapping,
    "between_memory": text,
    "between_memory_options": mapping,
    "collective": text,
    "dense_below": integer,
    "dense_last": flag,
    "start_step": partial(integer, below=sealed.STEPS),
    "seed": integer,
    "timeout": partial(number, least=0.001, finite=True),
    "on_nonfinite": partial(choice, allowed=("stop", "skip")),
    "on_resize": partial(choice, allowed=("refuse", "redistribute")),
    "check_every": integer,
    "check_error": number,
    "on_check": function,
    "bucket_mb": number,
    "every": integer,
    "fragments": integer,
    "delay": integer,
    "blend": number,
    "outer_lr": partial(number, finite=True),
    "outer_momentum": partial(number, finite=True),
    "outer_nesterov": flag,
}
"""Argument -> the function that checks a value of it and converts it to the right type."""
OPTIONAL = (
    *("memory", "memory_options", "between_options", "between_memory", "between_memory_options"),
    *("collective", "on_nonfinite", "check_error", "on_check"),
)
"""Arguments that may be None."""


def checked(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments that `CHECKS` names, checked and converted, without the others.

    Raises:
        UsageError: a value of the wrong type, or out of range.
    """
    return {
        name: None if value is None and name in OPTIONAL else CHECKS[name](name, value)
        for name, value in values.items()
        if name in CHECKS
    }
