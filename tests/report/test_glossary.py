"""The words of the tables."""

from __future__ import annotations

from pathlib import Path

from builders import BASE, summary, write
from commands import invoke

from gcbench.report import glossary


def test_a_long_table_points_to_the_glossary(tmp_path: Path) -> None:
    write(tmp_path, *(summary(f"m{i}", 0, 0.9) for i in range(glossary.LONG + 1)))
    assert glossary.POINTER in invoke("compare", tmp_path, "--details").out
    write(tmp_path / "few", *BASE)
    assert glossary.POINTER not in invoke("compare", tmp_path / "few", "--details").out
