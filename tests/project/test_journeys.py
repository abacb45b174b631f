"""Three users follow the guides: a researcher, an engineer and a student.

Each command runs in a folder of its own, in a process of its own, as from a shell.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from commands import ROOT

CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text()
ADVICE = r"Do not compress|Use |Reduce in bf16"
MODULE = """
from torch import nn

def build():
    return nn.Sequential(nn.Linear(1024, 4096), nn.ReLU(), nn.Linear(4096, 1000))
"""


def follow(command: str, folder: Path) -> str:
    """Run a command as it stands, and return what it printed.

    From `folder`, with its own folder for downloads: no data set is at hand.
    """
    name, *words = shlex.split(command)
    assert name in ("gcbench", "python")
    start = ["-m", "gcbench"] if name == "gcbench" else []
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(folder)])}
    environment |= {"COLUMNS": "100", "MPLBACKEND": "agg"}
    done = subprocess.run(
        [sys.executable, *start, *words],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def test_a_researcher_compares_a_method_of_one_file(tmp_path):
    (shown,) = (
        block
        for block in re.findall(r"```python\n(.*?)```", CONTRIBUTING, re.DOTALL)
        if "class Halves(" in block
    )
    (tmp_path / "mine.py").write_text(shown)
    follow("gcbench verify ./mine.py", tmp_path)
    methods = "none,./mine.py,topk:ratio=0.05"
    follow(f"gcbench run --compressor {methods} --task digits --seed 0,1,2", tmp_path)
    rows = json.loads(follow("gcbench compare --json", tmp_path))
    assert {row["compressor_name"]: row["n"] for row in rows} == {"none": 3, "mine": 3, "topk": 3}
    (mine,) = (row for row in rows if row["compressor_name"] == "mine")
    assert mine["difference_low"] <= mine["difference"] <= mine["difference_high"]
    (tmp_path / "mine.py").write_text(shown.replace(".half()", ".half().neg()"))
    with pytest.raises(AssertionError):
        follow("gcbench verify ./mine.py --no-processes", tmp_path)


def test_an_engineer_learns_whether_it_pays(tmp_path):
    (tmp_path / "mypackage.py").write_text(MODULE)
    own = "gcbench advise --module mypackage:build --compute-ms 120 --workers 32 --cluster "
    for command in (
        f"{own} a100x8-25g",
        "gcbench advise --model resnet50 --cluster v100x8-25g --workers 64",
    ):
        answer = follow(command, tmp_path).lstrip().split("\n\n")[0]
        assert re.match(ADVICE, answer), "the answer comes first"
    answer = follow(f"{own} a100x8-25g --cluster-set inter.gbit=1", tmp_path)
    assert re.search(r"^(Use |Reduce in bf16)", answer, re.MULTILINE), "a slow link pays"


def test_a_student_sees_a_papers_figure(tmp_path):
    assert "terngrad-figure3" in follow("gcbench list suites", tmp_path)
    script = ROOT / "results" / "papers" / "terngrad_figure5.py"
    bars = json.loads(follow(f"python {script} --json", tmp_path))["tables"]
    assert sum(len(table["rows"]) for table in bars if table["name"] == "bars") >= 42
    stored = ROOT / "results" / "reference"
    compare = f"gcbench compare --suite terngrad-figure3 {stored} --json"
    published = {row["published"] for row in json.loads(follow(compare, tmp_path))}
    assert 0.9922 in published, "the paper's accuracy with 2 and with 64 workers"
