"""A third party's analysis: one module and one entry point; command, table, picture and report."""

from __future__ import annotations

import json

import pytest
from commands import gcbench_each, invoke

from gcbench import studies

MODULE = '''"""How many zeros there are: a question of somebody else's.

Counts the zeros of numbers.
"""

from pydantic import BaseModel, ConfigDict, Field

from gcbench.reporting import figures
from gcbench.reporting.analysis import Analysis, Shown, Table, provenance


class Settings(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    numbers: list[int] = Field(default=[0, 1], description="Numbers to look at.")
    most: int = Field(default=9, ge=1, description="Zeros that are too many.")
    word: str = Field(description="What to call it.")


def run(settings, command, observer, ledger):
    zeros = sum(number == 0 for number in settings.numbers)
    rows = [{"word": settings.word, "zeros": zeros}]
    shown = [Shown(field="word", heading="word"), Shown(field="zeros", heading="zeros")]
    return Analysis(
        kind="zeros",
        settings=settings.model_dump(mode="json"),
        command=command,
        provenance=provenance(),
        conclusions=[f"{zeros} zeros."],
        tables=[Table(name="zeros", title="Zeros.", shown=shown, rows=rows)],
        failed=zeros > settings.most,
    )


def draw(analysis, path):
    figure, axes = figures.plt.subplots() if hasattr(figures, "plt") else _subplots()
    axes.bar(["zeros"], [analysis.table("zeros").rows[0]["zeros"]])
    figure.savefig(path)


def _subplots():
    import matplotlib.pyplot as plt

    return plt.subplots()
'''
BROKEN = '''"""Broken."""

raise RuntimeError("not today")
'''


@pytest.fixture
def site(tmp_path):
    """A folder with somebody's package as pip would leave it, to be put on PYTHONPATH."""
    info = tmp_path / "site" / "somebodys-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: somebodys\nVersion: 1.0\n")
    points = "zeros = zeros_study\nbroken = broken_study\nbounds = zeros_study\n"
    (info / "entry_points.txt").write_text(f"[gcbench.studies]\n{points}")
    (info.parent / "zeros_study.py").write_text(MODULE)
    (info.parent / "broken_study.py").write_text(BROKEN)
    return str(info.parent)


def test_one_module_and_one_entry_point(site, tmp_path):
    results, page = tmp_path / "r", tmp_path / "report.html"
    own = ("zeros", "--results", results)
    helped, done, printed, usage, failed, reported, listed, broken = gcbench_each(
        ("zeros", "--help"),
        (*own, "--word", "nothing", "--numbers", "0,0,3"),
        (*own, "--word", "x", "--json"),
        ("zeros", "--word", "x", "--most", "0"),
        (*own, "--word", "x", "--numbers", "0,0", "--most", "1"),
        ("report", results, "--output", page),
        ("list", "analyses", "--json"),
        ("broken",),
        path=site,
    )
    assert "Counts the zeros of numbers." in helped.out
    assert "Zeros that are too many." in helped.out
    assert done.code == 0, done.err
    assert "nothing      2" in done.out
    folders = [*results.glob("zeros-*")]
    assert len(folders) == 3
    assert all((folder / "zeros.png").stat().st_size > 1000 for folder in folders)
    assert printed.json["settings"] == {"numbers": [0, 1], "most": 9, "word": "x"}
    assert usage.err.startswith("gcbench: usage: --most: ")
    assert failed.code == 1
    assert reported.code == 0
    assert "2 zeros." in page.read_text()
    rows = {row["name"]: row for row in listed.json}
    assert rows["zeros"]["what"].startswith("How many zeros")
    assert rows["bounds"]["module"] == "gcbench.studies.bounds"  # a name that is taken
    assert "RuntimeError: not today" in rows["broken"]["what"]
    assert broken.code == 1
    assert "the analysis 'broken' of broken_study: RuntimeError: not today" in broken.err


def test_every_analysis_is_listed():
    rows = json.loads(invoke("list", "analyses", "--json").out)
    assert len(rows) >= 8
    assert all(row["what"].endswith((".", ":")) or row["what"] for row in rows)


def test_our_own_analyses_are_commands_that_are_imported_when_called():
    listed = invoke("--help").out
    for kind in studies.DERIVED:
        assert f"  {kind} " in listed or f"  {kind}\n" in listed
        assert "--progress" in invoke(kind, "--help").out
    assert "Did you mean 'positions'?" in invoke("positons").err
