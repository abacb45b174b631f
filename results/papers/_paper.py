"""What the scripts of this folder share: run, judge, table, plot.

A script has `KIND`, a pydantic class `Settings`, `run`, `judge` and `draw`. Gradients come from a
short uncompressed training, captured as by `gcbench run --capture` in runs below `<results>/runs`,
which all scripts and `gcbench histogram` reuse.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any

import typer
from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    model_serializer,
)
from torch import Tensor

from gcbench import cli
from gcbench.commands.derived import command
from gcbench.commands.helptext import PlainCommand
from gcbench.core import codec, purposes
from gcbench.core.compressor import Compressor, Context, Key
from gcbench.core.errors import GcbenchError
from gcbench.core.progress import Observer
from gcbench.profile import histogram
from gcbench.profile.histogram.reconstruction import Gradients
from gcbench.report import figures, verdicts
from gcbench.report.analysis import Analysis, Ledger, Row, Table, Value, shown
from gcbench.training import captures


def _distinct(values: list[Any]) -> list[Any]:
    if len({*values}) < len(values):
        raise ValueError(f"{values} repeats a value; give each once")
    return values


Distinct = AfterValidator(_distinct)
Seeds = Annotated[list[Annotated[int, Field(ge=0, lt=2**63)]], Field(min_length=1), Distinct]


def main(study: ModuleType | None = None) -> None:
    """Run an analysis, by default the `__main__` module, with the flags in `sys.argv`."""
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
    app.command(cls=PlainCommand)(command(study or sys.modules["__main__"]))
    cli.main(run=app)


# ---- run -----------------------------------------------------------------------------------------


class Choices(BaseModel):
    """Settings are frozen, and unknown ones are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    sources: dict[str, str] = {}
    """Digests of the files and plug-ins that the others name; the command fills it."""

    @model_serializer(mode="wrap")
    def _without_empty_sources(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return {k: v for k, v in dump(self).items() if k != "sources" or v}


class Trained(Choices):
    """Settings of the training and of the captured steps."""

    task: str = Field(default="digits", description="Task to train without compression.")
    network: str = Field(default="", description="Its network; empty: the task's default.")
    steps: int = Field(default=200, ge=2, description="Training steps.")
    capture: list[Annotated[int, Field(ge=0)]] = Field(
        default=[], description="Steps, from 0, whose gradients are used; empty: 5, evenly spaced."
    )
    workers: int = Field(default=4, ge=1, description="Workers.")
    seed: Seeds = Field(default=[0, 1, 2], description="Seeds; each is one training.")

    def where(self) -> str:
        """Return task, network, workers and steps for footnotes."""
        return f"{name(self.task, self.network)}, {self.workers} workers, {self.steps} steps"


def name(task: str, network: str) -> str:
    """Return task and network as text."""
    return f"{task}, {network}" if network else task


def title(analysis: Analysis) -> str:
    """Return task and network of an analysis, for the title of its picture."""
    return name(analysis.settings["task"], analysis.settings["network"])


def measured(
    measure: Callable[[Gradients], Iterable[Row]],
    settings: Trained,
    observer: Observer,
    ledger: Ledger,
    data_dir: Path | None,
    also: tuple[int, ...] = (),
) -> list[Row]:
    """Return the rows of `measure` for the gradients of each seed and captured step, in order.

    `also`: steps captured in addition to those of the settings.

    Raises:
        UsageError: an invalid config, or steps that it does not have.
        GcbenchError: the training fails, or a gradient is not finite.
    """
    config: dict[str, Any] = {
        "task": settings.task,
        "workers": settings.workers,
        "steps": settings.steps,
    }
    if settings.network:
        config["task_options"] = {"network": settings.network}
    chosen = settings.capture or captures.spread(settings.steps, histogram.SNAPSHOTS)
    steps = sorted({*chosen, *also})
    results = ledger.path.parent.parent
    rows: list[Row] = []
    trained = histogram.train(
        config, settings.seed, steps, results, data_dir, "plain", force=ledger.afresh
    )
    for one in trained:
        gradients = Gradients(one.layers, one.buckets(settings.workers), one.step, one.seed)
        if problem := gradients.problem():
            raise GcbenchError(f"step {one.step}, seed {one.seed}: {problem}")
        observer.step(0, f"seed {one.seed}, step {one.step}")
        rows += [{"seed": one.seed, "step": one.step, **row} for row in measure(gradients)]
    observer.step(1, "done")
    return rows


def coded(method: Compressor, gradients: Gradients) -> Iterator[tuple[Tensor, Tensor, int]]:
    """Yield each worker's gradient, float32, (n,), its decoding, and the bytes of its payload."""
    segments = gradients.segments(method)
    key = Key(gradients.seed, gradients.step, 0, 0, purposes.ENCODE)
    for rank, x in enumerate(gradients.buckets):
        ctx = Context(segments, key=key._replace(rank=rank))
        shared, (prepared,) = codec.agree(method, [x], ctx)
        ctx = ctx._replace(shared=shared)
        payload = codec.encode(method, x, ctx._replace(prepared=prepared))
        yield x, codec.decode(method, payload, ctx), payload.nbytes


def error(x: Tensor, decoded: Tensor) -> float:
    """Return ||x - x'|| / ||x||; NaN if x is zero, and infinity if x' is not finite."""
    if not bool(decoded.isfinite().all()):
        return math.inf
    norm = float(x.double().norm())
    return float((x.double() - decoded.double()).norm()) / norm if norm else math.nan


def log_ratio(ours: Value, theirs: Value) -> float:
    """Return the logarithm of the ratio of two errors; NaN unless both are positive and finite."""
    a, b = number(ours), number(theirs)
    return math.log(a / b) if 0 < a < math.inf and 0 < b < math.inf else math.nan


# ---- judge and table -----------------------------------------------------------------------------


def result(
    kind: str,
    settings: BaseModel,
    command: str,
    judged: Sequence[Row],
    *tables: Table,
    of: str = "",
    notes: Sequence[str] = (),
    conclusions: Sequence[str] | None = None,
) -> Analysis:
    """Return the analysis: the verdicts in `judged`, and further tables.

    `of`: the field that distinguishes verdicts on the same claim; `notes`: footnotes of the table
    of verdicts; `conclusions`: default one sentence per verdict.
    """
    sentences = verdicts.sentences(judged) if conclusions is None else conclusions
    claims = verdicts.table(judged, of=of, notes=notes)
    return Analysis.of(kind, settings, command, conclusions=sentences, tables=[claims, *tables])


Columns = Mapping[str, str | tuple[str, float]]
"""Field -> heading, or (heading, factor on the values)."""


def table(name: str, title: str, columns: Columns, rows: Sequence[Row], **more: Any) -> Table:
    """Return a table with these columns; `more` are other fields of `Table`."""
    return Table(name=name, title=title, shown=shown(columns), rows=[*rows], **more)


# ---- plot ----------------------------------------------------------------------------------------


@contextmanager
def plot(
    path: Path, width: float, height: float, title: str, panels: int = 1, **grid: Any
) -> Iterator[Any]:
    """Yield the axes of a picture with `panels` columns; add legends and save it at the end.

    Raises:
        UsageError: an ending that is not a picture's.
        GcbenchError: `path` cannot be written.
    """
    path = figures.check(path)
    with figures.canvas(width, height) as figure:
        axes = figure.subplots(1, panels, squeeze=False, **grid)[0]
        yield axes
        for one in axes:
            if one.get_legend_handles_labels()[0]:
                one.legend(frameon=False, fontsize="small")
        figure.suptitle(title, fontsize="medium")
        figures.save(figure, path)


def number(value: Any) -> float:
    """Return a value of a row as a float; NaN for None."""
    return math.nan if value is None else float(value)


def values(rows: Sequence[Row], field: str, scale: float = 1.0) -> list[float]:
    """Return a field of all rows as floats, times `scale`; NaN where it is None."""
    return [scale * number(row[field]) for row in rows]
