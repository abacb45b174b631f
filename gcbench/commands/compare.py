"""`gcbench compare`: tables and a picture of stored runs. Prints rows without importing torch."""

from __future__ import annotations

import gc
import re
from collections.abc import Sequence
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gcbench.commands import (
    RUNS,
    SUITE,
    Details,
    Format,
    Formatted,
    Json,
    Progress,
    Shown,
    end_with,
    option,
    say,
    watched,
)
from gcbench.core import output
from gcbench.core.errors import UsageError
from gcbench.core.values import items_of

if TYPE_CHECKING:
    from gcbench.report.compare import Asked, ComparisonRow
    from gcbench.report.suite_match import Beside
    from gcbench.results.reader import Run
    from gcbench.training.suites import Suite

S = str | None


MACHINE = "machine"
"""The value of `--by` that compares the same runs of several machines."""


FEWEST = 10
"""Lines of a default answer that a second table needs."""


class Width(StrEnum):
    """Columns of a paper that a picture may span."""

    single = "single"
    double = "double"


def compare(
    folders: Annotated[
        list[Path] | None,
        typer.Argument(
            help="Runs, folders of runs, files of rows (.json, .parquet), or bundles (.zip)."
        ),
    ] = None,
    where: Annotated[
        list[str] | None,
        option("Only rows with this setting, e.g. workers=4 or compressor=none,topk."),
    ] = None,
    by: Annotated[
        S,
        option(
            "Print a table for each value of a setting, e.g. task; machine: do the same runs "
            "on several machines end in the same parameters?"
        ),
    ] = None,
    target: Annotated[
        S,
        option(
            "Show steps and bytes to reach this accuracy, e.g. 0.9 (or this loss); fp32: the "
            "median last evaluation of `none`."
        ),
    ] = None,
    trials: Annotated[bool, option("Also show the trials that chose learning rates.")] = False,
    format_: Formatted = Format.table,
    suite: Annotated[S, option(SUITE + " Only its runs, beside the published numbers.")] = None,
    plot: Annotated[
        Path | None,
        option(
            "Draw accuracy against bytes, a suite with its paper's numbers, or with --by the "
            "effect of a setting (.png, .svg, .pdf)."
        ),
    ] = None,
    sort: Annotated[
        str,
        option(
            "Sort rows by accuracy, loss, difference, payload, wire, bits, ratio, step, "
            "target or method, the best first; with a minus (-payload) the worst first.",
            show_default=False,
        ),
    ] = "",
    columns: Annotated[
        S, option("Only columns whose headings begin with these: accuracy,vs none,payload.")
    ] = None,
    width: Annotated[
        Width | None, option("Make picture and LaTeX as wide as one or two columns of a paper.")
    ] = None,
    label: Annotated[
        list[str] | None,
        option(
            "A display name: mine=./mine.py, or lion=signsgd:memory=momentum.", show_default=False
        ),
    ] = None,
    details: Details = False,
    progress: Shown = Progress.auto,
    json: Json = False,
) -> None:
    """Compare finished runs: accuracy over seeds, bytes, time by phase."""
    from gcbench.report import bundle, figures, suite_index
    from gcbench.report import compare as comparing
    from gcbench.results import reader
    from gcbench.results.suites import head, per_suite

    if plot is not None:
        figures.check(plot)
    asked = comparing.Asked(
        _conditions(where or ()),
        target,
        by,
        "json" if json else format_.value,
        sort,
        tuple(items_of("--columns", columns)) if columns is not None else (),
        width.value if width is not None else "",
        [comparing.Label.parse(one) for one in label or ()],
        details,
    )
    if width is not None and plot is None and asked.format != "latex" and by != MACHINE:
        raise UsageError(
            f"--width {width.value} is that of a picture: add --plot x.pdf, or remove it"
        )
    places = folders or [RUNS]
    faults: reader.Faults = []
    watch = partial(watched, progress, "compare")
    with bundle.opened(places) as paths:
        runs = reader.load(paths, watch, faults, repeated=by == MACHINE)
    gc.freeze()  # the rows stay: looking for garbage among them would take seconds
    if by == MACHINE:
        from gcbench.report import machines, tables

        names = ("target", "trials", "suite", "plot", "sort", "columns", "width", "label")
        values = (target, trials, suite, plot, sort, columns, width, label)
        if flags := [f"--{name}" for name, value in zip(names, values, strict=True) if value]:
            raise UsageError(f"--by machine has one table: remove {', '.join(flags)}")
        comparing.check(runs, asked.conditions)
        meets = comparing.where(runs, asked.conditions)
        chosen_runs = [run for run in meets[0] if meets[1](run)]
        named = dict(zip(paths, places, strict=True))
        output.emit(machines.render(chosen_runs, named, asked.format, tables.columns()))
        end_with(faults)
        return
    for one in asked.labels:
        if not any(map(one.fits, runs)):
            reader.warn(f"--label {one.name}: no run here is of {one.method} with these settings")
    changed = where or by or target or trials or columns or sort or label
    chosen = _load_suite(suite) if suite is not None else None
    groups = per_suite(runs, {} if chosen is None else {chosen.name: chosen.version})
    if runs and not groups:
        raise UsageError("all rows are of other versions of their suites; name other folders")
    groups = {name: reader.once(group) for name, group in groups.items()}
    labelled = [run for name, group in groups.items() if name for run in group]
    if suite is not None:
        labelled += groups.get("", [])
        if chosen is not None and trials:
            from gcbench.report import suite_match

            labelled = suite_match.with_trials(chosen, labelled)
        groups = {suite: labelled}
    elif (several := len(groups.keys() - {""}) > 1) and plot is None and not changed:
        output.emit(suite_index.index(groups, places, asked.format))
        end_with(faults)
        return
    elif (several and _is_short(asked)) or (
        len(groups) > 1 and (plot is not None or asked.format in ("csv", "json"))
    ):
        raise UsageError(
            f"these rows come from {len(groups)} suites and cannot share one table or picture: "
            f"choose with --suite {' or '.join(filter(None, groups))}"
        )
    groups = dict(sorted(groups.items(), key=lambda group: group[0] != ""))  # the user's rows first
    asked = asked._replace(lines=asked.lines - 2 * (len(groups) - 1))
    if len(groups) > 1:  # each value must be in one of them
        every = [run for group in groups.values() for run in group]
        comparing.check(every, asked.conditions)
    shown: list[ComparisonRow] = []
    for name, group in groups.items():
        if shown and _is_short(asked) and plot is None and asked.lines < FEWEST:
            output.emit(f"\n{len(group)} runs of suite {name} not shown: add --suite {name}.")
            continue
        tested = not trials and any(not run.is_trial for run in group)
        if not tested and not trials and len(groups) > 1:
            which = f"suite {name}" if name else "runs of no suite"
            reader.warn(f"{which}: only trials of learning rates; --trials shows them")
            continue
        beside = _beside(name, labelled, only=len(groups) == 1) if name and tested else None
        if beside is not None:
            if len(groups) == 1:
                comparing.check(beside.runs, asked.conditions)
            rows = comparing.chosen(
                beside.runs, asked, beside.suite.choices, beside.rows, beside.best
            )
            title = f"Suite {beside.suite.name}: {beside.suite.title}" if suite is None else ""
            missing = beside.unmade()
        else:
            tried = group if trials else reader.without_trials(group)
            if len(groups) == 1:
                comparing.check(tried, asked.conditions)
            rows = comparing.chosen(tried, asked)
            title, missing = "", []
        if not rows:
            continue
        text = ("\n" if shown else "") + comparing.render(rows, asked, title)
        output.emit(text)
        asked = asked._replace(lines=asked.lines - text.count("\n"))
        if missing:
            say("\n  ".join(missing) if details else f"{missing[0]}: --details lists them")
        shown += rows
    if not shown and not asked.conditions:
        raise UsageError("no results here, only trials of learning rates; --trials shows them")
    if not shown:
        words = (f"{key}={','.join(values)}" for key, values in asked.conditions.items())
        raise UsageError(f"no row has all of {' and '.join(words)}")
    if plot is not None:
        from gcbench.report import effect_plot, paper_plot, run_plots, tier_plot

        name = next(iter(groups))
        title = head(name)["title"] if chosen is None and name else getattr(chosen, "title", "")
        if by not in (None, "task", "tier"):  # these group methods, and are none of their settings
            if width is not None:
                raise UsageError(f"--width {width.value} with --by {by} --plot: remove --width")
            effect_plot.draw(shown, by, title, plot)
        elif name and paper_plot.has_published(shown):
            paper_plot.draw_suite(shown, title, plot, asked.width)
        elif width is not None:
            paper_plot.draw(shown, plot, asked.width)
        elif any(row.tier is not None for row in shown):
            tier_plot.draw(shown, title, plot)
        else:
            on_front = {row.runs[0].method for row in shown if row.on_front}
            drawn = [run for row in shown for run in row.runs]
            run_plots.draw(drawn, plot, asked.labels, on_front)
        say(f"wrote {plot}")
    end_with(faults)


def _beside(name: str, labelled: Sequence[Run], *, only: bool) -> Beside | None:
    """Return the runs of a suite; None, with a warning, if the suite has changed since.

    Raises:
        UsageError: it has, and these runs are the `only` ones.
    """
    from gcbench.report import suite_match
    from gcbench.results import reader

    try:
        return suite_match.beside(_load_suite(name), labelled)
    except UsageError as error:
        if only:
            raise
        reader.warn(f"{error}; they are compared without the suite")
        return None


def _is_short(asked: Asked) -> bool:
    return asked.format == "table" and not asked.details


def _load_suite(name: str) -> Suite:
    from gcbench.training import suites  # imports torch

    return suites.load(name)


def _conditions(arguments: Sequence[str]) -> dict[str, list[str]]:
    """Return the values of each setting in words like workers=2,4 or betas=[0.9,0.99]."""
    conditions: dict[str, list[str]] = {}
    for word in arguments:
        key, equals, values = word.partition("=")
        if not (key and equals and values) or key in conditions:
            raise UsageError(f"--where {word!r}: SETTING=VALUE[,VALUE] expected, each setting once")
        conditions[key] = re.split(r",(?![^\[{]*[\]}])", values)
    return conditions
