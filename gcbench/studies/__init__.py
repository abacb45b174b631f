"""The analyses: each asks one question, and answers with tables, a picture and rows on disk.

A module of this package has a frozen pydantic `Settings`, a function that turns it into an
`analysis.Analysis`, and `draw(analysis, path)`, which needs no more than the saved rows.

A third party's analysis is one such module and one line: an entry point of the group
`gcbench.studies`, whose name is the kind and the command, and whose value is the module. Its
function is `run(settings, command, observer, ledger)`; its first docstring line, and the types,
defaults and descriptions of the settings' fields, become the command (`gcbench.commands.derived`).
A `run` with a parameter `data_dir` gets the folder of the data sets: its command has `--data-dir`.
The table, the picture and the section in a report follow from the analysis that it returns.
"""

from __future__ import annotations

import importlib
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING

from gcbench.core.errors import unknown

if TYPE_CHECKING:
    from gcbench.reporting.analysis import Analysis

MODULES: dict[str, str] = {
    "advice": "gcbench.studies.scale.advice",
    "bandwidth": "gcbench.studies.bandwidth",
    "bounds": "gcbench.studies.bounds",
    "histogram": "gcbench.studies.histogram",
    "scale": "gcbench.studies.scale.prediction",
    "scale-figure5": "gcbench.studies.scale.figure5",
    "scale-link": "gcbench.studies.scale.breakeven",
    "scale-pays": "gcbench.studies.scale.links",
    "scale-validation": "gcbench.studies.scale.validation",
}
"""Kind of analysis -> the module that makes and draws it: those with a command by hand."""
DERIVED: dict[str, str] = {
    "densities": "gcbench.studies.densities",
    "fft-range": "gcbench.studies.fft_range",
    "number-formats": "gcbench.studies.number_formats",
    "positions": "gcbench.studies.positions",
    "ternary-noise": "gcbench.studies.ternary_noise",
}
"""Those of this package whose command is made from their settings, as a third party's is."""
GROUP = "gcbench.studies"


def third_parties() -> dict[str, str]:
    """Return the kinds of analyses that others have installed, and their modules.

    A kind that is taken is left out: nobody's analysis stands in for another.
    """
    points = entry_points(group=GROUP)
    taken = MODULES | DERIVED
    return {point.name: point.value for point in points if point.name not in taken}


def known() -> dict[str, str]:
    """Return every kind of analysis, and its module."""
    return MODULES | DERIVED | third_parties()


def listed() -> list[dict[str, str]]:
    """Return one row an analysis: its kind, the question that it answers, and its module."""
    rows = []
    for kind, module in known().items():
        try:
            told = importlib.import_module(module).__doc__ or ""
        except Exception as error:  # a listing of what there is must not end with a broken module
            told = f"cannot be used: {type(error).__name__}: {error}"
        rows.append({"name": kind, "what": told.strip().partition("\n")[0], "module": module})
    return rows


def draw(analysis: Analysis, path: Path) -> list[Path]:
    """Draw the pictures of an analysis and return their files: PNG, SVG or PDF by the ending.

    The first is `path`; an analysis whose `draw` returns more files than one has written the others
    beside it.

    Raises:
        UsageError: another ending, or a kind of analysis that this gcbench does not know.
        MissingTableError: the analysis was read from a file that leaves out what is drawn.
        GcbenchError: `path` cannot be written.
    """
    from gcbench.reporting import figures

    modules = known()
    if analysis.kind not in modules:
        raise unknown("kind of analysis", analysis.kind, modules)
    module = importlib.import_module(modules[analysis.kind])
    return list(module.draw(analysis, figures.check(path)) or [path])
