"""The work of `compare` and `report` on many rows: it is counted, as times vary with the machine.

results/TRUST.md has the times of 100,000 rows, by tests/scale.py.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import scale

from gcbench.core import registry, values
from gcbench.report import brief, compare, figures, page, sections, tables
from gcbench.results import declared, reader, rows
from gcbench.stats import ranks


def calls(function: Callable[[], object]) -> int:
    """Return the number of calls of Python and C functions."""
    count = 0

    def profile(frame: Any, event: str, argument: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(profile)
    try:
        function()
    finally:
        sys.setprofile(None)
    return count


def grows_linearly(function: Callable[[Sequence[tuple[str, ...]]], object]) -> bool:
    few, many = ([("topk", f"ratio=0.{i:04}", "k=1") for i in range(n)] for n in (100, 400))
    return calls(lambda: function(many)) < 6 * calls(lambda: function(few))


def test_labels_are_shortened_without_comparing_each_pair() -> None:
    def each_pair(labels: Sequence[tuple[str, ...]]) -> list[bool]:
        return [any(word in list(other) for other in labels) for word in labels]

    assert not grows_linearly(each_pair)
    assert grows_linearly(brief.fewest_fields)
    assert grows_linearly(brief._unusual)


def loaded(path: Path, methods: int, seeds: int, vary: str = "field") -> list[reader.Run]:
    rows.write(path, list(scale.stored(methods, seeds, vary)))
    return reader.load([path])


@pytest.mark.parametrize("vary", scale.VARY)
def test_rows_take_few_encodings(tmp_path: Path, monkeypatch, vary: str) -> None:
    """A row's settings are encoded once or twice, not once per property that is compared."""
    count = 0
    encode = values._encode

    def counted(value: Any) -> str:
        nonlocal count
        count += 1
        return encode(value)

    runs = loaded(tmp_path / "rows.parquet", 60, 1, vary)
    monkeypatch.setattr(values, "_encode", counted)
    assert len(compare.rows(runs)) == 60
    assert count <= 7 * 60


def test_a_method_is_read_once(tmp_path: Path, monkeypatch) -> None:
    registry.compressor_class("topk")
    count = 0
    read = registry.compressor_class

    def counted(name: str) -> Any:
        nonlocal count
        count += 1
        return read(name)

    monkeypatch.setattr(registry, "compressor_class", counted)
    expected = declared.of_method({"compressor": "topk"})
    once, count = count, 0
    methods = declared.Methods()
    for number in range(20):
        config = {"compressor": "topk", "options": {"ratio": (number + 1) / 100}}
        assert methods.of(config) == expected
    assert count == once
    computed = [declared.of_method({"compressor": "demo", "options": {"k": k}}) for k in (1, 2)]
    assert [methods.of({"compressor": "demo", "options": {"k": k}}) for k in (1, 2)] == computed


def test_equal_texts_of_rows_are_decoded_once(tmp_path: Path, monkeypatch) -> None:
    rows.write(tmp_path / "rows.parquet", list(scale.stored(1, 50)))
    decoder = rows._Decoder(share_seeds=True)
    count, decode = 0, decoder.decode

    def counted(text: str) -> Any:
        nonlocal count
        count += 1
        return decode(text)

    decoder.decode = counted
    read = rows._each(tmp_path / "rows.parquet", [], decoder, encoded=("evaluations",))
    configs = {id(row["config"]) for _, row, _ in read}
    assert len(configs) == 1
    assert count < 10


def test_rows_with_unusual_text_have_their_settings(tmp_path: Path) -> None:
    """Their configs are freed early, and Python gives the address of one to the next."""
    stored = []
    for number, one in enumerate(scale.stored(20, 3, "lr")):
        command = f"gcbench run --compressor ./josé/mine.py --lr {number}"
        one["provenance"] = {**one["provenance"], "command": command}
        resolved = {key: one[key] for key in reader._RESOLVED}
        lr = 0.01 * (number // 3 + 1)
        one["config"] = {**reader.DEFAULTS, **one["config"], **resolved, "lr": lr}
        stored.append(one)
    rows.write(tmp_path / "rows.parquet", stored)
    runs = reader.load([tmp_path / "rows.parquet"], repeated=True)
    assert [run.config["lr"] for run in runs] == [one["config"]["lr"] for one in stored]


def test_evaluations_are_compressed_and_decompressed_by_batch(tmp_path: Path, monkeypatch) -> None:
    stored = list(scale.stored(1, 50))
    rows.write(tmp_path / "rows.parquet", stored)
    runs = reader.load([tmp_path / "rows.parquet"])
    texts = [run.curve for run in runs]
    assert all(isinstance(text, rows.PackedText) for text in texts)
    assert sum(len(data) for data in {text.column.data for text in texts}) < 1000 * 50
    count, decompress = 0, pa.decompress

    def counted(*words: Any, **options: Any) -> Any:
        nonlocal count
        count += 1
        return decompress(*words, **options)

    monkeypatch.setattr(pa, "decompress", counted)
    assert [run.evaluations() for run in runs] == [row["evaluations"] for row in stored]
    assert count == 1


def test_packed_texts_of_any_characters() -> None:
    texts = ["[1]", None, "", "\0é\ud800", "[2]"]
    assert [
        one.read() if isinstance(one, rows.PackedText) else one for one in rows.packed(texts)
    ] == texts


class Command(str):
    """A command that counts its comparisons."""

    compared = 0
    __hash__ = str.__hash__

    def __eq__(self, other: object) -> bool:
        Command.compared += 1
        return str.__eq__(self, other)


def test_a_command_is_numbered_without_comparing_all_others() -> None:
    section = sections.Section("x")
    every = [Command(f"gcbench run --seed {seed}") for seed in range(200)]
    assert [section.number(command) for command in (*every, *every)] == [*range(1, 201)] * 2
    assert Command.compared < 400
    assert every[-1] in list(every)  # a list compares: the counter counts
    assert Command.compared >= 199


def test_a_page_shows_the_best_rows_and_counts_the_others(tmp_path: Path, monkeypatch) -> None:
    drawn: list[int] = []
    asked: list[str] = []
    task_class = registry.task_class
    sections._usual_steps.cache_clear()
    monkeypatch.setattr(figures, "write_labels", lambda axes, marks: drawn.append(len(marks)))
    monkeypatch.setattr(registry, "task_class", lambda name: asked.append(name) or task_class(name))
    monkeypatch.setattr(figures, "save", lambda figure, path: path.touch())
    contents = page.Found(runs=loaded(tmp_path / "rows.parquet", 110, 21))
    (one,), _ = sections.compared(contents.runs, None, ())
    section = sections.accuracy(one)
    (sheet,) = section.sheets
    assert len(sheet.columns[0].cells) == tables.MOST_ROWS < 110
    assert sheet.columns[0].cells[0] == "none"
    assert f"{tables.MOST_ROWS} of 110 rows" in " ".join(section.lead)
    assert drawn == [tables.FEW_POINTS]
    few = one.rows[: tables.MOST_POINTS]
    assert tables.drawn(few) == few, "a comparison of usual size is drawn whole"
    assert {len(each) for each in sheet.commands} == {sections.MOST_SEEDS}
    assert asked == ["cifar10"]
    worst, *_ = sorted(one.rows, key=lambda row: row.mean or 0.0)
    assert worst.is_baseline or worst.method not in sheet.columns[0].cells


def test_the_best_rows_are_of_all_tiers_and_budgets(tmp_path: Path) -> None:
    every = compare.rows(loaded(tmp_path / "rows.parquet", 30, 1))
    tiers = [compare.replace(row, tier="few" if i % 3 else "many") for i, row in enumerate(every)]
    best = tables.best(tiers, 7)
    assert {row.tier for row in best} == {"few", "many"}
    assert any(row.is_baseline for row in best)
    for tier in ("few", "many"):
        inside = [row.mean for row in best if row.tier == tier and not row.is_baseline]
        outside = [row.mean for row in tiers if row.tier == tier and row not in best]
        assert min(inside) >= max(outside)
    assert tables.best(tiers, 30) == tiers


def test_the_front_is_the_same_in_blocks_of_any_size(tmp_path: Path, monkeypatch) -> None:
    runs = loaded(tmp_path / "rows.parquet", 60, 5)
    expected = [row.on_front for row in compare.rows(runs)]
    assert 1 < sum(expected) < 60
    monkeypatch.setattr(ranks, "BLOCK", 4)
    monkeypatch.setattr(ranks, "STRONGEST", 1)
    assert [row.on_front for row in compare.rows(runs)] == expected


@pytest.mark.parametrize(
    "text",
    [
        "X()",
        "TopK(ratio=0.5)",
        "FFT(theta=0.85, code_bits=10, granularity='model', half=True, low=None)",
        "X(a=-1, b=1e-05, c='x=1, y=(2)')",
        "X(a=[1, 2], b={'c': 1})",
        "X(a=nan)",
        "X(a=01)",
        "not python",
        "X(a=1,)",
    ],
)
def test_fields_of_a_repr_are_what_python_reads(monkeypatch, text: str) -> None:
    config = {"options": {"other": 3}}
    summary = type("S", (), {"config": config, "compressor": text})
    fast = reader.fields(summary)
    monkeypatch.setattr(reader, "_PLAIN_CALL", reader.re.compile("(?!)"))
    assert fast == reader.fields(summary)
    assert [*map(type, fast.values())] == [*map(type, reader.fields(summary).values())]
