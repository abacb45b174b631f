"""Rates and delays of a link, as `tc` writes them."""

from __future__ import annotations

import re
from dataclasses import dataclass

from gcbench.core.errors import UsageError

_RATES = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
_DELAYS = {"": 1e-3, "us": 1e-6, "ms": 1e-3, "s": 1.0}
_NUMBER = re.compile(r"([0-9]*\.?[0-9]+)([a-z]*)")


@dataclass(frozen=True)
class Link:
    """The link between a node and the switch, the same in both directions."""

    bits_per_second: float | None
    """None: not limited."""
    delay: float = 0.0
    """Seconds from one node to another."""
    loss: float = 0.0
    """Share of the packets that the link drops."""

    @property
    def name(self) -> str:
        """Short text for tables, such as "100 Mbit/s, 5 ms"."""
        parts = [rate_text(self.bits_per_second)]
        if self.delay:
            parts.append(f"{1e3 * self.delay:g} ms")
        if self.loss:
            parts.append(f"{100 * self.loss:g}% loss")
        return ", ".join(parts)


def rate_text(bits_per_second: float | None) -> str:
    """Return a rate with its unit."""
    if bits_per_second is None:
        return "unlimited"
    for unit, size in (("Gbit/s", 1e9), ("Mbit/s", 1e6)):
        if bits_per_second >= size:
            return f"{bits_per_second / size:g} {unit}"
    return f"{bits_per_second / 1e3:g} kbit/s"


def parse_rate(text: str) -> float | None:
    """Return bits per second; None for "unlimited".

    Raises:
        UsageError: not a number with a unit, or not positive.
    """
    if text == "unlimited":
        return None
    match = _NUMBER.fullmatch(text.strip().lower())
    if match is None or match[2] not in _RATES or float(match[1]) <= 0:
        raise UsageError(
            f"--bandwidth: received {text!r}; expected a number with the unit kbit, mbit or gbit, "
            "or unlimited, e.g. 100mbit,1gbit"
        )
    return float(match[1]) * _RATES[match[2]]


def parse_delay(text: str) -> float:
    """Return seconds; a number without a unit is in milliseconds.

    Raises:
        UsageError: not a number, or an unknown unit.
    """
    match = _NUMBER.fullmatch(text.strip().lower())
    if match is None or match[2] not in _DELAYS:
        raise UsageError(
            f"--delay: received {text!r}; expected a number with the unit us, ms or s, e.g. 0,5ms"
        )
    return float(match[1]) * _DELAYS[match[2]]
