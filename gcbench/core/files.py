"""Reading files that a user names, and the digests by which damaged results are recognized.

The folder of a finished run is protected by `summary.json`: `files` has the SHA-256 of every other
file of the run that gcbench reads, and `digest` the SHA-256 of the summary itself. The module
imports neither torch nor pandas.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from gcbench.core.errors import GcbenchError, UsageError

DIGEST = "digest"
"""The key of a summary that holds the SHA-256 of all its other keys (`digest`)."""
FILES = "files"
"""The key of a summary that holds the SHA-256 of the run's other files, by name."""
REMEDY = "Restore it from a copy, or run again with --force"
_KINDS = (
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISFIFO, "a pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)


def _refused(path: Path, mode: int) -> UsageError:
    kind = next((name for matches, name in _KINDS if matches(mode)), "not a regular file")
    return UsageError(
        f"{path} is {kind}; only regular files are read. Write the data to a file and name that"
    )


def is_special(path: Path) -> bool:
    """Return whether a path is a pipe, a socket or a device: neither a file nor a folder."""
    try:
        mode = path.stat().st_mode
    except OSError:
        return False
    return not (stat.S_ISREG(mode) or stat.S_ISDIR(mode))


def check_regular(path: Path) -> None:
    """Refuse a path that is neither a file nor a folder, nor missing; never blocks.

    Raises:
        UsageError: it is a pipe, a socket or a device, which could block the reader or never end.
    """
    if is_special(path):
        raise _refused(path, path.stat().st_mode)


def unreadable(error: OSError, path: Path) -> GcbenchError:
    """Return the error for a file or folder that the system refuses to read."""
    name = error.filename or path
    return GcbenchError(
        f"{name} cannot be read ({error.strerror}); check its permissions, or name other folders"
    )


def walk(folder: Path) -> Iterator[tuple[Path, list[str], list[str]]]:
    """Yield each folder below `folder` with the names of the folders and files in it.

    As `os.walk`, whose lists may be changed, but the names of folders are sorted, links to folders
    are followed unless they lead to a parent of `folder`, and each folder is visited once. A folder
    that does not exist has none.

    Raises:
        GcbenchError: a folder cannot be listed.
    """

    def refuse(error: OSError) -> None:
        if not isinstance(error, FileNotFoundError):
            raise unreadable(error, folder)

    top = Path(os.path.realpath(folder))
    visited = {str(top), *map(str, top.parents)}
    for place, below, names in os.walk(folder, onerror=refuse, followlinks=True):
        below[:] = sorted(name for name in below if _is_new(os.path.join(place, name), visited))
        yield Path(place), below, names


def _is_new(place: str, visited: set[str]) -> bool:
    real = os.path.realpath(place)
    is_new = real not in visited
    visited.add(real)
    return is_new


def read_bytes(path: Path) -> bytes:
    """Return the contents of a regular file, or of one that a symbolic link leads to.

    Raises:
        UsageError: it is a folder, a pipe, a socket or a device.
        OSError: it cannot be opened or read.
    """
    mode = path.stat().st_mode
    if not stat.S_ISREG(mode):
        raise _refused(path, mode)
    # Another process may have replaced the file by a pipe since: opening does not wait for one.
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
        mode = os.fstat(file.fileno()).st_mode
        if not stat.S_ISREG(mode):
            raise _refused(path, mode)
        return file.read()


def read_text(path: Path) -> str:
    """Return the text of a regular file in UTF-8; see `read_bytes`.

    Raises:
        UsageError: it is a folder, a pipe, a socket or a device.
        OSError: it cannot be opened or read.
        UnicodeDecodeError: it is not UTF-8 (a ValueError).
    """
    return read_bytes(path).decode("utf-8")


# ---- digests -------------------------------------------------------------------------------------


def digest(summary: Mapping[str, Any]) -> str:
    """Return the SHA-256 of a summary without its digest, as canonical JSON: 64 hex digits."""
    rest = {key: value for key, value in summary.items() if key != DIGEST}
    text = json.dumps(rest, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def sealed(summary: Mapping[str, Any]) -> dict[str, Any]:
    """Return the summary with its digest as the last key."""
    rest = {key: value for key, value in summary.items() if key != DIGEST}
    return {**rest, DIGEST: digest(rest)}


def check_digest(summary: Mapping[str, Any], where: str, remedy: str) -> None:
    """Compare a summary with the digest that it holds; `where` names it in the error.

    Raises:
        GcbenchError: they differ.
    """
    if summary.get(DIGEST) != digest(summary):
        raise GcbenchError(
            f"{where}: its values do not match its `{DIGEST}`: it was damaged or edited. {remedy}"
        )


def hash_file(path: Path) -> str:
    """Return the SHA-256 of a regular file: 64 hex digits. Raises as `read_bytes`."""
    return hashlib.sha256(read_bytes(path)).hexdigest()


def check_run(folder: Path, summary: Mapping[str, Any]) -> None:
    """Compare the summary of a finished run, and the other files in its folder, with the digests.

    A file that was deleted is not an error here; whatever needs it reports that.

    Raises:
        GcbenchError: the summary has no digest, or a file does not match its digest. The message
            names the file.
    """
    remedy = f"{REMEDY}, or name it as a .json file of rows, which may leave digests out"
    check_folder(folder / "summary.json", summary, remedy)


def check_folder(path: Path, head: Mapping[str, Any], remedy: str) -> None:
    """Compare the JSON object in a file, and the files beside it that it lists, with their digests.

    Raises:
        GcbenchError: there is no digest, or a file does not match its digest; with the `remedy`.
    """
    listed = head.get(FILES)
    if DIGEST not in head or not isinstance(listed, dict):
        raise GcbenchError(
            f"{path} has no `{DIGEST}` and `{FILES}`, which gcbench writes: it was damaged or "
            f"comes from another program. {remedy}"
        )
    check_digest(head, str(path), remedy)
    for name, expected in listed.items():
        _check_file(path.parent / name, expected, remedy)


def check_capture(path: Path) -> None:
    """Compare a file one folder below that of a finished run with its digest in summary.json.

    Files of unfinished runs, and files that are not part of a run, have no digest yet.

    Raises:
        GcbenchError: the file, or the summary, does not match its digest.
    """
    place = path.parent.parent / "summary.json"
    try:
        summary = json.loads(read_text(place))
    except OSError:
        return
    except ValueError as error:
        raise GcbenchError(f"{place} cannot be read ({error}). {REMEDY}") from error
    listed = summary.get(FILES) if isinstance(summary, dict) else None
    if isinstance(listed, dict):
        check_digest(summary, str(place), REMEDY)
        name = str(path.relative_to(place.parent))
        if name in listed:
            _check_file(path, listed[name])


def _check_file(path: Path, expected: str, remedy: str = REMEDY) -> None:
    """Compare a file with its digest; a missing one is left to whatever needs it."""
    try:
        digest = hash_file(path)
    except FileNotFoundError:
        return
    except OSError as error:
        raise GcbenchError(f"{path} cannot be read ({error}). {remedy}") from error
    if digest != expected:
        raise GcbenchError(f"{path} does not match its digest: it was damaged or edited. {remedy}")
