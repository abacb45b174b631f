"""Sinks: where a run's records go besides its own files, TensorBoard or a class of a third party.

Neither results nor the config's hash depend on a sink. It lives in the process of worker 0 only,
and writes to `<run folder>/<its name>/`. Whenever a run starts or is resumed, the sink receives all
records of the run from the first one on. So nothing is missing if a part of the run was made
without the sink, and nothing is there twice if the sink deletes what an earlier attempt wrote.

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
from gcbench.results.run_folder import CAPTURES, LOCK
from gcbench.training.store import Run

OWN = (CAPTURES, LOCK)
"""Names in a run's folder that a sink must not have. (The other names there have an ending.)"""


class Sink(ABC):
    """Receives the records of one run; a subclass is made without arguments."""

    name: ClassVar[str] = ""

    @classmethod  # noqa: B027  (most sinks need nothing)
    def check(cls) -> None:
        """Raise UsageError if something that the sink needs is missing; called before any run."""

    @abstractmethod
    def open(self, folder: Path, config: Mapping[str, Any], provenance: Mapping[str, Any]) -> None:
        """Begin in `folder`, the sink's own, and delete what an earlier attempt wrote there.

        `config` and `provenance` are those of the run's `config.json` and `provenance.json`.
        """

    @abstractmethod
    def record(self, record: Mapping[str, Any]) -> None:
        """Take a record, a line of `metrics.jsonl`; once this returns a crash must not lose it.

        The keys are those of `schema.METRIC_COLUMNS` that its `kind` has, and in an evaluation the
        `test_NAME` of the task's own metrics; None stands for a number that was not finite, or for
        an accuracy that the task does not have.
        """

    def close(self) -> None:  # noqa: B027  (most sinks need nothing)
        """End; also called after an error."""


# ---- the sinks of a run --------------------------------------------------------------------------


def names(text: str) -> tuple[str, ...]:
    """Return the names of sinks in a comma-separated list, each once.

    Raises:
        UsageError: a sink is unknown, has the name of a folder that runs use themselves, or needs
            something that is not installed; then the message says how to get it.
    """
    found = tuple(dict.fromkeys(word.strip() for word in text.split(",")))
    for name in found:
        if name in OWN:
            raise UsageError(
                f"sink {name!r}: it would write to a run's own {name!r}; its package has to "
                "register it under another name"
            )
        named(name).check()
    return found


@contextlib.contextmanager
def _named(name: str) -> Iterator[None]:
    """Raise GcbenchError, which names the sink, in place of any other error in it."""
    try:
        yield
    except GcbenchError:
        raise
    except Exception as error:
        raise GcbenchError(
            f"sink {name!r} failed: {error!r}. The run's own records and its last checkpoint stay: "
            f"repeat the command, without --sink {name} if it cannot be helped"
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
        """Open the sinks of these names and send them the records that the run has already.

        Raises:
            GcbenchError: one of them cannot write.
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
            with contextlib.suppress(GcbenchError):  # the first error is raised, not this one
                self.close()
            raise

    def record(self, record: Mapping[str, Any]) -> None:
        """Send all sinks a record that is stored; GcbenchError if one of them fails."""
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
    """Delete what these sinks have written about a run."""
    for name in names:
        with _named(name), contextlib.suppress(FileNotFoundError):
            shutil.rmtree(run.folder / name)


def retell(chosen: Sequence[str], run: Run, summary: Mapping[str, Any]) -> None:
    """Send sinks the stored records of a finished run; GcbenchError if a sink fails."""
    forget(run, chosen)  # so that repeated commands do not add copies
    Sinks(chosen, run, summary["config"], summary["provenance"]).close()


# ---- TensorBoard ---------------------------------------------------------------------------------


class TensorBoard(Sink):
    """Scalars as event files, the config and the provenance as text.

    The time of an event is the start of the run plus its `seconds`, the time spent in steps. So
    curves over time leave out evaluations and pauses, and do not depend on how often a run was
    resumed.
    Values are float32, as TensorBoard's scalars are; the exact ones are in metrics.jsonl.
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
    """Kind of record -> column -> tag. Bytes are not written at evaluations: train records have
    them."""

    @classmethod
    def check(cls) -> None:
        """Raise UsageError without the package tensorboard."""
        try:
            import torch.utils.tensorboard  # noqa: F401
        except ImportError as error:
            raise UsageError(
                f"--sink tensorboard cannot work here ({error}): pip install 'gcbench[tensorboard]'"
            ) from None

    def open(self, folder: Path, config: Mapping[str, Any], provenance: Mapping[str, Any]) -> None:
        """Begin an event file."""
        from torch.utils.tensorboard import SummaryWriter

        self.started = datetime.fromisoformat(provenance["started"]).timestamp()
        # The earlier attempt's file stays: a TensorBoard that has it open would not go on without.
        self.writer: Any = SummaryWriter(folder, purge_step=0)
        for tag, value in (("config", config), ("provenance", provenance)):
            text = json.dumps(value, indent=2, default=str)
            self.writer.add_text(tag, f"```\n{text}\n```", 0, self.started)
        self.writer.flush()

    def record(self, record: Mapping[str, Any]) -> None:
        """Write the record's scalars; a loss that is not finite is NaN."""
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
