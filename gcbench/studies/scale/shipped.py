"""Results that come with the package: reference rows and the measurement of codecs.

A wheel has them in `gcbench/results`, a source checkout in `results` beside the package.
"""

from __future__ import annotations

from pathlib import Path

import gcbench
from gcbench.reporting import reader

ROWS = "reference"
"""The folder of committed rows."""


def path(name: str) -> Path | None:
    """Return a file or folder of the committed results; None where it is missing."""
    package = Path(gcbench.__file__).parent
    places = (root / "results" / name for root in (package, package.parent))
    return next((place for place in places if place.exists()), None)


def rows() -> list[Path]:
    """Return the files of reference rows that the package brings."""
    folder = path(ROWS)
    return [] if folder is None else reader.row_files(folder)


def name_of(place: Path) -> str:
    """Return how to tell a reader of a path: what the package brings by its name alone."""
    brought = {file.resolve() for file in rows()}
    return f"gcbench's own {place.name}" if place.resolve() in brought else str(place)
