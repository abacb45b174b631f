"""Flip every bit of every file of a small run: no reader may take a result that was changed.

Run by hand, as it takes minutes: `PYTHONPATH=tests python tests/flips.py [--json FILE]`. The test
suite flips a sample (tests/results/test_flips.py); results/TRUST.md has the last figures.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gcbench
from gcbench.core.errors import GcbenchError
from gcbench.results import reader, rows
from gcbench.training import captures, grid, runner
from gcbench.training.store import Run

SETTINGS = {"task": "quadratic", "compressor": "terngrad", "workers": 2, "batch": 4, "steps": 4}


def make(folder: Path) -> tuple[Path, Path]:
    """Make a run with captured gradients, and a file with its row; return both places."""
    plan = captures.Plan((1,))
    table = folder / "rows.parquet"
    created = runner.Runner(
        folder / "runs", None, 60.0, "none", force=False, capture=plan, rows_files=[table]
    )
    created.all(grid.expand(SETTINGS | {"log_every": 2, "eval_every": 2}, None), json=False)
    (run,) = (folder / "runs").iterdir()
    return run, table


def _loaded(place: Path) -> Any:
    (run,) = reader.load([place])
    summary = run.summary.model_dump()
    rest = {key: value for key, value in summary.items() if key not in ("digest", "files")}
    return [rest, run.evaluations()]


def readers(run: Path, table: Path) -> dict[Path, list[Callable[[], Any]]]:
    """Return for each file what reads it: compare and report, resume and suites, histogram."""
    whole = [lambda: _loaded(run), lambda: Run(run).summary]
    result: dict[Path, list[Callable[[], Any]]] = {
        path: whole for path in sorted(run.glob("*")) if path.is_file()
    }
    for path in sorted((run / "captures").iterdir()):
        result[path] = [lambda path=path: captures.Capture(path).digest]  # type: ignore[misc]
    result[table] = [lambda: _loaded(table), lambda: rows.read(table)]
    return result


def outcomes(path: Path, read: list[Callable[[], Any]], bits: Iterator[int]) -> Counter[str]:
    """Flip bits of a file, one at a time, and count what each reader makes of it.

    detected: an error that names the file. unnamed: another error. unchanged: the result is that of
    the undamaged file. silent: it is another one.
    """
    data = path.read_bytes()
    right = [json.dumps(one(), sort_keys=True) for one in read]
    result: Counter[str] = Counter()
    try:
        for bit in bits:
            damaged = bytearray(data)
            damaged[bit // 8] ^= 1 << bit % 8
            path.write_bytes(damaged)
            for one, expected in zip(read, right, strict=True):
                try:
                    same = json.dumps(one(), sort_keys=True) == expected
                    result["unchanged" if same else "silent"] += 1
                except GcbenchError as error:
                    result["detected" if path.name in str(error) else "unnamed"] += 1
    finally:
        path.write_bytes(data)
    return result


def sample(path: Path, count: int, seed: int = 0) -> Iterator[int]:
    """Return `count` bits of a file; all of them where the file has no more."""
    total = 8 * path.stat().st_size
    every = range(total)
    return iter(every if count >= total else random.Random(seed).sample(every, count))


def main() -> None:
    """Flip all bits, print a line per file, and write the figures as JSON if asked to."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--each", type=int, default=2**62, help="at most that many bits per file")
    options = parser.parse_args()
    table: dict[str, dict[str, int]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        run, rows_file = make(Path(scratch))
        for path, read in readers(run, rows_file).items():
            result = outcomes(path, read, sample(path, options.each))
            bits = min(options.each, 8 * path.stat().st_size)
            table[path.name] = {"bits": bits, "readers": len(read), **result}
            print(path.name, table[path.name], flush=True)
    if options.json:
        head = {"gcbench": gcbench.__version__, "settings": SETTINGS}
        options.json.write_text(json.dumps({**head, "files": table}, indent=1) + "\n")


if __name__ == "__main__":
    main()
