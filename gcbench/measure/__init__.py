"""The analyses: each asks one question, and answers with tables, a picture and rows on disk.

A module of this package has a frozen pydantic `Settings`, a function that turns it into an
`analysis.Analysis`, and `draw(analysis, path)`, which needs no more than the saved rows.
"""

from __future__ import annotations

MODULES: dict[str, str] = {}
"""Kind of analysis -> the module that makes and draws it."""
