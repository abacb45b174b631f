"""Clusters: nodes of devices, the links inside and between nodes, and the time of a collective.

The alpha-beta model: a message of b bytes takes alpha + b / beta. Between nodes, beta is the share
of the link's rate that the library achieves (`transport`), and alpha contains its time per call. N
workers fill nodes of g devices. If N <= g, alpha and beta are those of the links inside a node.
With M = N / g > 1 nodes:

ring (all-reduce, all-gather): every round uses every link, so the slowest link decides. A node's
    link to the network carries what one worker sends, because the ring enters a node once.
all-to-all: each of the g workers of a node sends to the workers of all other nodes, so the node's
    link carries g b (N - g) / N bytes; messages inside the node are sent in parallel.
reduce-scatter: half of the ring all-reduce. broadcast: every link carries b bytes once.

`tree` needs log2 N rounds instead of N - 1, and its all-to-all moves log2(N) / 2 times as many
bytes (Bruck). `fastest` takes the faster of ring and tree for each collective.

Topologies: with `flat` every collective has N workers. With `best` payloads do, too, because the
hooks exchange them among all ranks; but the library may reduce inside each node first and then
between nodes, so all-reduces and reduce-scatters take the faster way. `nodes` adds the gradients
inside each node in fp32, exchanges one payload per node, and distributes the mean inside: the
compressed exchange then has M workers, and each device compresses 1 / g of the gradient. Of the
hooks only `shard_hook(between=...)` does this, over replicas on other nodes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from gcbench.core import settings_file
from gcbench.core.errors import UsageError, unknown
from gcbench.predict.networks import Shapes
from gcbench.predict.traffic import buckets
from gcbench.predict.transport import TRANSPORTS, Transport

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Share = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]
BACKWARD = 2 / 3
"""Share of the computation in the backward pass: two of three matrix products."""
REDUCTIONS = ("allreduce", "reducescatter")
"""Collectives that a library can do inside nodes first, and then between nodes."""


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Link(_Model):
    """A full-duplex link."""

    gbit: Positive  # 10^9 bits per second, each way
    latency_us: NotNegative = 0.0  # microseconds per message

    @property
    def bytes_per_second(self) -> float:
        """Bandwidth in bytes per second."""
        return self.gbit * 1e9 / 8

    def seconds(self, rounds: float, nbytes: float) -> float:
        """Return the time of `rounds` messages, one after another, of `nbytes` in total."""
        return rounds * self.latency_us * 1e-6 + nbytes / self.bytes_per_second


class Device(_Model):
    """An accelerator; the numbers come from data sheets and were not measured."""

    name: str
    tflops: Positive  # 10^12 operations per second in the precision of training
    memory_gbyte: Positive  # memory bandwidth, 10^9 bytes per second
    like: str | None = None  # use the published utilization of this device if there is none


_DATA: dict[str, dict[str, Any]] = yaml.safe_load(
    (Path(__file__).parent / "data" / "clusters.yaml").read_text()
)
DEVICES = {name: Device(name=name, **fields) for name, fields in _DATA["devices"].items()}


class Cluster(_Model):
    """Equal nodes of equal devices."""

    name: str
    gpus_per_node: Annotated[int, Field(ge=1)]
    nodes: Annotated[int, Field(ge=1)] | None = None
    """The number of nodes; None: any number."""
    device: Device
    utilization: Annotated[Share, Field(gt=0)] | None = None
    """Share of the device's peak that training reaches; None: as published (`throughput`)."""
    intra: Link
    """The link between any two devices of a node."""
    inter: Link
    """The link of a node to the network, which the devices of the node share."""
    transport: str = "nccl"
    """The library that sends between nodes (`TRANSPORTS`): what share of `inter` it achieves."""
    note: str = ""
    """Source of the rate of the link between nodes."""
    overlap: Share = 1.0
    """Share of the backward pass that can hide communication: 1 as in DDP, 0 for none."""
    algorithm: Literal["ring", "tree", "fastest"] = "fastest"
    topology: Literal["flat", "nodes", "best"] = "best"
    buckets: Annotated[int, Field(ge=1)] | None = None
    """Number of equal messages per gradient, each with its own latency. None: DDP's buckets
    (`traffic.buckets`) if communication overlaps with the backward pass, else one message."""
    price: NotNegative | None = None
    """Price per device and hour, in any currency."""

    def nodes_of(self, workers: int) -> int:
        """Return the number of nodes that `workers` workers fill.

        Raises:
            UsageError: the last node is not full, or the cluster has fewer nodes.
        """
        each = self.gpus_per_node
        if workers > each and workers % each:
            fitting = workers // each * each
            raise UsageError(
                f"{workers} workers do not fill nodes of {each}; try {fitting} or {fitting + each}"
            )
        nodes = max(1, workers // each)
        if self.nodes is not None and nodes > self.nodes:
            raise UsageError(
                f"{workers} workers need {nodes} nodes of {each}; cluster {self.name} has "
                f"{self.nodes}: at most {self.nodes * each} workers"
            )
        return nodes

    @field_validator("transport")
    @classmethod
    def _exists(cls, name: str) -> str:
        if name not in TRANSPORTS:
            raise ValueError(f"expected one of {', '.join(TRANSPORTS)}")
        return name

    @property
    def library(self) -> Transport:
        """The library that sends between nodes."""
        return TRANSPORTS[self.transport]

    def parts(self, arrival: Shapes) -> tuple[float, ...]:
        """Return each message's share of a gradient, in the order in which they are sent.

        `arrival`: the tensors' shapes in the order in which the backward pass computes gradients.
        """
        if self.buckets is not None:
            return (1 / self.buckets,) * self.buckets
        sizes = buckets(arrival) if self.overlap else (1.0,)
        return tuple(size / sum(sizes) for size in sizes)

    def exposed(self, communicate: float, compute: float, parts: Sequence[float]) -> float:
        """Return the seconds of communication that `compute` seconds of computation do not hide.

        A message is ready when its share of the computation is done, and messages are sent one
        after another. Only the share `overlap` of the computation can hide communication.
        """
        ready = done = 0.0
        for part in parts:
            ready += part * self.overlap * compute
            done = max(done, ready) + part * communicate
        return done - self.overlap * compute if self.overlap else communicate

    def seconds(self, kind: str, nbytes: float, workers: int, calls: int = 1) -> float:
        """Return the time of one collective.

        `kind`: "allreduce", "reducescatter", "allgather", "alltoall", "hops" (as in
        `traffic.Message`) or "broadcast". `nbytes`: what each worker contributes, or what the root
        of a broadcast sends, in bytes. `calls`: number of messages in which it is sent.
        """
        if workers == 1:
            return 0.0
        nodes = self.nodes_of(workers)
        ways = {"ring": (False,), "tree": (True,), "fastest": (False, True)}[self.algorithm]
        flat = min(self._seconds(kind, nbytes, workers, nodes, calls, tree=tree) for tree in ways)
        if kind not in REDUCTIONS or self.topology == "flat" or not self._has_levels(workers):
            return flat
        inside = self.seconds(kind, nbytes, self.gpus_per_node, calls)
        between = self.of_nodes.seconds(kind, nbytes, nodes, calls)
        return min(flat, inside + between)

    def _seconds(
        self, kind: str, nbytes: float, workers: int, nodes: int, calls: int, *, tree: bool
    ) -> float:
        tree = tree and kind != "hops"  # each hop needs the previous one's partial sum
        depth = math.ceil(math.log2(workers))
        rounds = (depth if tree else workers - 1) * calls
        inter = self.inter.bytes_per_second * self.library.share(kind, workers)
        if nodes == 1:
            latency, call = self.intra.latency_us, 0.0
        else:
            latency = max(self.inter.latency_us, self.intra.latency_us * (self.gpus_per_node > 1))
            call = self.library.call_us * calls
        if kind == "alltoall":
            more = max(1.0, depth / 2) if tree else 1.0
            inside = workers // nodes
            within = nbytes * (inside - 1) / workers / self.intra.bytes_per_second
            out = inside * nbytes * (workers - inside) / workers / inter
            return (rounds * latency + call) * 1e-6 + more * max(within, out)
        slowest = self.intra.bytes_per_second
        if nodes > 1:
            slowest = min(slowest, inter) if self.gpus_per_node > 1 else inter
        times, sent = {
            "allreduce": (2, 2 * (workers - 1) / workers),
            "reducescatter": (1, (workers - 1) / workers),
            "hops": (1, (workers - 1) / workers),
            "allgather": (1, workers - 1),
            "broadcast": (1, 1),
        }[kind]
        return (times * rounds * latency + call) * 1e-6 + sent * nbytes / slowest

    @property
    def of_nodes(self) -> Cluster:
        """The cluster in which each node is one worker."""
        return self.model_copy(update={"gpus_per_node": 1})

    def way(self, workers: int) -> str:
        """Return how payloads are exchanged: "flat" or "nodes"; within one node always "flat"."""
        return "nodes" if self.topology == "nodes" and self._has_levels(workers) else "flat"

    def _has_levels(self, workers: int) -> bool:
        """Return whether workers have links inside nodes and links between nodes."""
        return workers > self.gpus_per_node > 1


_BUILT_IN: dict[str, dict[str, Any]] = _DATA["clusters"]
NAMES = tuple(_BUILT_IN)


def _device(name: str) -> Device:
    """Return a built-in device; UsageError for an unknown name."""
    if name not in DEVICES:
        hint = "Any other: device: {name: mine, tflops: 100, memory_gbyte: 900}."
        raise unknown("device", name, DEVICES, hint)
    return DEVICES[name]


def load(spec: str, changes: Mapping[str, Any] | None = None) -> Cluster:
    """Return a built-in cluster, or the cluster of a YAML file, with `changes` applied.

    A change like {"inter.gbit": 25} replaces one number of a part and leaves the others.

    Raises:
        UsageError: an unknown name, an unreadable file, or a setting that is missing, unknown or
            out of its range.
    """
    path = Path(spec)
    if spec in _BUILT_IN:
        settings: Any = _BUILT_IN[spec]
    elif path.suffix.lower() in (".yaml", ".yml"):
        settings = settings_file.read(path, "--cluster", "gpus_per_node: 8")
    else:
        raise unknown("cluster", spec, NAMES, "Or give a .yaml file.")
    fields: dict[str, Any] = {"name": path.stem, **settings}
    for key, value in sorted((changes or {}).items(), key=lambda change: "." in change[0]):
        outer, dot, inner = key.partition(".")
        if dot:
            part = fields.get(outer)
            if outer == "device" and isinstance(part, str):
                part = _device(part).model_dump()
            fields[outer] = {**(part if isinstance(part, dict) else {}), inner: value}
        else:
            fields[outer] = value
    if {"inter", "inter.gbit"} & (changes or {}).keys() and "note" not in (changes or {}):
        fields["note"] = ""  # it has the source of another rate
    if isinstance(fields.get("device"), str):
        fields["device"] = _device(fields["device"])
    try:
        return Cluster.model_validate(fields)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(map(str, first["loc"]))
        if first["type"] == "extra_forbidden":
            names = [name for name in Cluster.model_fields if name != "name"]
            raise unknown(f"setting in cluster {spec}:", field, names) from None
        received = "" if first["type"] == "missing" else f", received {first['input']!r}"
        raise UsageError(f"cluster {spec}: {field}: {first['msg']}{received}") from None
