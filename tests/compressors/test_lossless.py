"""Coded exponents: every pattern survives, whole runs equal those of bf16, the size's bound."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

import gcbench
from gcbench.core import codec
from gcbench.core.compressor import Context, Key, Payload, Segments
from gcbench.core.errors import PayloadError
from gcbench.ops import lossless

N = 1 << 20
NORMAL = torch.randn(N, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("block", [65536, 4096, 100, 1])
def test_every_pattern_survives(block):
    """All 65,536 of bfloat16: NaN with payloads, infinities, denormals, both zeros."""
    patterns = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int16)
    shuffled = patterns[torch.randperm(1 << 16, generator=torch.Generator().manual_seed(1))]
    segments = Segments.of([(1 << 16,)], block)
    for values in (patterns, shuffled):
        parts = lossless.encode(values.view(torch.bfloat16), segments)
        assert torch.equal(lossless.decode(parts, segments, "it").view(torch.int16), values)


def test_the_size():
    """11.25 bits for normal values; entropy allows 10.55, from probabilities of the exponents."""
    method = gcbench.get_compressor("lossless")
    bits = 8 * method.compress(NORMAL).payload.nbytes / N
    assert bits == pytest.approx(method.claims.nominal_bits, abs=0.01)
    edges = [2.0**k for k in range(-40, 6)]
    below = [math.erf(edge / math.sqrt(2)) for edge in edges]
    inside = [after - before for before, after in itertools.pairwise(below)]
    entropy = -sum(p * math.log2(p) for p in inside if p > 0)
    assert entropy == pytest.approx(2.545, abs=0.002)
    assert 16 / (8 + entropy) == pytest.approx(1.517, abs=0.001)
    assert bits > 8 + entropy


@pytest.mark.parametrize("collective", ["twoshot", "allgather"])
def test_whole_runs(collective, tmp_path):
    """A training run ends in the parameters of bf16, bit for bit, with fewer bytes."""
    ends = []
    for name in ("bf16", "lossless"):
        settings = {"task": "digits", "steps": 20, "workers": 4, "collective": collective}
        ends.append(gcbench.run(compressor=name, **settings, results=tmp_path).iloc[0])
    assert ends[0].params_sha256 == ends[1].params_sha256
    assert ends[1].payload_bytes_up < ends[0].payload_bytes_up


def parts_of(x: torch.Tensor, block: int) -> tuple[list[torch.Tensor], Context, gcbench.Compressor]:
    method = gcbench.get_compressor("lossless", granularity=block)
    ctx = Context(Segments.of([(len(x),)], block), torch.empty(0), Key(0, 0, 0))
    return [part.clone() for part in codec.encode(method, x, ctx).parts], ctx, method


def test_payloads_that_no_encoder_sends_are_refused():
    x = torch.tensor([1.0, 2.0, 2.0**-20, 0.5])
    parts, ctx, method = parts_of(x, 4)
    fractions, words, tops, escaped = parts
    assert (tops.tolist(), escaped.tolist()) == ([128], [107])
    wrong = {
        "too few exponents": (fractions, words, tops, escaped[:0]),
        "an exponent near the largest": (fractions, words, tops, torch.full_like(escaped, 126)),
        "below 0": (fractions, words, torch.zeros_like(tops), escaped),
        "no largest": (fractions, words + words.new_tensor([1 << 3, 0, 0]), tops, escaped),
        "three parts": (fractions, words, tops),
        "infinite": (fractions, words, tops + 127, escaped),
    }
    (two, codes, largest, none), short, _ = parts_of(torch.tensor([1.0, 4.0]), 4)
    with pytest.raises(PayloadError, match="lossless"):  # codes 2 and 0 of the exponent 0
        codec.decode(method, Payload((two, codes, torch.zeros_like(largest), none)), short)
    for bad in wrong.values():
        with pytest.raises(PayloadError, match="lossless"):
            codec.decode(method, Payload(tuple(bad)), ctx)
