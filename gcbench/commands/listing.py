"""`gcbench list`, `info` and `kernels`: what there is, this machine, and saved kernel timings."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from gcbench.commands import Details, Json, print_json
from gcbench.core import output

TIMINGS = Path("results/kernels.json")
S = str | None


class Kind(StrEnum):
    """What to list."""

    compressors = "compressors"
    memories = "memories"
    tasks = "tasks"
    suites = "suites"
    words = "words"
    backends = "backends"
    analyses = "analyses"


class KernelFormat(StrEnum):
    """The formats in which timings are printed."""

    table = "table"
    markdown = "markdown"
    json = "json"


def list_(
    kind: Annotated[Kind, typer.Argument(help="What to list.")] = Kind.compressors,
    details: Details = False,
    json: Json = False,
) -> None:
    """List compressors, tasks, suites: also memories, backends, analyses, terms of the tables."""
    from gcbench import studies
    from gcbench.report import listings

    analyses = kind is Kind.analyses
    rows = studies.listed if analyses else listings.ROWS[kind.value]
    if json:
        print_json(rows())
    elif details:
        listings.show(rows())
    else:
        titles = studies.listed() if analyses else listings.titles(kind.value)
        listings.show_titles(kind.value, titles)


def info(json: Json = False) -> None:
    """Show versions, devices and backends; for each missing backend the reason."""
    from gcbench.report import listings

    facts = listings.info()
    if json:
        print_json(facts)
    else:
        listings.show_info(facts)


def kernels(
    file: Annotated[Path, typer.Argument(help="What `make bench` wrote.")] = TIMINGS,
    op: Annotated[
        S, typer.Option(help="Only operations and methods whose name contains this.")
    ] = None,
    backend: Annotated[
        S, typer.Option(help="Only backends whose name begins with this, e.g. cpu.")
    ] = None,
    size: Annotated[S, typer.Option(help="Only this size, e.g. 25e6 or resnet50.")] = None,
    threads: Annotated[S, typer.Option(help="Only this number of threads.")] = None,
    details: Details = False,
    format_: Annotated[
        KernelFormat, typer.Option("--format", help="How to print.")
    ] = KernelFormat.table,
    json: Json = False,
) -> None:
    """Show saved timings of kernels: beside copy_, eager torch and the least memory traffic."""
    from gcbench.report import kernel_timings as timing

    timings = timing.load(file)
    rows = timing.select(timings.rows, size=size, threads=threads, op=op, backend=backend)
    text = timing.render(timings, rows, "json" if json else format_.value, details=details)
    output.emit(text)
