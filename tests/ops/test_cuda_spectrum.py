"""Spectra on a GPU where `test_kernels.py` does not reach: buffers, launches, refusals."""

from __future__ import annotations

from itertools import accumulate

import pytest
import torch
from cusim import cuda_device, on_shim, shim  # noqa: F401  # fixtures
from torch import Tensor

from gcbench import ops
from gcbench.core.compressor import Segments
from gcbench.ops.cuda import launch
from gcbench.ops.spectrum import Rows

LENGTHS = (5, 0, 3000, 1024, 1, 2050, 5)
EDGES = Segments((0, *accumulate(LENGTHS)))
WIDTHS = (9, 0, 3700, 1024, 4, 2055, 5)
"""Zeros after a row: more than its elements, many to a tile, fewer than tiles, none."""
ROWS = Rows(tuple(sum(WIDTHS[i + 1 :]) for i in range(len(WIDTHS))), WIDTHS)


def normal(n: int) -> Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(n))


def same(result: Tensor, wanted: Tensor) -> bool:
    return torch.equal(result.cpu().view(torch.int32), wanted.view(torch.int32))


def test_the_whole_buffer_is_written(cuda_device):  # noqa: F811
    """Zeros after rows too, and nothing of what was there stays."""
    x = normal(EDGES.numel)
    with ops.using("reference"):
        wanted, units = ops.spectrum.scaled(x, EDGES, 4.0, 0.0, rows=ROWS)
    out = torch.full((ROWS.numel,), torch.nan, device=cuda_device)
    result, unit = ops.spectrum.scaled(x.to(cuda_device), EDGES, 4.0, 0.0, rows=ROWS, out=out)
    assert result.data_ptr() == out.data_ptr()
    assert same(result, wanted)
    assert same(unit, units)
    back = ops.spectrum.restored(result, unit, EDGES, rows=ROWS)
    assert same(back, x)


def test_in_place(cuda_device):  # noqa: F811
    x, pairs = normal(6000), Segments((0, 2, 2, 2050, 6000))
    unit = torch.tensor([0.5, 2.0, 4.0, 2.0**-20])
    with ops.using("reference"):
        wanted, energies = ops.spectrum.unscaled(x, unit, pairs)
        restored = ops.spectrum.restored(x, unit, pairs)
    here = x.to(cuda_device, copy=True)
    settings = torch.zeros(3000, device=cuda_device)
    result, energy = ops.spectrum.unscaled(
        here, unit.to(cuda_device), pairs, out=here, energy=settings
    )
    assert result.data_ptr() == here.data_ptr()
    assert energy.data_ptr() == settings.data_ptr()
    assert same(result, wanted)
    assert same(energy, energies)
    here = x.to(cuda_device, copy=True)
    assert same(ops.spectrum.restored(here, unit.to(cuda_device), pairs, out=here), restored)


def test_there_and_back_by_kernels(cuda_device):  # noqa: F811
    """Segments of several lengths, alike ones apart from each other: these lie as rows."""
    segments = Segments((0, *accumulate((6, 40_009, 3000, 6, 0, 3000))))
    x = normal(segments.numel).to(cuda_device)
    with ops.using("reference"):
        bins, energy = ops.spectrum.forward(x, segments, half=True)
        back = ops.spectrum.inverse(bins, segments)
    result, energies = ops.spectrum.forward(x, segments, half=True)
    assert same(result, bins.cpu())
    assert same(energies, energy.cpu())
    assert same(ops.spectrum.inverse(result, segments), back.cpu())


def test_sums_of_more_spectra_than_one_launch_takes(cuda_device):  # noqa: F811
    n, spectra = 4100, []
    for p in range(66):
        selected = torch.arange(p % 5, n, p % 7 + 1)
        spectra.append((selected, normal(2 * len(selected) + p % 2)[p % 2 :].view(-1, 2)))
    weights = [1 / (p + 3) for p in range(66)]
    with ops.using("reference"):
        wanted = ops.spectrum.mean(spectra, weights, n)
    out = torch.full((n, 2), torch.nan, device=cuda_device)
    there = [(selected.to(cuda_device), values.to(cuda_device)) for selected, values in spectra]
    assert ops.spectrum.mean(there, weights, n, out=out).data_ptr() == out.data_ptr()
    assert same(out, wanted)


@pytest.mark.parametrize("bad", [[1, 1], [2, 1], [-1, 2], [0, 5000], [4999, 2**40]])
def test_bins_out_of_range_or_order_end_the_kernel(shim, bad):  # noqa: F811
    """On a GPU too; but there nothing could be launched afterwards."""
    with on_shim(shim), pytest.raises(launch.LaunchError, match="__trap"):
        ops.spectrum.mean([(torch.tensor(bad), torch.ones(2, 2))], [1.0], 5000)


@pytest.mark.parametrize("width", [2, 6, 1100])
def test_the_launches_do_not_depend_on_segments(shim, width):  # noqa: F811
    n = 1100
    segments, x = Segments.of([(n,)], width), torch.ones(n)
    unit = torch.ones(len(segments))
    before = len(shim.launches)
    with on_shim(shim):
        ops.spectrum.scaled(x, segments, 1.0, 0.0)
        ops.spectrum.unscaled(x, unit, segments)
        ops.spectrum.restored(x, unit, segments)
    used = [kernel for _, kernel in shim.launches[before:]]
    scaled = ["tile_statistics", "segment_statistics", "spectrum_scaled"]
    assert used == [*scaled, "spectrum_unscaled", "spectrum_restored"]


def test_empty_segments_have_units(shim):  # noqa: F811
    """And nothing else is launched for nothing."""
    nothing, empty = torch.empty(0), Segments((0,) * 301)  # more than threads
    with on_shim(shim):
        out, unit = ops.spectrum.scaled(nothing, empty, 2.0, 0.0)
        assert out.shape == (0,)
        assert unit.tolist() == [2.0**-111] * 300
        before = len(shim.launches)
        ops.spectrum.scaled(nothing, Segments((0,)), 2.0, 0.0)
        ops.spectrum.unscaled(nothing, unit, empty)
        ops.spectrum.restored(nothing, unit, empty)
        none = [(torch.empty(0, dtype=torch.int64), torch.empty(0, 2))]
        assert ops.spectrum.mean(none, [1.0], 0).shape == (0, 2)
    assert len(shim.launches) == before


def test_what_a_kernel_takes_on_trust_is_checked_before(shim):  # noqa: F811
    segments, x, one = Segments((0, 64)), torch.zeros(64), torch.ones(1)
    selected, values, rows = torch.arange(4), torch.ones(4, 2), Rows((0,), (70,))
    many = Rows((0, 64), (64, 0))
    wrong = [
        lambda: ops.spectrum.scaled(x[:63], segments, 1.0, 0.0),
        lambda: ops.spectrum.scaled(x.double(), segments, 1.0, 0.0),
        lambda: ops.spectrum.scaled(x, segments, 1.0, 0.0, out=x[:63]),
        lambda: ops.spectrum.scaled(x, segments, 1.0, 0.0, rows=rows, out=x.clone()),
        lambda: ops.spectrum.scaled(x, segments, 1.0, 0.0, rows=many),
        lambda: ops.spectrum.unscaled(x, one[:0], segments),
        lambda: ops.spectrum.unscaled(x, one, segments, rows=rows),
        lambda: ops.spectrum.unscaled(x, one, segments, out=x[:62]),
        lambda: ops.spectrum.unscaled(x[:63], one, Segments((0, 63))),
        lambda: ops.spectrum.restored(x, one.double(), segments),
        lambda: ops.spectrum.restored(x, one, segments, rows=rows),
        lambda: ops.spectrum.restored(x, one, segments, out=x.double()),
        lambda: ops.spectrum.mean([(selected, values[:3])], [1.0], 8),
        lambda: ops.spectrum.mean([(selected.int(), values)], [1.0], 8),
        lambda: ops.spectrum.mean([(selected, values)], [1.0, 2.0], 8),
        lambda: ops.spectrum.mean([(selected, values)], [1.0], 8, out=torch.empty(9, 2)),
    ]
    before = len(shim.launches)
    with on_shim(shim):
        for call in wrong:
            with pytest.raises(ValueError, match="expected"):
                call()
    assert len(shim.launches) == before
