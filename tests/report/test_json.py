"""results/JSON.md against what the commands print, and results/GLOSSARY.md against its source."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from builders import BASE, summary, write
from commands import ROOT, invoke

from gcbench.report import glossary

PAGE = (ROOT / "results/JSON.md").read_text()


def documented(page: str, command: str) -> tuple[set[str], set[str]]:
    """Return the keys that the page says are always there, and those that are only at times."""
    section = page.partition(f"## `gcbench {command} --json`\n")[2].partition("\n## ")[0]
    always: set[str] = set()
    at_times: set[str] = set()
    for line in section.splitlines():
        cells = [cell.strip() for cell in line.split("|")]
        if len(cells) < 4 or "`" not in cells[1]:
            continue
        into = at_times if cells[2].startswith("only ") else always
        into |= set(re.findall(r"`([^`]+)`", cells[1]))
    return always, at_times


def differs(page: str, command: str, found: dict[str, Any]) -> str:
    """Return how a document differs from what the page says of it; nothing if it does not."""
    always, at_times = documented(page, command)
    missing, new = always - found.keys(), found.keys() - always - at_times
    return "; ".join(
        f"{what}: {', '.join(sorted(keys))}"
        for what, keys in (("not printed", missing), ("not on the page", new))
        if keys
    )


def printed(command: str, tmp_path: Path) -> Any:
    write(tmp_path / "runs", *BASE, summary("x", 0, 0.9))
    words: dict[str, list[object]] = {
        "run": ["--steps", 2, "--workers", 2, "--results", tmp_path, "--progress", "none"],
        "compare": [tmp_path / "runs"],
        "verify": ["none", "--no-processes"],
        "kernels": [ROOT / "results/kernels.json", "--size", "1e4"],
        "data path": ["mnist"],
        "report": [tmp_path / "runs", "--output", tmp_path / "x.html"],
        "histogram": [
            *("--steps", 2, "--workers", 2, "--capture", "0", "--compressor", "terngrad"),
            *("--results", tmp_path / "analyses", "--progress", "none"),
        ],
    }
    found = invoke(*command.split(), *words.get(command, []), "--json").json
    return found[0] if isinstance(found, list) else found


COMMANDS = re.findall(r"^## `gcbench (.+) --json`$", PAGE, re.MULTILINE)


@pytest.mark.parametrize("command", COMMANDS)
def test_the_page_has_the_keys_that_are_printed(command: str, tmp_path: Path) -> None:
    found = printed(command, tmp_path)
    assert differs(PAGE, command, found) == ""


def test_every_command_is_on_the_page() -> None:
    from gcbench import cli

    names = {
        info.name or info.callback.__name__.rstrip("_") for info in cli.app.registered_commands
    }
    assert len(names) >= 10
    assert [
        name for name in names if f"`{name}" not in PAGE and f"gcbench {name}" not in PAGE
    ] == []
    assert all(f"list {kind.value} --json" in PAGE for kind in cli.Kind)


def test_the_glossary_is_one() -> None:
    assert (ROOT / "results/GLOSSARY.md").read_text() == glossary.page()
    rows = invoke("list", "words", "--json").json
    assert {row["name"]: row["what"] for row in rows} == glossary.WORDS


def test_a_long_table_points_to_the_glossary(tmp_path: Path) -> None:
    write(tmp_path, *(summary(f"m{i}", 0, 0.9) for i in range(glossary.LONG + 1)))
    assert glossary.POINTER in invoke("compare", tmp_path).out
    write(tmp_path / "few", *BASE)
    assert glossary.POINTER not in invoke("compare", tmp_path / "few").out
