"""Checks of the types and ranges of the hooks' arguments."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from gcbench.core.errors import UsageError

SEEDS = 2**63
"""Upper bound of seeds, exclusive."""


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


def optional_text(name: str, value: Any) -> str | None:
    """Return a string or None; UsageError for any other value."""
    if value is not None and not isinstance(value, str):
        raise UsageError(f"{name}={value!r}: expected a name")
    return value


def optional_mapping(name: str, value: Any) -> Mapping[str, Any] | None:
    """Return a mapping with string keys, or None; UsageError for any other value."""
    if value is None:
        return None
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise UsageError(f"{name}={value!r}: expected a dict of fields by name")
    return value


def optional_function(name: str, value: Any) -> Callable[..., Any] | None:
    """Return a callable or None; UsageError for any other value."""
    if value is not None and not callable(value):
        raise UsageError(f"{name}={value!r}: expected a function")
    return value  # type: ignore[no-any-return]
