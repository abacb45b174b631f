"""What the documents say is done as they say it."""

from __future__ import annotations

import inspect
import math
import re
import statistics
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from commands import invoke
from scipy import stats

from gcbench import ops
from gcbench.core import registry
from gcbench.core.compressor import Segments
from gcbench.core.exchange import Exchange, Lane
from gcbench.reporting import catalog, kernel_timings
from gcbench.studies import conformance
from gcbench.training import suites

ROOT = Path(__file__).parents[2]
REFERENCE = ROOT / "results" / "reference"
CONTROLS = ROOT / "results" / "controls"


TEXT = (ROOT / "CONTRIBUTING.md").read_text()


@pytest.fixture
def shown(monkeypatch):
    """Return a function that runs the example of CONTRIBUTING.md with this class."""

    def find(name: str) -> type:
        (source,) = (
            block
            for block in re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
            if f"class {name}(" in block
        )
        module = types.ModuleType(name.lower())
        monkeypatch.setitem(sys.modules, name.lower(), module)
        exec(source, module.__dict__)
        return module.__dict__[name]

    return find


def test_the_compressor_of_contributing_works(shown, simulated, clock):
    """The file that CONTRIBUTING.md shows is a compressor, in every collective that it lists."""
    method = shown("Halves")()
    xs = [torch.full((3000,), float(rank)) for rank in range(4)]
    for collective in method.collectives:
        world = simulated(4)
        exchange = Exchange(world, [Lane(method, collective, 0, Segments((0, 3000)))], 0, clock)
        assert torch.equal(exchange.mean(xs, 0), torch.full((3000,), 1.5))
        assert world.traffic[0].payload_up == 2 * 3000
    outcomes = [conformance.run(method, check) for check in conformance.CHECKS]
    assert [outcome for outcome in outcomes if outcome.verdict == "fails"] == []


def test_the_method_in_rounds_of_contributing_works(shown, simulated, clock):
    """Of ten blocks the one that is largest in the mean arrives, whole and exact."""
    method = shown("LargestBlocks")()
    xs = [torch.zeros(640) for _ in range(2)]
    xs[0][:64], xs[1][:64] = 3.0, -3.0  # the largest of each worker, and nothing in the mean
    for x in xs:
        x[128:192] = torch.arange(64.0)
    world = simulated(2)
    exchange = Exchange(world, [Lane(method, "allreduce", 0, Segments((0, 640)))], 0, clock)
    expected = torch.zeros(640)
    expected[128:192] = torch.arange(64.0)
    assert torch.equal(exchange.mean(xs, 0), expected)
    assert world.traffic[0].payload_up == 4 * (10 + 64)
    outcomes = [conformance.run(method, check) for check in conformance.CHECKS]
    assert [outcome for outcome in outcomes if outcome.verdict == "fails"] == []


def test_the_memory_of_contributing_works(shown, simulated, clock):
    """A constant gradient is learned: what an unbiased code adds to it ends."""
    memory = shown("Differences")(rate=0.25)
    method = registry.compressor("qsgd", levels=7)
    xs = [torch.randn(400, generator=torch.Generator().manual_seed(rank)) for rank in range(2)]
    lane = Lane(method, "allgather", 0, Segments((0, 400)), memory)
    exchange = Exchange(simulated(2), [lane], 0, clock)
    mean = (xs[0] + xs[1]) / 2
    errors = [float((exchange.mean(xs, step) - mean).norm()) for step in range(60)]
    assert errors[0] > 0.1
    assert errors[-1] < 1e-3 * errors[0]


def test_the_sink_of_contributing_works(shown, tmp_path):
    board = shown("Board")()
    board.open(tmp_path, {"task": "digits"}, {})
    board.record({"step": 5, "kind": "train"})
    board.close()
    assert (tmp_path / "board.txt").read_text() == '{"task": "digits"}\n5 train\n'


def wrong_signatures(lines: list[str]) -> list[str]:
    """Return the lines that are not the signature of an operation."""
    found = []
    for line in lines:
        told = re.match(r"(\w+)\.(\w+)(\(.*?\))(  |$)", line)
        function = getattr(getattr(ops, told[1], None), told[2], None) if told else None
        if not told or function is None:
            found.append(line)
            continue
        real = inspect.signature(function)
        plain = [
            value.replace(annotation=inspect.Parameter.empty) for value in real.parameters.values()
        ]
        given = str(inspect.Signature(plain)).replace("device='cpu'", 'device="cpu"')
        if given != told[3]:
            found.append(f"{line}: it is {given}")
    return found


def test_the_operations_of_contributing_have_these_signatures():
    (block,) = re.findall(r"```text\n(packing.*?)```", TEXT, re.DOTALL)
    lines = block.splitlines()
    assert len(lines) >= 30
    assert wrong_signatures(lines) == []
    assert len(wrong_signatures(["packing.pack(codes)  x", "packing.nothing()", "no.op()"])) == 3


def test_the_table_of_methods_is_what_the_list_says():
    """A method that the README lists is registered, and the numbers beside it are measured."""
    rows = {row["name"]: row for row in catalog.compressors() if row["source"] == "built-in"}
    table = re.findall(r"^\| `(\w+)` \| (.*) \|$", (ROOT / "README.md").read_text(), re.MULTILINE)
    told = {name: cells.split(" | ") for name, cells in table if name in rows}
    assert len(told) > 10
    for name, (_, nominal, up, down, collectives, memory, two_way, unbiased) in told.items():
        row = rows[name]
        assert nominal == ("-" if row["nominal_bits"] is None else f"{row['nominal_bits']:g}")
        assert {"up": float(up), "down": float(down)} == row["measured_bits"]
        assert collectives.split(", ") == row["collectives"]
        assert (memory, two_way == "yes") == (row["memory"], row["two_way"])
        assert (unbiased != "no") == row["unbiased"]


KERNELS = {
    "encode": (
        *("terngrad.agree_encode", "qsgd.encode", "int8.encode", "onebit.encode_feedback"),
        *("signsgd.encode", "topk.encode_feedback", "powersgd.encode_feedback"),
    ),
    "decode": ("terngrad", "qsgd", "int8", "onebit", "signsgd", "topk", "powersgd"),
}
"""The calls of the README's table of speeds, row by row."""


def saved(name: str, isa: str) -> dict[str, str]:
    """Return the ratios to copy_ of ResNet-50, one thread, of an instruction set, by call."""
    timings = kernel_timings.load(ROOT / "results" / name)
    place = ("resnet50", "cpu", 1, f"cpu {isa}")
    return {
        row.op: f"{row.of_copy:.2f}"
        for row in timings.rows
        if (row.size, row.device, row.threads, row.backend) == place
    }


def test_the_table_of_speeds_is_what_was_saved():
    """Ratios to copy_ of what an exchange calls: with AVX-512, and in a sentence with AVX2."""
    text, ratios = (ROOT / "README.md").read_text(), saved("kernels.json", "avx512")
    for which, wanted in KERNELS.items():
        found = re.search(rf"^\| {which} \| (.*) \|$", text, re.MULTILINE)
        assert found
        told = [cell.strip() for cell in found[1].split("|") if cell.strip()]
        calls = [name if "." in name else f"{name}.{which}" for name in wanted]
        assert told == [ratios[call] for call in calls]
    sentence = re.search(r"With AVX2 alone the encoders reach\s([\d., ]+) \(", text)
    assert sentence
    narrow = saved("kernels-avx2.json", "avx2")
    assert sentence[1].split(", ") == [narrow[call] for call in KERNELS["encode"]]


def of_seeds(row: dict[str, Any]) -> str:
    """Return a line of README's tables of results from a row of `gcbench compare --json`.

    Accuracies are in points, with two decimals; losses have three.
    """
    scale, digits = (100, 2) if row["metric"] == "accuracy" else (1, 3)
    result = f"{scale * row['mean']:.{digits}f}"
    if row["sd"] is not None:
        result += f" ± {scale * row['sd']:.{digits}f}"
    difference = "-"
    if row["difference"] is not None:
        difference = f"{scale * row['difference']:+.{digits}f}"
    if row["difference_low"] is not None:
        low, high = (f"{scale * row[f'difference_{end}']:+.{digits}f}" for end in ("low", "high"))
        difference += f" [{low}, {high}]"
    name, _, fields = row["method"].partition(" ")
    rate = f"{row['lr']:g}" + ("" if row["rate"] == "tuned" else f", {row['rate']}")
    ratios = f"{row['payload_ratio_up']:.3g} | {row['payload_ratio_down']:.3g}"
    found = result, str(row["n"]), difference, row["rank"], rate
    cells = f"`{name}` {fields}".strip(), *found, ratios
    return f"| {row['tier']} | " + " | ".join(cells) + " |"


@pytest.mark.parametrize(
    ("suite", "heading"),
    [("main", "\n## Results\n"), ("main-language", "\n### A language model\n")],
)
def test_the_tables_of_results_are_what_the_stored_rows_say(suite, heading):
    """Every row of the suite that was run, with the numbers that `gcbench compare` prints."""
    rows = invoke("compare", "--suite", suite, REFERENCE, "--json").json
    text = (ROOT / "README.md").read_text()
    section = text.partition(heading)[2].partition("\n#")[0]
    tiers = "|".join(re.escape(tier) for tier in suites.load(suite).tiers)
    told = re.findall(rf"^\| (?:{tiers}) \|.*$", section, re.MULTILINE)
    assert told == [*map(of_seeds, sorted(rows, key=by_rank))]
    assert len(told) > 15


def by_rank(row: dict[str, Any]) -> tuple[Any, ...]:
    """Return what sorts the rows of a table: most bits, then ranks, equal ones by method."""
    places = [int(place) for place in row["rank"].split("-")]
    return row["tier"], places[0], places[-1], row["method"]


NUMBER = r"[+-]?(?:\d+\.\d+|\.\d+|\d+)"
INTERVAL = re.compile(rf"({NUMBER}) \[({NUMBER}), ({NUMBER})\]")


def differences(rows: list[dict[str, Any]]) -> set[tuple[float, ...]]:
    """Return mean and 95 % interval of the paired differences of all rows.

    Accuracies are in points, to two decimals; losses have three.
    """
    found = set()
    for one in rows:
        scale, decimals = (100, 2) if one["metric"] == "accuracy" else (1, 3)
        for other in rows:
            pairs = [
                scale * (value - other["values"][other["seeds"].index(seed)])
                for seed, value in zip(one["seeds"], one["values"], strict=True)
                if seed in other["seeds"]
            ]
            if one is not other and len(pairs) > 1:
                half = stats.t.ppf(0.975, len(pairs) - 1) * statistics.stdev(pairs)
                half /= math.sqrt(len(pairs))
                middle = statistics.mean(pairs)
                found.add(tuple(round(v, decimals) for v in (middle, middle - half, middle + half)))
    return found


def over_workers(rows: list[dict[str, Any]]) -> set[tuple[float, ...]]:
    """Return mean and 95 % interval of what is seen over all numbers of workers, in points.

    To two decimals and to three. By optimizer: the mean over the numbers of workers less the
    uncompressed result, and the change from the least to the most of a line through the accuracies
    over log2 of the workers.
    """
    found = set()
    for momentum in {row["momentum"] for row in rows}:
        mine = [row for row in rows if row["momentum"] == momentum]
        (plain,) = (row["values"] for row in mine if row["compressor_name"] == "none")
        table = {row["workers"]: row["values"] for row in mine if row["compressor_name"] != "none"}
        assert {len(values) for values in table.values()} == {len(plain)}
        x, y = np.log2([*table]), 100 * np.array([*table.values()])
        change = np.polyfit(x, y, 1)[0] * (x.max() - x.min())
        for values in (y.mean(0) - 100 * np.array(plain), change):
            half = stats.t.ppf(0.975, len(values) - 1) * values.std(ddof=1) / len(values) ** 0.5
            three = (values.mean(), values.mean() - half, values.mean() + half)
            for sign, order in ((1, [0, 1, 2]), (-1, [0, 2, 1])):
                found |= {tuple(np.round(sign * np.array(three)[order], n)) for n in (2, 3)}
    return found


def test_the_intervals_of_the_findings_are_those_of_the_stored_rows():
    """Each "mean [low, high]" beside a file of rows is that of two of its rows, paired by seed.

    So are those of README's results.
    """
    text = (ROOT / "results" / "FINDINGS.md").read_text()
    lines = [line for line in text.splitlines() if ".parquet" in line and "seeds |" in line]
    told = {}
    for line in lines:
        name = re.findall(r"(?:reference|controls)/([\w-]+)\.parquet", line)[0]
        told[line] = (name, [tuple(map(float, match)) for match in INTERVAL.findall(line)])
    stored = {path.stem: path.stem for path in REFERENCE.glob("*.parquet")}
    stored |= {path.stem: path.with_suffix(".yaml") for path in CONTROLS.glob("*.parquet")}
    known = {
        name: differences(
            invoke(
                "compare", "--suite", suite, REFERENCE, *CONTROLS.glob("*.parquet"), "--json"
            ).json
        )
        for name, suite in stored.items()
    }
    every = invoke("compare", "--suite", "terngrad-figure3", REFERENCE, "--json").json
    known["terngrad-figure3"] |= over_workers(every)
    for line, (name, intervals) in told.items():
        assert set(intervals) <= known[name], line
    controls = [path.stem for path in CONTROLS.glob("*.parquet")]
    readme = (ROOT / "README.md").read_text()
    item = readme.partition("2. **At equal bits")[2].partition("3. **")[0]
    section, _, language = (
        readme.partition("\n## Results")[2].partition("\n## ")[0].partition("\n### ")
    )
    claims = readme.partition("\n## What the papers claim")[2].partition("\n## ")[0]
    for part, suites_of_part in (
        (item, stored),
        (claims, stored),
        (section, {"main"}),
        (language, {"main-language", *controls}),
    ):
        quoted = {tuple(map(float, match)) for match in INTERVAL.findall(part)}
        assert quoted
        assert quoted <= set().union(*(known[name] for name in suites_of_part))
    assert sum(len(intervals) for _, intervals in told.values()) > 15


def test_readme_has_a_line_for_each_claim_of_a_paper():
    """Claim, source and verdict are those of the findings, in their order, without our own."""
    findings = (ROOT / "results" / "FINDINGS.md").read_text().partition("\n## ")[0]
    lines = [line[2:-2].split(" | ") for line in findings.splitlines() if line.startswith("| ")]
    claims = [cells[:3] for cells in lines if not cells[1].startswith("ours")]
    readme = (ROOT / "README.md").read_text().partition("numbers, n and intervals are in")[2]
    table = readme.partition("\n| ")[2].partition("\n\n")[0]
    told = [line.removeprefix("| ")[:-2].split(" | ") for line in table.splitlines()]
    assert [cells for cells in told if set(cells) != {"|-|-|"}] == claims
    assert len(claims) > 40


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md", "results/README.md"])
def test_files_that_documents_name_exist(name):
    """Every path in backticks or in a link that looks like one of ours is there."""
    text = (ROOT / name).read_text()
    paths = re.findall(r"[`(]((?:gcbench|compressors|tasks|cuda|results|tests)/[\w./-]+)[`)]", text)
    base = (ROOT, (ROOT / name).parent)
    missing = [
        path
        for path in paths
        if not any((folder / path).exists() for folder in base)
        and not path.startswith(("results/runs", "compressors/halves.py"))
    ]
    assert not missing
