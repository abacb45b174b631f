"""signSGD with majority vote: one bit per element up, one bit down, no scale.

Worker i sends sign(g_i), the owner of a shard returns V = sign(sum_i sign(g_i)), and every worker
applies x <- x - lr V. Each element moves by lr, so learning rates are those of Adam (1e-4 to 1e-3).
Tensors that stay dense, and steps in fp32, apply the sign of the mean gradient.

Biased, and magnitudes are lost, so not contractive. With unimodal symmetric noise of standard
deviation sigma, the vote of M workers is wrong with probability at most sigma / (sqrt(M) |g|). With
skewed noise that probability can tend to 1 as M grows.
Wire: 1 bit per element, up and down. With `abstain` 2 bits both ways, with `quorum` 2 bits down.
Source: Bernstein et al., ICML 2018, arXiv:1802.04434, algorithms 1 (signSGD), 2 (Signum) and 3
(vote), theorems 1 and 2. Signum is `--memory momentum`: a worker sends its momentum's sign.
sign(0) = +1 and a tied vote is +1, as in the authors' bit-packed vote (arXiv:1810.05291); their
first code sent 0 (test_signsgd.py::test_zeros_and_ties_count_as_plus). Weights without gradient
therefore drift by the learning rate per step, unless a tiny `abstain` prevents it. With an even
number of workers, ties let the other weights drift, too: `ties="coin"` ended 27 points higher with
4 workers (`gcbench help tables`). The source mentions abstention without a rule. Here a worker
sends 0 where g = 0 or |g| < abstain * rms of its tensor, and the vote is 0 where it is tied or won
by fewer than min(quorum, M) votes.

>>> import gcbench, torch
>>> method = gcbench.get_compressor("signsgd")
>>> packed = method.compress(torch.tensor([4.0, -1.0, 0.5, -2.5]))
>>> packed.payload.parts[0].tolist()
[5]
>>> method.decompress(packed)
tensor([ 1., -1.,  1., -1.])
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from gcbench import ops
from gcbench.core.claims import Claims
from gcbench.core.compressor import Compressor, Context, Layout, Parts, Payload, Segments
from gcbench.core.errors import UsageError
from gcbench.core.rule import Directions, UpdateRule


@dataclass(frozen=True)
class SignSGD(Compressor):
    """Signs and their majority vote. A payload of `count` workers is the outcome."""

    ties: str = "plus"  # a tied vote is +1, or a fair "coin": M workers are as good as M - 1
    abstain: float = 0.0  # threshold, in root mean squares of the tensor; 0: no abstention
    quorum: int = 1  # minimum margin of a majority, in votes

    collectives: ClassVar[tuple[str, ...]] = ("twoshot", "allgather")
    recipe: ClassVar[Mapping[str, Any]] = {
        "optimizer": "sgd",
        "lr": 1e-3,
        "momentum": 0.0,
        "nesterov": False,
    }
    variants = ({}, {"ties": "coin"}, {"abstain": 0.5}, {"quorum": 2})

    def __post_init__(self) -> None:
        if self.ties not in ("plus", "coin"):
            raise ValueError(f"ties={self.ties!r}: expected 'plus' or 'coin'")
        if not (math.isfinite(self.abstain) and self.abstain >= 0):
            raise ValueError(f"abstain={self.abstain}: expected a finite number, at least 0")
        if self.quorum < 1:
            raise ValueError(f"quorum={self.quorum}: expected at least 1 vote")
        if self.ties == "coin" and self._bits(2) == 2:
            raise ValueError("ties='coin': with abstain or quorum a tied vote is 0; leave it out")

    @property
    def rule(self) -> UpdateRule:
        return Directions()

    def legal_collectives(self) -> tuple[str, ...]:
        # Only an owner can toss a coin.
        return self.collectives[:1] if self.ties == "coin" else self.collectives

    def _bits(self, count: int) -> int:
        """Return the bits per code of `count` workers; one worker's signs need no quorum."""
        return 2 if self.abstain or (self.quorum > 1 and count > 1) else 1

    def encode(self, x: Tensor, ctx: Context) -> Parts:
        if self.abstain:
            return ops.sign.pack_above(x, self.abstain, ctx.segments, out=ctx.part(0))
        return ops.sign.pack(x, out=ctx.part(0))

    def cut(self, payload: Payload, bounds: Sequence[int]) -> list[Payload]:
        words = ops.packing.split_words(payload.parts[0], self._bits(1), bounds)
        return [Payload((piece,)) for piece in words]

    def decode(self, payload: Payload, ctx: Context) -> Tensor:
        bits = self._bits(payload.count)
        return ops.sign.decode(payload.parts[0], bits, ctx.segments.numel, self.name, out=ctx.out)

    def _tied(self, payloads: Sequence[Payload]) -> bool:
        """Return whether a coin decides ties between these votes."""
        return self.ties == "coin" and sum(payload.count for payload in payloads) % 2 == 0

    def mean(self, payloads: Sequence[Payload], ctx: Context) -> Tensor:
        """Return the vote, as `merge` does; UsageError if ties need the owner's coin."""
        if self._tied(payloads):
            raise UsageError(f"{self!r} needs collective twoshot: only an owner can toss a coin")
        vote, workers = self.merge(payloads, ctx), sum(payload.count for payload in payloads)
        return self.decode(Payload((vote,), workers), ctx)

    def merge(self, payloads: Sequence[Payload], ctx: Context) -> Tensor:
        """Return the majority vote, an integer sum of signs: the parameter server's step."""
        words, counts = [payload.parts[0] for payload in payloads], [p.count for p in payloads]
        bits, coin = list(map(self._bits, counts)), ctx.key if self._tied(payloads) else None
        return ops.sign.vote(
            words, counts, bits, ctx.segments.numel, self.name,
            width=self._bits(sum(counts)), quorum=self.quorum, coin=coin, out=ctx.part(0),
        )  # fmt: skip

    def layout(self, segments: Segments, count: int = 1) -> Layout:
        return ((torch.int32, ops.packing.packed_words(segments.numel, self._bits(count))),)


class SignSGDClaims(Claims[SignSGD], of=SignSGD):
    """Signs and their majority vote: neither unbiased nor contractive."""

    @property
    def aggregate(self) -> str:
        return "vote" if self.codec.quorum == 1 else "other"

    @property
    def signs(self) -> bool:
        return self.codec.quorum == 1 and not self.codec.abstain

    def aggregated(self, decoded: Sequence[Tensor], ctx: Context) -> Tensor:
        """Return the sign that wins by min(quorum, M) votes or more, else 0; ties: +1 or a coin."""
        votes = torch.stack([one.double() for one in decoded]).sum(0)
        won = torch.where(votes.abs() >= min(self.codec.quorum, len(decoded)), votes.sign(), 0.0)
        if not self.signs:
            return won.float()
        return torch.where(votes == 0, 1.0 if self.codec.ties == "plus" else torch.nan, won).float()

    @property
    def exact_for(self) -> tuple[str, ...]:
        # All magnitudes are 1 = rms, where a worker must not abstain; zeros need abstention.
        return (
            ()
            if self.codec.abstain > 1
            else ("signs", "ternary")
            if self.codec.abstain
            else ("signs",)
        )

    @property
    def nominal_bits(self) -> float | None:
        return None if self.codec.abstain else 1.0
