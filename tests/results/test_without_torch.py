"""Stored results are read, compared and printed without torch, and with few calls."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from builders import summary, write
from commands import ROOT

from gcbench.results import rows

COUNT = """
import json, sys
calls = 0
def count(frame, event, argument):
    global calls
    path = frame.f_code.co_filename
    calls += event == "call" and path.startswith(ROOT) and ".venv" not in path
ROOT, *words = sys.argv[1:]
sys.argv = ["gcbench", *words]
from gcbench.__main__ import main
sys.setprofile(count)
try:
    main()
finally:
    sys.setprofile(None)
    heavy = {"torch", "scipy", "scipy.stats", "matplotlib"} & sys.modules.keys()
    print(json.dumps([calls, sorted(heavy)]), file=sys.stderr)
"""


def compared(place: Path, *words: str) -> tuple[int, list[str]]:
    """Return the Python calls into this project's files, and the large packages imported."""
    command = [sys.executable, "-c", COUNT, str(ROOT), "compare", str(place), *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    calls, heavy = json.loads(done.stderr.splitlines()[-1])
    return calls, heavy


def test_two_runs_take_few_calls_and_no_torch(tmp_path: Path) -> None:
    method = summary("topk", 0, 0.6)
    method["config"] |= {"memory": "residual", "memory_options": {}}
    calls, heavy = compared(write(tmp_path, summary("none"), method))
    assert calls < 5000
    assert heavy == []


def test_calls_grow_with_the_rows_and_not_with_their_square(tmp_path: Path) -> None:
    def many(count: int) -> int:
        runs = [rows.row(summary("none"), [], "")]
        for number in range(count):
            one = summary("topk", 0, 0.5 + number / 10**4, payload_bytes_up=10**6 + number)
            one["config"] |= {"memory": "residual", "options": {"ratio": (number + 1) / 10**4}}
            runs.append(rows.row(one, [], ""))
        rows.write(tmp_path / f"{count}.parquet", runs)
        return compared(tmp_path / f"{count}.parquet", "--format", "csv")[0]

    few, more = many(200), many(800)
    assert (more - few) / 600 < 1.5 * few / 200
