"""Top-k of chunks in 14 bits: selection, classes and bytes by independent arithmetic."""

from __future__ import annotations

import pytest
import torch

import gcbench
from gcbench.core import codec
from gcbench.core.compressor import Context, Key, Payload, Segments
from gcbench.core.errors import PayloadError, UsageError
from gcbench.ops import packing
from gcbench.training.configuration import Config

NOTHING = torch.empty(0)
FIRST = Key(0, 0, 0)


def normal(n: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(seed))


def by_hand(x: list[float], chunk: int, topk: int) -> list[float]:
    """What arrives of one segment: lists, loops and Python's own floats."""
    selected: list[int] = []
    for start in range(0, len(x), chunk):
        places = range(start, min(start + chunk, len(x)))
        count = min(len(places), -(-topk * len(places) // chunk))
        selected += sorted(places, key=lambda i: (-abs(x[i]), i))[:count]
    level = sum(abs(x[i]) for i in selected) / len(selected)
    large = [i for i in selected if abs(x[i]) >= level]
    small = [i for i in selected if abs(x[i]) < level]
    there = [0.0] * len(x)
    for members in (large, small):
        for i in members:
            mean = sum(abs(x[j]) for j in members) / len(members)
            there[i] = -mean if x[i] < 0 else mean
    return there


@pytest.mark.parametrize(
    ("n", "chunk", "topk"), [(700, 64, 8), (64, 64, 1), (130, 64, 64), (5, 64, 8)]
)
def test_what_arrives(n, chunk, topk):
    x = normal(n, n)
    method = gcbench.get_compressor("sparseloco", chunk=chunk, topk=topk)
    expected = torch.tensor(by_hand(x.tolist(), chunk, topk))
    torch.testing.assert_close(method.decompress(method.compress(x)), expected, rtol=1e-6, atol=0)


def test_the_bytes_on_the_wire():
    """Indices in chunks, codes (1 negative, 2 large) and the two means, small ones first."""
    method = gcbench.get_compressor("sparseloco", chunk=4, topk=2)
    segments = Segments((0, 6))
    x = torch.tensor([0.0, -8.0, 1.0, 2.0, 0.5, -6.0])  # two of four, one of two
    indices, codes, magnitudes = codec.encode(method, x, Context(segments, NOTHING, FIRST)).parts
    assert packing.unpack(indices, 2, 3).tolist() == [1, 3, 1]
    assert packing.unpack(codes, 2, 3).tolist() == [3, 0, 3]
    assert magnitudes.tolist() == [2.0, 7.0]
    assert method.layout(segments)[-1] == (torch.float32, 2)


def test_bits_an_element():
    """64 (12 + 2) bits of 4096 elements, and 8 bytes per tensor."""
    method = gcbench.get_compressor("sparseloco")
    payload = method.compress(normal(1 << 20)).payload
    assert 8 * payload.nbytes == (1 << 20) / 4096 * 64 * 14 + 64
    assert round(method.claims.nominal_bits, 3) == 0.219


def test_two_magnitudes_keep_most():
    """The figure of the card, and the projection: what is lost is what is not there."""
    x, method = normal(1 << 20), gcbench.get_compressor("sparseloco")
    there = method.decompress(method.compress(x)).double()
    selected = x.double()[there != 0]
    assert len(selected) == (1 << 20) // 64
    assert float(there.square().sum() / selected.square().sum()) == pytest.approx(0.995, abs=5e-4)
    lost = float((x - there).square().sum())
    assert lost == pytest.approx(float(x.double().square().sum() - there.square().sum()), rel=1e-6)


def test_magnitudes_live_where_granularity_says():
    """A tensor with values a thousand times as large does not take the other's magnitudes."""
    segments = Segments.of([(4096,), (4096,)], "tensor")
    x = torch.cat([normal(4096), 1000 * normal(4096, 1)])
    method = gcbench.get_compressor("sparseloco")
    payload = codec.encode(method, x, Context(segments, NOTHING, FIRST))
    there = codec.decode(method, payload, Context(segments, NOTHING))
    assert torch.equal(there[:4096], method.decompress(method.compress(x[:4096])))
    assert torch.equal(there[4096:], method.decompress(method.compress(x[4096:])))


def test_payloads_that_no_encoder_sends():
    method, segments = gcbench.get_compressor("sparseloco", chunk=100, topk=4), Segments((0, 250))
    indices, codes, magnitudes = codec.encode(
        method, normal(250), Context(segments, NOTHING, FIRST)
    ).parts
    places = packing.unpack(indices, 7, 10)

    def refused(places, magnitudes, match):
        parts = packing.pack(places, 7), codes, torch.tensor(magnitudes)
        with pytest.raises(PayloadError, match=match):
            codec.decode(method, Payload(parts), Context(segments, NOTHING))

    beyond, twice = places.clone(), places.clone()
    beyond[3], twice[1] = 100, twice[0]
    refused(beyond, magnitudes.tolist(), "chunk of 100")
    refused(twice, magnitudes.tolist(), "increase")
    short = places.clone()
    short[9] = 50  # the last chunk has 50 elements
    refused(short, magnitudes.tolist(), "chunk of 50")
    for wrong in ([2.0, 1.0], [-1.0, 1.0], [0.0, float("inf")], [float("nan"), 1.0]):
        refused(places, wrong, "magnitudes")


def test_fields_and_memory():
    config = Config.make({"task": "digits", "compressor": "sparseloco", "steps": 1})
    assert (config.memory, config.memory_options) == ("residual", {"decay": 0.95})
    for fields in ({"chunk": 0}, {"chunk": 2**16 + 1}, {"topk": 0}, {"chunk": 8, "topk": 9}):
        with pytest.raises(UsageError, match=r"chunk=|topk="):
            gcbench.get_compressor("sparseloco", **fields)
