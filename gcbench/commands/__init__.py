"""The commands of the analyses, one a file: each parses, calls and prints. Nothing heavy here."""

from __future__ import annotations

import json
import sys
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from gcbench.measure.analysis import Analysis

ANALYSES = Path("results/analyses")


class Progress(StrEnum):
    """How to show progress."""

    auto = "auto"
    bar = "bar"
    plain = "plain"
    none = "none"


class Format(StrEnum):
    """How to print tables."""

    table = "table"
    markdown = "markdown"
    csv = "csv"
    json = "json"
    latex = "latex"


DataDir = Annotated[
    Path | None,
    typer.Option(
        envvar="GCBENCH_DATA",
        help="Folder with cifar-10-batches-bin/ and mnist/; without it the download cache serves.",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout.")]
Formatted = Annotated[Format, typer.Option("--format", help="How to print.")]
Shown = Annotated[Progress, typer.Option("--progress", help="How to show progress.")]
Results = Annotated[
    Path, typer.Option("--results", help="Folder below which the analysis has its own.")
]
Plot = Annotated[
    Path | None,
    typer.Option(
        "--plot", help="Draw the picture here, too (.png, .svg, .pdf); its folder has a .png."
    ),
]
Force = Annotated[bool, typer.Option("--force", help="Do again what is done.")]


def say(text: str) -> None:
    """Print a line on stderr."""
    print(text, file=sys.stderr, flush=True)


def print_json(value: Any) -> None:
    """Print a value on stdout as JSON."""
    print(json.dumps(value, indent=2))


def deliver(
    analysis: Analysis, results: Path, plot: Path | None, chosen: Format, *, as_json: bool
) -> None:
    """Save an analysis, print it, and draw it into its folder and to `plot`."""
    from gcbench.measure import analysis as measuring

    folder = measuring.save(analysis, results)
    print(measuring.render(analysis, "json" if as_json else chosen.value))
    for path in filter(None, (folder / f"{analysis.kind}.png", plot)):
        measuring.draw(analysis, path)
        say(f"wrote {path}")
