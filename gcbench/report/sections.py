"""The parts of the report: a section a task or suite, an analysis, a table of times."""

from __future__ import annotations

import base64
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from gcbench.core import registry
from gcbench.core.errors import GcbenchError, UsageError
from gcbench.core.values import text
from gcbench.report import analysis as measuring
from gcbench.report import compare, kernel_timings, kinds, run_plots, suite_match, tables, tier_plot
from gcbench.report.analysis import Analysis, MissingTableError
from gcbench.report.compare import ComparisonRow
from gcbench.report.kernel_timings import Timings
from gcbench.report.rendering import Column, ends, where
from gcbench.report.suite_match import Beside
from gcbench.results.reader import Run, once
from gcbench.results.suites import per_suite
from gcbench.training import suites

KINDS = ("summary", "accuracy", "analysis", "timing")
"""The kinds of sections, in the order of the page."""
LONG = 40
"""Rows above which a table is folded, and scrolls below its headings."""
SHORT = 20
"""A run of fewer steps than the task's default / `SHORT` shows its times, but no accuracy."""

# ---- sorting -------------------------------------------------------------------------------------

_NUMBER = re.compile(
    r"[~<>≤≥\[(]*\s*([+-]?(?:\d[\d,]*\.?\d*|\.\d+)(?:e[+-]?\d+)?)\s?([kKMGTµmn]?)", re.I
)
_UNITS = {"": 1.0, "k": 2.0**10, "m": 2.0**20, "g": 2.0**30, "t": 2.0**40}
_LOSSES = re.compile(r"\b(errors?|loss|lost|wrong|slower)\b")
_HIGH = re.compile(r"\b(\w*bw|gb/s|speedup|gain|accuracy|ratio|faster|x \w+|of floor|images/s)\b")


def sort_key(cell: str) -> float | None:
    """Return the number with which a cell begins, a size such as 16M in bytes; None without one.

    Two cells of equal number keep the order that they have.
    """
    match = _NUMBER.match(cell)
    if match is None:
        return None
    unit = match[2].lower() if re.match(r"\s?[kKMGT]i?B?\b", cell[match.end(1) :]) else ""
    return float(match[1].replace(",", "")) * _UNITS[unit]


def keys(column: Column) -> list[float | None] | None:
    """Return the sort keys of a column's cells; None for a column of text.

    A column is one of numbers if some cells begin with one and no other cell has a digit.
    """
    numbers = [sort_key(cell) for cell in column.cells]
    bare = (cell for cell, key in zip(column.cells, numbers, strict=True) if key is None)
    some = any(key is not None for key in numbers)
    return numbers if some and not any(re.search(r"\d", cell) for cell in bare) else None


def best(column: Column) -> str:
    """Return which end of a column the first click on its heading shows: "high" or "low"."""
    if column.best:
        return column.best
    heading = column.heading.lower()
    if column.heading == "front":
        return "high"  # "yes" before ""
    return "high" if _HIGH.search(heading) and not _LOSSES.search(heading) else "low"


# ---- what a page is made of ----------------------------------------------------------------------


@dataclass
class Sheet:
    """A table of the page: headings, cells, and for each row the numbers of its commands."""

    title: str
    columns: Sequence[Column]
    which: int
    """The first columns, which say what a row is."""
    commands: Sequence[Sequence[int]] = ()
    """Per row; empty: the section's commands make all rows."""
    notes: Sequence[str] = ()
    methods: Sequence[str] = ()
    """Per row, for the filter; empty: the rows are of no method."""
    tiers: Sequence[str] = ()
    places: Sequence[str] = ()
    """Per row, settings that a narrow page shows below the first cell."""
    links: Sequence[Section] = ()
    """Per row, the section to which its first cell leads."""
    tasks: Sequence[str] = ()
    """Per row, for the filter, where the section is of several tasks."""
    folds: bool = True
    """Whether it is folded where it is long."""

    @property
    def heads(self) -> list[dict[str, Any]]:
        """Heading, class and sorting of each column."""
        return [
            {
                "text": column.heading,
                "kind": self.kind(place),
                "best": best(column),
                "numeric": keys(column) is not None,
            }
            for place, column in enumerate(self.columns, 1)
        ]

    def kind(self, place: int) -> str:
        """Return the CSS class of the column at `place`, from 1; the class "key" stays in view."""
        if place > self.which:
            prose = any(len(cell) > 60 for cell in self.columns[place - 1].cells)
            return "prose" if prose else ""
        return "name key" if place == 1 else "name"

    @property
    def long(self) -> bool:
        """Whether the table is folded."""
        return self.folds and len(self.columns[0].cells) > LONG

    @property
    def rows(self) -> list[dict[str, Any]]:
        """Of each row: its cells with their sort keys, its commands, what the filters compare."""
        count = len(self.columns[0].cells)
        empty: list[Any] = [None] * count
        by = [keys(column) or empty for column in self.columns]
        cells = [column.cells for column in self.columns]

        def of(values: Sequence[Any]) -> Sequence[Any]:
            return values or empty

        return [
            {
                "cells": [
                    (texts[i], sort[i], self.kind(place))
                    for place, (texts, sort) in enumerate(zip(cells, by, strict=True), 1)
                ],
                "commands": of(self.commands)[i] or (),
                "method": of(self.methods)[i],
                "tier": of(self.tiers)[i],
                "task": of(self.tasks)[i],
                "place": of(self.places)[i],
                "link": of(self.links)[i],
            }
            for i in range(count)
        ]


@dataclass
class Section:
    """A part of the page: what it is about, its picture, its tables, its commands."""

    title: str
    kind: str = "analysis"
    """One of `KINDS`."""
    lead: Sequence[str] = ()
    picture: str = ""
    """Data URL of the SVG picture; "" without one."""
    sheets: list[Sheet] = field(default_factory=list)
    commands: list[str] = field(default_factory=list)
    where: Sequence[str] = ()
    """Machines and versions that made the numbers, a line each."""
    task: str = ""
    items: Sequence[tuple[str, Section | None]] = ()
    """Sentences, each with the section whose numbers support it."""
    anchor: str = ""
    numbers: dict[str, int] = field(default_factory=dict)
    """The numbers of the commands that `number` added."""

    def number(self, command: str) -> int:
        """Return the number of a command in the section's list, from 1; a new one is added."""
        if command not in self.numbers:
            self.commands.append(command)
            self.numbers[command] = len(self.commands)
        return self.numbers[command]


def anchored(sections: Iterable[Section]) -> None:
    """Give each section a name for links, no two the same."""
    taken: set[str] = set()
    for section in sections:
        name = re.sub(r"[^a-z0-9]+", "-", section.title.lower()).strip("-") or "section"
        number = 1
        section.anchor = name
        while section.anchor in taken:
            number += 1
            section.anchor = f"{name}-no-{number}"
        taken.add(section.anchor)


def _picture(draw: Callable[[Path], object]) -> str:
    """Return the SVG picture that `draw` writes, as a data URL."""
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / "picture.svg"
        draw(path)
        return "data:image/svg+xml;base64," + base64.b64encode(path.read_bytes()).decode()


# ---- accuracy ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Compared:
    """Runs that are compared with each other: those of a task, or of a suite."""

    title: str
    task: str
    runs: Sequence[Run]
    rows: Sequence[ComparisonRow]
    beside: Beside | None = None

    @cached_property
    def shown(self) -> list[ComparisonRow]:
        """The rows of the tables, without the settings that they share: see `tables.best`."""
        return tables.best(self.rows, tables.MOST_ROWS)

    @cached_property
    def configs(self) -> list[dict[str, Any]]:
        """The configs of the runs, each once."""
        return list({id(config): config for run in self.runs for config in [run.config]}.values())

    @cached_property
    def is_short(self) -> bool:
        """Whether the accuracy of none of the runs says anything."""
        return all(map(_is_short, {run.method: run for run in self.runs}.values()))


def _task(run: Run) -> str:
    """Return the task and its options in words."""
    options = run.config.get("task_options") or {}
    return " ".join([run.summary.task, *(f"{k}={text(v)}" for k, v in options.items())])


def _is_short(run: Run) -> bool:
    """Whether the run has too few of its task's default steps for its accuracy to say anything."""
    usual = _usual_steps(run.summary.task)
    return usual is not None and SHORT * run.summary.steps < usual


@cache
def _usual_steps(task: str) -> int | None:
    """Return the default steps of a task; None without any, or where it is not installed."""
    try:
        usual = registry.task_class(task)().defaults().get("steps")
    except GcbenchError:  # a task of a plug-in that is not installed
        return None
    return None if usual is None else int(usual)


def _by_task(runs: Iterable[Run]) -> dict[str, list[Run]]:
    groups: dict[str, list[Run]] = {}
    tasks: dict[str, str] = {}
    for run in runs:
        if run.method not in tasks:
            tasks[run.method] = _task(run)
        groups.setdefault(tasks[run.method], []).append(run)
    return dict(sorted(groups.items()))


def compared(
    runs: Sequence[Run], target: float | None, asked: Sequence[Beside]
) -> tuple[list[Compared], list[Compared]]:
    """Return what gets a section, and the short runs, of which only times are shown.

    Sections are of the suites that are asked for or that rows name, then of tasks. Trials, which
    chose learning rates and never saw the test split, are left out.
    """
    groups = per_suite(runs, {one.suite.name: one.suite.version for one in asked})
    rest = groups.pop("", [])
    labelled = [run for group in groups.values() for run in group]
    wanted = {beside.suite.name: beside for beside in asked}
    for name, members in groups.items():
        if name in wanted:
            continue
        try:
            wanted[name] = suite_match.beside(suites.load(name), labelled)
        except UsageError:  # the suite has been changed since
            rest += members
    chosen: list[Compared] = []
    short: list[Compared] = []
    for beside in wanted.values():
        rows = beside.rows(
            compare.rows(beside.runs, target, beside.suite.choices, preferred=beside.best)
        )
        title = f"{beside.suite.name}: {beside.suite.title}"
        chosen.append(Compared(title, _task(beside.runs[0]), beside.runs, rows, beside))
    for task, alike in _by_task(run for run in once(rest) if not run.is_trial).items():
        whole = [run for run in alike if not _is_short(run)]
        if whole:
            chosen.append(Compared(task, task, whole, compare.rows(whole, target)))
        if cut := [run for run in alike if _is_short(run)]:
            short.append(Compared(f"{task}, short runs", task, cut, compare.rows(cut)))
    return chosen, short


_BUDGET = ("workers", "steps", "batch", "optimizer", "lr")


def budget(one: Compared) -> str:
    """Return what the runs have in common and what differs, in words."""
    words = []
    for key in _BUDGET:
        values = distinct(one, key)
        if values != ["null"] and values != ["None"]:
            words.append(f"{key} {few(values)}")
    counts = [len(row.runs) for row in one.rows]
    return f"{'; '.join(words)}; {ends(counts)} seed{'s' * (max(counts) > 1)} a row."


def distinct(one: Compared, key: str) -> list[str]:
    """Return the values of a setting among the runs, as text."""
    return list(dict.fromkeys(text(config.get(key)) for config in one.configs))


def few(values: Sequence[str]) -> str:
    """Return values as one text; of more than four the first three and the count."""
    return ", ".join(values if len(values) <= 4 else [*values[:3], f"... ({len(values)} values)"])


MOST_SEEDS = 20
"""Seeds per row whose commands are listed."""
MOST_PLACES = 20
"""Lines on machines and versions below a section."""


def _omitted(one: Compared) -> str:
    """Return a sentence on the rows and commands that the section leaves out, "" without any."""
    count = len(one.rows)
    parts = []
    if count > len(one.shown):
        parts.append(
            f"{len(one.shown)} of {count:,} rows are shown: in turn the best of each tier and "
            "budget, and its uncompressed runs. `gcbench compare --format csv` has all of them."
        )
    if any(len(row.runs) > MOST_SEEDS for row in one.shown):
        parts.append(f"Commands: of the first {MOST_SEEDS} seeds per row.")
    return " ".join(parts)


def _where(one: Compared) -> list[str]:
    """Return machine, versions, commit and backend of the runs, a line each."""
    provenances = {id(run.summary.provenance): run.summary.provenance for run in one.runs}
    facts = [(where(each), each.get("backend")) for each in provenances.values()]
    lines = sorted({place + f", backend {b}" * bool(b) for place, b in facts} - {""})
    more = len(lines) - MOST_PLACES
    return lines if more <= 0 else [*lines[:MOST_PLACES], f"and {more:,} more machines or versions"]


def _commands(section: Section, row: ComparisonRow) -> Iterator[int]:
    for run in row.runs[:MOST_SEEDS]:
        command = run.summary.provenance.get("command")
        yield section.number(str(command) if command else f"not recorded: {run.source}")


_OF_TIMES = ("Times: ", "~: ")
"""Beginnings of the notes that belong to the times."""


def _section(one: Compared, *lead: str, of_times: bool) -> Section:
    """Return the section of the times, or of the rest, with its table; the method comes first."""
    constants, rows = tables.constants(one.shown)
    same = constants and f"All rows: {constants}."
    sentences = [budget(one), _omitted(one), same, *lead]
    section = Section(one.title, lead=[*filter(None, sentences)], task=one.task, where=_where(one))
    groups = tables.groups(rows)
    settings = list(groups["which"])
    method = settings.pop(len(rows[0].context))
    if of_times:
        section.title, section.kind, title = f"Times: {one.title}", "timing", "Time by phase"
        columns, names = [method, *settings, *groups["times"]], 1 + len(settings)
    else:
        section.kind, title = "accuracy", "Accuracy and bytes"
        result, *quality = groups["quality"]
        versus, *others = sorted(quality, key=lambda column: column.heading != "vs none")
        payload, *traffic = sorted(groups["traffic"], key=lambda c: c.heading != tables.PAYLOAD)
        columns = [method, result, versus, payload, *settings, *others]
        columns, names = [*columns, *groups["target"], *traffic], 1
    sheet = Sheet(
        title,
        columns,
        names,
        [list(_commands(section, row)) for row in rows],
        [note for note in tables.notes(rows) if note.startswith(_OF_TIMES) == of_times],
        methods=[row.first.compressor_name for row in rows],
        tiers=[row.tier or "" for row in rows],
        places=[row.place for row in rows],
    )
    section.sheets.append(sheet)
    return section


def accuracy(one: Compared) -> Section:
    """Return the section of runs that are compared: picture, and the method first in each row."""
    section = _section(one, "; ".join(one.beside.unmade()) if one.beside else "", of_times=False)
    tiered = [row for row in one.rows if row.tier is not None and row.mean is not None]
    alike = list(one.rows)
    if tiered:
        first = tables.largest_budget(tiered)[0]
        alike = [row for row in one.rows if row.context == first.context]
    drawn = tables.drawn(alike)
    if len(alike) < len(one.rows):
        section.lead = [*section.lead, f"The picture has the rows of {first.place}."]
    if len(drawn) < len(alike):
        section.lead = [*section.lead, f"The picture has the best {len(drawn)}."]
    if tiered:
        section.picture = _picture(lambda path: tier_plot.draw(drawn, one.title, path))
    else:
        runs = [run for row in drawn for run in row.runs]
        on_front = {row.runs[0].method for row in drawn if row.on_front}
        section.picture = _picture(lambda path: run_plots.draw(runs, path, (), on_front))
    return section


def timed(one: Compared) -> bool:
    """Whether there are times of these runs that may be shown."""
    return bool(tables.groups(one.shown)["times"])


def times(one: Compared) -> Section:
    """Return the section of the times by phase."""
    short = f"Less than 1/{SHORT} of the task's default steps: no accuracy is shown."
    return _section(one, short if one.rows and one.is_short else "", of_times=True)


# ---- analyses and kernels ------------------------------------------------------------------------


def _methods(columns: Sequence[Column]) -> list[str]:
    """Return the column of methods, which the page can be filtered by."""
    return next((column.cells for column in columns if column.heading == "method"), [])


def analysed(label: str, analysis: Analysis) -> Section:
    """Return the section of one analysis."""
    section = Section(
        f"{label} {measuring.digest(analysis.settings)}",
        lead=[*analysis.answer, *analysis.conclusions],
        commands=[analysis.command],
        where=[where(analysis.provenance)],
    )
    for table, title, rows in measuring.parts(analysis):
        named = measuring.columns(table, rows)
        differing, equal = tables.differing(named[table.which :])
        columns = [*named[: table.which], *differing]
        notes = [f"Equal in all {len(rows)} rows: {'; '.join(equal)}."] if equal else []
        notes += table.notes if rows[-1] is table.rows[-1] else ()
        sheet = Sheet(title, columns, table.which, (), notes, _methods(named))
        section.sheets.append(sheet)
    try:
        section.picture = _picture(lambda path: kinds.draw(analysis, path))
    except UsageError:
        section.lead = [*section.lead, "This gcbench does not know how to draw it."]
    except MissingTableError:
        why = "No picture: its file leaves out what it is drawn from; the command makes it again."
        section.lead = [*section.lead, why]
    return section


def kernels(title: str, timings: Timings) -> Section:
    """Return the section of kernel timings."""
    machine, meaning = kernel_timings.notes(timings)
    section = Section(title, "timing", [meaning], commands=["make bench"], where=[machine])
    for heading, columns in kernel_timings.tables(timings):
        section.sheets.append(Sheet(heading, columns, len(kernel_timings.NAMES)))
    return section
