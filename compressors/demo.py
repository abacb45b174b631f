"""DeMo: the largest cosine coefficients of each chunk; the update is the sign of their mean.

Each dimension of a tensor (as shape[0] x rest; a vector is one row) is cut by its largest divisor
<= chunk. c = orthonormal DCT-II of a chunk, separably in two dimensions; q = inverse DCT of the
topk largest |c| (ties: lowest index). Coefficient j of the update is the mean over the workers that
sent j, not over all; then the inverse DCT, then sign, with sign(0) = 0.

Biased; ||x - q||^2 is the dropped energy (Parseval), at most 1 - topk / size of each chunk's.
Memory: residual <- 0.999 residual + g, less q. The source accumulates lr * g instead: its residual
is this one times lr, also when lr changes, since the engine then rescales residuals. Neither the
order of coefficients nor a sign depends on the factor, so the updates are the same.
Wire: topk indices of ceil(log2 size) bits (at least 1) and topk float32 a chunk: 32 (12 + 32) bits
for 64 x 64 elements, 0.344 an element. Indices come first, in increasing order within a chunk,
packed by width, narrow ones first.
Source: Peng, Quesnelle and Kingma 2024, arXiv:2411.19870, algorithm 1; defaults of their code.
That code sends 64-bit indices, 0.75 bits an element (tests/test_demo.py::test_bytes_of_a_chunk),
fails on tensors of four dimensions (test_four_dimensions_are_a_matrix), and averages in an order
that a GPU does not fix; here workers are added in the order of ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from gcbench import ops
from gcbench.core.claims import Claims
from gcbench.core.compressor import Compressor, Key, Layout, Payload, Segments, fill
from gcbench.core.errors import PayloadError


@dataclass(frozen=True)
class DeMo(Compressor):
    """The largest coefficients of chunks under a cosine transform; one payload a worker."""

    chunk: int = 64  # elements, the longest side of a chunk
    topk: int = 32  # coefficients sent of each chunk
    sign: bool = True  # False applies the mean itself

    memory: ClassVar[str] = "residual"
    memory_options: ClassVar[Mapping[str, Any]] = {"decay": 0.999}
    variants = ({}, {"sign": False}, {"chunk": 16, "topk": 8})

    @property
    def recipe(self) -> Mapping[str, Any]:
        """Return plain steps by the sign; the mean itself is a gradient for any optimizer."""
        if not self.sign:
            return {}
        return {"optimizer": "sgd", "lr": 1e-3, "momentum": 0.0, "nesterov": False}

    def __post_init__(self) -> None:
        if not 1 <= self.chunk <= 256:
            raise ValueError(f"chunk={self.chunk}: 1 to 256 elements, so that an index has 16 bits")
        if self.topk < 1:
            raise ValueError(f"topk={self.topk}: a number of coefficients, at least 1")

    def _cuts(self, segments: Segments) -> list[ops.dct.Chunks]:
        return ops.dct.chunks(segments, self.chunk, self.topk)

    def encode(
        self,
        x: Tensor,
        segments: Segments,
        shared: Tensor,
        key: Key,
        *,
        prepared: Any = None,
        out: Payload | None = None,
    ) -> Payload:
        cuts = self._cuts(segments)
        coefficients = ops.dct.forward(x, cuts)
        places = ops.dct.largest(coefficients, cuts)
        return fill(out, ops.dct.pack(places, cuts), coefficients[places])

    def _sent(self, payload: Payload, segments: Segments) -> tuple[Tensor, Tensor]:
        """Return where a payload's values belong among all coefficients, int64, and the values."""
        self.check(payload, segments)
        words, values = payload.parts
        try:
            places = ops.dct.unpack(words, self._cuts(segments))
        except PayloadError as error:
            raise PayloadError(f"{self.name}: {error}") from None
        return places, self.check_finite(values)

    def decode(
        self, payload: Payload, segments: Segments, shared: Tensor, *, out: Tensor | None = None
    ) -> Tensor:
        """Return what one worker sent: the inverse DCT of its coefficients, without the sign."""
        places, values = self._sent(payload, segments)
        dense = values.new_zeros(segments.numel)
        dense[places] = values
        restored = ops.dct.inverse(dense, self._cuts(segments))
        return restored if out is None else out.copy_(restored)

    def mean(
        self,
        payloads: Sequence[Payload],
        segments: Segments,
        shared: Tensor,
        *,
        out: Tensor | None = None,
    ) -> Tensor:
        """Return the update: coefficients averaged over their senders, and the sign taken."""
        total = payloads[0].parts[-1].new_zeros(segments.numel)
        senders = torch.zeros_like(total)
        for payload in payloads:
            places, values = self._sent(payload, segments)
            total[places] += values  # a payload has a place once: the order is that of ranks
            senders[places] += 1
        update = ops.dct.inverse(total.div_(senders.clamp_(min=1)), self._cuts(segments))
        update = update.sign_() if self.sign else update
        return update if out is None else out.copy_(update)

    def layout(self, segments: Segments, count: int = 1) -> Layout:
        cuts = self._cuts(segments)
        return ((torch.int32, ops.dct.words(cuts)), (torch.float32, ops.dct.kept(cuts)))

    @property
    def claims(self) -> DeMoClaims:
        return DeMoClaims(self)


class DeMoClaims(Claims[DeMo]):
    """Contracts by the energy of the dropped coefficients; the update is no mean."""

    contractive = True
    aggregate = "other"
    portable = False

    def error_bound(self, x: Tensor, segments: Segments) -> float:
        """Return the bound on the dropped energy, with room for rounding and for denormals."""
        return 2.0**-296 * x.count_nonzero().item() + sum(
            (1 - cut.kept / cut.size + 2**-18) * float(x[cut.place].double().square().sum())
            for cut in self.codec._cuts(segments)
        )

    def delta(self, segments: Segments) -> float | None:
        """Return the least topk / size of a chunk, with room for rounding."""
        cuts = self.codec._cuts(segments)
        return min((cut.kept / cut.size for cut in cuts), default=1.0) - 2.0**-18
