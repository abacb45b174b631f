"""Errors that a user sees as one line: what was received, what is allowed, what to do."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class GcbenchError(Exception):
    """A failure with a message for the user; the command line prints it and exits with 1."""

    exit_code = 1


class UsageError(GcbenchError):
    """An invalid request; the command line exits with 2."""

    exit_code = 2


class DivergedError(GcbenchError):
    """A run had a non-finite gradient at `step`; it ends, and is recorded as diverged."""

    def __init__(self, message: str, step: int) -> None:
        super().__init__(message)
        self.step = step


class Interrupted(GcbenchError):
    """The user interrupted the run; a checkpoint is written."""

    exit_code = 130


class PeerLostError(GcbenchError):
    """Another worker has failed, so this one cannot continue."""


class PayloadError(GcbenchError, ValueError):
    """A payload that no encoder of this configuration can have produced."""


def unknown(kind: str, name: str, choices: Iterable[str], hint: str = "") -> UsageError:
    """Return the error for an unknown `name`; it lists the closest choice, then all choices.

    Without any choice it says that there are none.
    """
    names = sorted(choices)
    close = difflib.get_close_matches(str(name), names, n=1, cutoff=0.5)
    nearest = f" Did you mean {close[0]!r}?" if close else ""
    tail = f" {hint}" if hint else ""
    listing = f"Known: {', '.join(names)}." if names else "There are none: leave it out."
    return UsageError(f"unknown {kind} {name!r}.{nearest} {listing}{tail}")
