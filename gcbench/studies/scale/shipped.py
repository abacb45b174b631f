"""Results that are part of the package: reference rows, and the measurement of codecs.

A wheel has them in `gcbench/results`, a source checkout in `results` beside the package.
"""

from __future__ import annotations

from pathlib import Path

import gcbench
from gcbench.results import reader

ROWS = "reference"
"""The folder of committed rows."""


def path(name: str) -> Path | None:
    """Return a file or folder of the committed results; None where it is missing."""
    package = Path(gcbench.__file__).parent
    places = (root / "results" / name for root in (package, package.parent))
    return next((place for place in places if place.exists()), None)


def rows() -> list[Path]:
    """Return the files of reference rows in the package; none if it has none."""
    folder = path(ROWS)
    return [] if folder is None else reader.row_files(folder)


def name_of(place: Path) -> str:
    """Return a path as messages show it: files of the package by name only, others in full."""
    brought = {file.resolve() for file in rows()}
    return f"gcbench's own {place.name}" if place.resolve() in brought else str(place)
