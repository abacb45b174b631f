"""The analyses: each asks one question, and answers with tables, a picture and rows on disk.

A module of this package has a frozen pydantic `Settings`, a function that turns it into an
`analysis.Analysis`, and `draw(analysis, path)`, which needs no more than the saved rows.

A third party's analysis is one such module and one line: an entry point of the group
`gcbench.studies`, whose name is the kind and the command, and whose value is the module. Its
function is `run(settings, command, observer, ledger)`; its first docstring line, and the types,
defaults and descriptions of the settings' fields, become the command (`gcbench.commands.derived`).
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
    "scale-validation": "gcbench.studies.scale.validation",
}
"""Kind of analysis -> the module that makes and draws it: those of this package."""
GROUP = "gcbench.studies"


def third_parties() -> dict[str, str]:
    """Return the kinds of analyses that others have installed, and their modules.

    A kind that is taken is left out: nobody's analysis stands in for another.
    """
    points = entry_points(group=GROUP)
    return {point.name: point.value for point in points if point.name not in MODULES}


def listed() -> list[dict[str, str]]:
    """Return one row an analysis: its kind, the question that it answers, and its module."""
    rows = []
    for kind, module in (MODULES | third_parties()).items():
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

    known = MODULES | third_parties()
    if analysis.kind not in known:
        raise unknown("kind of analysis", analysis.kind, known)
    module = importlib.import_module(known[analysis.kind])
    return list(module.draw(analysis, figures.check(path)) or [path])
