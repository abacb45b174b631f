"""Rotation and 4 bits: the matrix, bytes by hand, what the rotation is for, bounds."""

from __future__ import annotations

import pytest
import torch

import gcbench
from gcbench.core import codec
from gcbench.core.compressor import Context, Key, Payload, Segments
from gcbench.core.errors import PayloadError
from gcbench.ops.hadamard import rotate

NOTHING = torch.empty(0)
FIRST = Key(0, 0, 0)


def normal(n: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(seed))


def sylvester(d: int) -> torch.Tensor:
    """Sylvester's matrix by its definition, float64, shape (d, d)."""
    h = torch.ones(1, 1, dtype=torch.float64)
    while len(h) < d:
        h = torch.cat([torch.cat([h, h], 1), torch.cat([h, -h], 1)])
    return h / d**0.5


@pytest.mark.parametrize("d", [1, 2, 8, 128])
def test_the_rotation_is_the_matrix(d):
    x = normal(3 * d)
    expected = (x.view(3, d).double() @ sylvester(d).T).float().view(-1)
    torch.testing.assert_close(
        rotate(x, Segments.of([(3 * d,)], d)), expected, rtol=1e-5, atol=1e-6
    )


@pytest.mark.parametrize("d", [1, 3, 100, 127, 128])
def test_the_rotation_undoes_itself_and_keeps_the_norm(d):
    """Also for lengths that are not a power of two: 100 elements are 64, 32 and 4."""
    x, block = normal(5 * d), Segments.of([(5 * d,)], d)
    rotated = rotate(x, block)
    torch.testing.assert_close(rotate(rotated, block), x, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(rotated.norm(), x.norm(), rtol=1e-6, atol=0)
    assert torch.equal(x, normal(5 * d)), "the input is left as it is"
    if d == 100:
        alone = rotate(x[64:96], Segments((0, 32)))
        assert torch.equal(rotated[64:96], alone)


def test_the_bytes_on_the_wire():
    """x = (3, 0.8): y = (3.8, 2.2) / sqrt(2), codes 7 and round(4.05) = 4, sent as 14 and 11."""
    method = gcbench.get_compressor("hadamard4", granularity=2)
    segments = Segments.of([(2,)], 2)
    payload = codec.encode(method, torch.tensor([3.0, 0.8]), Context(segments, NOTHING, FIRST))
    words, scales = payload.parts
    assert method.layout(segments) == ((torch.int32, 4), (torch.float32, 1))
    assert words.tolist() == [14 | 11 << 4, 0, 0, 0]
    assert float(scales) == pytest.approx(3.8 / 2**0.5)
    expected = torch.tensor([3.8 * (1 + 4 / 7) / 2, 3.8 * (1 - 4 / 7) / 2])
    torch.testing.assert_close(codec.decode(method, payload, Context(segments, NOTHING)), expected)


def test_bits_an_element():
    payload = gcbench.get_compressor("hadamard4").compress(normal(1 << 16)).payload
    assert 8 * payload.nbytes == 4.25 * (1 << 16)


def error(method, x: torch.Tensor) -> float:
    lost = (x - method.decompress(method.compress(x))).double().square().sum()
    return float(lost / x.double().square().sum())


def test_an_outlier_takes_nobodys_resolution():
    """One element of 100 among 127 of size 1: unrotated 4 bits lose all of the small ones."""
    x = torch.cat([torch.tensor([100.0]), normal(127).sign()])
    method = gcbench.get_compressor("hadamard4")
    there = method.decompress(method.compress(x))
    small = (there[1:] - x[1:]).square().sum() / x[1:].square().sum()
    assert float(small) < 0.4
    assert 7 * 1 / 100 < 0.5, "without the rotation 7 x / a rounds to 0: a loss of 1"
    spike = torch.zeros(128)
    spike[77] = -3.0
    torch.testing.assert_close(method.decompress(method.compress(spike)), spike, rtol=0, atol=1e-6)


def test_normal_input_loses_what_the_card_says():
    method = gcbench.get_compressor("hadamard4")
    assert error(method, normal(1 << 20)) == pytest.approx(0.0138, rel=0.01)


def test_contraction_needs_short_blocks():
    assert gcbench.get_compressor("hadamard4", granularity=196).claims.contractive
    assert not gcbench.get_compressor("hadamard4", granularity=197).claims.contractive
    assert not gcbench.get_compressor("hadamard4", granularity="tensor").claims.contractive


def test_the_error_stays_near_the_bound_where_codes_tie():
    """y = (7, 1/2, 1/2, ...): every element but the first loses half a step."""
    y = torch.cat([torch.tensor([7.0]), torch.full((127,), 0.4999)])
    method, block = gcbench.get_compressor("hadamard4"), Segments((0, 128))
    x = rotate(y, block)
    lost = float((x - method.decompress(method.compress(x))).double().square().sum())
    assert lost == pytest.approx(127 * 0.4999**2, rel=1e-3)
    assert lost <= method.claims.error_bound(x, Context(block)) <= float(x.double().square().sum())


def test_payloads_that_no_encoder_sends():
    method, segments = gcbench.get_compressor("hadamard4", granularity=2), Segments((0, 2))
    words, scales = codec.encode(
        method, torch.tensor([3.0, 1.0]), Context(segments, NOTHING, FIRST)
    ).parts
    with pytest.raises(PayloadError, match="15"):
        codec.decode(method, Payload((words | 15, scales)), Context(segments, NOTHING))
    for scale in (float("nan"), -1.0, 1e-38):
        with pytest.raises(PayloadError, match="scale"):
            codec.decode(
                method, Payload((words, torch.tensor([scale]))), Context(segments, NOTHING)
            )
    with pytest.raises(PayloadError, match="scale 0"):
        codec.decode(method, Payload((words, torch.tensor([0.0]))), Context(segments, NOTHING))
