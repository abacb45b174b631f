"""The transfers that `gcbench bandwidth` times on one worker, and their checks.

A measurement is a `Probe`: a call to time, the bytes that it moves, and a function that counts the
wrong elements of its last result. An iteration lasts from a barrier until the slowest worker has
its result.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from gcbench.core.world import World

PARTS = ("statistic", "encode", "communicate", "decode")
"""The phases of an exchange."""

# Names since torch 2.13, where the older ones warn.
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class Item(NamedTuple):
    """One measurement, repeated at every size."""

    kind: str
    """"bound" (a copy, a socket), "library" (a collective of gloo or NCCL) or "exchange"."""
    method: str
    collective: str
    """"-" if there is none."""

    @property
    def name(self) -> str:
        """The item's name in messages."""
        return self.method if self.collective == "-" else f"{self.method} by {self.collective}"

    def key(self, size: int) -> str:
        """Return the key of a measurement in the ledger."""
        return f"{self.kind} {self.method} {self.collective} {size}"


@dataclass
class Probe:
    """One call to time on this worker, with its check."""

    nbytes: int
    """Bytes in algbw."""
    wire: float
    """Bytes that a worker sends to others, for busbw."""
    call: Callable[[], object]
    """The call that is timed."""
    wrong: Callable[[], int]
    """Returns the number of wrong elements in this worker's last result."""
    before: Callable[[], object] = lambda: None
    """Called before each iteration, not timed."""
    close: Callable[[], object] = lambda: None


# ---- bounds --------------------------------------------------------------------------------------


def pattern(rank: int, start: int, stop: int, device: torch.device) -> Tensor:
    """Return small integers that depend on rank and position, float32, shape (stop - start,).

    Their sums over up to 2^17 workers are exact in float32.
    """
    positions = torch.arange(start, stop, dtype=torch.int64, device=device)
    return ((positions + 31 * rank) % 251 - 125).float()


def _memcpy(world: World, count: int) -> Probe:
    """Copy a tensor, on all workers at once."""
    x = pattern(world.ranks[0], 0, count, world.device)
    out = torch.zeros_like(x)
    return Probe(4 * count, 4.0 * count, lambda: out.copy_(x), lambda: int((out != x).sum()))


class Loopback:
    """One TCP connection through 127.0.0.1, between two threads."""

    def __init__(self, nbytes: int) -> None:
        with socket.create_server(("127.0.0.1", 0)) as server:
            self.sender = socket.create_connection(server.getsockname())
            self.receiver, _ = server.accept()
        self.sender.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.received = torch.zeros(nbytes, dtype=torch.uint8)
        self._view = self.received.numpy().data
        self._ready, self._done = threading.Semaphore(0), threading.Semaphore(0)
        threading.Thread(target=self._receive, daemon=True).start()

    def _receive(self) -> None:
        with self.receiver:
            while True:
                self._ready.acquire()
                left = self._view
                while left.nbytes:
                    count = self.receiver.recv_into(left)
                    if not count:
                        return  # closed
                    left = left[count:]
                self._done.release()

    def send(self, data: Tensor) -> None:
        """Send a uint8 tensor, shape (nbytes,), and return when it is received."""
        self._ready.release()
        self.sender.sendall(data.numpy().data)
        self._done.acquire()

    def close(self) -> None:
        """Close both ends; the thread ends."""
        self.sender.close()
        self._ready.release()


def _loopback(world: World, count: int) -> Probe:
    """Send the bytes of a tensor on the CPU through the loopback device, on worker 0 only."""
    if world.ranks[0] != 0:
        return Probe(4 * count, 4.0 * count, lambda: None, lambda: 0)
    x = pattern(0, 0, count, torch.device("cpu"))
    data, wire = x.view(torch.uint8), Loopback(4 * count)
    return Probe(
        nbytes=4 * count,
        wire=4.0 * count,
        call=lambda: wire.send(data),
        wrong=lambda: int((wire.received.view(torch.float32) != x).sum()),
        before=wire.received.zero_,
        close=wire.close,
    )


# ---- the library's own collectives ---------------------------------------------------------------


def _patterns(world: World, start: int, stop: int) -> Iterator[Tensor]:
    """Yield the patterns of all workers in order."""
    return (pattern(rank, start, stop, world.device) for rank in range(world.size))


def _all_reduce(world: World, count: int) -> Probe:
    size, x = world.size, pattern(world.ranks[0], 0, count, world.device)
    out = torch.empty_like(x)

    def wrong() -> int:
        return int((out != sum(_patterns(world, 0, count))).sum())

    wire = 2 * (size - 1) / size * 4 * count
    return Probe(4 * count, wire, lambda: dist.all_reduce(out), wrong, lambda: out.copy_(x))


def _sharded(
    collective: Callable[[Tensor, Tensor], object],
    sends: bool,
    receives: bool,
    world: World,
    count: int,
) -> Probe:
    """Return the probe of a collective on a tensor cut into equal shards, one per worker.

    `sends`, `receives`: whether a worker sends and receives all shards, or only its own.
    """
    rank, size = world.ranks[0], world.size
    shard = max(1, count // size)
    x = pattern(rank, 0, shard * size if sends else shard, world.device)
    out = x.new_empty(shard * size if receives else shard)

    def wrong() -> int:
        place = (rank * shard, (rank + 1) * shard) if sends else (0, shard)
        pieces = _patterns(world, *place)
        return int((out != (torch.cat([*pieces]) if receives else sum(pieces))).sum())

    nbytes = 4 * shard * size
    return Probe(nbytes, (size - 1) / size * nbytes, lambda: collective(out, x), wrong, out.zero_)


def _broadcast(world: World, count: int) -> Probe:
    x = pattern(world.ranks[0], 0, count, world.device)
    root = pattern(0, 0, count, world.device)
    out = torch.empty_like(x)
    wrong = lambda: int((out != root).sum())  # noqa: E731
    call = lambda: dist.broadcast(out, 0)  # noqa: E731
    return Probe(4 * count, 4.0 * count, call, wrong, lambda: out.copy_(x))


def _sendrecv(world: World, count: int) -> Probe:
    """Send to the next worker and receive from the previous one, at the same time."""
    rank, size = world.ranks[0], world.size
    x = pattern(rank, 0, count, world.device)
    received = pattern((rank - 1) % size, 0, count, world.device)
    out = torch.empty_like(x)

    def call() -> None:
        sent = dist.P2POp(dist.isend, x, (rank + 1) % size)
        receive = dist.P2POp(dist.irecv, out, (rank - 1) % size)
        for work in dist.batch_isend_irecv([sent, receive]):
            work.wait()

    return Probe(4 * count, 4.0 * count, call, lambda: int((out != received).sum()), out.zero_)


BOUNDS: Mapping[str, Callable[[World, int], Probe]] = {"memcpy": _memcpy, "loopback": _loopback}
PLAIN: Mapping[str, Callable[[World, int], Probe]] = {
    "all_reduce": _all_reduce,
    "reduce_scatter": partial(_sharded, reduce_scatter, True, False),
    "all_gather": partial(_sharded, all_gather, False, True),
    "alltoall": partial(_sharded, dist.all_to_all_single, True, True),
    "broadcast": _broadcast,
    "sendrecv": _sendrecv,
}
"""Collectives of the library by nccl-tests' names, with its sizes and factors (PERFORMANCE.md)."""
YARDSTICK = "all_reduce"
"""The plain collective that is the baseline of exchanges; always measured."""
