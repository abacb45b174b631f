"""The analyses: each asks one question, and answers with tables, a picture and rows on disk.

A module of this package has a frozen pydantic `Settings`, a function that turns it into an
`analysis.Analysis`, and `draw(analysis, path)`, which needs no more than the saved rows.
"""

from __future__ import annotations

import importlib
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
"""Kind of analysis -> the module that makes and draws it."""


def draw(analysis: Analysis, path: Path) -> None:
    """Draw the picture of an analysis: PNG, SVG or PDF by the ending of `path`.

    Raises:
        UsageError: another ending, or a kind of analysis that this gcbench does not know.
        MissingTableError: the analysis was read from a file that leaves out what is drawn.
        GcbenchError: `path` cannot be written.
    """
    from gcbench.reporting import figures

    if analysis.kind not in MODULES:
        raise unknown("kind of analysis", analysis.kind, MODULES)
    importlib.import_module(MODULES[analysis.kind]).draw(analysis, figures.check(path))
