"""Runs on disk: records, checkpoints, a summary.

`metrics.jsonl` grows line by line; `checkpoint.pt` is replaced atomically, and the one before it is
kept; `summary.json` is written last and marks a finished run. A checkpoint contains a digest of its
bytes, of the provenance, and the number and a digest of the records up to its step. If one of them
does not match, the checkpoint before it is used; if that one does not match either, the run is not
resumed. `summary.json` contains digests of itself and of the run's other files
(`gcbench.core.files`), which every reader compares.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import io
import json
import os
import shutil
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import torch

from gcbench.core import files
from gcbench.core.errors import GcbenchError
from gcbench.core.schema import METRIC_COLUMNS, SCHEMA

CAPTURES = "captures"
"""The folder of a run's captured gradients (`gcbench.training.captures`)."""
CHECKPOINTS = ("checkpoint.pt", "checkpoint.previous.pt")
"""The last checkpoint, and the one before it."""
MARK = b"gcbench checkpoint 2 sha256 "
"""The first bytes of a checkpoint; then come the digest, a line feed, and what torch.save wrote."""
RUN_FILES = ("config.json", "provenance.json", "metrics.jsonl", "metrics.parquet")
"""The files of a run besides its summary, its checkpoints and its captures."""
LOCK = "lock"
"""The file that exists, and is locked, while a process writes to a run."""


@contextlib.contextmanager
def explained(path: Path) -> Iterator[None]:
    """Raise GcbenchError, which says what to do, in place of an OSError while writing `path`."""
    try:
        yield
    except OSError as error:
        raise GcbenchError(
            f"cannot write {path}: {error.strerror or error}. Free space or choose another folder "
            "with --results; runs that are there stay as they are"
        ) from error


def open_own(path: Path, mode: str, buffering: int = -1) -> IO[Any]:
    """Open a file of a run, as `open` does; if it exists it must be a regular file.

    A symbolic link could lead to a file that is no part of the run, which would be overwritten; a
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
            raise _not_own(path) from None
        raise
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise _not_own(path)
    if "w" in mode:
        file.truncate(0)
    return file


def _not_own(path: Path) -> GcbenchError:
    return GcbenchError(
        f"{path} is a symbolic link, or no regular file; gcbench made no such thing and leaves it "
        "alone: remove it, or choose another folder with --results"
    )


def write_atomically(path: Path, data: bytes, kept: Path | None = None) -> None:
    """Replace `path` with `data`: after a crash it holds the old bytes or the new, never a mix.

    `kept`: where to move the old file; after a crash there may be a file at `kept` and none at
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
            if kept is not None and path.exists():
                path.replace(kept)
            part.replace(path)
            folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)
        except OSError:
            part.unlink(missing_ok=True)
            raise


def _json(value: Mapping[str, Any]) -> bytes:
    return (json.dumps(value, indent=2, allow_nan=False) + "\n").encode()


def _lines(records: Sequence[Mapping[str, Any]]) -> bytes:
    """Return the lines of metrics.jsonl for these records."""
    return "".join(json.dumps(record, allow_nan=False) + "\n" for record in records).encode()


class _NotWholeError(Exception):
    """A checkpoint is damaged, or its records are."""


class Run:
    """The folder of one run; only one process at a time writes to it (`locked`)."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @property
    def summary(self) -> dict[str, Any] | None:
        """The summary of a finished run, else None.

        Raises:
            GcbenchError: the file is there but holds no JSON object, or it or another file of the
                run does not match its digest.
        """
        if not (self.folder / "summary.json").exists():
            return None
        found = self._object("summary.json")
        if files.DIGEST in found or found.get("schema") == SCHEMA:  # others are made again
            files.check_run(self.folder, found)
        return found

    def create(self) -> None:
        """Make the folder, if it does not exist.

        Raises:
            GcbenchError: it cannot be made, or is a symbolic link.
        """
        with explained(self.folder):
            if self.folder.is_symlink():
                raise _not_own(self.folder)
            self.folder.mkdir(parents=True, exist_ok=True)

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Lock the run for this process; GcbenchError if another process writes to it."""
        path = self.folder / LOCK
        with explained(path):
            file = open_own(path, "w")
        with file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                # The lock counts only if the file is still there: the last holder may have removed
                # it between the two calls.
                held = os.path.samestat(os.fstat(file.fileno()), path.lstat())
            except (BlockingIOError, FileNotFoundError):
                held = False
            if not held:
                raise GcbenchError(
                    f"{self.folder} is being written by another gcbench process; wait for it"
                )
            try:
                yield
            finally:
                path.unlink(missing_ok=True)

    def start(self, config: Mapping[str, Any], provenance: Mapping[str, Any]) -> None:
        """Write the config and the provenance, and delete all else of an earlier attempt."""
        write_atomically(self.folder / "config.json", _json(config))
        write_atomically(self.folder / "provenance.json", _json(provenance))
        for name in ("summary.json", *CHECKPOINTS, "metrics.jsonl", "metrics.parquet"):
            with explained(self.folder / name):
                (self.folder / name).unlink(missing_ok=True)
        with explained(self.folder / CAPTURES), contextlib.suppress(FileNotFoundError):
            shutil.rmtree(self.folder / CAPTURES)

    def _object(self, name: str) -> dict[str, Any]:
        """Return the JSON object in a file of this run.

        Raises:
            GcbenchError: the file cannot be read or holds something else.
        """
        path = self.folder / name
        try:
            with open_own(path, "r") as file:
                value = json.load(file)
        except (OSError, ValueError) as error:
            raise GcbenchError(f"{path} cannot be read ({error}); run again with --force") from None
        if not isinstance(value, dict):
            raise GcbenchError(f"{path} holds no JSON object; run again with --force")
        return value

    def read_provenance(self) -> dict[str, Any]:
        """Return the provenance of the attempt that is being resumed; GcbenchError if damaged."""
        return self._object("provenance.json")

    def can_resume(self, config: Mapping[str, Any]) -> bool:
        """Return whether an earlier attempt with exactly this config left a checkpoint.

        Raises:
            GcbenchError: it did, but its config or provenance is damaged.
        """
        if not any((self.folder / name).exists() for name in CHECKPOINTS):
            return False
        self.read_provenance()
        return self._object("config.json") == config

    def append(self, record: Mapping[str, Any]) -> None:
        """Add one line to the metrics; it is in the file when this returns."""
        path = self.folder / "metrics.jsonl"
        with explained(path), open_own(path, "a") as file:
            file.write(json.dumps(record, allow_nan=False) + "\n")

    def records(self) -> list[dict[str, Any]]:
        """Return the metrics; a last line that a crash cut short is left out."""
        path = self.folder / "metrics.jsonl"
        if not path.exists():
            return []
        found = []
        with open_own(path, "rb") as file:
            text = file.read().decode(errors="replace")
        for line in text.splitlines():
            try:
                found.append(json.loads(line))
            except ValueError:
                break
        return found

    def rewind(self, step: int) -> None:
        """Delete the records after `step`, from which the run is resumed."""
        kept = [record for record in self.records() if record["step"] <= step]
        write_atomically(self.folder / "metrics.jsonl", _lines(kept))

    def _records_digest(self, step: int) -> list[Any]:
        """Return how many records there are up to a step, and their SHA-256."""
        kept = [record for record in self.records() if record["step"] <= step]
        return [len(kept), hashlib.sha256(_lines(kept)).hexdigest()]

    def _provenance_digest(self) -> str:
        """Return the SHA-256 of provenance.json, "" if there is none."""
        path = self.folder / "provenance.json"
        return files.hash_file(path) if path.exists() else ""

    def save(self, state: Mapping[str, Any]) -> None:
        """Write a checkpoint: a dict of tensors, numbers and strings, with the step in "step".

        The checkpoint before it is kept. The records up to its step reach the disk before it does.
        """
        metrics = self.folder / "metrics.jsonl"
        if metrics.exists():
            with explained(metrics), open_own(metrics, "a") as file:
                os.fsync(file.fileno())
        buffer = io.BytesIO()
        digests = {
            "metrics": self._records_digest(state.get("step", 0)),
            "provenance": self._provenance_digest(),
        }
        torch.save({**state, **digests}, buffer)
        data = buffer.getvalue()
        head = MARK + hashlib.sha256(data).hexdigest().encode() + b"\n"
        last, before = (self.folder / name for name in CHECKPOINTS)
        write_atomically(last, head + data, kept=before)

    def checkpoint(self, tell: Callable[[str], object] = print) -> dict[str, Any] | None:
        """Return the last undamaged checkpoint, on the CPU; None if there is no checkpoint.

        If that is the one before the last, `tell` is called with a line that says so.

        Raises:
            GcbenchError: no checkpoint can be read, or their records are not all there.
        """
        faults = []
        for name in CHECKPOINTS:
            path = self.folder / name
            if not path.exists():
                continue
            try:
                state = self._checkpoint(path)
            except _NotWholeError as fault:
                faults.append(str(fault))
                continue
            if faults:
                tell(f"{faults[0]}; going on from the checkpoint before it, step {state['step']}")
            return state
        if faults:
            raise GcbenchError(f"{faults[0]}; start over with --force")
        return None

    def _checkpoint(self, path: Path) -> dict[str, Any]:
        """Return one checkpoint; _NotWholeError if it is damaged."""
        try:
            with open_own(path, "rb") as file:
                head, data = file.read(len(MARK) + 65), file.read()
            if head != MARK + hashlib.sha256(data).hexdigest().encode() + b"\n":
                raise ValueError("its digest is another")  # noqa: TRY301 - one message for all
            state: dict[str, Any] = torch.load(
                io.BytesIO(data), map_location="cpu", weights_only=True
            )
        except GcbenchError:
            raise
        except Exception as error:
            raise _NotWholeError(f"{path} cannot be read ({error})") from error
        metrics = state.pop("metrics", None)
        if metrics != self._records_digest(state.get("step", 0)):
            raise _NotWholeError(
                f"{self.folder / 'metrics.jsonl'} lost or changed records up to step "
                f"{state.get('step')} of {path.name}"
            )
        if state.pop("provenance", None) != self._provenance_digest():
            raise _NotWholeError(
                f"{self.folder / 'provenance.json'} was changed after {path.name} was written"
            )
        return state

    def _sealed(self) -> list[str]:
        """Return the files whose digests belong to the summary, relative to the folder."""
        captured = sorted((self.folder / CAPTURES).glob("*"))
        names = [*RUN_FILES, *(str(path.relative_to(self.folder)) for path in captured)]
        return [name for name in names if (self.folder / name).is_file()]

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Write metrics.parquet and, last, summary.json; then delete the checkpoints.

        The summary gets the digests of `gcbench.core.files`: its own, and those of the other files.
        """
        import pyarrow as pa
        import pyarrow.parquet as pq

        records = self.records()
        types = {"kind": pa.string(), "step": pa.int64()}
        names = dict.fromkeys((*METRIC_COLUMNS, *(name for record in records for name in record)))
        schema = pa.schema([(name, types.get(name, pa.float64())) for name in names])
        columns = {name: [record.get(name) for record in records] for name in names}
        buffer = io.BytesIO()
        pq.write_table(pa.table(columns, schema=schema), buffer)
        write_atomically(self.folder / "metrics.parquet", buffer.getvalue())
        listed = {name: files.hash_file(self.folder / name) for name in self._sealed()}
        sealed = files.sealed({**summary, files.FILES: listed})
        write_atomically(self.folder / "summary.json", _json(sealed))
        for name in CHECKPOINTS:
            (self.folder / name).unlink(missing_ok=True)
