"""The code blocks of CONTRIBUTING.md run, and the files that documents name exist."""

from __future__ import annotations

import re
import sys
import types
from pathlib import Path

import pytest
import torch

from gcbench.checks import cases, verify
from gcbench.core import registry
from gcbench.core.compressor import Segments
from gcbench.core.exchange import Exchange, Lane

ROOT = Path(__file__).parents[2]
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
    outcomes = verify.outcomes(method, cases.QUICK)
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
    outcomes = verify.outcomes(method, cases.QUICK)
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
