"""What the documents say is done as they say it."""

from __future__ import annotations

import re
import sys
import types
from pathlib import Path

import pytest
import torch

from gcbench.core.compressor import Segments
from gcbench.core.exchange import Exchange, Lane
from gcbench.reporting import catalog, kernel_timings
from gcbench.studies import conformance

ROOT = Path(__file__).parent.parent


def test_the_example_of_contributing_works(simulated, clock):
    """The file that CONTRIBUTING.md shows is a compressor, in every collective that it lists."""
    text = (ROOT / "CONTRIBUTING.md").read_text()
    source = re.search(r"```python\n(.*?)```", text, re.DOTALL)
    assert source
    module = types.ModuleType("halves")
    sys.modules["halves"] = module
    try:
        exec(source.group(1), module.__dict__)
    finally:
        del sys.modules["halves"]
    method = module.Halves()
    xs = [torch.full((3000,), float(rank)) for rank in range(4)]
    for collective in method.collectives:
        world = simulated(4)
        exchange = Exchange(world, [Lane(method, collective, 0, Segments((0, 3000)))], 0, clock)
        assert torch.equal(exchange.mean(xs, 0), torch.full((3000,), 1.5))
        assert world.traffic[0].payload_up == 2 * 3000
    outcomes = [conformance.run(method, check) for check in conformance.CHECKS]
    assert [outcome for outcome in outcomes if outcome.verdict == "fails"] == []


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
        *("ternary_encode", "level_encode", "int8_encode", "class_feedback"),
        *("sign_pack", "sign_vote8", "largest_elements"),
    ),
    "decode": ("ternary_mean", "level_decode", "int8_decode", "class_decode", "sign_decode"),
}
"""The operations of the README's table of kernels, row by row."""


def test_the_table_of_kernels_is_what_was_saved():
    """Ratios to copy_ and to eager torch: 25e6 elements, one thread, AVX-512."""
    timings = kernel_timings.load(ROOT / "results/kernels.json")
    saved = {
        (row.op, row.backend): row
        for row in timings.rows
        if (row.size, row.device, row.threads) == ("25e6", "cpu", 1)
    }
    text = (ROOT / "README.md").read_text()
    for which, ops in KERNELS.items():
        found = re.search(rf"^\| {which} \| (.*) \|$", text, re.MULTILINE)
        assert found
        told = [cell.strip() for cell in found[1].split("|") if cell.strip()]
        rows = [(saved[op, "cpu avx512"], saved[op, "eager"]) for op in ops]
        times = [f"{row.of_copy:.2f} ({eager.seconds / row.seconds:.0f}x)" for row, eager in rows]
        assert told == times


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
