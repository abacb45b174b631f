"""When the host reads the error flags of GPU kernels: after each kernel, or once for several.

A kernel cannot raise. It sets a flag in device memory, and reading the flag synchronizes the
device. Inside `together` the flags of all kernels are read once, at the end.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class _Waiting(threading.local):
    checks: list[Callable[[], None]] | None = None


_waiting = _Waiting()
"""The checks that this thread runs at the end of `together`; None outside it."""


@contextmanager
def together() -> Iterator[None]:
    """Defer the checks of this thread's kernels to the end of a with block.

    The host then waits for the device once. The output of a kernel that set its flag is undefined.

    Raises:
        PayloadError: a payload is corrupt; if several are, the first one.
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
    """Call `check`, which raises if a kernel set its error flag: now, or when `together` ends."""
    if _waiting.checks is None:
        check()
    else:
        _waiting.checks.append(check)
