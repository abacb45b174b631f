"""Mutants of the methods: what they change, the verdicts, and the stored result."""

from __future__ import annotations

import ast
import json
from pathlib import Path

import pytest

from gcbench.checks import mutants

ROOT = Path(__file__).parents[2]
RESULT = ROOT / "results" / "mutants.json"
FILE = "fp8.py"

SOURCE = """
class Method:
    levels: int = 4

    def __post_init__(self):
        assert self.levels > 1

    def encode(self, x, ctx):
        '''Text.'''
        if x < 3:
            x += 1
        return pack(x, ctx)[0]


class MethodClaims:
    def error_bound(self, x, ctx):
        return 0.5
"""


def test_a_mutant_changes_one_place_of_the_code(tmp_path):
    path = tmp_path / "method.py"
    path.write_text(SOURCE)
    changes = [mutant.name for mutant in mutants.mutants_of(path)]
    assert {name.partition(":")[2].split(" ")[0] for name in changes} <= {"10", "11", "12"}
    for change in (
        *("condition negated", "Lt -> LtE", "Add= -> Sub=", "statement dropped"),
        *("first two arguments swapped", "0 -> 1", "3 -> 4", "3 -> 0"),
    ):
        assert any(name.endswith(change) for name in changes), change
    plain = ast.dump(ast.parse(SOURCE))
    texts = {ast.dump(mutant.tree) for mutant in mutants.mutants_of(path)}
    assert len(texts) == len(changes)
    assert plain not in texts


@pytest.fixture(scope="module")
def original() -> str:
    fault, digest = mutants.isolated(
        lambda report: report(mutants.broad_search(mutants.configured(mutants.load(None, FILE))))
    )
    assert fault == ""
    return digest


def decided(mutant: mutants.Mutant, original: str) -> str:
    verdict = mutants.isolated(lambda report: mutants.decide(mutant, original, report))
    return str(verdict["outcome"])


def test_the_verdict_on_a_mutant(original):
    tree = ast.parse((ROOT / "compressors" / FILE).read_text())
    assert decided(mutants.Mutant(FILE, 1, "nothing", tree), original) == "equivalent"
    changed = next(iter(mutants.mutants_of(ROOT / "compressors" / FILE)))
    assert decided(changed, original) == "killed"


def test_the_stored_result_covers_every_file_and_kills_nearly_all():
    result = json.loads(RESULT.read_text())
    files = {p.name for p in (ROOT / "compressors").glob("*.py") if [*mutants.mutants_of(p)]}
    assert {*result["files"]} == files
    assert sum(row["tried"] for row in result["files"].values()) >= 200
    assert result["share"] >= 0.95
    assert {*result["survivors"]} == {*result["reasons"]}
    assert mutants.page(result) in RESULT.with_name("MUTANTS.md").read_text()
