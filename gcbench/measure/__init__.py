"""The analyses: each asks one question, and answers with tables, a picture and rows on disk.

A module of this package has a frozen pydantic `Settings`, a function that turns it into an
`analysis.Analysis`, and `draw(analysis, path)`, which needs no more than the saved rows.
"""

from __future__ import annotations

MODULES: dict[str, str] = {
    "advice": "gcbench.measure.scale.advice",
    "bandwidth": "gcbench.measure.bandwidth",
    "bounds": "gcbench.measure.bounds",
    "histogram": "gcbench.measure.histogram",
    "scale": "gcbench.measure.scale.prediction",
    "scale-figure5": "gcbench.measure.scale.figure5",
    "scale-link": "gcbench.measure.scale.breakeven",
    "scale-validation": "gcbench.measure.scale.validation",
}
"""Kind of analysis -> the module that makes and draws it."""
