"""Arguments of the hooks: their types and ranges, checked in the call."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from gcbench.core.errors import UsageError

SEEDS = 2**63
"""Seeds are below this."""


def integer(name: str, value: Any, below: int = 2**63) -> int:
    """Return an integer from 0 on; UsageError for any other value, also for a bool."""
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise UsageError(f"{name}={value!r}: an integer, at least 0, is expected")
    if not 0 <= int(value) < below:
        raise UsageError(f"{name}={value!r}: at least 0 and below {below} allowed")
    return int(value)


def number(name: str, value: Any, least: float = 0.0, *, finite: bool = False) -> float:
    """Return a number from `least` on; UsageError for any other value, also for NaN or a bool."""
    if isinstance(value, bool) or not hasattr(value, "__float__"):
        raise UsageError(f"{name}={value!r}: a number, at least {least:g}, is expected")
    if not float(value) >= least:
        raise UsageError(f"{name}={value!r}: at least {least:g} allowed")
    if finite and math.isinf(value):
        raise UsageError(f"{name}={value!r}: a finite number is expected")
    return float(value)


def flag(name: str, value: Any) -> bool:
    """Return a bool; UsageError for any other value."""
    if not isinstance(value, bool):
        raise UsageError(f"{name}={value!r}: True or False is expected")
    return value


def choice(name: str, value: Any, allowed: tuple[str, ...]) -> str:
    """Return one of the allowed words; UsageError for any other value."""
    if not isinstance(value, str) or value not in allowed:
        raise UsageError(f"{name}={value!r}: allowed are {', '.join(map(repr, allowed))}")
    return value


def optional_text(name: str, value: Any) -> str | None:
    """Return a string or None; UsageError for any other value."""
    if value is not None and not isinstance(value, str):
        raise UsageError(f"{name}={value!r}: a name is expected")
    return value


def optional_mapping(name: str, value: Any) -> Mapping[str, Any] | None:
    """Return a mapping with names for keys, or None; UsageError for any other value."""
    if value is None:
        return None
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise UsageError(f"{name}={value!r}: a dict of fields by name is expected")
    return value


def optional_function(name: str, value: Any) -> Callable[..., Any] | None:
    """Return a callable or None; UsageError for any other value."""
    if value is not None and not callable(value):
        raise UsageError(f"{name}={value!r}: a function is expected")
    return value  # type: ignore[no-any-return]
