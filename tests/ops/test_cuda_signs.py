"""Signs on CUDA devices: what tests/kernel_cases/sign.py does not ask of every backend."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from cusim import cuda_device, shim  # noqa: F401  # fixtures

from gcbench import ops
from gcbench.core.compressor import TILE, Key, Segments
from gcbench.core.errors import PayloadError
from gcbench.ops.cuda import sign, tables

MIXED = Segments((0, 0, 5, 1029, 5637, 5637, 13_829, 13_893, 23_000, 23_001))
"""Empty and short segments, one of exactly eight tiles, one of nine, and a short last tile."""


def normal(n: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(seed))


def reference(name, *args, **kwargs):
    with ops.using("reference"):
        return getattr(ops.sign, name)(*args, **kwargs)


def test_the_plan_has_every_tile_once():
    offsets = (*MIXED.offsets, *(MIXED.numel + 300 * i for i in range(1, 20)))
    segments = Segments(offsets)
    plan = sign.plan_of(segments)
    tiles = [-(-(stop - start) // TILE) for start, stop in pairwise(offsets)]
    seen = []
    for block in plan.short.view(-1, sign.WARPS).tolist():
        busy = [entry for entry in block if entry >= 0]
        (count,) = {tiles[entry // sign.WARPS] for entry in busy}
        assert all(entry == -count for entry in block[len(busy) :])
        for i in range(0, len(busy), count):  # a segment's warps are beside one another, in order
            assert busy[i : i + count] == list(range(busy[i], busy[i] + count))
        seen += busy
    short = [s for s, number in enumerate(tiles) if 0 < number <= sign.WARPS]
    assert sorted(seen) == [sign.WARPS * s + t for s in short for t in range(tiles[s])]
    (long,) = (s for s, number in enumerate(tiles) if number > sign.WARPS)
    assert plan.tiles.tolist() == [[long] * 9, [offsets[long] + TILE * t for t in range(9)]]
    assert plan.long.tolist() == [[long], [0]]
    assert sign.plan_of(Segments((0, 0))) == (None, None, None)


@pytest.mark.parametrize("kind", ["class", "scaled"])
def test_results_may_lie_where_the_arguments_are(kind, cuda_device):  # noqa: F811
    x, residual = normal(MIXED.numel), normal(MIXED.numel, 1)
    *parts, lost = reference(f"{kind}_feedback", x, residual, MIXED, "method")
    for place in range(2):
        settings = [x.to(cuda_device, copy=True), residual.to(cuda_device, copy=True)]
        received = getattr(ops.sign, f"{kind}_feedback")(
            *settings, MIXED, "method", lost=settings[place]
        )
        assert received[-1] is settings[place]
        assert all(torch.equal(a.cpu(), b) for a, b in zip(received, (*parts, lost), strict=True))
    total = x.to(cuda_device, copy=True)
    moved = [part.to(cuda_device) for part in parts]
    getattr(ops.sign, f"{kind}_decode")(*moved, MIXED, "method", total=total, count=3, out=total)
    wanted = reference(f"{kind}_decode", *parts, MIXED, "method", total=x, count=3)
    assert torch.equal(total.cpu(), wanted)


@pytest.mark.parametrize("kind", ["class", "scaled"])
def test_a_payload_that_is_wrong_leaves_the_total(kind, cuda_device):  # noqa: F811
    x = normal(MIXED.numel)
    words, *values = reference(f"{kind}_encode", x, MIXED)
    total = x.to(cuda_device, copy=True)
    for place, value, message in (
        (8, torch.nan, "not finite"),
        (8, -1.0, "must not be above 0, nor that of"),
        (0, 1.0, "class without elements"),
    ):
        wrong = [part.to(cuda_device, copy=True) for part in (words, *values)]
        wrong[-1][place] = value
        with pytest.raises(PayloadError, match=rf"^method: .*{message}"):
            getattr(ops.sign, f"{kind}_decode")(*wrong, MIXED, "method", total=total, out=total)
        assert torch.equal(total.cpu(), x)


@pytest.mark.parametrize("kind", ["class", "scaled"])
def test_means_that_are_not_finite_are_told(kind, cuda_device):  # noqa: F811
    for place in (1, 6000, 14_000):  # in a segment of one tile, of several, of many
        x = normal(MIXED.numel)
        x[place] = torch.inf
        settings = x.to(cuda_device), torch.zeros(MIXED.numel, device=cuda_device)
        with pytest.raises(PayloadError, match=r"method: .*not finite"):
            getattr(ops.sign, f"{kind}_feedback")(*settings, MIXED, "method")


@pytest.mark.parametrize("rule", [{"width": 1}, {"width": 1, "coin": Key(3, 5, 2)}, {"width": 2}])
@pytest.mark.parametrize("sizes", [(1,), (2,), (1, 2)])
@pytest.mark.parametrize("number", [63, 64, 65, 2 * tables.MOST_PAYLOADS + 2])
def test_votes_of_more_ballots_than_a_launch_takes(
    number,
    sizes,
    rule,
    cuda_device,  # noqa: F811
):
    n = 1500
    bits = (sizes * number)[:number]
    ballots = [
        ops.packing.pack((normal(n, i) > 0).int() * size, size) for i, size in enumerate(bits)
    ]
    wanted = reference("vote", ballots, (1,) * number, bits, n, "method", **rule)
    settings = [ballot.to(cuda_device) for ballot in ballots]
    received = ops.sign.vote(settings, (1,) * number, bits, n, "method", **rule)
    assert torch.equal(received.cpu(), wanted)


def test_a_bit_after_the_last_is_seen_in_every_ballot(cuda_device):  # noqa: F811
    for place in range(3):
        ballots = [ops.sign.pack(normal(1030, i)) for i in range(3)]
        ballots[place][-1] |= 1 << 6
        settings = [ballot.to(cuda_device) for ballot in ballots]
        with pytest.raises(PayloadError, match="method: a bit is set after the last code"):
            ops.sign.vote(settings, (1,) * 3, (1,) * 3, 1030, "method", width=1)


def test_sums_of_more_than_a_tile_of_tiles(cuda_device):  # noqa: F811
    segments = Segments((0, 77, TILE * (TILE + 3)))
    x = normal(segments.numel)
    received = ops.sign.class_encode(x.to(cuda_device), segments)
    wanted = reference("class_encode", x, segments)
    assert all(torch.equal(a.cpu(), b) for a, b in zip(received, wanted, strict=True))


def test_an_output_of_another_shape_is_refused(cuda_device):  # noqa: F811
    x = torch.ones(40, device=cuda_device)
    words = torch.empty(4, dtype=torch.int32, device=cuda_device)
    for out in (words[:1], words[:2].float(), words[::2]):
        with pytest.raises(ValueError, match="expected"):
            ops.sign.pack(x, out=out)
    assert ops.sign.pack(x, out=words[1:3]).tolist() == [2**20 - 1] * 2
