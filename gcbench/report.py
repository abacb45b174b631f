"""One page of HTML that holds everything: runs compared, analyses, pictures, and the commands.

The page needs no network and no other file. Each number stands in a row that names the commands
which make it again.
"""

from __future__ import annotations

import base64
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

from gcbench import __version__, compare, finished, plots, tables
from gcbench.compare import Row
from gcbench.errors import GcbenchError, UsageError
from gcbench.finished import Run
from gcbench.measure import MODULES
from gcbench.measure import analysis as measuring
from gcbench.measure.analysis import HEAD, Analysis
from gcbench.store import write_atomically
from gcbench.suites.published import Beside
from gcbench.typeset import Column

TEMPLATE = "report.html.j2"


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


def collect(folders: Sequence[Path]) -> tuple[list[Run], list[Analysis]]:
    """Return the finished runs and the analyses in `folders`, at any depth.

    Raises:
        UsageError: a path is missing, or nothing in any of them is a run or an analysis.
        GcbenchError: something that is there cannot be read.
    """
    holding: list[Path] = []
    analyses: dict[str, Analysis] = {}
    for folder in folders:
        if not folder.exists():
            raise UsageError(f"{folder} does not exist; name a folder of runs or analyses")
        for place in _analyses(folder):
            found = measuring.load(place)
            analyses.setdefault(found.name, found)
        if folder.is_file() or any(finished.run_folders(folder)):
            holding.append(folder)
    runs = finished.load(holding) if holding else []
    if not runs and not analyses:
        names = ", ".join(map(str, folders))
        raise UsageError(
            f"no finished run and no analysis in {names}; make some with `gcbench run`, "
            f"`gcbench {'`, `gcbench '.join(MODULES) or 'kernels'}`"
        )
    return runs, list(analyses.values())


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
    section.picture = _picture(lambda path: plots.draw(runs, path))
    section.where = sorted({_machine(run.summary.provenance) for run in runs} - {""})
    return section


def _commands(section: Section, row: Row) -> Iterator[int]:
    for run in row.runs:
        known = run.summary.provenance.get("command")
        yield section.number(str(known) if known else f"not recorded: {run.source}")


def _analysed(analysis: Analysis) -> Section:
    """Return the section of one analysis."""
    section = Section(
        f"{analysis.kind} {measuring.digest(analysis.settings)}",
        lead=analysis.conclusions,
        commands=[analysis.command],
        where=[measuring.where(analysis.provenance)],
    )
    for table, title, rows in measuring.parts(analysis):
        last = rows[-1] is table.rows[-1]
        columns = measuring.columns(table, rows)
        section.sheets.append(Sheet(title, columns, table.which, (), table.notes if last else ()))
    if analysis.kind in MODULES:
        section.picture = _picture(lambda path: measuring.draw(analysis, path))
    else:
        section.lead = [*section.lead, "This gcbench does not know how to draw it."]
    return section


def _by_task(runs: Iterable[Run]) -> dict[str, list[Run]]:
    """Return the runs by task and its options."""
    tasks: dict[str, list[Run]] = {}
    for run in runs:
        options = run.config.get("task_options") or {}
        words = [run.summary.task, *(f"{k}={finished.text(v)}" for k, v in options.items())]
        tasks.setdefault(" ".join(words), []).append(run)
    return dict(sorted(tasks.items()))


def page(
    runs: Sequence[Run],
    analyses: Sequence[Analysis],
    *,
    title: str = "gcbench report",
    target: float | None = None,
    suites: Sequence[Beside] = (),
    said: Callable[[int, int, str], None] = lambda done, of, what: None,
) -> str:
    """Return the page of these runs and analyses.

    `target` is that of `compare.rows`; `suites` have a section each, too; `said` is called as
    (sections done, of, next one).
    """
    from jinja2 import Environment, PackageLoader, StrictUndefined

    parts: dict[str, Callable[[], Section]] = {}
    for one in suites:
        name = f"{one.suite.name}: {one.suite.title}"
        parts[name] = partial(_compared, name, one.runs, target, one)
    parts |= {
        name: partial(_compared, name, alike, target) for name, alike in _by_task(runs).items()
    }
    for analysis in sorted(analyses, key=lambda a: a.name):
        parts[analysis.name] = partial(_analysed, analysis)
    sections = []
    for done, (name, make) in enumerate(parts.items()):
        said(done, len(parts), name)
        sections.append(make())
    environment = Environment(
        loader=PackageLoader("gcbench", "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template(TEMPLATE).render(
        title=title,
        sections=sections,
        runs=len(runs),
        analyses=len(analyses),
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
        raise GcbenchError(f"cannot write {path}; name another file with --output") from error
