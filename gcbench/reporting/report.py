"""One page of HTML: runs compared, analyses, kernel timings, pictures, and the commands.

The page needs no network and no other file. Each number stands in a row that names the commands
which make it again.
"""

from __future__ import annotations

import base64
import json
import os
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from markupsafe import Markup

from gcbench import __version__
from gcbench.core.errors import GcbenchError, UsageError
from gcbench.reporting import analysis as measuring
from gcbench.reporting import compare, kernel_timings, reader, run_plots, tables
from gcbench.reporting.analysis import HEAD, Analysis, MissingTableError
from gcbench.reporting.compare import Row
from gcbench.reporting.kernel_timings import Timings
from gcbench.reporting.published import Beside
from gcbench.reporting.reader import Run
from gcbench.reporting.rendering import Column
from gcbench.training import configuration
from gcbench.training.store import write_atomically

TEMPLATE = "report.html.j2"
LONG = 40
"""Rows above which a table scrolls below its headings; printed, it is whole."""


@dataclass(frozen=True)
class Sheet:
    """A table of the page: headings, cells, and for each row the numbers of its commands."""

    title: str
    columns: Sequence[Column]
    which: int
    """The first columns, which say what a row is."""
    commands: Sequence[Sequence[int]] = ()
    """Per row; empty: the section's commands make all rows."""
    notes: Sequence[str] = ()

    def kind(self, place: int) -> Markup:
        """Return the class attribute of the column at `place`, from 1; the key stays in view."""
        if place > self.which:
            return Markup("")
        return Markup(' class="name key"' if place == self.which else ' class="name"')

    @property
    def rows(self) -> list[tuple[tuple[str, ...], Sequence[int]]]:
        """Cells and numbers of commands of each row."""
        cells = list(zip(*(column.cells for column in self.columns), strict=True))
        return list(zip(cells, self.commands or [()] * len(cells), strict=True))


@dataclass
class Section:
    """A part of the page: what it is about, its picture, its tables, its commands."""

    title: str
    lead: Sequence[str] = ()
    picture: str | None = None
    """The address of the SVG, which holds it."""
    sheets: list[Sheet] = field(default_factory=list)
    commands: list[str] = field(default_factory=list)
    where: Sequence[str] = ()
    """On what the numbers were made."""

    @property
    def anchor(self) -> str:
        """The section's name in a link."""
        return re.sub(r"[^a-z0-9]+", "-", self.title.lower()).strip("-")

    def number(self, command: str) -> int:
        """Return the place of a command in the section's list, from 1; new ones are added."""
        if command not in self.commands:
            self.commands.append(command)
        return self.commands.index(command) + 1


# ---- what there is -------------------------------------------------------------------------------


@dataclass
class Found:
    """What a page is of."""

    runs: list[Run] = field(default_factory=list)
    analyses: dict[str, Analysis] = field(default_factory=dict)
    """By their names."""
    timings: dict[str, Timings] = field(default_factory=dict)
    """By the title of their section."""
    labels: dict[str, str] = field(default_factory=dict)
    """What a reader calls an analysis, by its name: its kind, or its file."""

    def add(self, analysis: Analysis, label: str | None = None) -> None:
        """Keep an analysis, each once: of two copies the one with more tables."""
        self.labels.setdefault(analysis.name, label or analysis.kind)
        known = self.analyses.setdefault(analysis.name, analysis)
        if known.provenance != analysis.provenance:
            reader.warn(
                f"{analysis.name} found twice, made at different times: the first is shown, of "
                f"{known.provenance.get('started')}"
            )
        elif len(known.tables) < len(analysis.tables):
            self.analyses[analysis.name] = analysis


def collect(places: Sequence[Path]) -> Found:
    """Return what there is in folders, at any depth, and in JSON files, each of which is named.

    A file holds runs, an analysis, or kernel timings.

    Raises:
        UsageError: a path is missing, or something else, or there is nothing in any of them.
        GcbenchError: something that is there cannot be read.
    """
    found = Found()
    holding: list[Path] = []
    for place in places:
        if not place.exists():
            raise UsageError(f"{place} does not exist; name a folder of runs or analyses")
        if place.is_file():
            holding += _file(place, found)
            continue
        for folder in _analyses(place):
            found.add(measuring.load(folder))
        if any(reader.run_folders(place)):
            holding.append(place)
    found.runs = reader.load(holding) if holding else []
    if not (found.runs or found.analyses or found.timings):
        names = ", ".join(map(str, places))
        raise UsageError(
            f"no finished run and no analysis in {names}; make some with `gcbench run`, or with "
            "`gcbench histogram`, `bounds`, `bandwidth`, `scale` or `advise`"
        )
    return found


def _file(path: Path, found: Found) -> list[Path]:
    """Add what a file holds; a file of runs is returned, to be read together with all others."""
    try:
        data = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(f"{path} cannot be read as JSON ({error}); {_TAKEN}") from None
    keys = data.keys() if isinstance(data, dict) else set()
    if path.name == HEAD:
        found.add(measuring.load(path.parent))
    elif keys >= {"kind", "tables"}:
        found.add(measuring.parse(data, path), path.stem)
    elif keys >= {"machine", "rows"} or "benchmarks" in keys:
        timings = kernel_timings.load(path)
        found.timings[f"{path.stem} {measuring.digest(timings.model_dump())}"] = timings
    elif "schema" in keys or (isinstance(data, list) and not (path.parent / HEAD).exists()):
        return [path]
    elif isinstance(data, list):
        raise UsageError(f"{path} is one table of an analysis; name its folder, {path.parent}")
    else:
        raise UsageError(f"{path} holds no run, analysis or kernel timings; {_TAKEN}")
    return []


_TAKEN = (
    "a file of the page is what `gcbench run`, an analysis such as `gcbench bounds`, or `gcbench "
    "kernels` print with --json"
)


def _analyses(folder: Path) -> Iterator[Path]:
    for place, below, files in os.walk(folder):
        below.sort()
        if HEAD in files:
            below.clear()
            yield Path(place)


# ---- sections ------------------------------------------------------------------------------------


def _picture(draw: Callable[[Path], None]) -> str:
    """Return what `draw` draws as an address that holds the SVG."""
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / "picture.svg"
        draw(path)
        return "data:image/svg+xml;base64," + base64.b64encode(path.read_bytes()).decode()


def _machine(provenance: Mapping[str, Any]) -> str:
    """Return a run's machine, versions and commit in one line."""
    backend = provenance.get("backend")
    return measuring.where(provenance) + (f", backend {backend}" if backend else "")


def _compared(
    title: str, runs: Sequence[Run], target: float | None, beside: Beside | None = None
) -> Section:
    """Return the section of the runs of one task, or of those that are a suite's."""
    rows = compare.rows(runs, target)
    if beside is not None:
        rows = beside.rows(rows)
    constants, told = tables.constants(rows)
    missing = "; ".join(beside.unmade()) if beside is not None else ""
    section = Section(title, lead=[*filter(None, [constants, missing])])
    numbers = [list(_commands(section, row)) for row in told]
    names = len(told[0].context) + 1
    notes = tables.notes(told)
    for place, columns in enumerate(tables.sheets(told)):
        heading = ("Accuracy and bytes", "Time by phase")[place]
        section.sheets.append(Sheet(heading, columns, names, numbers, () if place else notes))
    section.picture = _picture(lambda path: run_plots.draw(runs, path))
    section.where = sorted({_machine(run.summary.provenance) for run in runs} - {""})
    return section


def _commands(section: Section, row: Row) -> Iterator[int]:
    for run in row.runs:
        known = run.summary.provenance.get("command")
        yield section.number(str(known) if known else f"not recorded: {run.source}")


Draw = Callable[[Analysis, Path], None]
"""Draws the picture of an analysis to a file: `gcbench.studies.draw`."""


def _analysed(draw: Draw, label: str, analysis: Analysis) -> Section:
    """Return the section of one analysis."""
    section = Section(
        f"{label} {measuring.digest(analysis.settings)}",
        lead=analysis.conclusions,
        commands=[analysis.command],
        where=[measuring.where(analysis.provenance)],
    )
    for table, title, rows in measuring.parts(analysis):
        last = rows[-1] is table.rows[-1]
        columns = measuring.columns(table, rows)
        section.sheets.append(Sheet(title, columns, table.which, (), table.notes if last else ()))
    try:
        section.picture = _picture(lambda path: draw(analysis, path))
    except UsageError:
        section.lead = [*section.lead, "This gcbench does not know how to draw it."]
    except MissingTableError:
        told = "No picture: its file leaves out what it is drawn from; the command makes it again."
        section.lead = [*section.lead, told]
    return section


def _timed(title: str, timings: Timings) -> Section:
    """Return the section of kernel timings."""
    machine, meaning = kernel_timings.notes(timings)
    section = Section(title, [meaning], commands=["make bench"], where=[machine])
    for heading, columns in kernel_timings.tables(timings, timings.rows):
        section.sheets.append(Sheet(heading, columns, len(kernel_timings.NAMES)))
    return section


def _by_task(runs: Iterable[Run]) -> dict[str, list[Run]]:
    """Return the runs by task and its options."""
    tasks: dict[str, list[Run]] = {}
    for run in runs:
        options = run.config.get("task_options") or {}
        words = [run.summary.task, *(f"{k}={configuration.text(v)}" for k, v in options.items())]
        tasks.setdefault(" ".join(words), []).append(run)
    return dict(sorted(tasks.items()))


def page(
    found: Found,
    draw: Draw,
    *,
    title: str = "gcbench report",
    target: float | None = None,
    suites: Sequence[Beside] = (),
    said: Callable[[int, int, str], None] = lambda done, of, what: None,
) -> str:
    """Return the page of what was found.

    `target` is that of `compare.rows`; `suites` have a section each, too; `said` is called as
    (sections done, of, next one).
    """
    from jinja2 import Environment, PackageLoader, StrictUndefined

    parts: dict[str, Callable[[], Section]] = {}
    for beside in suites:
        name = f"{beside.suite.name}: {beside.suite.title}"
        parts[name] = partial(_compared, name, beside.runs, target, beside)
    for name, alike in _by_task(found.runs).items():
        parts[name] = partial(_compared, name, alike, target)
    for name, analysis in sorted(found.analyses.items()):
        parts[name] = partial(_analysed, draw, found.labels[name], analysis)
    for name, timings in found.timings.items():
        parts[name] = partial(_timed, name, timings)
    sections = []
    for done, (name, make) in enumerate(parts.items()):
        said(done, len(parts), name)
        sections.append(make())
    environment = Environment(
        loader=PackageLoader("gcbench.reporting", "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template(TEMPLATE).render(
        title=title,
        sections=sections,
        runs=len(found.runs),
        analyses=len(found.analyses),
        timings=sum(len(timings.rows) for timings in found.timings.values()),
        long=LONG,
        version=__version__,
        made=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
    )


def check(path: Path) -> None:
    """Refuse a file that cannot become the page: before long work, not after it.

    Raises:
        UsageError: the ending is not .html, or the folder is not there.
    """
    if path.suffix.lower() not in (".html", ".htm"):
        raise UsageError(f"{path}: a page ends in .html")
    if not path.parent.is_dir():
        raise UsageError(f"{path.parent} is no folder; make it, or name another file")


def write(path: Path, text: str) -> None:
    """Write the page to `path`; GcbenchError if that cannot be."""
    try:
        write_atomically(path, text.encode())
    except GcbenchError as error:
        why = getattr(error.__cause__, "strerror", None) or error
        raise GcbenchError(
            f"cannot write {path}: {why}; name another file with --output"
        ) from error
