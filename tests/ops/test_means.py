"""Means of several payloads in one operation: the bits of the steps that the contract describes."""

from __future__ import annotations

import pytest
import torch

import gcbench
from gcbench.core import codec
from gcbench.core.compressor import Compressor, Context, Key, Payload, Segments
from gcbench.core.errors import PayloadError

METHODS = ("fp16", "bf16", "natural", "int8", "qsgd", "onebit", "efsignsgd", "topk", "sparseloco")
SHAPES = [(40, 33), (0,), (1,), (1700,)]
NOTHING = torch.empty(0)


def segments_of(name: str) -> Segments:
    return Segments.of(SHAPES, gcbench.get_compressor(name).granularity)


def payloads(name: str, counts: tuple[int, ...]) -> list[Payload]:
    created, segments = [], segments_of(name)
    for rank, count in enumerate(counts):
        x = torch.randn(segments.numel, generator=torch.Generator().manual_seed(rank))
        x *= 2.0 ** torch.arange(segments.numel).remainder(40).sub(20)
        payload = codec.encode(
            gcbench.get_compressor(name), x, Context(segments, NOTHING, Key(1, 2, rank))
        )
        created.append(payload._replace(count=count))
    return created


@pytest.mark.parametrize("counts", [(1,), (1, 1, 1), (3, 1, 2, 1), (1,) * 8])
@pytest.mark.parametrize("name", METHODS)
def test_they_are_added_in_the_order_of_ranks(name, counts):
    method, settings = gcbench.get_compressor(name), payloads(name, counts)
    selected = [payload.to_bytes().clone() for payload in settings]
    mean = codec.mean(method, settings, Context(segments_of(name), NOTHING))
    assert type(method).mean is not Compressor.mean
    assert torch.equal(mean, Compressor.mean(method, settings, Context(segments_of(name))))
    assert all(torch.equal(a.to_bytes(), b) for a, b in zip(settings, selected, strict=True))


@pytest.mark.parametrize("name", METHODS)
def test_each_payload_is_checked(name):
    method, settings = gcbench.get_compressor(name), payloads(name, (1, 1, 1))
    for place in range(3):
        part, *rest = settings[place].parts
        for wrong in (
            Payload((part[1:], *rest)),
            Payload((part, part, part)),
            settings[place]._replace(count=0),
        ):
            with pytest.raises(PayloadError, match=f"^{name}: payload "):
                codec.mean(
                    method,
                    [*settings[:place], wrong, *settings[place + 1 :]],
                    Context(segments_of(name), NOTHING),
                )


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("fp16", 0x7C00),
        ("bf16", 0x7F80),
        ("natural", 0xFF),
        ("natural", 0x100),
        ("int8", -128),
        ("qsgd", 0xF),
    ],
)
def test_a_value_that_no_encoder_sends_is_refused(name, value):
    """As the first code of one payload: infinity, -0 of natural compression, -128, level 8 of 7."""
    for place in range(3):
        settings = payloads(name, (1, 1, 1))
        part = settings[place].parts[0]
        if name == "int8":
            part[0] = value
        elif name == "natural":
            part[0] = int(part[0]) & ~0x1FF | value
        elif name == "qsgd":
            part[0] |= value
        else:
            part.view(torch.int16)[0] = value
        with pytest.raises(PayloadError, match=f"^{name}: (a|code) "):
            codec.mean(gcbench.get_compressor(name), settings, Context(segments_of(name), NOTHING))


def test_sums_of_finite_values_may_overflow():
    """As in the steps: the largest bfloat16 twice is infinite, and no payload is wrong."""
    method, segments = gcbench.get_compressor("bf16"), segments_of("bf16")
    x = torch.full((segments.numel,), 3.3e38)
    settings = [codec.encode(method, x, Context(segments, NOTHING, Key(1, 2, 3)))] * 2
    assert codec.mean(method, settings, Context(segments, NOTHING)).isinf().all()


@pytest.mark.parametrize(
    "fields",
    [
        {"levels": 1, "granularity": "tensor"},
        {"norm": "2", "levels": 127, "granularity": 128},
        {"norm": "2", "levels": 32, "granularity": 1024, "coding": "omega-dense"},
        {"norm": "2", "levels": 4, "coding": "omega-sparse"},
    ],
)
def test_qsgd_adds_all_its_codings(fields):
    method = gcbench.get_compressor("qsgd", **fields)
    segments = Segments.of(SHAPES, method.granularity)
    settings = []
    for rank, count in enumerate((3, 1, 2)):
        x = torch.randn(segments.numel, generator=torch.Generator().manual_seed(rank))
        payload = codec.encode(method, x, Context(segments, NOTHING, Key(1, 2, rank)))
        settings.append(payload._replace(count=count))
    mean = codec.mean(method, settings, Context(segments, NOTHING))
    assert torch.equal(mean, Compressor.mean(method, settings, Context(segments)))
    for place in range(3):
        part, norms = settings[place].parts
        wrong = Payload((part, norms[1:]), settings[place].count)
        with pytest.raises(PayloadError, match=r"^qsgd: "):
            codec.mean(
                method,
                [*settings[:place], wrong, *settings[place + 1 :]],
                Context(segments, NOTHING),
            )
