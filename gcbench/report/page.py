"""One page of HTML: a summary, accuracy, analyses, timings, pictures, and the commands.

The page needs no network and no other file. Each number stands in a row that names the commands
which make it again. `gcbench.report.sections` makes its parts, `summary` its first section.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

from gcbench._version import __version__
from gcbench.core import files
from gcbench.core.errors import GcbenchError, UsageError
from gcbench.core.writing import write_atomically
from gcbench.report import analysis as measuring
from gcbench.report import glossary, kernel_timings, sections, summary
from gcbench.report.analysis import HEAD, Analysis
from gcbench.report.kernel_timings import Timings
from gcbench.report.sections import Section
from gcbench.report.suite_match import Beside
from gcbench.results import reader
from gcbench.results.reader import Run

TEMPLATE = "report.html.j2"


# ---- contents -------------------------------------------------------------------------------


@dataclass
class Found:
    """The runs, analyses and timings of a page."""

    runs: list[Run] = field(default_factory=list)
    analyses: dict[str, Analysis] = field(default_factory=dict)
    """By `Analysis.name`."""
    timings: dict[str, Timings] = field(default_factory=dict)
    """By the title of their section."""
    labels: dict[str, str] = field(default_factory=dict)
    """The title of each analysis, by name: its kind or its file."""

    faults: reader.Faults = field(default_factory=list)
    """Errors of rows and runs that could not be read, and are left out."""

    def add(self, analysis: Analysis, label: str | None = None) -> None:
        """Add an analysis; of two copies, the one with more tables stays."""
        self.labels.setdefault(analysis.name, label or analysis.kind)
        first = self.analyses.setdefault(analysis.name, analysis)
        if first.provenance != analysis.provenance:
            reader.warn(
                f"{analysis.name} found twice, made at different times: the first is shown, of "
                f"{first.provenance.get('started')}"
            )
        elif len(first.tables) < len(analysis.tables):
            self.analyses[analysis.name] = analysis


def collect(places: Sequence[Path]) -> Found:
    """Return the contents of these folders, at any depth, and files.

    Rows and runs that cannot be read are left out, with their errors in `Found.faults`. A JSON
    file holds runs, an analysis or kernel timings.

    Raises:
        UsageError: a path is missing or holds something else, or nothing is found in any of them.
        GcbenchError: an analysis cannot be read, or no run can.
    """
    contents = Found()
    holding: list[Path] = []
    for place in places:
        files.check_regular(place)
        if not place.exists():
            raise UsageError(f"{place} does not exist; name a folder of runs or analyses")
        if place.is_file():
            holding += _file(place, contents)
            continue
        for folder in _analyses(place):
            contents.add(measuring.load(folder))
        if any(reader.run_folders(place)) or reader.row_files(place):
            holding.append(place)
    if holding:
        try:
            contents.runs = reader.load(holding, faults=contents.faults)
        except UsageError:
            raise
        except GcbenchError as error:
            contents.faults.append(error)
    tested = [run for run in contents.runs if not run.is_trial]
    if not (tested or contents.analyses or contents.timings):
        if contents.faults:
            raise contents.faults[0]
        if contents.runs:
            raise UsageError(
                "only trials of learning rates here, which have no place on a page; "
                "`gcbench compare --trials` shows them"
            )
        names = ", ".join(map(str, places))
        raise UsageError(
            f"no finished run and no analysis in {names}; make some with `gcbench run`, or with "
            "`gcbench histogram`, `bounds`, `bandwidth`, `predict` or `advise`"
        )
    return contents


def _file(path: Path, contents: Found) -> list[Path]:
    """Add the contents of a file, or return a file of runs, which are read together."""
    if path.suffix == ".parquet":
        return [path]
    try:
        data = json.loads(files.read_text(path))
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(f"{path} cannot be read as JSON ({error}); {_TAKEN}") from None
    keys = data.keys() if isinstance(data, dict) else set()
    if path.name == HEAD:
        contents.add(measuring.load(path.parent))
    elif keys >= {"kind", "tables"}:
        contents.add(measuring.parse(data, path), path.stem)
    elif keys >= {"machine", "rows"} or "benchmarks" in keys:
        timings = kernel_timings.load(path)
        contents.timings[f"{path.stem} {measuring.digest(timings.model_dump())}"] = timings
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
    for place, below, names in files.walk(folder):
        if HEAD in names:
            below.clear()
            yield place


# ---- the page ------------------------------------------------------------------------------------


def page(
    contents: Found,
    *,
    title: str = "gcbench report",
    target: float | None = None,
    suites: Sequence[Beside] = (),
    progress: Callable[[int, int, str], None] = lambda done, of, what: None,
) -> str:
    """Return the page as HTML.

    `target`: as for `compare.rows`. `suites` have a section each, as have the suites that rows
    name. `progress` is called as (sections done, of, title of the next one).
    """
    from jinja2 import Environment, PackageLoader, StrictUndefined

    chosen, short = sections.compared(contents.runs, target, suites)
    parts: dict[str, Callable[[], Section]] = {}
    for one in chosen:
        parts[one.title] = partial(sections.accuracy, one)
    for name, analysis in sorted(contents.analyses.items()):
        parts[name] = partial(sections.analysed, contents.labels[name], analysis)
    for one in [*chosen, *short]:
        if sections.timed(one):
            parts[f"Times: {one.title}"] = partial(sections.times, one)
    for name, timings in contents.timings.items():
        parts[name] = partial(sections.kernels, name, timings)
    pieces = []
    for done, (name, make) in enumerate(parts.items()):
        progress(done, len(parts), name)
        pieces.append(make())
    pieces = summary.sections(chosen, short, pieces, contents.analyses, contents.labels) + pieces
    sections.anchored(pieces)
    environment = Environment(
        loader=PackageLoader("gcbench.report", "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    tiers = {row.tier: None for one in chosen for row in one.rows if row.tier is not None}
    return environment.get_template(TEMPLATE).render(
        title=title,
        parts={kind: [one for one in pieces if one.kind == kind] for kind in sections.KINDS},
        tasks=sorted({one.task for one in chosen}),
        tiers=list(tiers),
        methods=sorted({row.first.compressor_name for one in chosen for row in one.shown}),
        runs=len(contents.runs),
        analyses=len(contents.analyses),
        timings=sum(len(timings.rows) for timings in contents.timings.values()),
        words=glossary.WORDS,
        version=__version__,
        made=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
    )


def check(path: Path) -> None:
    """Refuse a path to which no page can be written; call it before long work.

    Raises:
        UsageError: the ending is not .html, or the folder is not there.
    """
    if path.suffix.lower() not in (".html", ".htm"):
        raise UsageError(f"{path}: a page ends in .html")
    if not path.parent.is_dir():
        raise UsageError(f"{path.parent} is not a folder; create it, or name another file")


def write(path: Path, text: str) -> None:
    """Write the page to `path`; GcbenchError if that cannot be."""
    try:
        write_atomically(path, text.encode())
    except GcbenchError as error:
        why = getattr(error.__cause__, "strerror", None) or error
        raise GcbenchError(
            f"cannot write {path}: {why}; name another file with --output"
        ) from error
