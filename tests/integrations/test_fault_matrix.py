"""A sample of the fault matrix, its judge, and the published results."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import fault_matrix as matrix
import pytest


def test_a_sample_passes_and_broken_hooks_fail():
    """In a process without threads: the script forks."""
    options = ("--every", "113", "--parallel", "6", "--broken")
    done = subprocess.run(
        [sys.executable, matrix.__file__, *options], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout
    for name in matrix.BROKEN:
        assert f"broken: {name}: " in done.stdout
    assert "not noticed" not in done.stdout


# ---- the judge -----------------------------------------------------------------------------------

LIMITS = matrix.Limits(timeout=1.0, prompt=2.0, bounded=4.0)


def log(*events: tuple[str, float, dict[str, Any]]) -> list[dict[str, Any]]:
    return [{"event": event, "at": at, **values} for event, at, values in events]


MEAN = ("reduced", 1.0, {"what": "mean", "step": 0})
NAN = ("reduced", 1.0, {"what": "nan", "step": 0})
FAULT = ("fault", 2.0, {})
NAMED = ("error", 3.0, {"text": "rank 0: a collective ended because rank 1 failed"})
OWN = ("error", 3.0, {"text": "injected at encode of rank 1"})
FAILED, DONE = ("end", 3.0, {"how": "failed"}), ("end", 3.0, {"how": "done"})
STOPPED = [log(MEAN, NAMED, FAILED), log(MEAN, FAULT, OWN, FAILED)]
FINISHED = [log(MEAN, DONE), log(MEAN, FAULT, OWN, DONE)]
RAISE = matrix.Cell("ddp", "raise", "encode", True, "rank 1", 0)
KILL = matrix.Cell("ddp", "kill", "encode", True, "rank 1", 0)
SKIP = matrix.Cell("ddp", "nonfinite, skip", "forward", True, "rank 1", 0)


@pytest.mark.parametrize(
    ("cell", "logs", "result"),
    [
        (RAISE, STOPPED, "stopped"),
        (RAISE, FINISHED, "equal"),
        (KILL, [log(MEAN, NAMED, FAILED), log(MEAN, FAULT)], "stopped"),
        (SKIP, [log(NAN, DONE), log(FAULT, NAN, DONE)], "skipped"),
    ],
)
def test_a_good_end_passes(cell, logs, result):
    assert matrix.judge(cell, logs, LIMITS)[:2] == (result, [])


@pytest.mark.parametrize(
    ("cell", "logs"),
    [
        (RAISE, [log(MEAN, DONE), log(MEAN, DONE)]),  # there was no fault
        (RAISE, [log(MEAN, DONE), STOPPED[1]]),  # one rank trains on
        (RAISE, [log(MEAN), STOPPED[1]]),  # a rank hangs
        (RAISE, [[], STOPPED[1]]),
        (RAISE, [log(("reduced", 1.0, {"what": "wrong", "step": 0}), DONE), FINISHED[1]]),
        (RAISE, [log(("error", 3.0, {"text": "timed out"}), FAILED), STOPPED[1]]),  # no cause
        (RAISE, [log((*NAMED[:1], 4.5, NAMED[2]), FAILED), STOPPED[1]]),  # late
        (RAISE, [log(NAN, DONE), log(FAULT, NAN, DONE)]),  # NaN without skip
        (SKIP, [log(MEAN, DONE), log(FAULT, NAN, DONE)]),  # skipped on one rank alone
        (KILL, [log(MEAN, FAULT), STOPPED[1]]),
    ],
)
def test_a_bad_end_fails(cell, logs):
    assert matrix.judge(cell, logs, LIMITS)[1]


# ---- published results ---------------------------------------------------------------------------


def test_the_published_results_are_of_these_cells_and_none_fails():
    stored = json.loads(matrix.RESULT.read_text())
    assert [matrix.named(each) for each in stored["cells"]] == matrix.cells()
    assert not any(each["wrong"] for each in stored["cells"])
    assert matrix.summary(stored["cells"], stored["head"]) in matrix.TRUST.read_text()
