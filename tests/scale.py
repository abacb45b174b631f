"""CPU time and memory of `compare` and `report` on 100,000 rows, in several shapes.

Run by hand, as it takes minutes: `PYTHONPATH=tests python tests/scale.py [--vary name ...]`. It
prints the table of results/TRUST.md. The test suite counts the work of these commands instead
(tests/report/test_many_rows.py).
"""

from __future__ import annotations

import argparse
import datetime
import multiprocessing
import os
import platform
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from gcbench.results import rows

SOURCE = Path(__file__).parents[1] / "results" / "reference" / "main.parquet"
SHAPES = ((1, 100_000), (1_000, 100), (20_000, 5), (100_000, 1))
"""Methods and seeds per method."""
VARY = ("field", "name", "lr")
"""What differs among methods: a field of one compressor, the compressor's name, or the rate."""


def stored(
    methods: int, seeds: int, vary: str = "field", suite: str = ""
) -> Iterator[rows.StoredRun]:
    """Yield rows that vary one committed row of `topk`, and uncompressed rows of the same seeds.

    The accuracies of a method are normally distributed around its mean, with a standard deviation
    of 0.3 points; its payload differs from that of the others.
    """
    committed = rows.read(SOURCE)
    sparse, dense = (
        next(one for one in committed if one["compressor_name"] == name and one["config"]["test"])
        for name in ("topk", "none")
    )
    for method in range(methods):
        base = dense if method == 0 else sparse
        ratio = 0.5 * (method + 1) / methods
        draw = random.Random(method)
        mean = 0.6 + 0.1 * draw.random()
        for seed in range(seeds):
            yield _varied(base, method, ratio, seed, mean + 0.003 * draw.gauss(0, 1), vary, suite)


def _varied(
    base: rows.StoredRun, method: int, ratio: float, seed: int, value: float, vary: str, suite: str
) -> rows.StoredRun:
    config = {**base["config"], "seed": seed}
    row: dict[str, Any] = {**base, "seed": seed, "config": config, "suite": suite}
    last = {**base["evaluations"][-1], "test_accuracy": value}
    row |= {"test_accuracy": value, "evaluations": [*base["evaluations"][:-1], last]}
    row["config_hash"] = f"{method:06x}{seed:04x}"
    if method == 0:
        return row
    row["payload_bytes_up"] = base["payload_bytes_up"] * (1 + ratio)
    if vary == "field":
        config["options"] = {"ratio": ratio}
        row["compressor"] = f"TopK(ratio={ratio!r})"
    elif vary == "name":
        row["compressor_name"] = config["compressor"] = f"method{method}"
        row["compressor"] = f"Method{method}()"
    else:
        config["lr"] = ratio
    return row


def write(path: Path, methods: int, seeds: int, vary: str, suite: str) -> None:
    """Write the rows of `stored` to a file."""
    rows.write(path, list(stored(methods, seeds, vary, suite)))


class Used(NamedTuple):
    """CPU seconds and the largest resident memory, in MB, of a finished command."""

    seconds: float
    megabytes: float


def measure(*command: str) -> Used:
    """Return what `python -m gcbench` and these arguments use; CalledProcessError if it fails."""
    process = subprocess.Popen(
        [sys.executable, "-m", "gcbench", *command], stdout=subprocess.DEVNULL
    )
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command)
    return Used(usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024)


def main() -> None:
    """Print a line of Markdown for each shape and command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--vary", nargs="+", choices=VARY, default=VARY[:1])
    parser.add_argument("--shapes", nargs="+", default=[f"{m}x{s}" for m, s in SHAPES])
    parser.add_argument("--suite", default="", help='label of the rows, such as "main/5"')
    options = parser.parse_args()
    spawned = multiprocessing.get_context("spawn")
    today = datetime.datetime.now(datetime.UTC).date()
    print(
        f"{today}, {os.cpu_count()} cores, {platform.machine()}, CPython {sys.version.split()[0]}"
    )
    print("\n| methods x seeds | differ in | command | CPU s | peak MB |\n|-|-|-|-|-|")
    with tempfile.TemporaryDirectory() as scratch:
        table, page = Path(scratch) / "rows.parquet", Path(scratch) / "page.html"
        for shape in options.shapes:
            methods, seeds = map(int, shape.split("x"))
            for vary in options.vary:
                # Linux counts the parent's memory before exec as the child's, so this one is small.
                writer = spawned.Process(
                    target=write, args=(table, methods, seeds, vary, options.suite)
                )
                writer.start()
                writer.join()
                for command in (
                    ("compare", str(table)),
                    ("report", str(table), "--output", str(page)),
                ):
                    used = measure(*command)
                    print(
                        f"| {methods:,} x {seeds} | {vary} | {command[0]} | {used.seconds:.1f} | "
                        f"{used.megabytes:.0f} |",
                        flush=True,
                    )


if __name__ == "__main__":
    main()
