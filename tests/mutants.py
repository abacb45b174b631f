"""Small deliberate faults of the product, and the tests that find them.

    python tests/mutants.py [--list FILE] [NAME ...]

`mutants.yaml` lists them: each was once put into the code by hand, and a test was seen to fail. A
test that is moved, merged or deleted leaves its mutant here, which must still die elsewhere. Every
mutant gets a fresh copy of the tree, its kernels built where their sources are what changed. The
exit code is 1 if one survives, if a test fails without any, or if the list does not fit the code.
"""

from __future__ import annotations

import argparse
import ast
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import yaml

ROOT = Path(__file__).parents[1]
LIST = Path(__file__).with_name("mutants.yaml")
NOT_COPIED = (".*", "runs", "build", "dist")
PATIENCE = 900.0
"""Seconds until tests count as stuck."""


@dataclass(frozen=True)
class Mutant:
    """One change of one place."""

    name: str
    file: str
    text: str
    """What stands exactly once in the file."""
    becomes: str
    tests: tuple[str, ...]
    """Ids of pytest, `file::test` or `file::test[case]`, of which one must fail."""
    origin: str
    """Which test or finding it comes from."""


def load(path: Path = LIST) -> list[Mutant]:
    """Return the mutants of a list."""
    listed = yaml.safe_load(path.read_text())
    return [Mutant(**{**entry, "tests": tuple(entry["tests"])}) for entry in listed]


@cache
def _names_of_tests(path: Path) -> set[str]:
    tree = ast.parse(path.read_text())
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


def problems(mutants: Sequence[Mutant], root: Path) -> Iterator[str]:
    """Yield in what a list does not fit the code."""
    names = [mutant.name for mutant in mutants]
    for name in sorted({name for name in names if names.count(name) > 1}):
        yield f"{name}: the name of {names.count(name)} mutants"
    for mutant in mutants:
        path = root / mutant.file
        found = path.read_text().count(mutant.text) if path.is_file() else 0
        if found != 1:
            yield f"{mutant.name}: its text stands {found} times in {mutant.file}, not once"
        if mutant.text == mutant.becomes:
            yield f"{mutant.name}: changes nothing"
        if not mutant.tests:
            yield f"{mutant.name}: no test is named"
        for test in mutant.tests:
            file, _, name = test.partition("[")[0].partition("::")
            if not (root / file).is_file() or name not in _names_of_tests(root / file):
                yield f"{mutant.name}: there is no test {test}"


def passes(folder: Path, tests: Sequence[str]) -> tuple[bool | None, str]:
    """Run tests on a tree, until one fails; return whether all passed, and which one failed.

    None where that cannot be told: the kernels do not build, or pytest finds no test, does not
    start or gets stuck; then with the reason.
    """
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    pytest = ["-m", "pytest", "-x", "-q", "--tb=no", "-p", "no:cacheprovider", *tests]
    for words in (["hatch_build.py"], pytest):  # builds nothing where no source has changed
        try:
            done = subprocess.run(
                [sys.executable, *words],
                cwd=folder,
                env=environment,
                capture_output=True,
                text=True,
                timeout=PATIENCE,
            )
        except subprocess.TimeoutExpired:
            return None, f"{words[-1]}: stuck after {PATIENCE:.0f} s"
        if done.returncode not in (0, int(words is pytest)):
            return None, ((done.stdout + done.stderr).strip().splitlines() or ["no words"])[-1]
    failed = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", done.stdout, re.MULTILINE)
    return done.returncode == 0, failed[1] if failed else ""


def main(words: Sequence[str] | None = None) -> int:
    """Try the mutants that are named, or all of them; print what killed each."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--list", type=Path, default=LIST, help="another list than mutants.yaml")
    parser.add_argument("names", nargs="*", metavar="NAME", help="mutants to try; all of them")
    given = parser.parse_args(words)
    mutants = load(given.list)
    wrong = list(problems(mutants, ROOT))
    wrong += [
        f"{name}: no such mutant" for name in given.names if name not in {m.name for m in mutants}
    ]
    if wrong:
        print(*wrong, sep="\n")
        return 1
    if given.names:
        mutants = [mutant for mutant in mutants if mutant.name in given.names]
    killed, width = 0, max(len(mutant.name) for mutant in mutants)
    with TemporaryDirectory(prefix="mutants-") as scratch:
        clean, changed = Path(scratch) / "clean", Path(scratch) / "changed"
        shutil.copytree(ROOT, clean, ignore=shutil.ignore_patterns(*NOT_COPIED))
        passed, said = passes(clean, sorted({test for mutant in mutants for test in mutant.tests}))
        if not passed:
            print(f"without any mutant: {said}")
            return 1
        for mutant in mutants:
            began = time.monotonic()
            shutil.copytree(clean, changed)
            path = changed / mutant.file
            path.write_text(path.read_text().replace(mutant.text, mutant.becomes))
            passed, said = passes(changed, mutant.tests)
            killed += passed is False
            verdict = {True: "SURVIVED", False: f"killed by {said}", None: f"NO VERDICT: {said}"}
            seconds = time.monotonic() - began
            print(f"{mutant.name:{width}}  {verdict[passed]}  ({seconds:.0f} s)", flush=True)
            shutil.rmtree(changed)
    print(f"{killed} of {len(mutants)} mutants killed")
    return int(killed < len(mutants))


if __name__ == "__main__":
    sys.exit(main())
