"""Kinds of analyses and their modules.

An analysis asks one question, and answers with tables, a picture and rows on disk. Its module has a
frozen pydantic `Settings`, a function that returns an `analysis.Analysis` for such settings, and
`draw(analysis, path)`, which uses only the saved rows.

Analyses that reproduce a single published figure are scripts in results/papers/.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import TYPE_CHECKING

from gcbench.core.errors import unknown

if TYPE_CHECKING:
    from gcbench.report.analysis import Analysis

MODULES: dict[str, str] = {
    "advice": "gcbench.predict.advice",
    "bandwidth": "gcbench.profile.bandwidth",
    "bounds": "gcbench.checks.bounds",
    "histogram": "gcbench.profile.histogram",
    "netlab": "gcbench.netlab",
    "links": "gcbench.predict.links",
    "prediction": "gcbench.predict.prediction",
    "validation": "gcbench.predict.validation",
}
"""Kind of analysis -> its module."""


def draw(analysis: Analysis, path: Path) -> None:
    """Draw the picture of an analysis: PNG, SVG or PDF by the ending.

    Raises:
        UsageError: another ending, or a kind of analysis that this gcbench does not know.
        MissingTableError: the analysis was read from a file without the table that is drawn.
        GcbenchError: `path` cannot be written.
    """
    from gcbench.report import figures

    if analysis.kind not in MODULES:
        raise unknown("kind of analysis", analysis.kind, MODULES)
    module = importlib.import_module(MODULES[analysis.kind])
    module.draw(analysis, figures.check(path))
