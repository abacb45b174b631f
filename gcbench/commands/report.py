"""`gcbench report`: one page of HTML with everything that was found."""

from __future__ import annotations

import gc
import math
from pathlib import Path
from typing import Annotated

import typer

from gcbench.commands import ANALYSES, RUNS, Json, Progress, Shown, end_with, print_json, say
from gcbench.core.errors import UsageError


def report(
    folders: Annotated[
        list[Path] | None,
        typer.Argument(
            help="Runs, analyses, kernel timings, or folders of them; files of rows; bundles.",
            show_default=f"{RUNS} {ANALYSES}",
        ),
    ] = None,
    output: Annotated[Path, typer.Option("-o", "--output", help="The page to write.")] = Path(
        "report.html"
    ),
    title: Annotated[str, typer.Option(help="Its title.")] = "gcbench report",
    target: Annotated[
        float | None,
        typer.Option(
            help="Show steps and bytes to this accuracy, e.g. 0.9, or test loss: a number."
        ),
    ] = None,
    suite: Annotated[
        list[str] | None,
        typer.Option(help="Add a section with this suite's runs beside the published numbers."),
    ] = None,
    progress: Shown = Progress.auto,
    json: Json = False,
) -> None:
    """Write one HTML page of runs and analyses: sortable tables, pictures, commands.

    The page needs no network.
    """
    from gcbench.core import progress as showing
    from gcbench.report import bundle, page, suite_match
    from gcbench.report.rendering import counted
    from gcbench.results.suites import per_suite
    from gcbench.training import suites

    if target is not None and not math.isfinite(target):
        raise UsageError(f"--target {target}: an accuracy from 0 to 1, or a loss, expected")
    places = folders or [place for place in (RUNS, ANALYSES) if place.exists()] or [RUNS]
    with bundle.opened(places) as paths:
        contents = page.collect(paths)
    gc.freeze()  # the rows stay: looking for garbage among them would take seconds
    asked = [suites.load(name) for name in dict.fromkeys(suite or ())]
    groups = per_suite(contents.runs, {one.name: one.version for one in asked})
    if contents.runs and not groups and not (contents.analyses or contents.timings):
        raise UsageError("all rows are of other versions of their suites; name other folders")
    contents.runs = [run for group in groups.values() for run in group]
    beside = [suite_match.beside(one, contents.runs) for one in asked]
    observers: list[showing.Observer] = []

    def show(done: int, of: int, what: str) -> None:
        if not observers:
            observers.append(showing.observer(progress.value, "report", of))
        observers[0].step(done, what)

    page.check(output)
    try:
        text = page.page(contents, title=title, target=target, suites=beside, progress=show)
    finally:
        for observer in observers:
            observer.close()
    page.write(output, text)
    timings = sum(len(one.rows) for one in contents.timings.values())
    counts = {
        "runs": len(contents.runs),
        "analyses": len(contents.analyses),
        "kernel_timings": timings,
    }
    if json:
        print_json({"page": str(output), "bytes": len(text.encode()), **counts})
    else:
        nouns = zip(counts.values(), ("run", "analysis", "kernel timing"), strict=True)
        summary = ", ".join(counted(count, noun) for count, noun in nouns if count)
        say(f"wrote {output}: {summary}")
    end_with(contents.faults)
