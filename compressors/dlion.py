"""Distributed Lion: one bit per element up, the majority vote or the average of the bits down.

Worker i has a momentum m_i and sends a sign,
    d_i = sign(b1 m_i + (1 - b1) g_i);   m_i <- b2 m_i + (1 - b2) g_i;
all apply   theta <- theta - lr (D + weight_decay theta),
    D = sign(sum_i d_i)  (aggregate="vote", MaVo)   or   D = sum_i d_i / N  ("average", Avg).
sign(0) = +1, so a tied vote is +1.

The codec is exact for signs; the memory, which takes the signs, discards magnitudes. With one
worker, or equal gradients on all workers, the method is Lion. Each element moves by at most
lr (1 + weight_decay |theta|) per step, so |theta| stays below 1 / weight_decay once it is there.
Wire: 1 bit per element up; down 1 bit for the vote, or ceil(log2(N + 1)) bits for the average,
sent as the number of positive signs. Dense tensors and steps in fp32 send the same signs in 32
bits.
Source: Liu et al., NeurIPS 2024, arXiv:2404.00438, algorithm 1; Lion: Chen et al. 2023,
arXiv:2302.06675.
Differs: Lion has sign(0) = 0, which one bit cannot represent, so an element without gradients
drifts by lr per step (test_dlion.py::test_zeros_count_as_plus).

>>> import gcbench, torch
>>> method = gcbench.get_compressor("dlion")
>>> method.decompress(method.compress(torch.tensor([4.0, -1.0, 0.5, -2.5])))
tensor([ 1., -1.,  1., -1.])
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from gcbench import ops
from gcbench.core.claims import Claims
from gcbench.core.compressor import Compressor, Context, Layout, Payload, Segments
from gcbench.core.errors import PayloadError
from gcbench.core.memory import Memory
from gcbench.core.rule import UpdateRule


def sign(x: Tensor) -> Tensor:
    """Return 1 where x >= 0 and -1 elsewhere."""
    return torch.where(x >= 0, 1.0, -1.0)


@dataclass(frozen=True)
class LionMomentum(Memory):
    """A momentum per worker, whose interpolation with the gradient determines the sign to send."""

    beta1: float = 0.9
    beta2: float = 0.99

    buffers: ClassVar[tuple[str, ...]] = ("momentum",)
    has_momentum: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not (0 <= self.beta1 < 1 and 0 <= self.beta2 < 1):
            raise ValueError(
                f"beta1={self.beta1}, beta2={self.beta2}: expected at least 0 and below 1"
            )

    def offer(self, gradient: Tensor, ctx: Context) -> Tensor:
        direction = sign(ctx.state["momentum"].lerp(gradient, 1 - self.beta1))
        ctx.state["momentum"].lerp_(gradient, 1 - self.beta2)
        return direction

    def dense(self) -> Memory:
        return self


@dataclass(frozen=True)
class Signs(UpdateRule):
    """The mean of the signs, or its sign."""

    vote: bool

    def update(self, mean: Tensor, ctx: Context) -> Tensor:
        return sign(mean) if self.vote else mean


@dataclass(frozen=True)
class DistributedLion(Compressor):
    """Packed signs. A payload of `count` workers: their vote, or the number of positive signs."""

    aggregate: str = "vote"  # or "average"

    collectives: ClassVar[tuple[str, ...]] = ("twoshot", "allgather")
    memory: ClassVar[Any] = LionMomentum
    recipe: ClassVar[Mapping[str, Any]] = {"lr": 1e-4, "decay": "update"}
    variants = ({}, {"aggregate": "average"})

    def __post_init__(self) -> None:
        if self.aggregate not in ("vote", "average"):
            raise ValueError(f"aggregate={self.aggregate!r}: expected 'vote' or 'average'")

    @property
    def rule(self) -> UpdateRule:
        return Signs(self.aggregate == "vote")

    def _bits(self, count: int) -> int:
        return 1 if self.aggregate == "vote" else count.bit_length()  # ceil(log2(count + 1))

    def encode(self, x: Tensor, ctx: Context) -> Tensor:
        return ops.sign.pack(x, out=ctx.part(0))

    def decode(self, payload: Payload, ctx: Context) -> Tensor:
        words, n, count = payload.parts[0], ctx.segments.numel, payload.count
        if self._bits(count) == 1:
            return ops.sign.decode(words, 1, n, self.name, out=ctx.out)
        positive = ops.packing.unpack(words, self._bits(count), n)
        if bool((positive > count).any()):
            raise PayloadError(f"more positive signs than {count} workers")
        return (2 * positive - count).float() / count

    def mean(self, payloads: Sequence[Payload], ctx: Context) -> Tensor:
        workers = sum(payload.count for payload in payloads)
        return self.decode(Payload((self.merge(payloads, ctx),), workers), ctx)

    def merge(self, payloads: Sequence[Payload], ctx: Context) -> Tensor:
        n, counts = ctx.segments.numel, [p.count for p in payloads]
        if self.aggregate == "vote":
            words, bits = [p.parts[0] for p in payloads], [1] * len(payloads)
            return ops.sign.vote(words, counts, bits, n, self.name, width=1, out=ctx.part(0))
        unpacked = [ops.packing.unpack(p.parts[0], self._bits(p.count), n) for p in payloads]
        positive = torch.stack(unpacked).sum(0, dtype=torch.int32)
        return ops.packing.pack(positive, self._bits(sum(counts)), out=ctx.part(0))

    def layout(self, segments: Segments, count: int = 1) -> Layout:
        return ((torch.int32, ops.packing.packed_words(segments.numel, self._bits(count))),)


class DistributedLionClaims(Claims[DistributedLion], of=DistributedLion):
    """The codec is exact for signs; with one worker the method is Lion."""

    signs = True
    exact_for = ("signs",)
    nominal_bits = 1.0

    @property
    def aggregate(self) -> str:
        return "vote" if self.codec.aggregate == "vote" else "mean"

    def aggregated(self, decoded: Sequence[Tensor], ctx: Context) -> Tensor:
        mean = torch.stack([one.double() for one in decoded]).mean(0)
        return (sign(mean) if self.aggregate == "vote" else mean).float()

    def uncompressed(self, gradients: Iterable[Tensor], warm_up: int) -> Iterator[Tensor]:
        m, memory = torch.zeros(()), LionMomentum()
        for g in gradients:
            yield sign(torch.lerp(m, g, 1 - memory.beta1))
            m = torch.lerp(m, g, 1 - memory.beta2)
