"""Writing files that belong to gcbench: atomically, never through a link, with a useful error."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from gcbench.core.errors import GcbenchError


@contextlib.contextmanager
def explained(path: Path) -> Iterator[None]:
    """Raise GcbenchError, which says what to do, in place of an OSError while writing `path`."""
    try:
        yield
    except OSError as error:
        raise GcbenchError(
            f"cannot write {path}: {error.strerror or error}. Free space or choose another folder "
            "with --results or --output; runs that are there stay as they are"
        ) from error


def open_own(path: Path, mode: str, buffering: int = -1) -> IO[Any]:
    """Open a file of a run, as `open` does; if it exists it must be a regular file.

    A symbolic link could lead to a file outside the run, which would be overwritten; a
    pipe would make this process wait for a reader or writer.

    Raises:
        GcbenchError: the path is a link, a pipe, a device or a socket.
        OSError: as `open` does.
    """

    def opener(name: str, flags: int) -> int:
        # Truncated below, once it is known to be a regular file; opening a pipe does not block.
        return os.open(name, flags & ~os.O_TRUNC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)

    try:
        file = open(path, mode, buffering, opener=opener)  # noqa: SIM115
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO, errno.ESPIPE):
            raise not_own(path) from None
        raise
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise not_own(path)
    if "w" in mode:
        file.truncate(0)
    return file


def not_own(path: Path) -> GcbenchError:
    """Return the error for a path that is not a regular file of gcbench."""
    return GcbenchError(
        f"{path} is a symbolic link, or no regular file; gcbench made no such thing and leaves it "
        "alone: remove it, or choose another folder with --results"
    )


def write_atomically(path: Path, data: bytes, backup: Path | None = None) -> None:
    """Replace `path` with `data`: after a crash it holds the old bytes or the new, never a mix.

    `backup`: where to move the old file; after a crash there may be a file at `backup` and none at
    `path`. Once this returns the data survives a loss of power.

    Raises:
        GcbenchError: it cannot be written.
    """
    part = path.with_name(path.name + ".part")
    with explained(path):
        try:
            with open_own(part, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            if backup is not None and path.exists():
                path.replace(backup)
            part.replace(path)
            folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)
        except OSError:
            part.unlink(missing_ok=True)
            raise
