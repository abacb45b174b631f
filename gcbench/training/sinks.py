"""Sinks: further outputs of a run's records, TensorBoard or a class of a third party.

Neither results nor the config's hash depend on a sink. It runs only in the process of worker 0, and
writes to `<run folder>/<its name>/`. Whenever a run starts or resumes, the sink receives all
records from the first one on. Records are therefore complete even if a part of the run had no sink,
and not duplicated if the sink deletes the output of earlier attempts.

A third party registers a subclass of `Sink` under the entry-point group `gcbench.sinks`.
"""

from __future__ import annotations

import contextlib
import json
import math
import shutil
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

from gcbench.core import registry
from gcbench.core.errors import GcbenchError, UsageError
from gcbench.results.run_folder import CAPTURES, EARLIER, LOCK
from gcbench.training.store import Run

RESERVED = (CAPTURES, EARLIER, LOCK)
"""Names in a run's folder that a sink must not have. (The other names there have a suffix.)"""


class Sink(ABC):
    """Receives the records of one run; subclasses are created without arguments."""

    name: ClassVar[str] = ""

    @classmethod  # noqa: B027  (most sinks need nothing)
    def check(cls) -> None:
        """Raise UsageError if a requirement of the sink is missing; called before any run."""

    @abstractmethod
    def open(self, folder: Path, config: Mapping[str, Any], provenance: Mapping[str, Any]) -> None:
        """Start writing to the sink's `folder`, and delete the output of earlier attempts.

        `config` and `provenance`: the content of the run's `config.json` and `provenance.json`.
        """

    @abstractmethod
    def record(self, record: Mapping[str, Any]) -> None:
        """Write a record, a line of `metrics.jsonl`; after the return a crash must not lose it.

        Its keys are the columns of `schema.METRIC_COLUMNS` for its `kind`, and in an evaluation the
        `test_NAME` of the task's metrics. None is a number that was not finite, or an accuracy that
        the task does not have.
        """

    def close(self) -> None:  # noqa: B027  (most sinks need nothing)
        """Finish writing; also called after an error."""


# ---- the sinks of a run --------------------------------------------------------------------------


def names(text: str) -> tuple[str, ...]:
    """Return the unique names of sinks in a comma-separated list.

    Raises:
        UsageError: a sink is unknown, has a reserved name, or needs a package that is not
            installed.
    """
    result = tuple(dict.fromkeys(name.strip() for name in text.split(",")))
    for name in result:
        if name in RESERVED:
            raise UsageError(
                f"sink {name!r}: runs use this name themselves; its package must register it under "
                "another name"
            )
        named(name).check()
    return result


@contextlib.contextmanager
def _named(name: str) -> Iterator[None]:
    """Replace errors of a sink by a GcbenchError that names it."""
    try:
        yield
    except GcbenchError:
        raise
    except Exception as error:
        raise GcbenchError(
            f"sink {name!r} failed: {error!r}. The run's records and last checkpoint remain: "
            f"repeat the command, if necessary without --sink {name}"
        ) from error


class Sinks:
    """The open sinks of one run."""

    def __init__(
        self,
        chosen: Sequence[str],
        run: Run,
        config: Mapping[str, Any],
        provenance: Mapping[str, Any],
    ) -> None:
        """Open the sinks of these names and send them the existing records of the run.

        Raises:
            GcbenchError: a sink fails.
        """
        self.listening: dict[str, Sink] = {}
        try:
            for name in chosen:
                with _named(name):
                    folder = run.folder / name
                    folder.mkdir(exist_ok=True)
                    self.listening[name] = named(name)()
                    self.listening[name].open(folder, config, provenance)
            for record in run.records() if chosen else ():
                self.record(record)
        except GcbenchError:
            with contextlib.suppress(GcbenchError):  # raise the first error
                self.close()
            raise

    def record(self, record: Mapping[str, Any]) -> None:
        """Send a stored record to all sinks; GcbenchError if one of them fails."""
        for name, sink in self.listening.items():
            with _named(name):
                sink.record(record)

    def close(self) -> None:
        """Close all sinks; GcbenchError if one of them fails."""
        while self.listening:
            name, sink = self.listening.popitem()
            with _named(name):
                sink.close()


def forget(run: Run, names: Iterable[str]) -> None:
    """Delete the output of these sinks for a run."""
    for name in names:
        with _named(name), contextlib.suppress(FileNotFoundError):
            shutil.rmtree(run.folder / name)


def resend(chosen: Sequence[str], run: Run, summary: Mapping[str, Any]) -> None:
    """Send the stored records of a finished run to sinks; GcbenchError if a sink fails."""
    forget(run, chosen)  # repeated commands must not add copies
    Sinks(chosen, run, summary["config"], summary["provenance"]).close()


# ---- TensorBoard ---------------------------------------------------------------------------------


class TensorBoard(Sink):
    """Scalars as event files, the config and the provenance as text.

    The time of an event is the start of the run plus its `seconds`, the time spent in steps, so
    curves over time exclude evaluations and pauses. Values are float32, like all TensorBoard
    scalars; the exact ones are in metrics.jsonl.
    """

    TAGS: ClassVar[dict[str, dict[str, str]]] = {
        "train": {
            "train_loss": "loss/train",
            "lr": "lr",
            "payload_bytes_up": "bytes/payload_up",
            "payload_bytes_down": "bytes/payload_down",
            "wire_bytes": "bytes/wire",
            "seconds": "seconds",
        },
        "eval": {
            "test_accuracy": "accuracy/test",
            "test_loss": "loss/test",
            "validation_accuracy": "accuracy/validation",
            "validation_loss": "loss/validation",
        },
    }
    """Tags by kind of record and column. Only train records have bytes."""

    @classmethod
    def check(cls) -> None:
        """Raise UsageError without the package tensorboard."""
        try:
            import torch.utils.tensorboard  # noqa: F401
        except ImportError as error:
            raise UsageError(
                f"--sink tensorboard is unavailable ({error}): pip install 'gcbench[tensorboard]'"
            ) from None

    def open(self, folder: Path, config: Mapping[str, Any], provenance: Mapping[str, Any]) -> None:
        """Start an event file."""
        from torch.utils.tensorboard import SummaryWriter

        self.started = datetime.fromisoformat(provenance["started"]).timestamp()
        # Keep the file of an earlier attempt: a TensorBoard that has it open needs it.
        self.writer: Any = SummaryWriter(folder, purge_step=0)
        for tag, value in (("config", config), ("provenance", provenance)):
            text = json.dumps(value, indent=2, default=str)
            self.writer.add_text(tag, f"```\n{text}\n```", 0, self.started)
        self.writer.flush()

    def record(self, record: Mapping[str, Any]) -> None:
        """Write the record's scalars; a non-finite loss is NaN."""
        when = self.started + record["seconds"]
        tags = dict(self.TAGS[record["kind"]])
        for column in record:  # a task's own metrics
            split, _, metric = column.partition("_")
            if split in ("test", "validation"):
                tags.setdefault(column, f"{metric}/{split}")
        for column, tag in tags.items():
            value = record.get(column)
            if value is None and (column not in record or column.endswith("accuracy")):
                continue  # a column of another split, or the task has no accuracy
            value = math.nan if value is None else value
            self.writer.add_scalar(tag, value, record["step"], when)
        self.writer.flush()

    def close(self) -> None:
        """Close the event file."""
        if hasattr(self, "writer"):
            self.writer.close()


@cache
def registered() -> dict[str, registry.Entry]:
    """Return all registered sinks by name."""
    builtin = registry.Entry("tensorboard", "built-in", lambda: TensorBoard)
    return registry.with_third_parties("gcbench.sinks", Sink, {builtin.name: builtin})


def named(name: str) -> type[Sink]:
    """Return the class registered as `name`; UsageError for an unknown name."""
    return registry.named("sink", registered(), name)
