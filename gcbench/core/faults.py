"""What kernels on a device find wrong is told at once, or together: the host waits to read it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class _Waiting(threading.local):
    checks: list[Callable[[], None]] | None = None


_waiting = _Waiting()
"""What this thread looks at when `together` ends; None outside of it."""


@contextmanager
def together() -> Iterator[None]:
    """Look at what kernels of this thread find wrong at the end of a with statement, not at once.

    So the host waits for a device once. What a kernel with a fault has written is not defined.

    Raises:
        PayloadError: a payload is corrupt; of several the one that was read first.
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
    """Call `check`, which raises what a kernel found, now or when `together` ends."""
    if _waiting.checks is None:
        check()
    else:
        _waiting.checks.append(check)
