"""Clusters: nodes of devices, the links inside and between them, and what a collective takes there.

By the alpha-beta model a message of b bytes takes alpha + b / beta. N workers fill nodes of g. If N
<= g, alpha and beta are those of the links inside a node. With M = N / g > 1 nodes:

ring (all-reduce, all-gather): every round uses every link, so the slowest link decides. A node's
    link to the network carries what one worker sends, as the ring enters a node once.
all-to-all: each of the g workers of a node has messages of its own for the workers of other nodes,
    so the node's link carries g b (N - g) / N bytes; messages inside the node are sent in parallel.
reduce-scatter: half of the ring all-reduce.

`tree` has log2 N rounds in place of N - 1, and its all-to-all moves log2(N) / 2 times as many bytes
(Bruck); `fastest` takes the faster of ring and tree for each collective. `topology: nodes` first
adds the gradients inside a node in fp32, then exchanges one payload a node, and distributes the
mean inside: the compressed exchange then has M workers, and each device compresses 1 / g of the
gradient. `best` takes the faster of `flat` and `nodes`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from gcbench.core import settings_file
from gcbench.core.errors import UsageError, unknown

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Share = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]
BACKWARD = 2 / 3
"""The backward pass's share of the computation: two of three matrix products."""
BUCKET = 25 * 2**20
"""Bytes of a bucket of DDP, by the default of its `bucket_cap_mb`."""


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Wire(_Model):
    """A link, with this bandwidth in both directions at once."""

    gbit: Positive  # 10^9 bits a second
    latency_us: NotNegative = 0.0  # microseconds a message

    @property
    def bytes_per_second(self) -> float:
        """Its bandwidth."""
        return self.gbit * 1e9 / 8

    def seconds(self, rounds: float, nbytes: float) -> float:
        """Return the time of `rounds` messages one after the other with `nbytes` in all."""
        return rounds * self.latency_us * 1e-6 + nbytes / self.bytes_per_second


def rate_text(gbit: float) -> str:
    """Return a link's rate to two digits in the unit that people use: 0.529 is "530 Mbit/s"."""
    for unit, factor in (("Tbit/s", 1e-3), ("Gbit/s", 1.0)):
        if (value := float(f"{gbit * factor:.2g}")) >= 1:
            return f"{value:g} {unit}"
    return f"{float(f'{1e3 * gbit:.2g}'):g} Mbit/s"


def links_text(ranges: Sequence[tuple[float, float]]) -> str:
    """Return ranges of links, in Gbit/s, in words: "below 500 Mbit/s and above 30 Gbit/s".

    A range from 0 has no lower end, one to infinity no upper one.
    """

    def told(low: float, high: float) -> str:
        if low == 0:
            return "any link" if math.isinf(high) else f"below {rate_text(high)}"
        if math.isinf(high):
            return f"above {rate_text(low)}"
        return f"{rate_text(low)} to {rate_text(high)}"

    return " and ".join(told(*each) for each in ranges) or "no link"


class Device(_Model):
    """A device that computes; its numbers come from data sheets, and were not measured."""

    name: str
    tflops: Positive  # 10^12 floating-point operations a second, in the precision of training
    memory_gbyte: Positive  # 10^9 bytes a second of its memory
    like: str | None = None  # device whose share of the peak is assumed if none is published


_DATA: dict[str, dict[str, Any]] = yaml.safe_load(
    (Path(__file__).parent / "data" / "clusters.yaml").read_text()
)
DEVICES = {name: Device(name=name, **own) for name, own in _DATA["devices"].items()}
"""By name, from data sheets."""


class Cluster(_Model):
    """Equal nodes of equal devices."""

    name: str
    gpus_per_node: Annotated[int, Field(ge=1)]
    nodes: Annotated[int, Field(ge=1)] | None = None
    """The number of nodes; None: any number."""
    device: Device
    utilization: Annotated[Share, Field(gt=0)] | None = None
    """Share of the device's operations that training reaches; None: as published (`rates`)."""
    intra: Wire
    """The link between any two devices of a node."""
    inter: Wire
    """The link of a node to the network, which the devices of the node share."""
    note: str = ""
    """Where the link between nodes comes from, if not from a data sheet."""
    overlap: Share = 1.0
    """Share of the backward pass that can hide communication: 1 as in DDP, 0 for none."""
    algorithm: Literal["ring", "tree", "fastest"] = "fastest"
    topology: Literal["flat", "nodes", "best"] = "best"
    buckets: Annotated[int, Field(ge=1)] | None = None
    """Number of messages into which a gradient is cut, each with its own latency. None: one for
    each `BUCKET` bytes if communication hides, else one."""
    price: NotNegative | None = None
    """Price of a device for an hour, in any currency."""

    def nodes_of(self, workers: int) -> int:
        """Return how many nodes `workers` workers fill.

        Raises:
            UsageError: they do not fill them, or the cluster is smaller.
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

    def pieces(self, nbytes: float) -> int:
        """Return into how many messages a float32 gradient of `nbytes` bytes is cut."""
        if self.buckets is not None:
            return self.buckets
        return max(1, math.ceil(nbytes / BUCKET)) if self.overlap else 1

    def exposed(self, communicate: float, compute: float, pieces: int) -> float:
        """Return the seconds of communication that `compute` seconds of computation do not hide.

        The k-th of B equal pieces is ready after k / B of the computation P, and the pieces are
        sent one after the other. The last one cannot be hidden. So of the communication C this
        remains: max(C / B, C - s P (1 - 1 / B)), with the share s of `overlap`; C without overlap.
        """
        if not self.overlap:
            return communicate
        hidden = self.overlap * compute * (1 - 1 / pieces)
        return max(communicate / pieces, communicate - hidden)

    def seconds(self, kind: str, nbytes: float, workers: int) -> float:
        """Return the time of one collective.

        `kind`: "allreduce", "reducescatter", "allgather" or "alltoall"; `nbytes`: what each worker
        hands over.
        """
        if workers == 1:
            return 0.0
        nodes = self.nodes_of(workers)
        ways = {"ring": (False,), "tree": (True,), "fastest": (False, True)}[self.algorithm]
        return min(self._seconds(kind, nbytes, workers, nodes, tree=tree) for tree in ways)

    def _seconds(self, kind: str, nbytes: float, workers: int, nodes: int, *, tree: bool) -> float:
        depth = math.ceil(math.log2(workers))
        rounds = (depth if tree else workers - 1) * (self.buckets or 1)
        if nodes == 1:
            latency = self.intra.latency_us
        else:
            latency = max(self.inter.latency_us, self.intra.latency_us * (self.gpus_per_node > 1))
        if kind == "alltoall":
            more = max(1.0, depth / 2) if tree else 1.0
            inside = workers // nodes
            within = nbytes * (inside - 1) / workers / self.intra.bytes_per_second
            out = inside * nbytes * (workers - inside) / workers / self.inter.bytes_per_second
            return rounds * latency * 1e-6 + more * max(within, out)
        slowest = self.intra.bytes_per_second
        if nodes > 1:
            slower = self.inter.bytes_per_second
            slowest = min(slowest, slower) if self.gpus_per_node > 1 else slower
        if kind == "allreduce":
            sent = 2 * (workers - 1) / workers * nbytes
            return 2 * rounds * latency * 1e-6 + sent / slowest
        if kind == "reducescatter":
            return rounds * latency * 1e-6 + (workers - 1) / workers * nbytes / slowest
        return rounds * latency * 1e-6 + (workers - 1) * nbytes / slowest

    def topologies(self, workers: int) -> tuple[str, ...]:
        """Return the topologies that are possible; within one node there is only "flat"."""
        if workers <= self.gpus_per_node or self.gpus_per_node == 1:
            return ("flat",)
        return ("flat", "nodes") if self.topology == "best" else (self.topology,)

    def between(self) -> Cluster:
        """Return the cluster in which each node counts as one worker."""
        return self.model_copy(update={"gpus_per_node": 1})

    def inside_seconds(self, nbytes: float, workers: int, kind: str = "allreduce") -> float:
        """Return the seconds of a collective inside a node, on gradients of `nbytes` bytes.

        An all-reduce stands for adding them before, and distributing the mean after, the exchange
        between nodes; a reduce-scatter for adding them alone.
        """
        inside = workers // self.nodes_of(workers)
        return self.model_copy(update={"nodes": 1}).seconds(kind, nbytes, inside)


_KNOWN: dict[str, dict[str, Any]] = _DATA["clusters"]
NAMES = tuple(_KNOWN)


def _device(name: str) -> Device:
    """Return a built-in device; UsageError for an unknown name."""
    if name not in DEVICES:
        hint = "Any other: device: {name: mine, tflops: 100, memory_gbyte: 900}."
        raise unknown("device", name, DEVICES, hint)
    return DEVICES[name]


def make(settings: Mapping[str, Any], where: str) -> Cluster:
    """Return the cluster with these settings; `where` says in errors where they came from.

    Raises:
        UsageError: a setting is missing, unknown or out of its range.
    """
    found = dict(settings)
    if isinstance(found.get("device"), str):
        found["device"] = _device(found["device"])
    try:
        return Cluster.model_validate(found)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(map(str, first["loc"]))
        if first["type"] == "extra_forbidden":
            known = [name for name in Cluster.model_fields if name != "name"]
            raise unknown(f"setting in {where}:", field, known) from None
        came = "" if first["type"] == "missing" else f" (came: {first['input']!r})"
        raise UsageError(f"{where}: {field}: {first['msg']}{came}") from None


def load(spec: str, changes: Mapping[str, Any] | None = None) -> Cluster:
    """Return a built-in cluster, or that of a YAML file, with `changes` like {"inter.gbit": 25}.

    A change of a part, as {"device.memory_gbyte": 1500}, leaves the part's other numbers.

    Raises:
        UsageError: `spec` is neither, the file cannot be read; or see `make`.
    """
    path = Path(spec)
    if spec in _KNOWN:
        settings: Any = _KNOWN[spec]
    elif path.suffix.lower() in (".yaml", ".yml"):
        settings = settings_file.read(path, "--cluster", "gpus_per_node: 8")
    else:
        raise unknown("cluster", spec, NAMES, "Or name a .yaml file.")
    made: dict[str, Any] = {"name": path.stem, **settings}
    for key, value in sorted((changes or {}).items(), key=lambda change: "." in change[0]):
        outer, dot, inner = key.partition(".")
        if dot:
            part = made.get(outer)
            if outer == "device" and isinstance(part, str):
                part = _device(part).model_dump()
            made[outer] = {**(part if isinstance(part, dict) else {}), inner: value}
        else:
            made[outer] = value
    return make(made, f"cluster {spec}")
