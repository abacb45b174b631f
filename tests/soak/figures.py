"""Figures of a soak: what it found, with the command, the machine, the commit and the date."""

from __future__ import annotations

import json
import shlex
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from gcbench.training import configuration


def save(path: Path, began: datetime, found: dict[str, Any]) -> None:
    """Write the figures of a soak that began then (UTC) to `path`, a JSON file."""
    figures = {
        "command": "python " + shlex.join(sys.argv),
        "began": began.isoformat(timespec="seconds"),
        "ended": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": configuration.commit(),
        "machine": configuration.machine(),
        "versions": configuration.versions(),
        **found,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    whole = path.with_name(path.name + ".part")
    whole.write_text(json.dumps(figures, indent=1) + "\n")
    whole.replace(path)
