"""Positions of the gradients of an FSDP2 module's parameters in the input of its reduce-scatter."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Parameter:
    """One parameter of a module: its name in the model, and each rank's chunk."""

    name: str
    chunks: tuple[tuple[int, ...], ...]
    """Shape of each rank's chunk, without padding."""
    padded: int
    """Elements of each rank's chunk in FSDP's input, padded to the length of the first."""

    @classmethod
    def of(cls, name: str, shape: Sequence[int], dim: int, ranks: int) -> Parameter:
        """Split a parameter along `dim` as `torch.chunk` does."""
        most = -(-shape[dim] // ranks)
        rows = [max(0, min(most, shape[dim] - r * most)) for r in range(ranks)]
        chunks = tuple((*shape[:dim], k, *shape[dim + 1 :]) for k in rows)
        return cls(name, chunks, math.prod(chunks[0]))

    @property
    def numel(self) -> int:
        """Elements of all chunks."""
        return sum(map(math.prod, self.chunks))


@dataclass(frozen=True)
class Layout:
    """Positions of the gradients of a module's parameters in the input of its reduce-scatter.

    The input has a row per rank, with that rank's padded chunk of each parameter. The compressed
    parameters form one lane and the dense ones another. A lane has the chunks of rank 0 without
    padding, then those of rank 1, and so on.
    """

    parameters: tuple[Parameter, ...]
    dense: tuple[bool, ...]
    ranks: int

    @property
    def row(self) -> int:
        """Elements of one rank's row of the input, with padding."""
        return sum(parameter.padded for parameter in self.parameters)

    @property
    def numel(self) -> int:
        """Elements of all parameters."""
        return sum(parameter.numel for parameter in self.parameters)

    def lanes(self) -> list[list[Parameter]]:
        """Return the parameters of each lane."""
        pairs = [*zip(self.parameters, self.dense, strict=True)]
        lanes = [[p for p, dense in pairs if dense == kind] for kind in (False, True)]
        return [lane for lane in lanes if lane]

    def is_dense(self, lane: Sequence[Parameter]) -> bool:
        """Return whether a lane has the parameters that stay in fp32."""
        return self.dense[self.parameters.index(lane[0])]

    def shapes(self, lane: Sequence[Parameter], rank: int) -> list[tuple[int, ...]]:
        """Return the shapes of a rank's chunks of a lane, without empty ones."""
        return [p.chunks[rank] for p in lane if 0 not in p.chunks[rank]]

    def parts(self, ranks: Sequence[int]) -> list[list[tuple[str, int]]]:
        """Return names and elements of the chunks of `ranks`, per lane in its order."""
        return [
            [(p.name, math.prod(p.chunks[rank])) for rank in ranks for p in lane]
            for lane in self.lanes()
        ]

    def chunks(self, row: Tensor, rank: int) -> dict[str, Tensor]:
        """Return a rank's chunks in a row by the parameters' names: 1-D views."""
        pieces = torch.split(row, [parameter.padded for parameter in self.parameters])
        return {
            parameter.name: piece[: math.prod(parameter.chunks[rank])]
            for parameter, piece in zip(self.parameters, pieces, strict=True)
        }

    def take(self, rows: Tensor, ranks: Sequence[int]) -> list[Tensor]:
        """Return each lane's chunks of `ranks`, float32, 1-D: copies of their rows.

        `rows`: shape (len(ranks) * row,).
        """
        chunks = [
            self.chunks(row, rank)
            for rank, row in zip(ranks, torch.split(rows, self.row), strict=True)
        ]
        return [
            torch.cat([each[p.name] for each in chunks for p in lane]).float()
            for lane in self.lanes()
        ]

    def pieces(
        self, lane: Sequence[Parameter], x: Tensor, rank: int
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield the name and values of each chunk of a rank; x: its chunks of a lane."""
        sizes = [math.prod(p.chunks[rank]) for p in lane]
        names = [parameter.name for parameter in lane]
        return zip(names, torch.split(x, sizes), strict=True)

    def give(self, lane: Sequence[Parameter], shard: Tensor, row: Tensor, rank: int) -> None:
        """Copy the mean of a rank's chunks of a lane to its row, shape (row,)."""
        chunks = self.chunks(row, rank)
        for name, mean in self.pieces(lane, shard, rank):
            chunks[name].copy_(mean)
