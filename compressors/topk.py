"""Top-k: the k largest elements of each segment, and their positions.

x'_i = x_i for the k = max(1, ceil(rho d)) elements of largest |x_i| in a segment of d, else 0; of
equal magnitudes the lowest indices are kept. Exactly k elements are sent, zeros included, so the
layout is static.

Biased; ||x - x'||^2 <= (1 - k/d) ||x||^2, with equality for equal magnitudes, and no k-sparse
vector is closer to x. A long normal x loses 1 - rho - 2 tau phi(tau) of its energy,
tau = Q^-1(rho/2): 0.91551 at rho = .01. `values="fp16"` rounds a value by at most
max(2^-11 |x_i|, 2^-25) and saturates at 65504; "range" rounds by at most 2^-7 |x_i|, over 8
octaves. The error never exceeds ||x||^2, and a residual includes the rounding.
Wire: 32 k bits of values (fp16: 16 k, range: 10 k and 32 per segment) and the positions: 32 k bits
("int32"), d ("bitmap"), or about (2 + log2(d/k)) k ("gaps": Elias-Fano coding; codings are in
`gcbench.ops.selection`). "smallest" chooses the one with the fewest bytes, which depends only on
the sizes. At rho = .01 these are 0.64, 1.32 and 0.41 bits per element, 50x, 24x and 79x less than
fp32: positions take 32, 100 and 8.55 bits per kept element; their entropy is 8.08.
Two-shot sends as much down as up: each shard has its own k, and the owner sparsifies the mean
again. All-gather does not: the mean has between k and min(d, N k) nonzeros. By the sparse
all-reduce (`gcbench.core.exchange`) it has the k largest sums; a worker sends about 4 k words of 32
bits, not 2 k (N - 1), and an element that was dropped by its worker or by the sum is in a residual.
Source: Aji & Heafield, EMNLP 2017, arXiv:1704.05021, section 3; Alistarh et al., NeurIPS 2018,
arXiv:1809.10505, algorithm 1; the bound: Stich et al., NeurIPS 2018, arXiv:1809.07599, lemma A.1;
the sparse all-reduce: Li & Hoefler, PPoPP 2022, doi:10.1145/3503221.3508399 (Ok-Topk).
Differs: Aji & Heafield estimate a threshold for the model from a sample, so their count varies;
here it is exact (test_topk.py::test_exactly_k_by_magnitude_then_index), and `granularity="model"`
is their global selection. Wang et al. 2020 compare without error feedback: `--memory none`.
Ok-Topk uses the thresholds and the regions of earlier steps for some steps; here both selections
are exact and regions are cut anew, for 8 KiB of histograms and 16 N bytes of cuts per step
(test_sparse.py::test_a_worker_sends_at_most_6k_words).

>>> import gcbench, torch
>>> method = gcbench.get_compressor("topk", ratio=0.5)
>>> packed = method.compress(torch.tensor([4.0, -1.0, 0.5, -2.5]))
>>> packed.payload.nbytes
12
>>> method.decompress(packed)
tensor([ 4.0000,  0.0000,  0.0000, -2.5000])
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import ClassVar

from torch import Tensor

from gcbench import ops
from gcbench.core.claims import Claims
from gcbench.core.compressor import Compressor, Context, Layout, Parts, Payload, Segments

ROUNDING = {"fp32": 0.0, "fp16": 2.0**-22, "range": 2.0**-14}  # squared, relative


@dataclass(frozen=True)
class TopK(Compressor):
    """The largest elements; parts are the positions, in one or two tensors, and the values."""

    ratio: float = 0.01  # fraction of a segment's elements to keep
    positions: str = "smallest"  # or "int32", "bitmap", "gaps"
    values: str = "fp32"  # or "fp16", "range"
    granularity: str | int = "tensor"  # or "model", "column", or a group size

    collectives: ClassVar[tuple[str, ...]] = ("allgather", "twoshot", "sparse")
    memory: ClassVar[str] = "residual"
    variants = (
        {},
        *({"positions": coding} for coding in ops.selection.POSITION_CODINGS),
        *({"values": coding} for coding in ops.selection.VALUE_CODINGS[1:]),
        {"granularity": "model"},
        {"ratio": 0.15},
    )

    def __post_init__(self) -> None:
        if not 0 < self.ratio <= 1:
            raise ValueError(f"ratio={self.ratio}: expected a number above 0 and at most 1")
        for field, allowed in (
            ("positions", ("smallest", *ops.selection.POSITION_CODINGS)),
            ("values", ops.selection.VALUE_CODINGS),
        ):
            if getattr(self, field) not in allowed:
                raise ValueError(f"{field}={getattr(self, field)!r}: expected {', '.join(allowed)}")
        Segments.of([(1,)], self.granularity)  # raises UsageError if it is unknown

    def legal_collectives(self) -> tuple[str, ...]:
        """Without "sparse", which adds 32-bit positions and fp32 values, if these are coded."""
        plain = self.positions in ("smallest", "int32") and self.values == "fp32"
        return self.collectives if plain else self.collectives[:-1]

    def entries(self, x: Tensor, ctx: Context) -> tuple[Tensor, Tensor]:
        return ops.selection.largest_elements(x, ops.selection.kept_runs(ctx.segments, self.ratio))

    def encode(self, x: Tensor, ctx: Context) -> tuple[Tensor, ...]:
        runs = ops.selection.kept_runs(ctx.segments, self.ratio)
        return ops.selection.sparse_encode(x, runs, self.positions, self.values, out=ctx.parts)

    def encode_feedback(self, x: Tensor, residual: Tensor, ctx: Context) -> Parts:
        residual += x
        parts = self.encode(residual, ctx)
        positions, values = self._open(parts, ctx.segments)
        residual.index_add_(0, positions, values, alpha=-1)  # elsewhere 0 was sent
        return parts

    def _open(self, parts: Sequence[Tensor], segments: Segments) -> tuple[Tensor, Tensor]:
        """Decode these parts to positions, int64, and values, float32, shape (K,) each."""
        runs, n = ops.selection.kept_runs(segments, self.ratio), segments.numel
        return ops.selection.sparse_unpack(parts, n, runs, self.positions, self.values, self.name)

    def decode(self, payload: Payload, ctx: Context) -> Tensor:
        positions, values = self._open(payload.parts, ctx.segments)
        return ops.selection.scatter(values, positions, ctx.segments.numel, out=ctx.out)

    def mean(self, payloads: Sequence[Payload], ctx: Context) -> Tensor:
        """Return the mean over all workers, added in rank order; elements not sent count as 0."""
        parts = [(*self._open(payload.parts, ctx.segments), payload.count) for payload in payloads]
        return ops.selection.mean(parts, ctx.segments.numel, out=ctx.out)

    def layout(self, segments: Segments, count: int = 1) -> Layout:
        runs = ops.selection.kept_runs(segments, self.ratio)
        return ops.selection.sparse_layout(segments.numel, runs, self.positions, self.values)


class TopKClaims(Claims[TopK], of=TopK):
    """Contractive: the error is the energy of the dropped elements, plus the values' rounding."""

    contractive = True

    @property
    def exact_for(self) -> tuple[str, ...]:
        return ("sparse",) + ("signs", "ternary", "integers", "bytes") * (self.codec.ratio == 1)

    @property
    def nominal_bits(self) -> float:
        """Return 64 rho: an index and a value of 32 bits each."""
        return 64 * self.codec.ratio

    @property
    def gaussian_error(self) -> float | None:
        """Return the fraction of energy dropped; None if rounding is not negligible."""
        normal = NormalDist()
        tau = -normal.inv_cdf(self.codec.ratio / 2)
        dropped = max(0.0, 1 - self.codec.ratio - 2 * tau * normal.pdf(tau))
        return dropped if dropped >= 100 * ROUNDING[self.codec.values] else None

    def error_bound(self, x: Tensor, ctx: Context) -> float:
        """Return the energy of the smallest d - k elements per segment, plus rounding errors."""
        runs = ops.selection.kept_runs(ctx.segments, self.codec.ratio)
        total = captured = 0.0
        for run in runs:
            stop = run.start + run.rows * run.length
            energies = x[run.start : stop].double().square().view(run.rows, run.length)
            total += float(energies.sum())
            captured += float(energies.topk(run.keep, dim=1).values.sum() if run.length else 0)
        rounding = ops.selection.value_error(x, ctx.segments, self.codec.values, runs)
        return min(max(0.0, total - captured) + 1e-13 * total + rounding, total)

    def delta(self, segments: Segments) -> float | None:
        """Return the minimum k/d over segments, attained if all magnitudes are equal.

        None if values are rounded: the relative error of small ones is not bounded.
        """
        runs = [run for run in ops.selection.kept_runs(segments, self.codec.ratio) if run.length]
        if self.codec.values != "fp32":
            return None
        return min((run.keep / run.length for run in runs), default=1.0)
