"""The index of several suites' rows: what there is of each."""

from __future__ import annotations

import shlex
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

from gcbench.report.rendering import Column, block, csv_text, json_text
from gcbench.results.reader import Run
from gcbench.results.suites import head


def index(groups: Mapping[str, Sequence[Run]], places: Sequence[Path], format: str) -> str:
    """Return one row per suite and the command that shows one of them, in a format of tables.

    `groups` as `gcbench.results.suites.per_suite` returns them; runs of no suite have a row, too.
    """
    rows = [
        {
            "suite": name or None,
            "title": head(name)["title"] if name else "runs of no suite",
            "methods": len({run.summary.compressor_name for run in runs}),
            "rows": len({run.method for run in runs if not run.is_trial}),
            "runs": len(runs),
        }
        for name, runs in groups.items()
    ]
    if format == "json":
        return json_text(rows)
    if format == "csv":
        return csv_text(rows)
    columns = [Column(key, [str(row[key] or "-") for row in rows]) for key in rows[0]]
    width = shutil.get_terminal_size((200, 24)).columns
    command = shlex.join(["gcbench", "compare", *map(str, places), "--suite", "NAME"])
    return block(f"{len(rows)} suites. Show one: {command}", columns, 2, format, width)
