"""The time of one training step with a given exchange, on a cluster.

step = forward and backward + encode + decode + communication that the backward pass does not hide

Communication is cut into DDP's buckets, which hide under the backward pass as they become ready
(`Cluster.exposed`). DDP also broadcasts the model's buffers before every forward pass. With
`sharded` (FSDP) the bf16 parameters are gathered before the forward pass and again before the
backward pass, and gradients are reduce-scattered; a method replaces only that reduce-scatter. In
the topology "nodes" it is hybrid sharding: parameters are gathered and gradients reduce-scattered
inside nodes, and the replicas on different nodes exchange the means of their shards.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gcbench.core.compressor import Compressor
from gcbench.predict import traffic
from gcbench.predict.clusters import BACKWARD, Cluster
from gcbench.predict.networks import Network, Shapes
from gcbench.profile.breakeven import FLOAT, Links
from gcbench.report.analysis import Row
from gcbench.training import methods

HALF = "bf16 all-reduce"
"""The uncompressed step that reduces in bf16; with `sharded` it is a reduce-scatter."""
PARAMETER = 2
"""Bytes of a bf16 parameter, which `sharded` gathers."""
LINKS = 36
"""Number of link speeds tried before bisection, five per decade."""
TIE = 0.05
"""Steps that differ by at most this share are tied; the model's errors are not smaller."""
SIMPLE = (
    *("none", HALF, "bf16", "fp16", "int8", "natural", "qsgd", "terngrad", "signsgd"),
    *("randomk", "topk", "onebit", "efsignsgd", "powersgd", "demo", "fft"),
)
"""Of tied methods the first in this order wins; unlisted methods come last. Casts come first, then
codes of every element, then sparsifiers and methods with a residual."""

Spend = Callable[[str, float, int], tuple[float, float]]
"""(collective, elements, workers) -> one worker's seconds for encoding and for decoding."""


class Step:
    """A training step with one way to exchange the gradients of one network.

    `compute`: seconds of forward and backward. `lanes`: shapes that are compressed, and shapes
    exchanged in fp32. `floor` and `measured`: times of encoding and decoding the compressed
    tensors; `measured` is None if unknown.
    """

    def __init__(
        self,
        network: Network,
        compute: float,
        method: Compressor,
        collective: str,
        lanes: tuple[Shapes, Shapes],
        floor: Spend,
        measured: Spend | None = None,
        *,
        sharded: bool = False,
    ) -> None:
        self.network, self.compute, self.sharded = network, compute, sharded
        self.method, self.collective, self.lanes = method, collective, lanes
        self.floor, self.measured = floor, measured
        self.buffers = 0 if sharded else network.buffers
        self.elements = traffic.dense_bytes(lanes[0]) / FLOAT
        self.width = FLOAT
        """Bytes per element of gradients that are added inside a node before encoding."""
        self.cut = True
        """Whether each device of a node encodes only its share of the node's sum."""

    def messages(self, workers: int, *, whole: bool = False) -> list[traffic.Message]:
        """Return the messages of a step; a single worker sends none.

        `whole`: every worker receives the whole mean, also with `sharded`.
        """
        if workers == 1:
            return []
        if whole or not self.sharded:
            return traffic.exchange(self.method, self.collective, self.lanes, workers)
        compressed = traffic.exchange(self.method, self.collective, (self.lanes[0], ()), workers)
        dense = traffic.dense_bytes(self.lanes[1])
        return [
            *(message for message in compressed if not message.aggregated),
            *([traffic.Message("reducescatter", dense)] if dense else []),
        ]

    def at(self, workers: int, cluster: Cluster, *, measured: bool = False) -> dict[str, Any]:
        """Return seconds and bytes of a step, in the cluster's topology.

        `measured`: use measured encoding times, if known, instead of the floor.

        Raises:
            UsageError: the workers do not fill nodes, or the method refuses this many.
        """
        spend = self.measured if measured and self.measured else self.floor
        topology = cluster.way(workers)
        compute, numel = self.compute, float(self.network.numel)
        nodes = cluster.nodes_of(workers)
        parts = cluster.parts(self.network.arrival)
        broadcast = cluster.seconds("broadcast", self.buffers, workers) if self.buffers else 0.0
        calls = len(parts)
        inside, among, network = 1, workers, cluster
        communicate = gather = 0.0
        if topology == "nodes":
            inside, among = workers // nodes, nodes
            network = cluster.of_nodes
            # an all-reduce adds before the exchange between nodes and distributes the mean after it
            kind = "reducescatter" if self.sharded else "allreduce"
            communicate = cluster.seconds(kind, self.width * numel, inside, calls)
        scattered = self.sharded and topology == "flat"
        messages = self.messages(among, whole=not scattered)
        communicate += sum(
            network.seconds(kind, nbytes, among, calls)
            for sent in messages
            for kind, nbytes in sent.calls(cluster.library, among)
        )
        encode = decode = 0.0
        if among > 1:
            collective = "reducescatter" if scattered else self.collective
            encode, decode = spend(collective, self.elements / (inside if self.cut else 1), among)
        exposed = broadcast
        if self.sharded:
            owners = workers if scattered else inside
            shard = PARAMETER * (numel + self.network.frozen) / owners
            gather = cluster.seconds("allgather", shard, owners, calls)
            exposed = cluster.exposed(gather, (1 - BACKWARD) * compute, parts)
        exposed += cluster.exposed(gather + communicate, BACKWARD * compute, parts)
        moved = traffic.total(messages, among)
        return {
            "topology": topology,
            "compute_seconds": compute,
            "encode_seconds": encode,
            "decode_seconds": decode,
            "communicate_seconds": communicate + 2 * gather + broadcast,
            "gather_seconds": 2 * gather,
            "exposed_seconds": exposed,
            "step_seconds": compute + encode + decode + exposed,
            "payload_bytes_up": moved.up,
            "payload_bytes_down": moved.down,
            "wire_bytes": moved.wire,
        }

    def seconds(self, workers: int, cluster: Cluster, *, measured: bool = False) -> float:
        """Return the seconds of a step: see `at`."""
        return float(self.at(workers, cluster, measured=measured)["step_seconds"])


class Plain(Step):
    """An uncompressed step that reduces gradients in elements of `width` bytes.

    `casts`: seconds per element of both casts together. With a `width` of 0 the exchange is free.
    """

    def __init__(
        self, network: Network, compute: float, width: int, casts: float, *, sharded: bool = False
    ) -> None:
        def spend(collective: str, n: float, workers: int) -> tuple[float, float]:
            return casts * n / 2, casts * n / 2

        none, lanes = methods.parse("none"), (network.shapes, ())
        super().__init__(network, compute, none, "allreduce", lanes, spend, sharded=sharded)
        self.width, self.cut = width, False  # casts come before all additions

    def messages(self, workers: int, *, whole: bool = False) -> list[traffic.Message]:
        """Return the reduction of the gradients; a single worker sends none."""
        if not self.width or workers == 1:
            return []
        kind = "reducescatter" if self.sharded and not whole else "allreduce"
        return [traffic.Message(kind, float(self.width * self.network.numel))]


def simplest(gains: Mapping[str, float], margin: float = TIE) -> str:
    """Return the simplest (`SIMPLE`) of the methods that are tied with the fastest.

    `gains`: speedup of each method; those within `margin` of the largest are tied.
    """
    most = max(gains.values())
    tied = [spec for spec, gain in gains.items() if gain * (1 + margin) >= most]
    order = {name: position for position, name in enumerate(SIMPLE)}
    return min(tied, key=lambda spec: order.get(spec.partition(":")[0], len(order)))


@dataclass(frozen=True)
class Gains:
    """The speedups of a step over the uncompressed steps in fp32 and in bf16.

    Each is a pair: with measured encoding times (None if unknown), and with the floor, which is an
    upper bound.
    """

    fp32: tuple[float | None, float]
    bf16: tuple[float | None, float]

    @property
    def better(self) -> tuple[float | None, float]:
        """The speedups over the faster of the two uncompressed steps."""
        return min(self.fp32, self.bf16, key=lambda pair: pair[1])

    @property
    def sure(self) -> float:
        """The speedup over the faster uncompressed step, measured if known, else the bound."""
        low, high = self.better
        return high if low is None else low

    def fields(self) -> Row:
        """Return the speedups as fields of a row: numbers, and each range as text."""
        row: Row = {}
        for name, (low, high) in (("fp32", self.fp32), ("bf16", self.bf16)):
            row |= {f"over_{name}_low": low, f"over_{name}_high": high}
            row[f"over_{name}"] = range_text(low, high)
        return row


def range_text(low: float | None, high: float) -> str:
    """Return a speedup as text: "1.2 to 3.4"; "up to 3.4" if only the bound is known."""
    if low is None:
        return f"up to {high:.3g}"
    first, last = (f"{value:.3g}" for value in sorted((low, high)))
    return first if first == last else f"{first} to {last}"


def pays(
    step: Step,
    baselines: Sequence[Step],
    workers: int,
    cluster: Cluster,
    *,
    measured: bool = False,
    margin: float = 0.0,
) -> list[Links]:
    """Return the links between nodes, in bit/s, on which `step` is faster than every baseline.

    It has to be faster by at least the share `margin`. Speeds from 1 Mbit/s (reported as 0) to 10
    Tbit/s (reported as infinite) are tried.
    """

    def gains(gbit: float) -> bool:
        link = cluster.inter.model_copy(update={"gbit": gbit})
        there = cluster.model_copy(update={"inter": link})
        seconds = step.seconds(workers, there, measured=measured)
        base = min(one.seconds(workers, there) for one in baselines)
        return seconds * (1 + margin) < base * (1 - 1e-9)

    speeds = [10 ** (-3 + 7 * position / (LINKS - 1)) for position in range(LINKS)]
    faster = [gains(speed) for speed in speeds]
    edges = [0.0] if faster[0] else []
    for position in range(1, LINKS):
        if faster[position] != faster[position - 1]:
            low, high = speeds[position - 1], speeds[position]
            for _ in range(20):
                middle = math.sqrt(low * high)
                same = gains(middle) == faster[position - 1]
                low, high = (middle, high) if same else (low, middle)
            edges.append(1e9 * low)
    if faster[-1]:
        edges.append(math.inf)
    return list(zip(edges[::2], edges[1::2], strict=True))
