"""Mutants of the methods: what they change, the verdicts, and the stored result."""

from __future__ import annotations

import ast
import io
import json
import os
import shutil
import subprocess
import sys
from contextlib import redirect_stderr
from pathlib import Path
from types import SimpleNamespace

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


VERDICTS = f"""
import ast
from pathlib import Path

import torch

from gcbench.checks import mutants

torch.set_num_threads(1)
path = Path({str(ROOT / "compressors" / FILE)!r})


def search(report):
    report(mutants.broad_search(mutants.configured(mutants.load(None, {FILE!r}))))


fault, digest = mutants.isolated(search)
assert fault == ""
changed = next(iter(mutants.mutants_of(path)))
for mutant in (mutants.Mutant({FILE!r}, 1, "nothing", ast.parse(path.read_text())), changed):
    verdict = mutants.isolated(lambda report: mutants.decide(mutant, digest, report))
    print(verdict["outcome"])
"""


def test_the_verdict_on_a_mutant():
    """In a process of its own: a fork after torch has started threads hangs."""
    words = [sys.executable, "-c", VERDICTS]
    single = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(words, env=single, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["equivalent", "killed"]


def outcome(names: list[str], output: Path, monkeypatch) -> tuple[int, str]:
    """Return the exit code and the message of the command for a folder of one method."""
    words = ["--share", "0.001", "--seconds", "0", "--output", str(output), *names]
    monkeypatch.setattr(sys, "argv", ["mutants", *words])
    folder = output.parent / "compressors"
    folder.mkdir(exist_ok=True)
    shutil.copy(ROOT / "compressors" / FILE, folder)
    monkeypatch.setitem(sys.modules, "compressors", SimpleNamespace(__path__=[str(folder)]))
    printed = io.StringIO()
    try:
        with redirect_stderr(printed):
            mutants.main()
    except SystemExit as ended:
        return int(str(ended.code)), printed.getvalue()
    return 0, printed.getvalue()


def test_results_of_code_that_has_changed_leave(tmp_path, monkeypatch):
    """And a file that does not exist is refused."""
    path = tmp_path / "method.py"
    path.write_text(SOURCE)
    digests = [mutants.digest(mutant) for mutant in mutants.mutants_of(path)]
    path.write_text(SOURCE.replace("Text", "Another text"))
    assert digests == [mutants.digest(mutant) for mutant in mutants.mutants_of(path)]
    path.write_text(SOURCE.replace("pack", "seal"))
    assert not {*digests} & {mutants.digest(mutant) for mutant in mutants.mutants_of(path)}

    current = mutants.digest(next(mutants.mutants_of(ROOT / "compressors" / FILE)))
    each = {"mutant": f"{FILE}:1 x", "outcome": "killed", "by": "x", "cpu_seconds": 1}
    output = tmp_path / "mutants.json"
    output.write_text(json.dumps({"mutants": {current: each, "0" * 16: each}, "reasons": {}}))
    assert outcome([FILE], output, monkeypatch)[0] == 0
    assert {*json.loads(output.read_text())["mutants"]} == {current}
    code, message = outcome(["fp9.py"], output, monkeypatch)
    assert code == 2
    assert "fp9.py" in message


def test_the_stored_result_covers_every_file_and_kills_nearly_all():
    result = json.loads(RESULT.read_text())
    scripts = (ROOT / "compressors").glob("*.py")
    files = {path.name for path in scripts if any(True for _ in mutants.mutants_of(path))}
    assert {*result["files"]} == files
    assert sum(row["tried"] for row in result["files"].values()) >= 200
    assert result["share"] >= 0.95
    assert {*result["survivors"]} == {*result["reasons"]}
    assert mutants.page(result) in RESULT.with_name("MUTANTS.md").read_text()
