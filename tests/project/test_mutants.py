"""The list of mutants fits the code, and what survives is told."""

from __future__ import annotations

from dataclasses import replace

import mutants
import pytest
import yaml

FILE = "gcbench/core/errors.py"
TEST = "tests/project/test_mutants.py::test_a_plain_fact"
ENTRY = mutants.Mutant(
    name="an exit code",
    file=FILE,
    text="exit_code = 2",
    becomes="exit_code = 3",
    tests=(TEST,),
    origin="this test",
)
EVERYWHERE = "Error"
"""A word that stands in `FILE` more than once."""


def test_a_plain_fact():
    """What the mutant of `ENTRY` breaks."""
    from gcbench.core.errors import UsageError

    assert UsageError.exit_code == 2


def test_every_mutant_fits_the_code_and_names_tests_that_there_are():
    listed = mutants.load()
    assert list(mutants.problems(listed, mutants.ROOT)) == []
    rooms = {mutant.file.split("/")[1] for mutant in listed if mutant.file.startswith("gcbench/")}
    assert {"core", "ops", "training", "studies", "reporting", "integrations"} <= rooms


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"text": "exit_code = 4"}, "its text stands 0 times in gcbench/core/errors.py, not once"),
        ({"text": EVERYWHERE}, "times in gcbench/core/errors.py, not once"),
        ({"file": "gcbench/core/nowhere.py"}, "stands 0 times in gcbench/core/nowhere.py"),
        ({"becomes": ENTRY.text}, "changes nothing"),
        ({"tests": ()}, "no test is named"),
        ({"tests": (TEST + "_that_is_gone",)}, f"there is no test {TEST}_that_is_gone"),
        ({"tests": (TEST, "tests/project/test_gone.py::test_x")}, "there is no test tests/project"),
        ({"tests": (TEST.partition("::")[0],)}, "there is no test tests/project/test_mutants.py"),
    ],
)
def test_a_wrong_entry_is_told(change, said):
    assert list(mutants.problems([ENTRY], mutants.ROOT)) == []
    (told,) = mutants.problems([replace(ENTRY, **change)], mutants.ROOT)
    assert told.startswith("an exit code: ")
    assert said in told


def test_two_mutants_of_one_name_are_told():
    assert list(mutants.problems([ENTRY, ENTRY], mutants.ROOT)) == [
        "an exit code: the name of 2 mutants"
    ]


def listed(folder, *entries):
    """Return a file that lists these mutants."""
    path = folder / "list.yaml"
    path.write_text(yaml.safe_dump([dict(vars(one), tests=list(one.tests)) for one in entries]))
    return "--list", str(path)


def test_a_mutant_of_this_tree_dies(tmp_path, capsys):
    assert mutants.main(listed(tmp_path, ENTRY)) == 0
    dead, count = capsys.readouterr().out.splitlines()
    assert dead.startswith(f"an exit code  killed by {TEST}  (")
    assert count == "1 of 1 mutants killed"
    assert "exit_code = 2" in (mutants.ROOT / FILE).read_text()


@pytest.fixture
def small(tmp_path, monkeypatch):
    """A tree with one function and its test, and a mutant that dies."""
    tree = tmp_path / "tree"
    tree.mkdir()
    (tree / "hatch_build.py").write_text("")
    (tree / "half.py").write_text("def half(x):\n    return x // 2  # rounded down\n")
    (tree / "test_half.py").write_text(
        "import half\n\n\ndef test_half():\n    assert half.half(5) == 2\n"
    )
    monkeypatch.setattr(mutants, "ROOT", tree)
    return mutants.Mutant("up", "half.py", "x // 2", "-(-x // 2)", ("test_half.py::test_half",), "")


def test_what_survives_is_told_by_the_exit_code(small, tmp_path, capsys):
    harmless = replace(small, name="words", text="# rounded down", becomes="# the lower half")
    broken = replace(small, name="broken", text="def half", becomes="def def half")
    assert mutants.main(listed(tmp_path, small, harmless, broken)) == 1
    dead, alive, unknown, count = capsys.readouterr().out.splitlines()
    assert dead.startswith("up      killed by test_half.py::test_half  (")
    assert alive.startswith("words   SURVIVED  (")
    assert unknown.startswith("broken  NO VERDICT: ")
    assert count == "1 of 3 mutants killed"


def test_a_test_that_fails_without_any_mutant_kills_nothing(small, tmp_path, capsys):
    source = mutants.ROOT / "half.py"
    source.write_text(source.read_text().replace("x // 2", "x // 2 + 1"))
    assert mutants.main(listed(tmp_path, replace(small, text="+ 1", becomes="+ 2"))) == 1
    assert capsys.readouterr().out == "without any mutant: test_half.py::test_half\n"


def test_kernels_that_do_not_build_are_no_verdict(small, tmp_path, capsys):
    build = mutants.ROOT / "hatch_build.py"
    build.write_text("import half\n\nassert half.half(5) == 2, 'no kernels'\n")
    assert mutants.main(listed(tmp_path, small)) == 1
    assert "up  NO VERDICT: AssertionError: no kernels  (" in capsys.readouterr().out


def test_nothing_is_tried_where_the_list_is_wrong(tmp_path, capsys):
    assert mutants.main([*listed(tmp_path, replace(ENTRY, text="exit_code = 4")), "a word"]) == 1
    assert capsys.readouterr().out == (
        f"an exit code: its text stands 0 times in {FILE}, not once\na word: no such mutant\n"
    )
