"""The result of one check."""

from __future__ import annotations

from typing import NamedTuple


class Outcome(NamedTuple):
    """The result of one check, a row of the table."""

    check: str
    measured: str
    bound: str
    verdict: str
    """"holds", "fails", or "not declared" with the reason in `note`."""
    note: str = ""


class Measurement(NamedTuple):
    """What a check measured, the bound, and whether the bound holds."""

    measured: object
    bound: object
    holds: bool
    note: str = ""


class NotDeclaredError(Exception):
    """The method does not declare the property that a check is about."""
