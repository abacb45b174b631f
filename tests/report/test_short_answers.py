"""Every command answers in 25 lines of 80 columns on its default; --details prints the rest."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from commands import ROOT, Result, invoke

from gcbench import cli
from gcbench.report import analysis
from gcbench.report.analysis import Analysis, Shown, Table

LINES, COLUMNS = 25, 80
ROWS = ROOT / "results/reference"
SMALL = ("--task", "digits", "--steps", "1", "--workers", "1", "--compressor", "none")
SEEDS = ",".join(map(str, range(26)))

DEFAULTS: dict[str, list[tuple[object, ...]]] = {
    "run": [(*SMALL, "--seed", SEEDS)],
    "compare": [
        (ROWS,),
        *((path, "--suite", path.stem) for path in sorted(ROWS.glob("*.parquet"))),
        (ROWS / "main.parquet", "--trials"),
        (ROWS / "main.parquet", "--suite", "main", "--by", "seed", "--where", "seed=0"),
        (ROWS / "main.parquet", "--suite", "main", "--target", "0.7", "--sort", "payload"),
        (ROWS / "main.parquet", "--suite", "main", "--columns", "accuracy,vs,ratio,payload"),
        ("runs",),
    ],
    "bundle": [(ROWS / "main.parquet",)],
    "verify": [("none", "--no-processes")],
    "list": [(kind,) for kind in ("", "memories", "tasks", "suites", "words", "backends")],
    "info": [()],
    "kernels": [(path,) for path in sorted(ROOT.glob("results/kernels*.json"))],
    "histogram": [("--steps", "2", "--workers", "1")],
    "bounds": [("--quadratic-only", "--claims", "identity*", "--methods", "topk")],
    "bandwidth": [("--compressor", "none", "--sizes", "4K", "-n", "1", "-w", "0")],
    "predict": [("--compressor", "none,bf16,topk"), ("--compressor", "none,topk", "--links")],
    "advise": [("--compressor", "none,bf16,topk")],
    "netlab": [("--", "run")],
    "watch": [("--", "python", "train.py")],
    "report": [(ROWS / "terngrad-table1.parquet",)],
    "help": [()],
    "data path": [("mnist",)],
    "data get": [],
}
"""Command -> arguments of calls that print a default answer; `data get` downloads."""
SHOWING = ("run", "compare", "bundle", "histogram", "bandwidth", "verify", "report")
"""Commands that show progress, on a slow machine also of what is otherwise quick."""


def commands(app: typer.Typer, before: str = "") -> Iterator[str]:
    """Yield the names of an app's commands, those of its groups with the group's name."""
    for command in app.registered_commands:
        yield before + (command.name or command.callback.__name__.strip("_"))
    for group in app.registered_groups:
        yield from commands(group.typer_instance, f"{before}{group.name} ")


def too_long(result: Result) -> str:
    """Return what is wrong with an answer's size; "" if it fits. Progress does not count."""
    messages = [line for line in result.err.splitlines() if not re.match(r"\[\d+/\d+\] ", line)]
    lines = [*result.out.splitlines(), *messages]
    if len(lines) > LINES:
        return f"{len(lines)} lines"
    wide = [line for line in result.out.splitlines() if len(line) > COLUMNS]
    return f"{len(wide[0])} columns: {wide[0]}" if wide else ""


@pytest.fixture(autouse=True)
def terminal(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("COLUMNS", str(COLUMNS))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("gcbench.netlab.run", lambda *_: long_analysis())
    monkeypatch.setattr("gcbench.watch.run", lambda *_: long_analysis())


def long_analysis() -> Analysis:
    rows: list[dict[str, Any]] = [
        {"method": f"method {i} of a long name " * 3, "value": i, "note": "some words " * 8}
        for i in range(60)
    ]
    shown = [Shown(field=name, heading=name) for name in rows[0]]
    tables = [Table(name="first", title="A title " * 20, shown=shown, notes=["x"] * 9, rows=rows)]
    return Analysis(
        kind="netlab",
        settings={},
        command="gcbench netlab",
        provenance={},
        answer=["A long answer. " * 20],
        conclusions=["And more. " * 30] * 5,
        tables=tables,
    )


def test_every_command_is_tried() -> None:
    assert sorted(DEFAULTS) == sorted(commands(cli.app))


@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize(
    ("command", "words"), [(name, words) for name, calls in DEFAULTS.items() for words in calls]
)
def test_the_default_answer_is_short(command: str, words: tuple[object, ...]) -> None:
    if words == ("runs",):
        assert invoke("run", *SMALL, "--seed", SEEDS, "--results", "runs").code == 0
    quiet = ["--progress", "none"] if command in SHOWING else []
    result = invoke(*command.split(), *filter(None, [*quiet, *words]))
    assert result.code == 0, result.err
    assert not too_long(result), result.out + result.err


@pytest.mark.parametrize(
    "words",
    [
        ("compare", ROWS / "terngrad-table1.parquet"),
        ("list", "compressors"),
        ("kernels", ROOT / "results/kernels.json"),
        ("netlab", "--", "run"),
    ],
    ids=lambda words: words[0],
)
def test_a_longer_answer_is_noticed_and_details_print_it(words: tuple[object, ...]) -> None:
    short, long = invoke(*words), invoke(words[0], "--details", *words[1:])
    assert not too_long(short)
    assert "--details" in short.out
    assert "lines" in too_long(long)
    wide = Result(0, "x" * (COLUMNS + 1), "")
    assert "columns" in too_long(wide)


STORED = [*ROOT.glob("results/*.json"), *ROOT.glob("results/papers/*.json")]


@pytest.mark.parametrize("path", STORED, ids=lambda path: path.stem)
def test_stored_analyses_have_short_texts(path: Path) -> None:
    data = json.loads(path.read_text())
    if not (isinstance(data, dict) and data.keys() >= {"kind", "tables"}):
        return
    text = analysis.render(analysis.parse(data, path), width=COLUMNS, details=False)
    assert not too_long(Result(0, text, ""))


def test_a_table_that_hides_rows_says_how_many() -> None:
    text = analysis.render(long_analysis(), width=COLUMNS, details=False)
    (shown,) = {line for line in text.splitlines() if "of 60 rows" in line}
    drawn = sum(line.startswith("method ") for line in text.splitlines()) - 1
    assert f"{60 - drawn} of 60 rows" in shown


def test_the_help_has_a_line_for_each_command() -> None:
    listed = invoke("--help").out.partition("Commands:\n")[2].splitlines()
    names = [name.split()[0] for name in commands(cli.app)]
    assert [line.split()[0] for line in listed] == list(dict.fromkeys(names))
