"""Run a fifth of the reference rows again that were made from trees with uncommitted changes.

    python results/recheck.py [--data-dir FOLDER] [--only FILE.parquet]

Rows whose commit ends in "+" were made while files of the checkout differed from it. Of those that
belong to the current version of their suite and were made with this machine's processor, torch and
instruction set, on which the bits depend, every fifth is run again, in the order of their config
hashes; a row agrees if it ends in the same `params_sha256`. `results/reference/recheck.json` gets
the share that was checked and the rows that differ. Finished runs are not run again: the same
command resumes.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from gcbench import cli
from gcbench.core.errors import DivergedError
from gcbench.core.writing import write_atomically
from gcbench.results import rows
from gcbench.training import configuration, suites
from gcbench.training.configuration import Config
from gcbench.training.runner import Runner

REFERENCE = Path(__file__).parent / "reference"
REPORT = REFERENCE / "recheck.json"
EVERY = 5
"""One row in `EVERY` is run again."""


def current(row: dict[str, Any]) -> bool:
    """Return whether a row belongs to the version of its suite that gcbench has."""
    name, _, version = row["suite"].partition("/")
    return name in suites.names() and version == str(suites.load(name).version)


def environment(machine: dict[str, Any], versions: dict[str, Any]) -> tuple[Any, ...]:
    """Return what the bits of a run depend on besides its code and settings."""
    return machine["cpu"], machine["isa"], versions["torch"]


def selected(rows: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], int, int]:
    """Return the rows to run again, the number of those that could be, and of all unclean ones."""
    unclean = [
        row for row in rows if str(row["provenance"].get("commit")).endswith("+") and current(row)
    ]
    here = environment(configuration.machine(), configuration.versions())
    alike = [
        row
        for row in unclean
        if environment(row["provenance"]["machine"], row["provenance"]["versions"]) == here
    ]
    alike.sort(key=lambda row: row["config_hash"])
    return alike[::EVERY], len(alike), len(unclean)


def main() -> None:
    """Make the runs, file by file, and write the report after each of them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data-dir", type=Path, default=None)
    parser.add_argument("--results", type=Path, default=Path("results/runs/recheck"))
    parser.add_argument("--only", action="append", type=Path, help="a file of rows; default all")
    parser.add_argument("--count", action="store_true", help="only say how much there is to do")
    asked = parser.parse_args()
    files = {path.resolve(): path for path in sorted(REFERENCE.glob("*.parquet"))}
    for path in asked.only or ():
        if path.resolve() not in files:
            names = ", ".join(one.name for one in files.values())
            parser.error(f"--only {path}: not a file of {REFERENCE}, which has {names}")
    runner = Runner(asked.results, asked.data_dir, 60.0, "none", force=False)
    report = json.loads(REPORT.read_text()) if REPORT.exists() else {}
    for path in asked.only or files.values():
        again, alike, count = selected(rows.read(path))
        hours = sum(row.get("seconds", 0.0) for row in again) / 3600
        print(
            f"{path.name}: {len(again)} of {alike} rows made with this processor ({count} in all), "
            f"{hours:.1f} hours when they were made"
        )
        if asked.count:
            continue
        configuration.require_clean(path)
        checked: list[dict[str, Any]] = []
        for number, row in enumerate(again, 1):
            config = Config.model_validate(row["config"])
            try:
                now = runner.one(config, f"[{number}/{len(again)}]", leads=True)
            except DivergedError:
                now = json.loads((asked.results / config.run_name / "summary.json").read_text())
            keys = ("config_hash", "compressor", "seed", "params_sha256")
            checked.append(
                {key: row.get(key) for key in keys}
                | {"now": now.get("params_sha256"), "failed": "failed" in row}
                | {"commit": (now.get("provenance") or {}).get("commit")}
            )
            differing = [
                one
                for one in checked
                if one["params_sha256"] != one["now"] or (one["now"] is None) != one["failed"]
            ]
            report.setdefault(path.name, {})[configuration.machine()["cpu"]] = {
                "rows": count,
                "of this processor": alike,
                "selected": len(again),
                "checked": len(checked),
                "differing": differing,
                "hashes": [one["config_hash"] for one in checked],
            }
            write_atomically(REPORT, (json.dumps(report, indent=1) + "\n").encode())


if __name__ == "__main__":
    cli.main(run=main)
