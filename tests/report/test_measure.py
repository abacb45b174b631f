"""What all analyses share: their record on disk and as text, the ledger, methods by a word."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from commands import files_of_at_most, invoke

from gcbench.core.errors import GcbenchError, UsageError
from gcbench.report import analysis as measuring
from gcbench.report import kinds
from gcbench.report.analysis import Analysis, Ledger, MissingTableError, Shown, Table
from gcbench.training import configuration, methods


def example(**changes) -> Analysis:
    first = Table(
        name="times",
        title="Time of an encode",
        shown=[
            Shown(field="method", heading="method"),
            Shown(field="seconds", heading="encode\nms", scale=1e3),
            Shown(field="holds", heading="holds"),
            Shown(field="never", heading="never"),
        ],
        by="size",
        notes=["Medians."],
        rows=[
            {"size": 10, "method": "a|b", "seconds": 0.0012, "holds": True, "never": None},
            {"size": 20, "method": "c_d", "seconds": None, "holds": False, "never": None},
        ],
    )
    bins = Table(name="bins", title="for the picture", rows=[{"left": 0.5, "count": 3}])
    defaults = {
        "kind": "test",
        "settings": {"b": 1, "a": [2]},
        "command": "gcbench test",
        "provenance": measuring.provenance(),
        "conclusions": ["It holds."],
        "tables": [first, bins],
    }
    return Analysis(**{**defaults, **changes})


def test_an_analysis_comes_back_as_it_was_saved(tmp_path: Path) -> None:
    folder = measuring.save(example(), tmp_path)
    assert folder.name == f"test-{measuring.digest({'a': [2], 'b': 1})}"
    back = measuring.load(folder)
    assert measuring.document(back) == measuring.document(example(provenance=back.provenance))
    assert back.table("times").rows[1]["seconds"] is None
    rows = pq.read_table(folder / "times.parquet").to_pylist()
    assert rows == back.table("times").rows == json.loads((folder / "times.json").read_text())
    assert sorted(path.name for path in folder.iterdir()) == [
        *("analysis.json", "bins.json", "bins.parquet", "times.json", "times.parquet")
    ]


def test_no_flipped_bit_of_an_analysis_is_read(tmp_path: Path) -> None:
    folder = measuring.save(example(), tmp_path)
    before = measuring.document(measuring.load(folder))
    draw = random.Random(0)
    for path in folder.iterdir():
        whole = path.read_bytes()
        for bit in draw.sample(range(8 * len(whole)), 40):
            data = bytearray(whole)
            data[bit // 8] ^= 1 << bit % 8
            path.write_bytes(data)
            try:
                read = measuring.document(measuring.load(folder))
            except GcbenchError as error:
                read = before if str(folder) in str(error) else None
            assert read == before
        path.write_bytes(whole)


def test_an_analysis_without_digests_is_refused(tmp_path: Path) -> None:
    folder = measuring.save(example(), tmp_path)
    path = folder / "analysis.json"
    head = json.loads(path.read_text())
    path.write_text(json.dumps({key: value for key, value in head.items() if key != "digest"}))
    with pytest.raises(GcbenchError, match=r"analysis\.json has no `digest`"):
        measuring.load(folder)


def test_an_analysis_comes_back_from_its_json(tmp_path: Path) -> None:
    """Also without a table, which then is missed only by name."""
    printed = json.loads(measuring.render(example(), "json"))
    back = measuring.parse(printed, tmp_path)
    assert measuring.document(back) == printed
    assert back.table("times").rows[1]["seconds"] is None
    del printed["tables"][1]
    part = measuring.parse(printed, tmp_path)
    assert part.name == back.name
    with pytest.raises(MissingTableError, match=r"the table `bins` .*gcbench test"):
        part.table("bins")


def test_text_shows_what_has_a_value_in_its_unit() -> None:
    text = measuring.render(example(), width=80)
    assert "Time of an encode: 10" in text
    assert "Time of an encode: 20" in text
    assert "1.20" in text
    assert "never" not in text
    assert "for the picture" not in text
    assert text.index("Medians.") > text.index("c_d")
    assert "It holds." in text
    assert r"a\|b" in measuring.render(example(), "markdown")
    assert r"c\_d" in measuring.render(example(), "latex")
    assert measuring.render(example(), "csv").splitlines() == [
        *("size,method,seconds,holds,never", "10,a|b,0.0012,True,", "20,c_d,,False,")
    ]
    assert json.loads(measuring.render(example(), "json"))["tables"][1]["rows"][0]["count"] == 3
    with pytest.raises(UsageError, match="unknown format"):
        measuring.render(example(), "html")


def test_narrow_terminals_split_tables_and_cut_nothing() -> None:
    text = measuring.render(example(), width=16)
    tables = text.split("\n\n")
    assert all(len(line) <= 16 for line in tables[1].splitlines())
    assert text.count("a|b") > 1


def test_damaged_and_foreign_analyses_say_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no analysis in"):
        measuring.load(tmp_path)
    folder = measuring.save(example(), tmp_path)
    head = json.loads((folder / "analysis.json").read_text())
    (folder / "analysis.json").write_text(json.dumps({**head, "version": 99}))
    with pytest.raises(GcbenchError, match=r"schema 99, but this gcbench reads 1; delete"):
        measuring.load(folder)
    (folder / "analysis.json").write_text(json.dumps({**head, "tables": 3}))
    with pytest.raises(GcbenchError, match="do not match its `digest`"):
        measuring.load(folder)
    (folder / "analysis.json").write_text(json.dumps(head))
    (folder / "times.json").unlink()
    with pytest.raises(GcbenchError, match="cannot be read"):
        measuring.load(folder)
    with pytest.raises(UsageError, match="unknown kind of analysis 'test'"):
        kinds.draw(example(), tmp_path / "x.png")


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(GcbenchError, match="choose another folder with --results"):
        measuring.save(example(), tmp_path / "file")
    with (
        pytest.raises(GcbenchError, match="choose another folder with --results"),
        Ledger(tmp_path / "file" / "x").open(),
    ):
        pass


def test_a_ledger_keeps_what_was_made_before_a_crash(tmp_path: Path) -> None:
    with Ledger(tmp_path / "x").open() as ledger:
        assert "one" not in ledger
        ledger["one"] = {"value": 1.5, "text": "é"}
        ledger["two"] = [1, 2]
    path = tmp_path / "x" / measuring.LEDGER
    whole = path.read_bytes()
    path.write_bytes(whole[:-4])  # the crash cut the last line short
    with Ledger(tmp_path / "x").open() as ledger:
        assert ledger["one"] == {"value": 1.5, "text": "é"}
        assert "two" not in ledger
        ledger["two"] = [1, 2]
    assert path.read_bytes() == whole
    with Ledger(tmp_path / "x").open(afresh=True) as ledger:
        assert "one" not in ledger
    assert path.read_bytes() == b""


def test_the_work_of_one_processor_is_not_continued_on_another(tmp_path, monkeypatch):
    """Times of two machines were in one table, under the name of the second."""
    with Ledger(tmp_path).open() as ledger:
        ledger["a"] = 1
    machine = configuration.machine()
    monkeypatch.setattr(configuration, "machine", lambda: {**machine, "cores": 99})
    with Ledger(tmp_path).open() as ledger:
        assert ledger["a"] == 1
    monkeypatch.setattr(configuration, "machine", lambda: {**machine, "cpu": "another"})
    with pytest.raises(GcbenchError, match=r"another.*--force"):
        Ledger(tmp_path).open().__enter__()
    with Ledger(tmp_path).open(afresh=True) as ledger:
        assert "a" not in ledger


def test_an_analysis_names_another_processor_that_made_it(monkeypatch):
    """In a shared folder, bandwidth's times of another machine were printed as already measured."""
    machine = configuration.machine()
    analysis = example()
    assert analysis.elsewhere == ""
    monkeypatch.setattr(configuration, "machine", lambda: {**machine, "cpu": "another"})
    assert f"({machine['cpu']})" in analysis.elsewhere


def test_a_ledger_tells_when_and_by_what_code_it_was_begun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    times = iter("abcd")
    monkeypatch.setattr(measuring, "now", lambda: next(times))
    with Ledger(tmp_path, "old").open():
        pass  # nothing was kept: the next process begins
    with Ledger(tmp_path, "old").open() as ledger:
        ledger["one"] = 1
        assert (ledger.started, ledger.code) == ("b", "old")
    with Ledger(tmp_path, "new").open() as ledger:
        ledger["two"] = 2
        assert (ledger.started, ledger.code) == ("b", "old")
    with Ledger(tmp_path, "new").open(afresh=True) as ledger:
        assert (ledger.started, ledger.code) == ("d", "new")


def test_an_analysis_that_is_made_again_is_not_finished(tmp_path: Path) -> None:
    folder = tmp_path / example().name
    assert not measuring.finished(folder)
    measuring.save(example(), tmp_path)
    assert measuring.finished(folder)
    with Ledger(folder).open(afresh=True) as ledger:
        assert measuring.finished(folder)  # nothing was made yet
        ledger["one"] = 1
    assert not measuring.finished(folder)
    measuring.save(example(), tmp_path)
    assert measuring.finished(folder)


def test_a_full_disk_is_told_and_keeps_what_was_made(tmp_path: Path) -> None:
    with files_of_at_most(400), Ledger(tmp_path).open() as ledger:
        ledger["one"] = 1
        with pytest.raises(GcbenchError, match=r"cannot write .*: File too large. Free space"):
            ledger["two"] = "x" * 400
    with Ledger(tmp_path).open() as ledger:
        assert ledger["one"] == 1
        assert "two" not in ledger  # a part of it lies there


def test_two_processes_do_not_share_a_ledger(tmp_path: Path) -> None:
    script = (
        "import sys; from pathlib import Path; from gcbench.report.analysis import Ledger\n"
        "try:\n"
        "    with Ledger(Path(sys.argv[1])).open(): pass\n"
        "except Exception as error: print(error)"
    )
    with Ledger(tmp_path).open():
        words = [sys.executable, "-c", script, str(tmp_path)]
        message = subprocess.run(words, capture_output=True, text=True, check=True)
    assert "is being written by another gcbench process" in message.stdout


def test_methods_by_a_word() -> None:
    result = methods.all_of("topk, topk:ratio=0.25,fft:theta=0.5:granularity=tensor")
    assert list(result) == ["topk", "topk:ratio=0.25", "fft:theta=0.5:granularity=tensor"]
    assert repr(result["topk:ratio=0.25"]) == repr(methods.parse("topk:ratio=0.25"))
    assert "ratio=0.25" in repr(result["topk:ratio=0.25"])
    assert "theta=0.5" in repr(result["fft:theta=0.5:granularity=tensor"])
    assert len(methods.all_of(None)) > 10
    assert list(methods.all_of(None, ["none"])) == ["none"]
    for wrong, text in [
        ("topc", "Did you mean 'topk'"),
        ("topk:ration=1", "Did you mean 'ratio'"),
        ("topk:ratio", "NAME=VALUE"),
        ("topk:ratio=1/2", "one value"),
        ("topk,topk", "different methods"),
        ("topk,", "a value is empty"),
    ]:
        with pytest.raises(UsageError, match=text):
            methods.all_of(wrong)


def test_a_picture_that_cannot_be_is_refused_before_the_work(tmp_path: Path) -> None:
    """Every analysis has the same --plot."""
    where = ("--results", tmp_path / "analyses")
    for words in (("bounds",), ("bandwidth",), ("histogram",), ("advise",), ("predict",)):
        for name, text in (("x.jpg", ".png"), ("gone/x.png", "is not a folder")):
            refused = invoke(*words, *where, "--plot", tmp_path / name)
            assert (refused.code, text in refused.err) == (2, True), refused.err
    assert not (tmp_path / "analyses").exists()
