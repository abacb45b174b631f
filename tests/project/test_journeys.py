"""Three users follow README to the letter: a researcher, an engineer and a student.

Every command of its first screen is run, each door in a folder of its own, where nothing of gcbench
lies; those of hours are named with the reason.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from commands import ROOT

README = (ROOT / "README.md").read_text()
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text()
HOURS = {
    "gcbench run --suite terngrad-figure3": "trains LeNet 42 times, 5,000 steps each",
    "gcbench run --compressor none,terngrad --task cifar10 --workers 4": "3,000 steps, twice",
    "gcbench histogram --task cifar10 --network resnet20 --steps 400 --seed 0,1,2": "a training",
}
TIERS = "gcbench compare --suite main results/reference"
MODULE = """
from torch import nn

def build():
    return nn.Sequential(nn.Linear(1024, 4096), nn.ReLU(), nn.Linear(4096, 1000))
"""


def first_screen() -> str:
    return README[: README.index("\n## Results")]


def commands(text: str) -> list[str]:
    """Return the commands of a text, in its order: indented lines, and words in backticks."""
    found = re.findall(r"^    (gcbench [^#\n]+)|`(gcbench [^`]+)`", text, re.MULTILINE)
    return [(line or words).strip() for line, words in found]


def door(title: str) -> list[str]:
    (row,) = re.findall(rf"^\| \*\*{re.escape(title)}\*\* \| (.*) \|$", README, re.MULTILINE)
    return commands(row)


def follow(command: str, folder: Path) -> str:
    """Run a command as it stands, and return what it printed.

    From `folder`, with its own folder for downloads: no data set is at hand.
    """
    name, *words = shlex.split(command)
    assert name == "gcbench"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(folder)])}
    environment |= {"COLUMNS": "100", "MPLBACKEND": "agg"}
    done = subprocess.run(
        [sys.executable, "-m", "gcbench", *words],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout + done.stderr


def test_every_command_of_the_first_screen_is_followed_or_takes_hours():
    """What the tests below run, and what they leave out, is all that there is."""
    doors = [
        "compare a method of my own",
        "know whether it pays on my cluster",
        "rerun a paper's table or figure",
        "look at real gradients",
    ]
    followed = {command for title in doors for command in door(title)}
    followed |= {"gcbench advise --model resnet50 --cluster v100x8-25g --workers 64"}
    followed |= {"gcbench list words", TIERS}
    assert {*commands(first_screen())} - followed - {*HOURS} == set()
    assert {*HOURS} <= {*commands(first_screen())}


def test_a_researcher_compares_a_method_of_one_file(tmp_path):
    (shown,) = (
        block
        for block in re.findall(r"```python\n(.*?)```", CONTRIBUTING, re.DOTALL)
        if "class Halves(" in block
    )
    (tmp_path / "mine.py").write_text(shown)
    verify, run, compare = door("compare a method of my own")
    assert re.search(r"mine: \d+ hold, 0 fail", follow(verify, tmp_path))
    follow(run, tmp_path)
    told = follow(compare, tmp_path)
    rows = {line.split()[0]: line for line in told.splitlines() if "± 0." in line}
    assert set(rows) == {"none", "mine", "topk"}
    assert "[" in rows["mine"], "its difference to none has an interval"
    assert "Equal in all 3 rows: n 3" in told
    (tmp_path / "mine.py").write_text(shown.replace(".half()", ".half().neg()"))
    with pytest.raises(AssertionError, match=r"[1-9]\d* fail"):
        follow(f"{verify} --no-processes", tmp_path)


def test_an_engineer_learns_whether_it_pays(tmp_path):
    (tmp_path / "mypackage.py").write_text(MODULE)
    (own,) = door("know whether it pays on my cluster")
    top = next(line for line in commands(first_screen()) if line.startswith("gcbench advise"))
    for command in (own, top):
        answer = follow(command, tmp_path).lstrip().split("\n\n")[0]
        assert re.match(r"Do not compress|Use |Reduce in bf16", answer), "the answer comes first"
    slow = own.replace("a100x8-25g", "a100x8-25g --cluster-set inter.gbit=1")
    answer = follow(slow, tmp_path)
    assert re.search(r"^(Use |Reduce in bf16)", answer, re.MULTILINE), "on a slow link another"


def test_a_student_sees_a_papers_figure(tmp_path):
    listed, run, compare, figure = door("rerun a paper's table or figure")
    assert "terngrad-figure3" in follow(listed, tmp_path)
    told = follow(figure, tmp_path)
    assert re.search(r"42 bars|42 of", told)
    rows = ROOT / "results" / "mnist-figure3.json"
    shown = follow(compare.replace("results/runs", str(rows)), tmp_path)
    assert "99.22" in shown, "the published number stands beside"
    assert run in HOURS


def test_the_tiers_are_printed_without_running_anything():
    """In a checkout, where the rows are."""
    told = follow(TIERS, ROOT)
    assert "tier=about 2 bits" in told
    assert "terngrad" in told


def test_words_are_explained(tmp_path):
    told = follow("gcbench list words", tmp_path)
    for word in ("bucket", "payload", "wire", "two-shot", "error feedback"):
        assert word in told
