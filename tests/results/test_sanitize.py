"""Rows from elsewhere are shown as text, cut, or refused with their place."""

from __future__ import annotations

import csv
import io
import json

import pytest
from builders import summary, write
from commands import invoke

from gcbench.report.compare import rows
from gcbench.report.rendering import Column, markdown
from gcbench.results import sanitize
from gcbench.results.reader import load

EVIL = {
    "mathtext": r"$\frac{1}$",
    "control": "\x1b[2J\x1b]0;title\x07 and \x9b31m",
    "surrogate": "\ud800 alone",
    "direction": "\u202etxet",
    "formula": "=HYPERLINK(1)",
    "tags": "<script>alert(1)</script><img src=x onerror=y>",
    "link": "[x](javascript:alert)",
    "long": "x" * 15_000,
}


def hostile(text: str, task: str) -> dict:
    row = {**summary("theirs", 0, 0.4), "compressor_name": text, "compressor": text}
    return {**row, "task": task}


@pytest.mark.parametrize("format", ["table", "markdown", "latex", "csv", "json"])
def test_text_of_others_is_shown_as_text(tmp_path, format):
    path = tmp_path / "rows.json"
    rows = [hostile(text, "digits" if name == "long" else text) for name, text in EVIL.items()]
    path.write_text(json.dumps([summary("none", 0, 0.5), *rows]))
    done = invoke("compare", path, "--format", format)
    assert done.code == 0, done.err
    shown = done.out + done.err
    shown.encode()  # no lone surrogate
    assert all(c.isprintable() or c == "\n" for c in shown)
    if format == "markdown":
        assert "<script" not in shown
        assert "](" not in shown.replace("]\\(", "")
    if format == "csv":
        cells = [cell for line in csv.reader(io.StringIO(done.out)) for cell in line]
        assert not [cell for cell in cells if cell[:1] in {"=", "@"}]
    if format in ("table", "markdown", "latex"):
        assert max(map(len, shown.splitlines())) < 5000


@pytest.mark.parametrize("task", ["digits", EVIL["mathtext"]])
def test_pictures_are_drawn_with_names_of_others(tmp_path, task):
    path = tmp_path / "rows.json"
    rows = [hostile(text, task) for text in EVIL.values()]
    path.write_text(json.dumps([{**summary("none", 0, 0.5), "task": task}, *rows]))
    done = invoke("compare", path, "--plot", tmp_path / "x.png")
    assert done.code == 0, done.err
    assert (tmp_path / "x.png").stat().st_size > 1000


def nested(depth: int) -> list:
    value: list = []
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize(
    ("over", "message"),
    [
        ({"config": {"options": ["clip"]}}, "`config.options` is a list, a dict expected"),
        ({"config": {"lr": [[1]]}}, "`config.lr` is a list"),
        ({"provenance": {"machine": "mine"}}, "`provenance.machine` is a str, a dict expected"),
        ({"provenance": {"commit": 7}}, "`provenance.commit` is a int, a str expected"),
        ({"provenance": {"versions": {"torch": []}}}, "`provenance.versions.torch` is a list"),
        ({"train_loss": nested(40)}, "is nested more than 12 deep"),
        ({"compressor_name": "x" * 200_000}, "`compressor_name` is a text of 200000 characters"),
    ],
)
def test_what_is_no_row_is_refused_with_its_place(tmp_path, over, message):
    one = summary("none")
    for key, value in over.items():
        one[key] = {**one[key], **value} if isinstance(value, dict) else value
    path = tmp_path / "rows.json"
    path.write_text(json.dumps([summary("fp16"), one]))
    done = invoke("compare", path, "--json")
    assert done.code == 1
    assert [row["compressor_name"] for row in json.loads(done.out)] == ["fp16"]
    (line,) = done.err.splitlines()
    assert line.startswith(f"gcbench: left out: {path}, row 2")
    assert message in line


@pytest.mark.parametrize("text", ["[" * 100_000, "[" * 100_000 + "]" * 100_000])
def test_a_deep_file_is_refused(tmp_path, text):
    path = tmp_path / "rows.json"
    path.write_text(text)
    done = invoke("compare", path)
    assert done.code == 1
    assert f"{path} cannot be read" in done.err


def test_a_deep_expression_is_no_call(tmp_path):
    for i, deep in enumerate(("(" * 5000 + ")" * 5000, "X(a=" + "-" * 9000 + "1)")):
        write(tmp_path / str(i), {**summary("none"), "compressor": deep})
        assert rows(load([tmp_path / str(i)]))


def test_a_path_with_control_sequences_does_not_reach_the_terminal(tmp_path):
    done = invoke("compare", tmp_path / "\x1b[31mred")
    assert "\x1b" not in done.err
    assert r"\x1b[31mred" in done.err


def test_what_is_plain_stays_as_it_is():
    for text in ("TernGrad(clip=2.5)", "mean ± sd, 12 µs", "ä, 語"):
        assert sanitize.printable(text) == text
    assert sanitize.printable("a\tb\xa0c\nd") == "a b c\nd"
    assert markdown([Column("a", ["p < 1 | b"])], 1).endswith("| p &lt; 1 \\| b |")
    cells = (-1.5, "none", "-", "-x", None)
    assert [sanitize.csv_cell(v) for v in cells] == [-1.5, "none", "-", "'-x", None]
