"""Where the gradients of an FSDP2 module's parameters lie in the input of its reduce-scatter."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Parameter:
    """One parameter of a module: its name in the model, and the chunk that each rank keeps."""

    name: str
    chunks: tuple[tuple[int, ...], ...]
    """Shape of each rank's chunk, without padding."""
    padded: int
    """Elements that each rank's chunk has in FSDP's input, padded to the length of the first."""

    @classmethod
    def of(cls, name: str, shape: Sequence[int], dim: int, ranks: int) -> Parameter:
        """Cut a parameter along `dim` as `torch.chunk` does."""
        rows = -(-shape[dim] // ranks)
        kept = [max(0, min(rows, shape[dim] - r * rows)) for r in range(ranks)]
        chunks = tuple((*shape[:dim], k, *shape[dim + 1 :]) for k in kept)
        return cls(name, chunks, math.prod(chunks[0]))

    @property
    def numel(self) -> int:
        """Elements of all chunks."""
        return sum(map(math.prod, self.chunks))


@dataclass(frozen=True)
class Layout:
    """Where the gradients of a module's parameters lie in the input of its reduce-scatter.

    The input has a row for each rank; a row has a padded chunk of each parameter, in their order.
    The compressed parameters are one lane and the dense ones another. A lane has the chunks that
    rank 0 keeps, without padding, then those of rank 1, and so on.
    """

    parameters: tuple[Parameter, ...]
    dense: tuple[bool, ...]
    ranks: int

    @property
    def row(self) -> int:
        """Elements of one rank's row of the input, padding included."""
        return sum(parameter.padded for parameter in self.parameters)

    @property
    def numel(self) -> int:
        """Elements of all parameters."""
        return sum(parameter.numel for parameter in self.parameters)

    def lanes(self) -> list[list[Parameter]]:
        """Return the parameters of each lane."""
        pairs = [*zip(self.parameters, self.dense, strict=True)]
        dealt = [[p for p, dense in pairs if dense == kind] for kind in (False, True)]
        return [lane for lane in dealt if lane]

    def is_dense(self, lane: Sequence[Parameter]) -> bool:
        """Return whether a lane has the parameters that stay in fp32."""
        return self.dense[self.parameters.index(lane[0])]

    def chunks(self, row: Tensor, rank: int) -> dict[str, Tensor]:
        """Return a rank's chunks in a row, 1-D, by the parameters' names: views."""
        pieces = torch.split(row, [parameter.padded for parameter in self.parameters])
        return {
            parameter.name: piece[: math.prod(parameter.chunks[rank])]
            for parameter, piece in zip(self.parameters, pieces, strict=True)
        }

    def take(self, given: Tensor) -> list[Tensor]:
        """Return each lane's gradients, float32, 1-D: copies of the input, shape (ranks * row,)."""
        rows = [self.chunks(row, rank) for rank, row in enumerate(torch.split(given, self.row))]
        lanes = self.lanes()
        return [torch.cat([row[p.name] for row in rows for p in lane]).float() for lane in lanes]

    def own(self, row: Tensor, rank: int) -> list[Tensor]:
        """Return each lane's chunks of a rank, float32, 1-D, copied from its row, shape (row,)."""
        chunks = self.chunks(row, rank)
        return [torch.cat([chunks[p.name] for p in lane]).float() for lane in self.lanes()]

    def pieces(
        self, lane: Sequence[Parameter], x: Tensor, ranks: Sequence[int]
    ) -> Iterator[tuple[Parameter, Tensor]]:
        """Yield each chunk of x, the chunks of a lane that `ranks` keep, and whose it is."""
        whose = [parameter for _ in ranks for parameter in lane]
        sizes = [math.prod(p.chunks[rank]) for rank in ranks for p in lane]
        return zip(whose, torch.split(x, sizes), strict=True)

    def give(self, lane: Sequence[Parameter], shard: Tensor, own: Tensor, rank: int) -> None:
        """Copy the mean of a rank's shard of a lane to its row, shape (row,)."""
        places = self.chunks(own, rank)
        sizes = [math.prod(parameter.chunks[rank]) for parameter in lane]
        for parameter, mean in zip(lane, torch.split(shard, sizes), strict=True):
            places[parameter.name].copy_(mean)
