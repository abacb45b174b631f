"""Selection on a GPU where `test_cuda.py` does not reach: many long segments, few blocks."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from cusim import cuda_device, on_shim, shim  # noqa: F401  # fixtures
from torch import Tensor

from gcbench import ops
from gcbench.core.compressor import Key, Segments
from gcbench.ops.cuda import launch, selection

LENGTHS = (20_000, 9000, 8193, 0, 30_000, 5, 1024, 1025, 8192, 16_384, 24_576)
"""Of warps, of blocks and long ones; of whole chunks and not."""
EDGES = Segments(tuple(sum(LENGTHS[:i]) for i in range(len(LENGTHS) + 1)))


def inputs() -> Iterator[tuple[str, Tensor]]:
    """Yield what candidates are found in, and what the sample says nothing about."""
    n = EDGES.numel
    normal = torch.randn(n, generator=torch.Generator().manual_seed(1))
    yield "normal", normal
    yield "ties", normal.mul(2).round()
    yield "constant", torch.full((n,), -0.3)
    few = torch.zeros(n)
    few[::997] = -1.0
    yield "few", few


@pytest.fixture(params=[1024, 3])
def blocks(request, monkeypatch) -> int:
    """How many blocks look at candidates: enough, or each has chunks of several segments."""
    monkeypatch.setattr(selection, "MOST_BLOCKS", request.param)
    return request.param


@pytest.mark.parametrize("ratio", [0.01, 0.4])
def test_many_long_segments(ratio, blocks, cuda_device):  # noqa: F811
    runs = ops.selection.kept_runs(EDGES, ratio)
    for what, x in inputs():
        wanted = ops.selection.largest(ops.selection.magnitude_order(x), runs)
        selected, values = ops.selection.largest_elements(x.to(cuda_device), runs)
        assert torch.equal(selected.cpu(), wanted), what
        assert torch.equal(values.cpu(), x[wanted]), what
    for key in (Key(3, 5, 2, 7), Key(9, 3, 4, 2**34 - 7)):
        with ops.using("reference"):
            wanted = ops.selection.random_positions(key, runs)
        selected = ops.selection.random_positions(key, runs, cuda_device)
        assert torch.equal(selected.cpu(), wanted), key


@pytest.mark.parametrize("ratio", [0.1, 0.2])
def test_a_sample_that_is_all_there_is(ratio, cuda_device):  # noqa: F811
    """Fewer elements than are to be kept reach the limit, or those that do have no room."""
    n, size = 60_000, selection.SAMPLE
    index = torch.arange(size)
    first, end = index * n // size, (index + 1) * n // size
    sampled = torch.ones(n)
    sampled[first + (index * 2654435761 & 0xFFFFFFFF) % (end - first)] = 3.0
    runs = ops.selection.kept_runs(Segments((0, n)), ratio)
    for x in (sampled, 4 - sampled):
        wanted = ops.selection.largest(ops.selection.magnitude_order(x), runs)
        selected = ops.selection.largest_elements(x.to(cuda_device), runs)[0]
        assert torch.equal(selected.cpu(), wanted)


def test_more_sparse_tensors_than_a_launch_takes(cuda_device):  # noqa: F811
    n, number = 9000, 130
    generator = torch.Generator().manual_seed(2)
    sparse = []
    for i in range(number):
        selected = torch.randperm(n, generator=generator)[: i * 7].sort().values
        sparse.append((torch.randn(len(selected), generator=generator), selected))
    with ops.using("reference"):
        wanted = ops.selection.scatter_mean(sparse, n, number)
    there = [(values.to(cuda_device), selected.to(cuda_device)) for values, selected in sparse]
    assert torch.equal(ops.selection.scatter_mean(there, n, number).cpu(), wanted)


@pytest.mark.parametrize("wrong", [[5, 3], [3, 3], [-1, 3], [3, 10]])
def test_positions_that_would_write_elsewhere_end_the_kernel(wrong, shim):  # noqa: F811
    positions = torch.tensor(wrong)
    with on_shim(shim):
        for call in (
            lambda: ops.selection.scatter(torch.ones(2), positions, 10),
            lambda: ops.selection.pack_positions(positions, 10, "bitmap"),
        ):
            with pytest.raises(launch.LaunchError, match="__trap"):
                call()
        if min(wrong) < 0 or max(wrong) >= 10:
            with pytest.raises(launch.LaunchError, match="__trap"):
                ops.selection.gather(torch.ones(10), positions)
