"""Workers and their collectives, in this process or over torch.distributed; counts every byte.

A world has `size` workers, of which `ranks` live in this process: all of them in a simulation, one
under torch.distributed. A collective takes one contribution for each local worker and returns what
every worker receives, so the code above it is the same in both.

Bytes, for each worker: `payload_up` is what it hands over to be aggregated, `payload_down` is what
it gets back to decode; its own part is in both, as a parameter server would count. `wire` is what
leaves it for other workers: 2 (N - 1) / N of an all-reduced tensor (ring), N - 1 times an
all-gathered one, the shards of others in an all-to-all, (N - 1) / N of a broadcast one (a pipeline
through all workers, on average).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

T = TypeVar("T")
Op = Literal["sum", "max"]


@dataclass(frozen=True)
class Link:
    """A network link between any two workers, for modelled (never measured) times."""

    gbit: float  # 10^9 bits a second, each direction
    latency_us: float  # microseconds a message

    def seconds(self, rounds: int, nbytes: float) -> float:
        """Return the time of `rounds` messages one after the other with `nbytes` in all."""
        return rounds * self.latency_us * 1e-6 + nbytes * 8 / (self.gbit * 1e9)


@dataclass
class Traffic:
    """Bytes of one worker since the run began; wire bytes are fractions of a ring's messages."""

    payload_up: float = 0.0
    payload_down: float = 0.0
    wire: float = 0.0


def _nbytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


class World(ABC):
    """N workers; one `Traffic` for each that lives here."""

    size: int
    ranks: range
    device: torch.device
    inline: bool = False
    """Whether a worker's work is too little to be worth handing to threads."""

    def __init__(self, link: Link | None = None) -> None:
        self.traffic = [Traffic() for _ in self.ranks]
        self.link = link
        self.modelled_seconds = 0.0

    def _count(self, up: Sequence[int], down: Sequence[int], wire: Sequence[float]) -> None:
        for traffic, u, d, w in zip(self.traffic, up, down, wire, strict=True):
            traffic.payload_up += u
            traffic.payload_down += d
            traffic.wire += w

    def _model(self, rounds: int, wire: Sequence[float]) -> None:
        if self.link and self.size > 1:
            self.modelled_seconds += self.link.seconds(rounds, max(wire))

    def all_reduce(self, tensors: Sequence[Tensor], op: Op) -> Tensor:
        """Return the element-wise sum or maximum over all workers.

        Integers and maxima are exact in any order. On the CPU floats are added in the order of
        ranks, in every engine, so that the sum is the same bits.
        """
        sizes = [_nbytes(tensor) for tensor in tensors]
        wire = [2 * (self.size - 1) / self.size * size for size in sizes]
        self._count(sizes, sizes, wire)
        self._model(2 * (self.size - 1), wire)
        return self._all_reduce(tensors, op)

    def all_gather(
        self, tensors: Sequence[Tensor], sizes: Sequence[int], *, aggregated: bool = False
    ) -> list[Tensor]:
        """Return every worker's 1-D tensor, by rank; `sizes` are their element counts.

        `aggregated`: the tensors are shards of an aggregate on the way down, not contributions.
        """
        down = sum(sizes) * tensors[0].element_size()
        own = [_nbytes(tensor) for tensor in tensors]
        wire = [float((self.size - 1) * size) for size in own]
        self._count([0] * len(own) if aggregated else own, [down] * len(own), wire)
        self._model(self.size - 1, wire)
        return self._all_gather(tensors, sizes)

    def all_to_all(
        self, chunks: Sequence[Sequence[Tensor]], sizes: Sequence[Sequence[int]]
    ) -> list[list[Tensor]]:
        """Hand `chunks[i][r]` of local worker i to rank r; return what each got, by sender.

        `sizes[i][r]` is the element count of the 1-D tensor that worker i gets from rank r.
        """
        up = [sum(_nbytes(chunk) for chunk in row) for row in chunks]
        wire = [
            float(total - _nbytes(row[rank]))
            for rank, row, total in zip(self.ranks, chunks, up, strict=True)
        ]
        self._count(up, [0] * len(up), wire)
        self._model(self.size - 1, wire)
        return self._all_to_all(chunks, sizes)

    def broadcast(self, tensor: Tensor) -> Tensor:
        """Return worker 0's tensor, on every worker; passed on from each to the next."""
        size = _nbytes(tensor)
        up = [size if rank == 0 else 0 for rank in self.ranks]
        wire = [size * (self.size - 1) / self.size] * len(up)
        self._count(up, [size] * len(up), wire)
        self._model(self.size - 1, wire)
        return self._broadcast(tensor)

    @abstractmethod
    def _broadcast(self, tensor: Tensor) -> Tensor: ...

    @abstractmethod
    def _all_reduce(self, tensors: Sequence[Tensor], op: Op) -> Tensor: ...

    @abstractmethod
    def _all_gather(self, tensors: Sequence[Tensor], sizes: Sequence[int]) -> list[Tensor]: ...

    @abstractmethod
    def _all_to_all(
        self, chunks: Sequence[Sequence[Tensor]], sizes: Sequence[Sequence[int]]
    ) -> list[list[Tensor]]: ...

    @abstractmethod
    def map(self, call: Callable[[int], T]) -> list[T]:
        """Return `call(rank)` for each local worker, in the order of ranks."""

    @abstractmethod
    def collect(self, values: Sequence[T]) -> list[T]:
        """Return every worker's value, by rank: for records and checks, not counted as traffic."""

    @abstractmethod
    def close(self) -> None:
        """Release threads or process groups."""


class SimulatedWorld(World):
    """All workers in this process, on a few threads; each computes as a process of its own would.

    Every worker uses `threads` threads inside an operation, so the bits do not depend on how many
    workers run at the same time.
    """

    def __init__(
        self, size: int, device: torch.device, link: Link, threads: int, parallel: int
    ) -> None:
        self.size, self.ranks, self.device = size, range(size), device
        super().__init__(link)
        torch.set_num_threads(threads)
        self.pool = (
            ThreadPoolExecutor(
                parallel, "worker", initializer=torch.set_num_threads, initargs=(threads,)
            )
            if parallel > 1 and size > 1
            else None
        )

    def map(self, call: Callable[[int], T]) -> list[T]:  # noqa: D102
        if self.pool is None or self.inline:
            return list(map(call, self.ranks))
        return list(self.pool.map(call, self.ranks))

    def collect(self, values: Sequence[T]) -> list[T]:  # noqa: D102
        return list(values)

    def close(self) -> None:  # noqa: D102
        if self.pool is not None:
            self.pool.shutdown()

    def _broadcast(self, tensor: Tensor) -> Tensor:
        return tensor

    def _all_reduce(self, tensors: Sequence[Tensor], op: Op) -> Tensor:
        total = tensors[0].clone()
        for tensor in tensors[1:]:
            total = torch.maximum(total, tensor, out=total) if op == "max" else total.add_(tensor)
        return total

    def _all_gather(self, tensors: Sequence[Tensor], sizes: Sequence[int]) -> list[Tensor]:
        return list(tensors)

    def _all_to_all(
        self, chunks: Sequence[Sequence[Tensor]], sizes: Sequence[Sequence[int]]
    ) -> list[list[Tensor]]:
        return [list(column) for column in zip(*chunks, strict=True)]


class DistributedWorld(World):
    """One worker of a torch.distributed process group that has been initialized."""

    def __init__(self, device: torch.device) -> None:
        self.size, self.device = dist.get_world_size(), device
        rank = dist.get_rank()
        self.ranks = range(rank, rank + 1)
        super().__init__()

    def map(self, call: Callable[[int], T]) -> list[T]:  # noqa: D102
        return [call(self.ranks[0])]

    def collect(self, values: Sequence[T]) -> list[T]:  # noqa: D102
        everyone: list[Any] = [None] * self.size
        dist.all_gather_object(everyone, values[0])
        return everyone

    def close(self) -> None:  # noqa: D102
        dist.destroy_process_group()

    def _broadcast(self, tensor: Tensor) -> Tensor:
        received = tensor.clone()
        dist.broadcast(received, 0)
        return received

    def _all_reduce(self, tensors: Sequence[Tensor], op: Op) -> Tensor:
        tensor = tensors[0]
        if op == "sum" and tensor.is_floating_point() and tensor.device.type == "cpu":
            return self._ordered_sum(tensor)
        total = tensor.clone()
        dist.all_reduce(total, dist.ReduceOp.SUM if op == "sum" else dist.ReduceOp.MAX)
        return total

    def _ordered_sum(self, tensor: Tensor) -> Tensor:
        """Reduce-scatter and all-gather, each owner adding its shard in the order of ranks.

        It moves what a ring all-reduce moves; gloo's own adds in an order that depends on N.
        """
        flat = tensor.reshape(-1)
        shards = list(flat.tensor_split(self.size))
        own = shards[self.ranks[0]].numel()
        received = self._all_to_all([shards], [[own] * self.size])[0]
        total = received[0].clone()
        for shard in received[1:]:
            total += shard
        gathered = self._all_gather([total], [shard.numel() for shard in shards])
        return torch.cat(gathered).view_as(tensor)

    def _all_gather(self, tensors: Sequence[Tensor], sizes: Sequence[int]) -> list[Tensor]:
        tensor = tensors[0].contiguous()
        if len(set(sizes)) > 1:  # shorter tensors are not padded: every byte sent is a real one
            return self._all_to_all([[tensor] * self.size], [sizes])[0]
        out = tensor.new_empty(sum(sizes))
        dist.all_gather(list(torch.split(out, list(sizes))), tensor)
        return list(torch.split(out, list(sizes)))

    def _all_to_all(
        self, chunks: Sequence[Sequence[Tensor]], sizes: Sequence[Sequence[int]]
    ) -> list[list[Tensor]]:
        sent, counts = chunks[0], list(sizes[0])
        out = sent[0].new_empty(sum(counts))
        dist.all_to_all_single(out, torch.cat(list(sent)), counts, [c.numel() for c in sent])
        return [list(torch.split(out, counts))]
