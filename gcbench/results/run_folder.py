"""The folder of a run: records, provenance and summary.

`metrics.jsonl` grows line by line; `summary.json` is written last and marks a finished run. It
contains digests of itself and of the run's other files (`gcbench.core.files`), which every reader
compares. `gcbench.training.store` adds checkpoints.
"""

from __future__ import annotations

import contextlib
import fcntl
import io
import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from gcbench.core import files
from gcbench.core.errors import GcbenchError
from gcbench.core.writing import explained, not_own, open_own, write_atomically
from gcbench.results.schema import METRIC_COLUMNS, SCHEMA
from gcbench.results.settings import DEFAULTS

CAPTURES = "captures"
"""The folder of a run's captured gradients (`gcbench.training.captures`)."""
CHECKPOINTS = ("checkpoint.pt", "checkpoint.previous.pt")
"""The last checkpoint, and the one before it."""
RUN_FILES = ("config.json", "provenance.json", "metrics.jsonl", "metrics.parquet")
"""The files of a run besides its summary, its checkpoints and its captures."""
EARLIER = "earlier"
"""The folder of what an earlier attempt left, from the start of a run to its first step."""
LOCK = "lock"
"""The file that exists, and is locked, while a process writes to a run."""

_OF_AN_ATTEMPT = ("summary.json", *CHECKPOINTS, CAPTURES, *RUN_FILES)
"""What a run writes, in an order in which its first files decide whether it can be resumed."""


def _json(value: Mapping[str, Any]) -> bytes:
    return (json.dumps(value, indent=2, allow_nan=False) + "\n").encode()


def to_lines(records: Sequence[Mapping[str, Any]]) -> bytes:
    """Return the lines of metrics.jsonl for these records."""
    return "".join(json.dumps(record, allow_nan=False) + "\n" for record in records).encode()


class RunFolder:
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
        data = self._object("summary.json")
        if files.DIGEST in data or data.get("schema") == SCHEMA:  # others are made again
            files.check_run(self.folder, data)
        return data

    def create(self) -> None:
        """Make the folder, if it does not exist.

        Raises:
            GcbenchError: it cannot be made, or is a symbolic link.
        """
        with explained(self.folder):
            if self.folder.is_symlink():
                raise not_own(self.folder)
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
        """Write the config and the provenance, and set all else of an earlier attempt aside.

        `begin` deletes what is aside; `remove_unless_begun` puts it back.
        """
        aside = self.folder / EARLIER
        for name in _OF_AN_ATTEMPT:
            # What is aside already belongs to the last attempt that began.
            if os.path.lexists(self.folder / name) and not os.path.lexists(aside / name):
                with explained(self.folder / name):
                    aside.mkdir(exist_ok=True)
                    (self.folder / name).rename(aside / name)
        write_atomically(self.folder / "config.json", _json(config))
        write_atomically(self.folder / "provenance.json", _json(provenance))

    def begin(self) -> None:
        """Delete what `start` set aside: this attempt takes its first step."""
        with explained(self.folder / EARLIER), contextlib.suppress(FileNotFoundError):
            shutil.rmtree(self.folder / EARLIER)

    def remove_unless_begun(self) -> None:
        """Restore what `start` set aside, or delete a folder without records; after a failure."""
        aside = self.folder / EARLIER
        with contextlib.suppress(OSError):
            if aside.exists():
                for name in reversed(_OF_AN_ATTEMPT):  # the summary, which ends a run, last
                    if os.path.lexists(aside / name):
                        (aside / name).replace(self.folder / name)
                aside.rmdir()
            elif {path.name for path in self.folder.iterdir()} <= {*RUN_FILES[:2], LOCK}:
                shutil.rmtree(self.folder)

    def _object(self, name: str) -> dict[str, Any]:
        """Return the JSON object in a file of this run."""
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

    @property
    def has_checkpoint(self) -> bool:
        """Whether an earlier attempt left a checkpoint, maybe with another config."""
        return any((self.folder / name).exists() for name in CHECKPOINTS)

    def can_resume(self, config: Mapping[str, Any]) -> bool:
        """Return whether an earlier attempt with this config left a checkpoint.

        A setting that the earlier config lacks, because an older gcbench wrote it, has its default.

        Raises:
            GcbenchError: it did, but its config or provenance is damaged.
        """
        if not self.has_checkpoint:
            return False
        self.read_provenance()
        return DEFAULTS | self._object("config.json") == DEFAULTS | dict(config)

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
        records = []
        with open_own(path, "rb") as file:
            text = file.read().decode(errors="replace")
        for line in text.splitlines():
            try:
                records.append(json.loads(line))
            except ValueError:
                break
        return records

    def rewind(self, step: int) -> None:
        """Delete the records after `step`, from which the run is resumed."""
        earlier = [record for record in self.records() if record["step"] <= step]
        write_atomically(self.folder / "metrics.jsonl", to_lines(earlier))

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
