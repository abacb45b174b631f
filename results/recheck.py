"""Run a fifth of the reference rows again that were made from trees with uncommitted changes.

    python results/recheck.py [--data-dir FOLDER] [--only FILE.parquet] [--part 1/2]

Rows whose commit ends in "+" were made while files of the checkout differed from it. Of those that
belong to the current version of their suite and were made with this machine's processor, torch and
instruction set, on which the bits depend, a fifth is run again (of another one's: `--cpu`). Rows
that were run again earlier count; the others follow in the order of their config hashes, which is
random. A row agrees if it ends in the same `params_sha256`. `results/reference/recheck.json` gets
the share that was checked and the rows that differ, after each run. What it has is not run again:
the same command resumes, also in another checkout. Processes that share the work have a part each.

MKL chooses its kernels by the maker of the processor. On an AMD processor it uses those for Intel
with the following library, and rows from Intel processors with the same instruction set end in the
same bits:

    echo 'int mkl_serv_intel_cpu_true(void) { return 1; }' | cc -shared -fPIC -x c -o intel.so -
    LD_PRELOAD=$PWD/intel.so python results/recheck.py --cpu "Intel(R) Xeon(R) Processor"
"""

from __future__ import annotations

import argparse
import json
import math
import re
from collections.abc import Container, Iterable
from pathlib import Path
from typing import Any

import filelock

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


def processors(paths: Iterable[Path]) -> list[str]:
    """Return the processors of the rows of all files."""
    return sorted({row["provenance"]["machine"]["cpu"] for p in paths for row in rows.read(p)})


def selected(
    rows: list[dict[str, Any]], before: Container[str], cpu: str
) -> tuple[list[dict[str, Any]], int, int]:
    """Return the rows to run again, the number of those that could be, and of all unclean ones.

    Those that could be were made with the processor `cpu`, and with this machine's instruction set
    and torch. Rows whose config hashes are `before` were run again; they count.
    """
    unclean = [
        row for row in rows if str(row["provenance"].get("commit")).endswith("+") and current(row)
    ]
    here = environment(configuration.machine() | {"cpu": cpu}, configuration.versions())
    alike = [
        row
        for row in unclean
        if environment(row["provenance"]["machine"], row["provenance"]["versions"]) == here
    ]
    alike.sort(key=lambda row: (row["config_hash"] not in before, row["config_hash"]))
    done = sum(row["config_hash"] in before for row in alike)
    again = alike[: max(done, math.ceil(len(alike) / EVERY))]
    return sorted(again, key=lambda row: row["config_hash"]), len(alike), len(unclean)


def read_report() -> dict[str, Any]:
    """Return the report: file, processor, and the results of that file's rows there."""
    return json.loads(REPORT.read_text()) if REPORT.exists() else {}


def checked(name: str, cpu: str) -> list[str]:
    """Return the config hashes of a file's rows that were run again on a processor."""
    hashes: list[str] = read_report().get(name, {}).get(cpu, {}).get("hashes", [])
    return hashes


def add(
    name: str, cpu: str, counts: dict[str, int], row: dict[str, Any], now: dict[str, Any]
) -> None:
    """Add a row of `cpu` that was run again, whose summary is `now`, to the report.

    `elsewhere` in the report: the processors that ran rows of another one, by config hash.
    """
    with filelock.FileLock(REPORT.with_name(f".{REPORT.name}.lock")):
        report = read_report()
        before = report.setdefault(name, {}).get(cpu, {})
        hashes = sorted({*before.get("hashes", []), row["config_hash"]})
        differing = before.get("differing", [])
        if row.get("params_sha256") != now.get("params_sha256"):  # a failed run has none
            keys = ("config_hash", "compressor", "seed", "params_sha256")
            differing.append(
                {key: row.get(key) for key in keys}
                | {"now": now.get("params_sha256"), "failed": "failed" in row}
                | {"commit": (now.get("provenance") or {}).get("commit")}
            )
        elsewhere = before.get("elsewhere", {})
        if (there := (now.get("provenance") or {}).get("machine", {}).get("cpu", cpu)) != cpu:
            elsewhere[row["config_hash"]] = there
        results = {"checked": len(hashes), "differing": differing, "hashes": hashes}
        if elsewhere:
            results["elsewhere"] = elsewhere
        report[name][cpu] = counts | results
        write_atomically(REPORT, (json.dumps(report, indent=1) + "\n").encode())


def main() -> None:
    """Make the runs, file by file, and write the report after each of them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data-dir", type=Path, default=None)
    parser.add_argument("--results", type=Path, default=Path("results/runs/recheck"))
    parser.add_argument("--only", action="append", type=Path, help="a file of rows; default all")
    parser.add_argument("--count", action="store_true", help="only say how much there is to do")
    parser.add_argument("--cpu", help="the processor of the rows; default this machine's")
    parser.add_argument("--part", default="1/1", help="I/N: each Nth row from the Ith; default all")
    asked = parser.parse_args()
    if not (match := re.fullmatch(r"([1-9]\d*)/([1-9]\d*)", asked.part)):
        parser.error(f"--part {asked.part}: not of the form I/N, such as 1/2")
    if (part := int(match[1])) > (parts := int(match[2])):
        parser.error(f"--part {asked.part}: there are {parts} parts")
    files = {path.resolve(): path for path in sorted(REFERENCE.glob("*.parquet"))}
    for path in asked.only or ():
        if path.resolve() not in files:
            names = ", ".join(one.name for one in files.values())
            parser.error(f"--only {path}: not a file of {REFERENCE}, which has {names}")
    if asked.cpu and asked.cpu not in (cpus := processors(files.values())):
        parser.error(f"--cpu {asked.cpu}: no row is from it, but from {', '.join(cpus)}")
    runner = Runner(asked.results, asked.data_dir, 60.0, "none", force=False)
    cpu = asked.cpu or configuration.machine()["cpu"]
    for path in asked.only or files.values():
        before = checked(path.name, cpu)
        again, alike, count = selected(rows.read(path), before, cpu)
        left = [row for row in again if row["config_hash"] not in before]
        hours = sum(row.get("seconds", 0.0) for row in left) / 3600
        print(
            f"{path.name}: {len(again)} of {alike} rows made with {cpu} ({count} in all); "
            f"left {len(left)}, {hours:.1f} hours when they were made"
        )
        if asked.count:
            continue
        configuration.require_clean(path)
        counts = {"rows": count, "of this processor": alike, "selected": len(again)}
        for number, row in enumerate(again, 1):
            if number % parts != part % parts or row["config_hash"] in checked(path.name, cpu):
                continue
            config = Config.model_validate(row["config"])
            try:
                now = runner.one(config, f"[{number}/{len(again)}]", leads=True)
            except DivergedError:
                now = json.loads((asked.results / config.run_name / "summary.json").read_text())
            add(path.name, cpu, counts, row, now)


if __name__ == "__main__":
    cli.main(run=main)
