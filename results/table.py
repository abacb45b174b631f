"""Print rows of a JSON file, or of stdin (-), as a Markdown table, for pages.

python results/table.py FILE [--table NAME] [--where COLUMN=TEXT] [--scale COLUMN=FACTOR]
  COLUMN[=HEADING] ...

Without --table the rows are the file itself, or its entry "rows"; with it they are those of an
analysis' table. A column may name nested entries: config.hook. Numbers get three digits.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any


def rows_of(document: Any, table: str | None) -> list[dict[str, Any]]:
    """Return the rows of a file."""
    if table is not None:
        (match,) = [each for each in document["tables"] if each["name"] == table]
        return list(match["rows"])
    return list(document["rows"] if isinstance(document, dict) else document)


def value(row: Any, path: str) -> Any:
    """Return an entry of a row, None where it is missing."""
    for key in path.split("."):
        row = row.get(key) if isinstance(row, dict) else None
    return row


def cell(entry: Any, factor: float) -> str:
    """Return an entry as text."""
    if isinstance(entry, int | float) and not isinstance(entry, bool):
        entry *= factor
        return f"{entry:,.0f}" if abs(entry) >= 1000 else f"{entry:.3g}"
    if isinstance(entry, list):
        return ", ".join(map(str, entry))
    if isinstance(entry, bool):
        return "yes" if entry else "no"
    return "-" if entry is None else str(entry).replace("|", "&#124;")


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file")
    parser.add_argument("--table")
    parser.add_argument("--where", action="append", default=[])
    parser.add_argument("--scale", action="append", default=[])
    parser.add_argument("columns", nargs="+")
    arguments = parser.parse_args()
    text = (
        sys.stdin.read()
        if arguments.file == "-"
        else Path(arguments.file).read_text(encoding="utf-8")
    )
    rows = rows_of(json.loads(text), arguments.table)
    for key, _, text in (word.partition("=") for word in arguments.where):
        rows = [row for row in rows if text in str(value(row, key))]
    factors = {key: float(factor) for key, _, factor in (w.partition("=") for w in arguments.scale)}
    columns = [word.partition("=") for word in arguments.columns]
    print("|".join(["", *(heading or path for path, _, heading in columns), ""]))
    print("|" + "-|" * len(columns))
    for row in rows:
        cells = (cell(value(row, path), factors.get(path, 1.0)) for path, _, _ in columns)
        print("|".join(["", *cells, ""]))


if __name__ == "__main__":
    main()
