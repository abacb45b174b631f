"""The analyses: each asks one question, and answers with tables, a picture and rows on disk.

A module of this package has a frozen pydantic `Settings`, a function that returns an
`analysis.Analysis` for such settings, and `draw(analysis, path)`, which uses only the saved rows.

A third party's analysis is one such module and one line: an entry point of the group
`gcbench.studies`, whose name is the kind and the command, and whose value is the module. The
module's function is `run(settings, command, observer, ledger)`: `command` is the command line for
the record, `observer` shows progress (`training.progress`), `ledger` keeps finished parts
(`reporting.analysis`). A function `steps(settings)`, if there is one, says how many steps the
progress has. The command (`gcbench.commands.derived`) is made from the module's docstring, and from
the types, defaults and descriptions of the settings' fields. If `run` has a parameter `data_dir` it
gets the folder of the data sets, and the command has `--data-dir`. Table, picture and section in a
report are made from the analysis that `run` returns.
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
"""Kind of analysis -> its module, for analyses whose command is written out in `commands`."""
DERIVED: dict[str, str] = {
    "densities": "gcbench.studies.densities",
    "fft-range": "gcbench.studies.fft_range",
    "number-formats": "gcbench.studies.number_formats",
    "positions": "gcbench.studies.positions",
    "ternary-noise": "gcbench.studies.ternary_noise",
}
"""The same for analyses whose command is generated from their settings, as a third party's is."""
GROUP = "gcbench.studies"


def third_parties() -> dict[str, str]:
    """Return the kinds of analyses that other packages register, and their modules.

    Those with the name of an analysis of this package are left out: they must not replace it.
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
        except (Exception, SystemExit) as error:  # a faulty module must not break the list
            told = f"cannot be used: {type(error).__name__}: {error}"
        rows.append({"name": kind, "what": told.strip().partition("\n")[0], "module": module})
    return rows


def draw(analysis: Analysis, path: Path) -> list[Path]:
    """Draw the pictures of an analysis and return their files: PNG, SVG or PDF by the ending.

    The first file is `path`; some analyses write further pictures beside it.

    Raises:
        UsageError: another ending, or a kind of analysis that this gcbench does not know.
        MissingTableError: the analysis was read from a file without the table that is drawn.
        GcbenchError: `path` cannot be written.
    """
    from gcbench.reporting import figures

    modules = known()
    if analysis.kind not in modules:
        raise unknown("kind of analysis", analysis.kind, modules)
    module = importlib.import_module(modules[analysis.kind])
    return list(module.draw(analysis, figures.check(path)) or [path])
