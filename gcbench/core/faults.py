"""When faults that kernels find on a device are read: after each kernel, or once for several.

A kernel on a GPU cannot raise. It records a fault in a flag on the device, and the host has to wait
for the device to read it. Inside `together` the flags of all kernels are read once, at the end.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class _Waiting(threading.local):
    checks: list[Callable[[], None]] | None = None


_waiting = _Waiting()
"""The checks that this thread runs when `together` ends; None outside of it."""


@contextmanager
def together() -> Iterator[None]:
    """Check for faults of this thread's kernels at the end of a with statement, not after each.

    The host then waits for the device once. The output of a kernel that found a fault is undefined.

    Raises:
        PayloadError: a payload is corrupt; if several are, the one that was read first.
    """
    if _waiting.checks is not None:
        yield
        return
    _waiting.checks = []
    try:
        yield
        for check in _waiting.checks:
            check()
    finally:
        _waiting.checks = None


def look(check: Callable[[], None]) -> None:
    """Call `check`, which raises if a kernel found a fault: now, or when `together` ends."""
    if _waiting.checks is None:
        check()
    else:
        _waiting.checks.append(check)
