"""Workers and their collectives, in this process or over torch.distributed; counts every byte.

A world has `size` workers, of which `ranks` run in this process: all of them in a simulation, one
under torch.distributed. A collective takes one tensor per local worker and returns what each worker
receives, so callers need not distinguish the two.

Three byte counts per worker:

payload_up: what it contributes to the aggregate.
payload_down: what it receives to decode. Both include its own contribution, as a parameter server
    would count.
wire: what it sends to other workers: 2 (N - 1) / N of the bytes of an all-reduced tensor (ring),
    N - 1 times those of an all-gathered tensor, the pieces for others in an all-to-all, a tensor
    passed to the next worker once, and (N - 1) / N of a broadcast tensor (a pipeline through all
    workers, averaged over them).

Other messages between workers are JSON and tensors. Nothing is unpickled, so no received data is
executed.
"""

from __future__ import annotations

import json
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import astuple, dataclass
from datetime import timedelta
from typing import Any, Literal, TypeVar

import safetensors.torch
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import Store  # type: ignore[attr-defined]

from gcbench.core.errors import PeerLostError

T = TypeVar("T")
Op = Literal["sum", "max"]
TAG = 7433
"""Tag of messages between two workers, apart from those of the user's own job."""
ROLL_CALL_SECONDS = 2.0
"""How long a worker whose collective failed waits for the other workers to report."""


def to_bytes(value: Any) -> bytes:
    """Serialize a value: a line of JSON, then its tensors as safetensors.

    A value is None, a bool, a number, a string, a tensor, or a list, tuple or dict of values with
    string keys. `from_bytes` returns a tuple as a list.

    Raises:
        TypeError: the value, or a part of it, has another type.
    """
    tensors: dict[str, Tensor] = {}

    def plain(part: Any) -> Any:
        if isinstance(part, Tensor):
            name = str(len(tensors))
            tensors[name] = part.detach().cpu().contiguous().clone()  # safetensors wants no views
            return {"tensor": name}
        if isinstance(part, dict):
            if not all(isinstance(key, str) for key in part):
                raise TypeError(f"keys {list(part)}: expected strings")
            return {"dict": {key: plain(each) for key, each in part.items()}}
        return [plain(each) for each in part] if isinstance(part, list | tuple) else part

    line = json.dumps(plain(value)).encode()
    return line + b"\n" + (safetensors.torch.save(tensors) if tensors else b"")


def from_bytes(data: bytes) -> Any:
    """Return the value that `to_bytes` serialized; its tensors are on the CPU."""
    line, _, rest = data.partition(b"\n")
    tensors = safetensors.torch.load(rest) if rest else {}

    def value(part: Any) -> Any:
        if isinstance(part, dict):
            if "tensor" in part:
                return tensors[part["tensor"]]
            return {key: value(each) for key, each in part["dict"].items()}
        return [value(each) for each in part] if isinstance(part, list) else part

    return value(json.loads(line))


@dataclass(frozen=True)
class Link:
    """A network link between any two workers, for modelled (never measured) times."""

    gbit: float  # 10^9 bits per second, each direction
    latency_us: float  # microseconds per message

    def seconds(self, rounds: int, nbytes: float) -> float:
        """Return the seconds that `rounds` successive messages of `nbytes` in total take."""
        return rounds * self.latency_us * 1e-6 + nbytes * 8 / (self.gbit * 1e9)


@dataclass
class Traffic:
    """Bytes of one worker since the start of the run; `wire` may be fractional."""

    payload_up: float = 0.0
    payload_down: float = 0.0
    wire: float = 0.0


class World(ABC):
    """N workers; `traffic` has one entry per worker of this process."""

    size: int
    ranks: range
    device: torch.device
    inline: bool = False
    """Whether `map` runs the workers sequentially, because their work is too small for threads."""

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

    def all_reduce(self, tensors: Sequence[Tensor], op: Op, *, out: Tensor | None = None) -> Tensor:
        """Return the element-wise sum or maximum over all workers, in `out` if given.

        On the CPU every engine adds floats in rank order, so all engines compute the same bits;
        integer sums and maxima do not depend on the order.
        """
        sizes = [tensor.nbytes for tensor in tensors]
        wire = [2 * (self.size - 1) / self.size * size for size in sizes]
        self._count(sizes, sizes, wire)
        self._model(2 * (self.size - 1), wire)
        return self._all_reduce(tensors, op, out)

    def all_gather(
        self,
        tensors: Sequence[Tensor],
        sizes: Sequence[int],
        *,
        aggregated: bool = False,
        out: Tensor | None = None,
    ) -> list[Tensor]:
        """Return every worker's 1-D tensor, by rank; `sizes` are their element counts.

        `aggregated`: the tensors are shards of an aggregate, not contributions to one. `out`: a 1-D
        buffer of sufficient size. A simulation ignores it and returns the workers' tensors.
        """
        down = sum(sizes) * tensors[0].element_size()
        counts = [tensor.nbytes for tensor in tensors]
        wire = [float((self.size - 1) * size) for size in counts]
        self._count([0] * len(counts) if aggregated else counts, [down] * len(counts), wire)
        self._model(self.size - 1, wire)
        return self._all_gather(tensors, sizes, out)

    def all_to_all(
        self,
        tensors: Sequence[Tensor],
        splits: Sequence[Sequence[int]],
        sizes: Sequence[Sequence[int]],
        *,
        out: Tensor | None = None,
    ) -> list[list[Tensor]]:
        """Send piece r of each worker's 1-D tensor to rank r; return the received, by sender.

        `splits[i][r]`: the number of elements that local worker i sends to rank r; `sizes[i][r]`:
        the number that it receives from rank r. `out`: as for `all_gather`.
        """
        up = [tensor.nbytes for tensor in tensors]
        wire = [
            float(total - split[rank] * tensor.element_size())
            for rank, split, tensor, total in zip(self.ranks, splits, tensors, up, strict=True)
        ]
        self._count(up, [0] * len(up), wire)
        self._model(self.size - 1, wire)
        return self._all_to_all(tensors, splits, sizes, out)

    def shift(
        self, tensors: Sequence[Tensor], sizes: Sequence[int], *, out: Tensor | None = None
    ) -> list[Tensor]:
        """Send each worker's 1-D tensor to the next rank; return those of the previous ranks.

        The last rank sends to rank 0. `sizes[i]`: the number of elements that local worker i
        receives. `out`: as for `all_gather`.
        """
        counts = [tensor.nbytes for tensor in tensors]
        wire = [float(count) for count in counts]
        self._count(counts, [0] * len(counts), wire)
        self._model(1, wire)
        return self._shift(tensors, sizes, out)

    def broadcast(self, tensor: Tensor) -> Tensor:
        """Return worker 0's tensor on every worker; each worker forwards it to the next."""
        size = tensor.nbytes
        up = [size if rank == 0 else 0 for rank in self.ranks]
        wire = [size * (self.size - 1) / self.size] * len(up)
        self._count(up, [size] * len(up), wire)
        self._model(self.size - 1, [float(size)] * len(up))  # each forwards pieces as they arrive
        return self._broadcast(tensor)

    @abstractmethod
    def _broadcast(self, tensor: Tensor) -> Tensor: ...

    @abstractmethod
    def _all_reduce(self, tensors: Sequence[Tensor], op: Op, out: Tensor | None) -> Tensor: ...

    @abstractmethod
    def _all_gather(
        self, tensors: Sequence[Tensor], sizes: Sequence[int], out: Tensor | None
    ) -> list[Tensor]: ...

    @abstractmethod
    def _all_to_all(
        self,
        tensors: Sequence[Tensor],
        splits: Sequence[Sequence[int]],
        sizes: Sequence[Sequence[int]],
        out: Tensor | None,
    ) -> list[list[Tensor]]: ...

    @abstractmethod
    def _shift(
        self, tensors: Sequence[Tensor], sizes: Sequence[int], out: Tensor | None
    ) -> list[Tensor]: ...

    @abstractmethod
    def map(self, call: Callable[[int], T]) -> list[T]:
        """Return `call(rank)` for each local worker, in the order of ranks."""

    @abstractmethod
    def collect(self, values: Sequence[T]) -> list[T]:
        """Return every worker's value, by rank: for records and checks, not counted as traffic.

        Values are of the types of `to_bytes`; a tuple may become a list.
        """

    def collect_traffic(self) -> list[Traffic]:
        """Return every worker's traffic, by rank."""
        return [
            Traffic(*row) for row in self.collect([astuple(traffic) for traffic in self.traffic])
        ]

    @abstractmethod
    def close(self) -> None:
        """Release threads or process groups."""


class SimulatedWorld(World):
    """All workers in this process, on a few threads, with the same results as separate processes.

    Every worker uses `threads` threads inside an operation, so the bits do not depend on the number
    of workers that run concurrently. `close` restores the number of the calling thread.
    """

    def __init__(
        self, size: int, device: torch.device, link: Link, threads: int, parallel: int
    ) -> None:
        self.size, self.ranks, self.device = size, range(size), device
        super().__init__(link)
        self._threads_before = torch.get_num_threads()
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
        torch.set_num_threads(self._threads_before)

    def _broadcast(self, tensor: Tensor) -> Tensor:
        return tensor

    def _all_reduce(self, tensors: Sequence[Tensor], op: Op, out: Tensor | None) -> Tensor:
        total = _copy(tensors[0], out)
        for tensor in tensors[1:]:
            total = torch.maximum(total, tensor, out=total) if op == "max" else total.add_(tensor)
        return total

    def _all_gather(
        self, tensors: Sequence[Tensor], sizes: Sequence[int], out: Tensor | None
    ) -> list[Tensor]:
        return list(tensors)

    def _all_to_all(
        self,
        tensors: Sequence[Tensor],
        splits: Sequence[Sequence[int]],
        sizes: Sequence[Sequence[int]],
        out: Tensor | None,
    ) -> list[list[Tensor]]:
        rows = [
            torch.split(tensor, list(split)) for tensor, split in zip(tensors, splits, strict=True)
        ]
        return [list(column) for column in zip(*rows, strict=True)]

    def _shift(
        self, tensors: Sequence[Tensor], sizes: Sequence[int], out: Tensor | None
    ) -> list[Tensor]:
        return [tensors[-1], *tensors[:-1]]


class DistributedWorld(World):
    """One worker of a torch.distributed process group that has been initialized."""

    def __init__(
        self,
        device: torch.device,
        store: Store,
        timeout: timedelta,
        *,
        watched: bool,
        group: dist.ProcessGroup | None = None,
        limit: str = "GCBENCH_COLLECTIVE_TIMEOUT",
    ) -> None:
        """Join a process group with this `store` and `timeout`.

        `watched`: whether a launcher detects and reports a process that ends. `group`: None means
        the default group; ranks are ranks in the group. `limit`: the name of the timeout setting,
        for errors.
        """
        self.group, self.limit = group, limit
        self.size = dist.get_world_size() if group is None else group.size()
        self.device = device
        rank = dist.get_rank() if group is None else group.rank()
        self.ranks = range(rank, rank + 1)
        self.store, self.timeout, self.watched = store, timeout, watched
        super().__init__()

    @contextmanager
    def together(self) -> Iterator[None]:
        """Run a collective of torch.distributed.

        Raises:
            PeerLostError: the collective failed; the message names the workers that are gone.
        """
        began = time.monotonic()
        try:
            yield
        except (RuntimeError, ValueError) as error:
            # If torch does not know the group, formatting the RuntimeError raises a ValueError.
            cause = error.__context__ if isinstance(error, ValueError) else error
            if not isinstance(cause, RuntimeError):
                raise
            raise self._lost(cause, time.monotonic() - began) from cause

    def _lost(self, error: RuntimeError, waited: float) -> PeerLostError:
        rank, limit = self.ranks[0], self.timeout.total_seconds()
        reason = (str(error).splitlines() or [""])[0]
        timed_out = waited >= limit / 2
        gone = self._silent() if timed_out or not self.watched else []
        if gone:
            who = ", ".join(map(str, gone))
            what = f"because worker{'s' * (len(gone) > 1)} {who} ended or stopped responding"
        else:
            what = "because another worker aborted it"
        return PeerLostError(
            f"worker {rank}: a collective failed after {waited:.0f} s {what}; the limit is "
            f"{limit:.0f} s ({self.limit}). torch: {reason:.200}"
        )

    def _silent(self) -> list[int]:
        """Return the ranks that do not report within the limit; none if the store is gone, too."""
        others = set(range(self.size)) - set(self.ranks)
        with suppress(RuntimeError):
            self.store.set(f"gcbench/here/{self.ranks[0]}", "")
            patience = time.monotonic() + ROLL_CALL_SECONDS
            while others and time.monotonic() < patience:
                others -= {r for r in others if self.store.check([f"gcbench/here/{r}"])}
                time.sleep(0.01)
            return sorted(others)
        return []

    def map(self, call: Callable[[int], T]) -> list[T]:  # noqa: D102
        return [call(self.ranks[0])]

    def collect(self, values: Sequence[T]) -> list[T]:  # noqa: D102
        data = torch.frombuffer(bytearray(to_bytes(values[0])), dtype=torch.uint8).to(self.device)
        size = torch.tensor([data.numel()], device=self.device)
        sizes = torch.cat(self._all_gather([size], [1] * self.size, None)).tolist()
        everyone = self._all_gather([data], sizes, None)
        return [from_bytes(data.cpu().numpy().tobytes()) for data in everyone]

    def close(self) -> None:  # noqa: D102
        if self.group is None:
            dist.destroy_process_group()
        else:  # the caller created the group and destroys it
            self.group = None

    def _broadcast(self, tensor: Tensor) -> Tensor:
        received = tensor.clone()
        with self.together():
            dist.broadcast(received, group=self.group, group_src=0)
        return received

    def _all_reduce(self, tensors: Sequence[Tensor], op: Op, out: Tensor | None) -> Tensor:
        tensor = tensors[0]
        if op == "sum" and tensor.is_floating_point() and tensor.device.type == "cpu":
            return self._ordered_sum(tensor, out)
        total = _copy(tensor, out)
        with self.together():
            how = dist.ReduceOp.SUM if op == "sum" else dist.ReduceOp.MAX
            dist.all_reduce(total, how, group=self.group)
        return total

    def _ordered_sum(self, tensor: Tensor, out: Tensor | None) -> Tensor:
        """All-reduce as reduce-scatter and all-gather; a shard's owner adds in rank order.

        It moves as many bytes as a ring all-reduce. gloo's order of additions depends on N.
        """
        flat = tensor.reshape(-1)
        sizes = [shard.numel() for shard in flat.tensor_split(self.size)]
        share = sizes[self.ranks[0]]
        received = self._all_to_all([flat], [sizes], [[share] * self.size], None)[0]
        total = received[0]
        for shard in received[1:]:
            total += shard
        whole = torch.empty_like(tensor) if out is None else out
        self._all_gather([total], sizes, whole.view(-1))
        return whole

    def _all_gather(
        self, tensors: Sequence[Tensor], sizes: Sequence[int], out: Tensor | None
    ) -> list[Tensor]:
        tensor = tensors[0].contiguous()
        out = tensor.new_empty(sum(sizes)) if out is None else out[: sum(sizes)]
        pieces = list(torch.split(out, list(sizes)))
        if len(set(sizes)) == 1 and (self.size > 2 or self.device.type != "cpu"):
            with self.together():
                dist.all_gather(pieces, tensor, group=self.group)
        elif self.device.type == "cpu":
            self._pass([tensor] * self.size, pieces)
        else:  # without padding, so that only used bytes are sent
            counts = [tensor.numel()] * self.size
            repeated = tensor.repeat(self.size)
            with self.together():
                dist.all_to_all_single(out, repeated, list(sizes), counts, group=self.group)
        return pieces

    def _all_to_all(
        self,
        tensors: Sequence[Tensor],
        splits: Sequence[Sequence[int]],
        sizes: Sequence[Sequence[int]],
        out: Tensor | None,
    ) -> list[list[Tensor]]:
        tensor, counts = tensors[0].contiguous(), list(sizes[0])
        out = tensor.new_empty(sum(counts)) if out is None else out[: sum(counts)]
        received = list(torch.split(out, counts))
        if self.device.type == "cpu":
            self._pass(torch.split(tensor, list(splits[0])), received)
        else:
            with self.together():
                dist.all_to_all_single(out, tensor, counts, list(splits[0]), group=self.group)
        return [received]

    def _pass(self, sent: Sequence[Tensor], received: Sequence[Tensor]) -> None:
        """Send `sent[r]` to every rank r, and receive `received[r]` from it, over gloo.

        Receives come first: gloo announces a receive on the connection that carries the data, and
        behind the data that is already queued. gloo's own all-to-all sends first, so that the two
        directions of a link often take turns (results/netlab/transport.json).
        """
        rank = self.ranks[0]
        received[rank].copy_(sent[rank])
        others = [(rank + i) % self.size for i in range(1, self.size)]
        with self.together():
            works = [
                dist.irecv(received[other], group=self.group, tag=TAG, group_src=other)
                for other in reversed(others)
                if received[other].numel()
            ]
            works += [
                dist.isend(sent[other], group=self.group, tag=TAG, group_dst=other)
                for other in others
                if sent[other].numel()
            ]
            for work in works:
                if work is not None:  # of another group
                    work.wait()

    def _shift(
        self, tensors: Sequence[Tensor], sizes: Sequence[int], out: Tensor | None
    ) -> list[Tensor]:
        rank = self.ranks[0]
        after, before = (rank + 1) % self.size, (rank - 1) % self.size
        sent = [tensors[0].numel() * (other == after) for other in range(self.size)]
        received = [sizes[0] * (other == before) for other in range(self.size)]
        # NCCL runs both directions at once only inside a collective.
        return [self._all_to_all(tensors, [sent], [received], out)[0][before]]


def _copy(tensor: Tensor, out: Tensor | None) -> Tensor:
    return tensor.clone() if out is None else out.copy_(tensor)
