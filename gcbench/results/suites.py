"""Names, versions and titles of the built-in suites, read without making a suite's runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from gcbench.results.reader import Run, warn

FOLDER = Path(__file__).parents[1] / "training" / "suites"


def names() -> list[str]:
    """Return the names of the built-in suites."""
    return sorted(path.stem for path in FOLDER.glob("*.yaml"))


@cache
def head(name: str) -> Mapping[str, Any]:
    """Return the title, version and other keys of a built-in suite, without its entries."""
    content: dict[str, Any] = yaml.safe_load((FOLDER / f"{name}.yaml").read_text())
    return {"version": 1, **{key: value for key, value in content.items() if key != "entries"}}


def per_suite(runs: Sequence[Run], asked: Mapping[str, int]) -> dict[str, list[Run]]:
    """Return the runs by the name of the suite for which they were made, "" for none.

    Rows of another version of a suite than this gcbench has are left out, and counted on stderr.
    `asked`: versions of suites that may be files of the user's, by name.
    """
    versions = dict(asked)
    for name in {run.suite.partition("/")[0] for run in runs} & {*names()} - asked.keys():
        versions[name] = head(name)["version"]
    groups: dict[str, list[Run]] = {}
    left: dict[str, int] = {}
    for run in runs:
        name, _, version = run.suite.partition("/")
        if name in versions and version != str(versions[name]):
            left[run.suite] = left.get(run.suite, 0) + 1
            continue
        groups.setdefault(name if name in versions else "", []).append(run)
    for suite, count in left.items():
        name, _, version = suite.partition("/")
        warn(
            f"{count} rows of version {version} of suite {name} left out: this gcbench has version "
            f"{versions[name]}, and their results are not comparable"
        )
    return groups
