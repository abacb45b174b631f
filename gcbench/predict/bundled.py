"""Results that are part of the package: reference rows, and measured times of methods.

A wheel has them in `gcbench/results`, a source checkout in `results` beside the package.
"""

from __future__ import annotations

from pathlib import Path

import gcbench
from gcbench.results import reader

ROWS = "reference"
"""The folder of reference rows."""


def path(name: str) -> Path | None:
    """Return a file or folder of the packaged results; None if it is missing."""
    package = Path(gcbench.__file__).parent
    places = (root / "results" / name for root in (package, package.parent))
    return next((place for place in places if place.exists()), None)


def rows() -> list[Path]:
    """Return the packaged files of reference rows."""
    folder = path(ROWS)
    return [] if folder is None else reader.row_files(folder)


def display_name(place: Path) -> str:
    """Return a path as messages show it: packaged files by name only, others in full."""
    packaged = {file.resolve() for file in rows()}
    return f"gcbench's {place.name}" if place.resolve() in packaged else str(place)
