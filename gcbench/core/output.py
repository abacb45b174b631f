"""Standard output, which belongs to the result of a command: whatever else prints goes to stderr.

Plug-ins, libraries and worker processes may print. None of that may end in the JSON that another
program reads.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout, suppress
from typing import TextIO

_reserved: TextIO | None = None


def stream() -> TextIO:
    """Return the stream on which a command prints its result."""
    return sys.stdout if _reserved is None else _reserved


def emit(text: str, end: str = "\n") -> None:
    """Print a part of a command's result, with "?" for what the encoding of stdout lacks."""
    out = stream()
    encoding = out.encoding or "utf-8"  # of io.StringIO: None
    print(text.encode(encoding, "replace").decode(encoding), end=end, file=out)


@contextmanager
def reserved() -> Iterator[None]:
    """Let only `emit`, and what prints on `stream()`, reach stdout; all else goes to stderr.

    That includes code that writes to the file descriptor 1, and processes that start meanwhile.
    """
    global _reserved
    if _reserved is not None or sys.stdout is None:
        yield
        return
    before, original = sys.stdout, sys.__stdout__
    try:
        descriptor = before.fileno()
    except (OSError, ValueError):  # a stream of Python's alone, such as io.StringIO
        descriptor = -1
    if descriptor != 1:
        _reserved = before
        try:
            with redirect_stdout(sys.stderr):
                yield
        finally:
            _reserved = None
        return
    before.flush()
    real = os.dup(1)
    os.set_inheritable(real, False)
    os.dup2(2, 1)
    buffering = 1 if os.isatty(real) else -1
    out = open(real, "w", buffering, encoding=before.encoding, errors=before.errors)  # noqa: SIM115
    # shutil.get_terminal_size asks the terminal of sys.__stdout__.
    _reserved, sys.__stdout__ = out, out  # type: ignore[misc]
    try:
        yield
    finally:
        before.flush()  # what others printed, to stderr
        _reserved, sys.__stdout__ = None, original  # type: ignore[misc]
        try:
            out.flush()
        finally:
            os.dup2(real, 1)
            with suppress(OSError):  # a broken pipe, with text left in the buffer
                out.close()
