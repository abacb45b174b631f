"""`gcbench list`, `info` and `kernels`: what there is, this machine, and saved kernel timings."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from gcbench.commands import Details, Format, Formatted, Json, print_json
from gcbench.core import output

TIMINGS = Path("results/kernels.json")


class Kind(StrEnum):
    """What to list."""

    compressors = "compressors"
    memories = "memories"
    tasks = "tasks"
    suites = "suites"
    words = "words"
    backends = "backends"


def list_(
    kind: Annotated[Kind, typer.Argument(help="What to list.")] = Kind.compressors,
    details: Details = False,
    json: Json = False,
) -> None:
    """List compressors, memories, tasks or suites; also backends and the terms of the tables."""
    from gcbench.report import listings

    if json:
        print_json(listings.ROWS[kind.value]())
    elif details:
        listings.show(listings.ROWS[kind.value]())
    else:
        listings.show_titles(kind.value, listings.titles(kind.value))


def info(json: Json = False) -> None:
    """Show versions, devices and backends: for a missing backend, also the reason."""
    from gcbench.report import listings

    facts = listings.info()
    if json:
        print_json(facts)
    else:
        listings.show_info(facts)


def kernels(
    file: Annotated[Path, typer.Argument(help="A file from `make bench`.")] = TIMINGS,
    details: Details = False,
    format_: Formatted = Format.table,
    json: Json = False,
) -> None:
    """Show saved kernel timings: relative to copy_, eager torch and least memory traffic."""
    from gcbench.report import kernel_timings as timing

    timings = timing.load(file)
    shown = "json" if json else format_.value
    output.emit(timing.render(timings, shown, details=details))
