"""The fault table of results/TRUST.md: each row is a test that there is, and words are printed."""

from __future__ import annotations

import re

import pytest
from commands import ROOT

PAGE = (ROOT / "results" / "TRUST.md").read_text()
ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in PAGE.splitlines()
    if line.startswith("| ") and "::" in line
]


def wrong_rows(rows: list[list[str]]) -> list[str]:
    """Return what is wrong with rows of the table."""
    sources = "\n".join(path.read_text() for path in (ROOT / "gcbench").rglob("*.py"))
    found = []
    for fault, _, printed, test in rows:
        file, _, name = test.strip("`").partition("::")
        path = ROOT / "tests" / file
        if not path.is_file() or not re.search(rf"^def {name}\(", path.read_text(), re.MULTILINE):
            found.append(f"{fault}: no test {test}")
            continue
        words = printed.strip("`")
        if words != "-" and words not in path.read_text() and words not in sources:
            found.append(f"{fault}: nothing prints {words!r}")
    return found


def test_every_row_is_a_test_and_its_words_are_printed():
    assert len(ROWS) >= 20
    assert not wrong_rows(ROWS)


@pytest.mark.parametrize(
    ("place", "value", "said"),
    [(3, "`test_launch.py::test_nothing`", "no test"), (2, "`never said`", "nothing prints")],
)
def test_a_row_that_is_wrong_is_found(place, value, said):
    (row, *_) = ROWS
    wrong = [*row[:place], value, *row[place + 1 :]]
    (found,) = wrong_rows([wrong])
    assert said in found
