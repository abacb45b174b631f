"""Suites: what the bundled ones say, choosing runs, the published numbers beside ours, errors."""

from __future__ import annotations

import csv
import io
import json
import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from builders import summary_of
from commands import ROOT, invoke
from test_config import parse

from gcbench import ops
from gcbench.core import codec, registry
from gcbench.core.compressor import Context, Key, Segments
from gcbench.core.errors import UsageError
from gcbench.report import suite_match
from gcbench.results import rows
from gcbench.results.reader import load
from gcbench.training import configuration, resume, suites
from gcbench.training.configuration import Config

pytestmark = pytest.mark.usefixtures("forked")

MOMENTUM = {2: 0.9922, 16: 0.9927, 64: 0.9922}
VANILLA = {2: 0.9924, 16: 0.9921, 64: 0.9918}

OWN = """
title: mine
source: A paper
place: Table 9
differs: It has fewer steps.
paper_steps: 400
config: {task: digits, batch: 32, steps: 20, lr: 0.1}
entries:
  - config: {compressor: none, workers: 2}
    place: fp32
    published: 0.95
  - config: {compressor: terngrad}
    by: workers
    published: {2: 0.90, 4: null}
  - config: {compressor: topk, options: {ratio: [0.1, 0.5]}, memory: none, workers: 2}
    published: 0.5
    paper_steps: 20
"""


@pytest.fixture
def local(tmp_path: Path) -> Path:
    path = tmp_path / "own.yaml"
    path.write_text(OWN)
    return path


def row(config: Config, accuracy: float | None = 0.8, **over: Any) -> dict[str, Any]:
    """Return the summary that a run of this config would have."""
    return summary_of(config, test_accuracy=accuracy, **over)


def rows_of(path: Path, *result: dict[str, Any]) -> Path:
    """Write rows as somebody else's file."""
    path.write_text(json.dumps(result))
    return path


# ---- the bundled suites --------------------------------------------------------------------------


@pytest.mark.parametrize("name", suites.names())
def test_bundled_suites_say_all_that_a_reader_needs(name):
    suite = suites.load(name)
    points = suite.points()
    assert len(suite.differs) > 40
    if suite.tunes:  # a comparison of this project
        assert all(p.config.holdout or p.tune is None or p.tune.holdout for p in points)
        return
    assert "arXiv:" in suite.source
    assert suite.place.startswith(("Figure ", "Table "))
    for point in points:
        assert point.config.steps <= point.published.steps  # a laptop's budget
        message = [n for n in (point.published.accuracy, point.published.top5) if n is not None]
        assert message
        assert all(0.5 < number < 1 for number in message)
        assert point.published.source.startswith(suite.paper)
        assert Config.make(point.config.model_dump(exclude_unset=True)) == point.config


def numbers(name: str) -> dict[tuple[Any, ...], tuple[float | None, int]]:
    return {
        (c.compressor, c.workers, c.batch, c.momentum): (p.published.accuracy, p.published.steps)
        for p in suites.load(name).points()
        if (c := p.config)
    }


def test_figure_3_of_terngrad():
    workers = (2, 16, 64)
    assert numbers("terngrad-figure3") == {
        ("none", 2, 64, 0.9): (0.9920, 10_000),
        ("none", 2, 64, 0.0): (0.9926, 10_000),
        **{("terngrad", n, 64, 0.9): (MOMENTUM[n], 10_000) for n in workers},
        **{("terngrad", n, 64, 0.0): (VANILLA[n], 10_000) for n in workers},
    }
    for point in suites.load("terngrad-figure3").points():
        assert point.config.lr == {0.9: 0.01, 0.0: 0.1}[point.config.momentum]


def test_table_1_of_terngrad():
    assert numbers("terngrad-table1") == {
        ("none", 2, 128, 0.0): (0.8656, 300_000),
        ("terngrad", 2, 128, 0.0): (0.8564, 300_000),
        ("none", 16, 2048, 0.0): (0.8319, 18_750),
        ("terngrad", 16, 2048, 0.0): (0.8280, 18_750),
    }
    examples = {p.config.steps * p.config.batch for p in suites.load("terngrad-table1").points()}
    assert examples == {128 * 3200}  # both batches see equally many


def recipes(name: str) -> dict[tuple[Any, ...], tuple[Any, ...]]:
    return {
        (c.compressor, c.workers, c.batch, c.options.get("clip")): (
            p.published.accuracy,
            p.published.top5,
            p.published.steps,
            c.lr,
            c.weight_decay,
            c.task_options["dropout"],
        )
        for p in suites.load(name).points()
        if (c := p.config) and c.dense_last
    }


def test_table_2_of_terngrad():
    assert recipes("terngrad-table2") == {
        ("none", 2, 256, None): (0.5733, 0.8056, 370_000, 0.01, 5e-4, 0.5),
        ("terngrad", 2, 256, None): (0.5761, 0.8047, 370_000, 0.01, 5e-4, 0.2),
        ("terngrad", 2, 256, 0.0): (0.5463, 0.7816, 370_000, 0.01, 5e-4, 0.2),
        ("none", 4, 512, None): (0.5732, 0.8073, 185_000, 0.02, 5e-4, 0.5),
        ("terngrad", 4, 512, None): (0.5728, 0.8023, 185_000, 0.02, 5e-4, 0.2),
        ("none", 8, 1024, None): (0.5662, 0.8028, 92_500, 0.04, 5e-4, 0.5),
        ("terngrad", 8, 1024, None): (0.5754, 0.8025, 92_500, 0.04, 5e-4, 0.2),
    }
    points = suites.load("terngrad-table2").points()
    assert {p.config.steps * p.config.batch for p in points} == {256 * 3700}


def test_table_3_of_terngrad():
    assert recipes("terngrad-table3") == {
        ("none", 2, 128, None): (None, 0.8830, 600_000, 0.04, 4e-5, 0.2),
        ("terngrad", 2, 128, None): (None, 0.8677, 600_000, 0.04, 1e-5, 0.08),
        ("none", 4, 256, None): (None, 0.8782, 300_000, 0.08, 4e-5, 0.2),
        ("terngrad", 4, 256, None): (None, 0.8596, 300_000, 0.08, 1e-5, 0.08),
        ("none", 8, 512, None): (None, 0.8900, 300_000, 0.10, 4e-5, 0.2),
        ("terngrad", 8, 512, None): (None, 0.8647, 300_000, 0.10, 2e-5, 0.08),
    }


def test_top_5_stands_beside_its_published_number(tmp_path):
    points = [
        p for p in suites.load("terngrad-table3").points() if p.config.compressor == "terngrad"
    ]
    rows = [
        row(p.config, 0.3, test_top5=top5)
        for p, top5 in zip(points, (0.25, 0.5, None), strict=True)
    ]
    path = rows_of(tmp_path / "rows.json", *rows)
    message = invoke("compare", path, "--suite", "terngrad-table3", "--format", "csv")
    result = {
        line["workers"]: (line["test_top5"], line["published_top5"], line["published"])
        for line in csv.DictReader(io.StringIO(message.out))
    }
    assert result == {
        "2": ("0.25", "0.8677", ""),
        "4": ("0.5", "0.8596", ""),
        "8": ("", "0.8647", ""),
    }
    shown = invoke("compare", path, "--suite", "terngrad-table3", "--format", "markdown").out
    cells = {tuple(cell.strip() for cell in line.split("|")) for line in shown.splitlines()}
    assert any("25.00" in line and "86.77" in line for line in cells)
    without = invoke("compare", path, "--format", "markdown").out
    assert "top-5" not in without


def test_table_2_of_fft_sparsification():
    points = suites.load("fft-table2").points()
    methods = {registry.call(p.config.make_compressor()): p.published.accuracy for p in points}
    assert methods == {
        "NoCompression()": 0.9211,
        "FFT(theta=0.85, code_bits=10, mantissa=5, granularity='model', half=True, "
        "bitmap='real', pad=True, low=None, high=None)": 0.9199,
        "TopK(ratio=0.15, positions='smallest', values='fp32', granularity='tensor')": 0.9031,
        "QSGD(levels=3, norm='max', granularity=512, coding='fixed')": 0.8866,
        "TernGrad(clip=0.0, scale='clipped-max', share=True, granularity='tensor')": 0.8690,
    }
    assert {(p.config.collective, p.config.memory) for p in points} == {("allgather", "none")}
    assert {p.published.steps for p in points} == {round(180 * 50_000 / 1024)}


def test_a_run_of_a_suite_is_the_run_made_by_hand():
    for name in suites.names():
        for point in {p.entry: p for p in suites.load(name).points()}.values():
            (again,) = parse(configuration.command(point.config))
            assert again.hash == point.config.hash
    (hand,) = parse(
        "gcbench run --task mnist --compressor terngrad --workers 2 --threads 1"
        " --eval-every 0 --steps 10000"
    )
    assert hand.hash in {p.config.hash for p in suites.load("terngrad-figure3").points()}


# ---- choosing and changing -----------------------------------------------------------------------


def test_budget_changes_all_else_chooses(local):
    base = f"gcbench run --suite {local}"
    assert len(parse(base)) == 5
    created = parse(f"{base} --steps 7 --seed 3,4 --workers 2 --compressor none,terngrad")
    assert [(c.compressor, c.workers, c.steps, c.seed) for c in created] == [
        *[("none", 2, 7, 3), ("none", 2, 7, 4), ("terngrad", 2, 7, 3), ("terngrad", 2, 7, 4)],
    ]
    (created,) = parse(f"{base} --set ratio=0.5 --engine spawn --eval-every 0")
    assert (created.options, created.engine, created.eval_every) == ({"ratio": 0.5}, "spawn", 0)
    assert len(parse(f"{base} --set clip=2.5")) == 2  # a field's default, too
    assert len(parse(f"{base} --batch 32 --network mlp")) == 5
    (created,) = parse("gcbench run --suite fft-table2 --compressor qsgd --network resnet32")
    assert created.options == {"levels": 3}


@pytest.mark.parametrize(
    ("flags", "output"),
    [
        ("--workers 3", "suite 'own' has no run with 3, only with 2, 4;"),
        ("--compressor none,topkk", "no run with topkk, only with none, terngrad, topk;"),
        ("--set ratoi=0.1", "unknown field of suite own: 'ratoi'. Did you mean 'ratio'?"),
        (
            "--set ratio=0.2",
            "--set ratio=0.2: suite 'own' has no run with 0.2, only with 0.1, 0.5;",
        ),
        ("--workers 4 --compressor topk", "no run of suite 'own' matches all of"),
        ("--lr 0.3", "--lr 0.3: suite 'own' has no run with 0.3, only with 0.1;"),
        ("--steps 0", "entry 1: steps=0"),
        ("--config x.yaml", "two files of settings"),
    ],
)
def test_what_a_suite_does_not_have(local, flags, output):
    with pytest.raises(UsageError) as caught:
        parse(f"gcbench run --suite {local} {flags}")
    assert output in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("old", "new", "output"),
    [
        ("published: 0.95", "published: 95", "entry 1, published: accuracy 95"),
        ("published: 0.95", "published: .nan", "accuracy nan"),
        ("published: 0.95", "published: {2: 0.9}", "both or neither"),
        ("4: null}", "4: 90}", "accuracy 90"),
        ("by: workers", "by: compressor", "by 'compressor'"),
        ("by: workers", "by: steps", "by 'steps'"),
        ("title:", "titel:", "titel: unknown key; expected config, differs, entries"),
        (
            "place: fp32",
            "palce: fp32",
            "palce: unknown key; expected as_published, by, config, factors",
        ),
        ("paper_steps: 400", "", "suite 'own', entry 1: paper_steps is missing"),
        ("paper_steps: 400", "paper_steps: 0", "paper_steps: input should be greater"),
        ("none, workers: 2", "nne, workers: 2", "entry 1: unknown compressor 'nne'. Did you mean"),
        ("lr: 0.1", "rate: 0.1", "entry 1: unknown setting 'rate'"),
        ("lr: 0.1", "options: 3", "options=3"),
        ("terngrad}\n    by: workers", "none}\n    by: workers", "entries 1 and 2 have the same"),
        ("entries:", "entries: []\nx:", "entries: list should have at least 1 item"),
        ("title:", "name: x\ntitle:", "'name'"),
        ("title: mine", "5: mine", "key 5"),
    ],
)
def test_files_that_are_wrong(tmp_path, old, new, output):
    path = tmp_path / "own.yaml"
    assert old in OWN
    path.write_text(OWN.replace(old, new, 1))
    with pytest.raises(UsageError) as caught:
        suites.load(str(path))
    assert output in str(caught.value)
    assert "\n" not in str(caught.value)


def test_unknown_suites(tmp_path):
    with pytest.raises(UsageError, match=r"'terngrad-fig3'. Did you mean 'terngrad-figure3'\?"):
        suites.load("terngrad-fig3")
    with pytest.raises(UsageError, match=r"--suite .*gone\.yaml: No such file"):
        suites.load(str(tmp_path / "gone.yaml"))


# ---- beside the published numbers ----------------------------------------------------------------


def compared(folder: Path, suite: Path | str, *words: str) -> Any:
    return invoke("compare", folder, "--suite", suite, *words)


def test_the_published_number_stands_beside_ours(local, tmp_path):
    none, tern, four, topk, _ = parse(f"gcbench run --suite {local}")
    (longer,) = parse(f"gcbench run --suite {local} --compressor terngrad --workers 2 --steps 400")
    file = rows_of(
        tmp_path / "rows.json",
        *(row(none, 0.91), row(tern, 0.84), row(four, 0.7), row(topk, 0.4), row(longer, 0.93)),
    )
    message = compared(file, local, "--json")
    result = {(one["compressor_name"], one["workers"], one["steps"]): one for one in message.json}
    one = result["terngrad", 2, 20]
    assert (one["suite"], one["published"], one["published_steps"]) == ("own", 0.90, 400)
    assert one["published_difference"] == pytest.approx(-0.06)
    assert one["published_source"] == "A paper, Table 9"
    assert one["difference"] == pytest.approx(-0.07)  # from none, at equal budget
    assert result["none", 2, 20]["published_source"] == "A paper, Table 9, fp32"
    one = result["terngrad", 4, 20]
    assert (one["published"], one["published_difference"]) == (None, None)
    assert result["topk", 2, 20]["published_steps"] == 20

    text = compared(file, local, "--format", "markdown").out
    head, _, *lines = (line.split(" | ") for line in text.splitlines() if line.startswith("|"))
    place = head.index("published %")
    assert head[place + 1 : place + 3] == ["ours - published", "steps: ours / published"]
    cells = [line[place : place + 3] for line in lines if len(line) == len(head)]
    assert sorted(cells) == [
        ["-", "-", "20 / 400"],
        ["50.00", "-10.00", "20 / 20"],  # at the paper's steps: no mark
        ["90.00", "+3.00", "400 / 400"],
        ["90.00", "-6.00 §", "20 / 400"],
        ["95.00", "-4.00 §", "20 / 400"],
    ]
    assert "§: trained for 5 % of the paper's steps." in text
    assert "published: A paper, Table 9. It has fewer steps." in text
    latex = compared(file, local, "--format", "latex").out
    assert r"$-$6.00 \S{}" in latex
    cell = next(csv.DictReader(io.StringIO(compared(file, local, "--format", "csv").out)))
    assert (cell["published"], cell["published_steps"]) == ("0.95", "400")


def test_without_a_suite_nothing_is_published(local, tmp_path):
    file = rows_of(tmp_path / "rows.json", row(parse(f"gcbench run --suite {local}")[0]))
    shown = invoke("compare", file, "--json")
    assert not any("published" in key or key == "suite" for key in shown.json[0])
    assert "published" not in invoke("compare", file).out


def test_missing_runs_of_an_entry_with_several_methods_are_all_named(local, tmp_path):
    several = local.with_name("several.yaml")
    text = local.read_text().replace("compressor: terngrad", "compressor: [terngrad, int8]", 1)
    several.write_text(text)
    file = rows_of(tmp_path / "rows.json", row(parse(f"gcbench run --suite {several}")[0]))
    assert "  terngrad,int8" in compared(file, several, "--details").err


def test_the_runs_that_nobody_made_are_named_with_their_command(local, tmp_path):
    configs = parse(f"gcbench run --suite {local} --steps 7 --seed 3")
    file = rows_of(tmp_path / "rows.json", *map(row, configs[:2]))
    message = compared(file, local, "--details").err.splitlines()
    assert message == [
        "3 of 5 runs of suite own are missing",
        "  terngrad workers=4",
        "  topk ratio=[0.1,0.5] memory=none workers=2",
        f"  make them with: gcbench run --suite {local} --compressor terngrad,topk "
        "--steps 7 --seed 3",
    ]
    missing = parse(message[-1].partition(": ")[2])
    assert {c.hash for c in configs[2:]} <= {c.hash for c in missing}
    assert compared(rows_of(file, *map(row, configs)), local).err == ""
    usual = parse(f"gcbench run --suite {local}")[0]
    command = compared(rows_of(file, row(usual)), local, "--details").err.splitlines()[-1]
    assert "--steps" not in command
    assert "--seed" not in command
    others = [{**row(config), "suite": "main/4"} for config in configs[:2]]  # with seeds of its own
    rows.write(shared := tmp_path / "rows.parquet", [{**row(usual), "suite": "own/1"}, *others])
    command = compared(shared, local).err.splitlines()[-1]
    assert "--steps" not in command
    assert "--seed" not in command


def match(suite: Path, *result: dict[str, Any]) -> list[float | None]:
    """Return what is published of each row, -1 for one that is of no entry."""
    runs = load([rows_of(suite.parent / "rows.json", *result)])
    beside = suite_match.beside(suites.load(str(suite)), runs)
    expected = beside.points
    return [expected[r.method].published.accuracy if r.method in expected else -1 for r in runs]


@pytest.mark.parametrize("setting", ["dense_last: true", "betas: [[0.8, 0.99]]", "nesterov: false"])
def test_the_command_of_a_missing_entry_has_its_flags_and_lists(local, setting):
    text = OWN.replace("lr: 0.1}", "lr: 0.1, momentum: 0.5, nesterov: true}")
    local.write_text(text + f"  - config: {{compressor: none, workers: 2, {setting}}}\n")
    *others, missing = parse(f"gcbench run --suite {local}")
    file = rows_of(local.with_name("rows.json"), *map(row, others))
    command = compared(file, local, "--details").err.splitlines()[-1].partition(": ")[2]
    assert [config.hash for config in parse(command)] == [missing.hash]


def test_a_run_is_an_entry_by_what_the_suite_sets(local):
    """Budget, engine and machine are free; every other setting must be the entry's."""
    none, tern, *_ = parse(f"gcbench run --suite {local}")
    changed = [
        *({"steps": 9}, {"seed": 4}, {"engine": "spawn"}, {"threads": 3}, {"eval_every": 0}),
        *({"log_every": 3}, {"options": {"clip": 2.5}}, {"task_options": {"network": "mlp"}}),
    ]
    same = [Config.make({**tern.model_dump(), **change}) for change in changed]
    assert match(local, row(none), *map(row, same)) == [0.95] + [0.90] * len(same)
    other = [
        *({"lr": 0.2}, {"batch": 64}, {"workers": 8}, {"options": {"clip": 2.0}}, {"delay": 1}),
        *({"task_options": {"network": "conv"}}, {"dense_last": True}, {"compressor": "qsgd"}),
        *({"collective": "allgather"}, {"memory": "forced-residual"}, {"momentum": 0.5}),
    ]
    for change in other:
        settings = {**tern.model_dump(), **change}
        if settings["compressor"] != "terngrad":
            settings["collective"] = "auto"
        assert match(local, row(none), row(Config.make(settings))) == [0.95, -1], change
    by_step = Config.make({**tern.model_dump(), "options": {"clip": {0: 2.0, 5: 2.5}}})
    late = row(by_step) | {"compressor": repr(by_step.make_compressor(5))}
    assert match(local, row(none), late) == [0.95, -1]


def test_a_row_must_tell_what_the_suite_sets(local):
    none, tern, _, topk, _ = parse(f"gcbench run --suite {local}")
    short = row(tern)
    for key in ("ema", "schedule", "weight_decay"):
        del short["config"][key]
    assert match(local, row(none), short) == [0.95, 0.90]
    silent = row(tern)
    del silent["config"]["lr"]
    assert match(local, row(none), silent) == [0.95, -1]
    older = row(topk, compressor="TopK(ratio=0.1)")  # from before the other fields
    assert match(local, row(none), older) == [0.95, 0.5]
    silent = row(topk, compressor="TopK(positions='smallest')")
    silent["config"]["options"] = {}
    assert match(local, row(none), silent) == [0.95, -1]
    more = row(tern, compressor="TernGrad(clip=2.5, more=1)")  # a field that ours has not
    assert match(local, row(none), more) == [0.95, -1]


def test_runs_of_no_suite_are_refused(local, tmp_path):
    other = rows_of(tmp_path / "rows.json", row(Config.make({"task": "quadratic"}), None))
    refused = compared(other, local)
    assert refused.code == 2
    assert "no run here is one of suite own (1 read); make them with" in refused.err
    assert f"`gcbench run --suite {local}`" in refused.err
    assert invoke("compare", other, "--suite", "none").code == 2


def figure3(folder: Path) -> Path:
    """Write rows of Figure 3 as a user's file: momentum .9, one seed, fp32 and two sizes."""
    stored = rows.read(ROOT / "results/reference/terngrad-figure3.parquet")
    chosen = [
        one
        for one in stored
        if (one["seed"], one["config"]["momentum"]) == (0, 0.9)
        and (one["compressor_name"] == "none" or one["workers"] in (2, 16))
    ]
    rows.write(folder / "figure3.parquet", [{**one, "suite": ""} for one in chosen])
    return folder / "figure3.parquet"


def test_stored_rows_are_entries_of_a_suite(tmp_path):
    """Rows with other steps than the paper's stand beside its numbers."""
    shown = compared(figure3(tmp_path), "terngrad-figure3", "--json")
    expected = {(one["compressor_name"], one["workers"]): one["published"] for one in shown.json}
    assert expected == {
        ("none", 2): 0.9920,
        **{("terngrad", n): MOMENTUM[n] for n in (2, 16)},
    }


def test_rows_of_another_version_of_a_file_of_mine_are_left_out(local, tmp_path):
    """The version in a user's own file counts as that of a bundled suite does."""
    configs = [
        c for c in parse(f"gcbench run --suite {local} --seed 0,1") if c.compressor == "none"
    ]
    file = tmp_path / "rows.parquet"
    for config, accuracy, version in zip(configs, (0.6, 0.8), (1, 2), strict=True):
        rows.add(
            file, rows.row(row(config, accuracy, config_hash=config.hash), [], f"own/{version}")
        )
    first = compared(file, local, "--json")
    assert [(one["n"], one["mean"]) for one in first.json] == [(1, 0.6)]
    assert "1 rows of version 2 of suite own left out" in first.err
    local.write_text(OWN.replace("title:", "version: 2\ntitle:"))
    assert [one["mean"] for one in compared(file, local, "--json").json] == [0.8]
    page = invoke("report", file, "--suite", local, "--output", tmp_path / "page.html")
    assert "1 rows of version 1 of suite own left out" in page.err


def test_where_and_by_work_on_a_suite(local, tmp_path):
    file = rows_of(tmp_path / "rows.json", *map(row, parse(f"gcbench run --suite {local}")))
    message = compared(file, local, "--where", "workers=4", "--json")
    assert [one["workers"] for one in message.json] == [4]
    assert "workers=4" in compared(file, local, "--by", "workers").out


# ---- the other commands --------------------------------------------------------------------------


def test_run_and_compare_a_suite_for_real(local, tmp_path):
    flags = ["--suite", local, "--workers", "2", "--compressor", "none,terngrad"]
    results = ["--results", tmp_path / "runs", "--progress", "none"]
    done = invoke("run", *flags, "--steps", "2", *results, "--json")
    assert [one["steps"] for one in done.json] == [2, 2]
    assert f"gcbench compare {tmp_path / 'runs'} --suite {local}" in done.err
    hand = ["--compressor", "terngrad", "--batch", "32", "--lr", "0.1", "--workers", "2"]
    assert "skipped" in invoke("run", *hand, "--steps", "2", *results).err
    message = compared(tmp_path / "runs", local, "--json")
    assert [(one["published"], one["steps"]) for one in message.json] == [(0.95, 2), (0.90, 2)]


def test_of_several_baselines_the_one_with_equal_settings_is_taken(tmp_path):
    """Where a baseline may have another batch, the one with the same batch comes first."""
    path = tmp_path / "mine.yaml"
    path.write_text(
        "{title: mine, source: ours, place: here, differs: it is short, varies: [batch], config: "
        "{task: digits, steps: 20, workers: 2, lr: 0.1}, entries: [{config: {compressor: "
        "[none, topk], batch: [32, 64], seed: [0, 1]}}]}"
    )
    accuracies = {("none", 32): 0.9, ("topk", 32): 0.8, ("none", 64): 0.6, ("topk", 64): 0.7}
    suite = suites.load(str(path))
    runs = [
        summary_of(
            point.config,
            test_accuracy=accuracies[point.config.compressor, point.config.batch],
            test_loss=1.0,
        )
        for point in suite.points()
    ]
    file = rows_of(tmp_path / "rows.json", *runs)
    shown = invoke("compare", file, "--suite", path, "--json").json
    differences = {
        row["batch"]: row["difference"] for row in shown if row["compressor_name"] == "topk"
    }
    assert differences == {32: pytest.approx(-0.1), 64: pytest.approx(0.1)}


def test_list_suites():
    rows = {one["name"]: one for one in invoke("list", "suites", "--json").json}
    assert list(rows) == suites.names()
    table = rows["terngrad-table1"]
    assert (table["runs"], table["steps"], table["paper_steps"]) == (
        12,
        [3200, 200],
        [300000, 18750],
    )
    assert table["source"] == "Wen et al., NeurIPS 2017, arXiv:1705.07878, Table 1"
    assert Path(table["file"]).exists()
    assert "LeNet on MNIST" in invoke("list", "suites").out


def test_the_report_has_a_section_of_a_suite(tmp_path):
    page = tmp_path / "page.html"
    stored = figure3(tmp_path)
    done = invoke("report", stored, "--suite", "terngrad-figure3", "--output", page)
    assert done.code == 0, done.err
    text = page.read_text()
    assert "terngrad-figure3: LeNet on MNIST" in text
    assert "5 of 8 runs of suite terngrad-figure3 are missing; terngrad lr=0.01" in text
    assert "99.22" in text
    invoke("report", stored, "--output", page)
    assert "99.22" not in page.read_text()


# ---- the controls --------------------------------------------------------------------------------


def test_the_control_of_clipping_is_main_language_but_for_its_method(monkeypatch):
    """Its other rows are runs of `main-language`; it clips where `terngrad` clips.

    Its stored rows are those of this method with these fields. They name the digest of the file
    as it was written for the previous contract, so its command would run them again.
    """
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv(registry.FILES, "")
    registry.compressors.cache_clear()
    points = suites.load("results/controls/clipping.yaml").points()
    theirs = {point.identity for point in suites.load("main-language").points()}
    methods = {p.config.compressor for p in points if p.identity not in theirs}
    assert methods == {"clipped"}
    (control, *_) = (p.config for p in points if p.config.compressor == "clipped")
    segments = Segments.of([(40, 50), (7,), (300,)])
    x = torch.randn(segments.numel, generator=torch.Generator().manual_seed(1)) ** 3
    (clipped,) = codec.encode(
        control.make_compressor(), x, Context(segments, x[:0], Key(0, 0, 0, 0, 0))
    ).parts
    limits, _ = ops.ternary.scales(x, segments, 2.5)
    pairs = zip(torch.split(x, segments.lengths), limits, strict=True)
    torch.testing.assert_close(clipped, torch.cat([t.clamp(-c, c) for t, c in pairs]))
    assert (clipped != x).any()
    created = rows.read(path := Path("results/controls/clipping.parquet"))
    assert {row["seed"] for row in created} == {p.config.seed for p in points} | {100}
    for row in created:
        config = Config.model_validate(row["config"])
        assert config.hash == row["config_hash"]
        stored = row["provenance"] | {"plugins": configuration.plugins(config)}
        resume.check_objects(config, row | {"provenance": stored}, path)
    monkeypatch.undo()
    registry.compressors.cache_clear()


def test_the_control_of_rates_is_main_language_but_for_its_ladder():
    """Its rows are runs of `main-language`; between two of that suite's rates lies one more."""
    control = suites.load(str(ROOT / "results/controls/rates.yaml"))
    theirs = suites.load("main-language")
    points = control.points()
    assert {point.identity for point in points} < {point.identity for point in theirs.points()}
    assert {point.config.seed for point in points} == {p.config.seed for p in theirs.points()}
    assert control.tune.seed == theirs.tune.seed
    every_other = control.tune.ladder[::2]
    assert set(every_other) < set(theirs.tune.ladder)
    assert [high / low for low, high in pairwise(every_other)] == [2.0] * 4
    between = control.tune.ladder[1::2]
    for (low, high), middle in zip(pairwise(every_other), between, strict=True):
        assert middle == pytest.approx(math.sqrt(low * high), rel=0.02)
