"""Values of settings and rows as text: canonical JSON, short text, lists, what JSON can hold."""

from __future__ import annotations

import json
import math
from typing import Any

from gcbench.core.errors import UsageError


def finite(value: float | None) -> float | None:
    """Return the value; None for NaN and infinity, which JSON does not have, and for None."""
    return value if value is not None and math.isfinite(value) else None


def canonical(value: Any) -> str:
    """Return a value as text that is the same for equal values."""
    return _encode(value)


_encode = json.JSONEncoder(sort_keys=True, default=str).encode


def text(value: Any) -> str:
    """Return a setting's value as short text, without spaces; "auto" for None."""
    if isinstance(value, float):
        return f"{value:g}"
    if value is None:
        return "auto"
    return (value if isinstance(value, str) else json.dumps(value, default=str)).replace(" ", "")


def items_of(flag: str, listing: str) -> list[str]:
    """Return the items of a comma-separated list, without the spaces around them.

    Raises:
        UsageError: an item is empty; the message names `flag`.
    """
    items = [item.strip() for item in listing.split(",")]
    if not all(items):
        remedy = "remove the extra comma" if "," in listing else "leave it out"
        raise UsageError(f"{flag} {listing!r}: a value is empty; fill it, or {remedy}")
    return items
