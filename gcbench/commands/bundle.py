"""`gcbench bundle`: runs, the sources of their plug-ins and the environment in one file."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from gcbench.commands import RUNS, Progress, Shown, end_with, option, say, watched


def bundle(
    folders: Annotated[
        list[Path] | None,
        typer.Argument(help="Runs, folders of runs, or files of rows.", show_default=str(RUNS)),
    ] = None,
    output: Annotated[Path, typer.Option("-o", "--output", help="The .zip file to write.")] = Path(
        "runs.zip"
    ),
    source: Annotated[
        list[Path] | None,
        option("File or folder with the source of a plug-in. May be repeated.", show_default=False),
    ] = None,
    progress: Shown = Progress.auto,
) -> None:
    """Write runs to one file: with the environment and the sources of their plug-ins.

    `gcbench compare runs.zip` and `gcbench report runs.zip` read it on another machine. They never
    run the sources. Runs that several machines made are kept, for `gcbench compare --by machine`.
    """
    from gcbench.report import bundle as bundling
    from gcbench.report.rendering import counted
    from gcbench.results import reader

    bundling.check(output)
    faults: reader.Faults = []
    with bundling.opened(folders or [RUNS]) as places:
        every = reader.load(places, partial(watched, progress, "bundle"), faults, repeated=True)
        runs = reader.once(every, per_label=True, per_machine=True)
        counts = bundling.write(output, runs, source or ())
    sizes = (counted(count, what.removesuffix("s")) for what, count in counts.items())
    say(f"wrote {output}: {', '.join(sizes)}")
    end_with(faults)
