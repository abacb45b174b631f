"""Threshold: what is sent, its size, corrupt payloads, and the bound on the residual."""

from __future__ import annotations

import math

import pytest
import torch

import gcbench
from gcbench.checks import exchanges
from gcbench.core import codec, memory
from gcbench.core.compressor import Context, Payload, Segments
from gcbench.core.errors import PayloadError


def sent(x: torch.Tensor, shapes=None, **fields) -> torch.Tensor:
    method = gcbench.get_compressor("threshold", **fields)
    ctx = Context(Segments.of(shapes or [x.shape]))
    return codec.decode(method, codec.encode(method, x, ctx), ctx)


@pytest.mark.parametrize(
    ("x", "decoded"),
    [
        ([2.0, -2.0, 1.9, 0.0], [2.0, -2.0, 0.0, 0.0]),
        ([-0.5, 0.25, -0.5, 0.0], [-0.5, 0.0, -0.5, 0.0]),  # below v: the largest is sent
        ([0.0, 0.0, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0]),
        ([9.0, 8.0, -7.0, 6.0], [9.0, 8.0, -7.0, 6.0]),
    ],
)
def test_elements_that_reach_the_threshold_are_sent(x, decoded):
    assert sent(torch.tensor(x), threshold=2.0).tolist() == decoded


def test_each_tensor_sends_its_largest_element():
    x = torch.tensor([1.0, 3.0, 0.1, -0.2, 0.0, 0.3])
    assert (sent(x, [(2,), (2,), (2,)], threshold=2.0) != 0).tolist() == [0, 1, 0, 1, 0, 1]


def test_the_size_follows_the_gradient():
    """32 bits per value, and 2 + log2(d/K) per position within a tenth."""
    x = torch.randn(10**6, generator=torch.Generator().manual_seed(0))
    for threshold in (1.0, 2.0, 3.0):
        k = int((x.abs() >= threshold).sum())
        payload = gcbench.get_compressor("threshold", threshold=threshold).compress(x).payload
        assert payload.parts[-1].numel() == k
        assert 8 * payload.nbytes / k == pytest.approx(34 + math.log2(10**6 / k), rel=0.1)


@pytest.mark.parametrize("positions", [[0, 0], [1, 0], [0, 9]])
def test_corrupt_positions_are_refused(positions):
    method = gcbench.get_compressor("threshold", threshold=1.0)
    right = method.compress(torch.tensor([3.0, 2.0, 0.0, 0.0])).payload
    words = torch.tensor(positions, dtype=torch.int32)
    for parts in (
        (*right.parts[:-1], torch.tensor([1.0, math.nan])),
        (*right.parts[:-1], torch.ones(9)),
        (right.parts[0], right.parts[1] ^ 1, right.parts[2]),
        (words, right.parts[2]),
    ):
        with pytest.raises(PayloadError):
            codec.decode(method, Payload(parts), Context(Segments((0, 4))))


def test_residuals_stay_below_the_threshold():
    """Sahu et al.: with error feedback ||e||^2 < d v^2 at every step, for any gradients."""
    method = gcbench.get_compressor("threshold", threshold=0.5)
    steps = [
        list(torch.randn(2, 1000, generator=torch.Generator().manual_seed(i)) * 10.0 ** (3 - i))
        for i in range(6)
    ]
    memo = memory.make("residual", {})
    means, running = exchanges.exchange_steps(method, "allgather", steps, [(1000,)], memo)
    applied = sum(mean.double() for mean in means)
    left = torch.stack([states[0]["residual"] for states in running.workers])
    assert 0 < float(left.abs().max()) < 0.5
    total = sum(torch.stack(xs).double().mean(0) for xs in steps)
    assert float((applied + left.double().mean(0) - total).abs().max()) < 1e-3
