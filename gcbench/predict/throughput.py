"""How fast devices compute in training, from published throughput.

A network without a published figure on a device is assumed to reach the median utilization of the
published networks of its family there; without any, the utilization on the device that this one is
`like`. Utilization is floating-point operations per second (6 per MAC, `networks.OPERATIONS`)
divided by the peak in data/clusters.yaml. The figures are for large batches. Smaller batches reach
less, which is not modelled: steps then take longer than predicted, and compression gains less.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from gcbench.core.errors import UsageError
from gcbench.predict import networks
from gcbench.predict.clusters import DEVICES, Cluster, Device
from gcbench.predict.networks import OPERATIONS, Network

_DATA: dict[str, Any] = yaml.safe_load(
    (Path(__file__).parent / "data" / "throughput.yaml").read_text()
)
SOURCES: dict[str, dict[str, str]] = _DATA["sources"]
"""Titles and addresses of the publications."""


@dataclass(frozen=True)
class Published:
    """One published throughput."""

    device: str
    network: str
    rate: float
    """Examples per second and device."""
    batch: int
    """Examples per device and step."""
    source: str
    """A key of `SOURCES`."""

    @property
    def utilization(self) -> float:
        """Share of the device's peak."""
        macs = networks.network(self.network).macs or 0.0
        return OPERATIONS * macs * self.rate / (DEVICES[self.device].tflops * 1e12)


PUBLISHED = {
    (row["device"], row["network"]): Published(
        device=row["device"],
        network=row["network"],
        rate=row["rate"] if "rate" in row else row["tokens"] / row["sequence"],
        batch=row["batch"],
        source=row["source"],
    )
    for row in _DATA["rates"]
}
"""(device, network) -> throughput."""


@dataclass(frozen=True)
class Compute:
    """The time of forward and backward of one worker's batch."""

    seconds: float
    source: str
    """Where the time comes from, for footnotes."""
    batch: int | None = None
    """The batch of the published figure, if one was used."""


def utilization_of(device: Device, family: str) -> tuple[float, str] | None:
    """Return the utilization of a family of networks on a device, and its source as text.

    None if nothing is published for the family on this device or on the one that it is `like`.
    """
    figures = [
        one
        for one in PUBLISHED.values()
        if one.device == device.name and networks.network(one.network).family == family
    ]
    if figures:
        names = ", ".join(one.network for one in figures)
        median = statistics.median(one.utilization for one in figures)
        return median, f"{names} on {device.name}"
    like = DEVICES.get(device.like or "")
    return utilization_of(like, family) if like else None


def compute(cluster: Cluster, network: Network, batch: int) -> Compute:
    """Return the time of forward and backward of `batch` examples on one device of the cluster.

    Raises:
        UsageError: no throughput is published, and the network's MACs or its utilization of the
            device are unknown.
    """
    device = cluster.device
    published = PUBLISHED.get((device.name, network.name))
    if published is not None and cluster.utilization is None and device == DEVICES[device.name]:
        source = (
            f"{published.rate:.4g} {network.examples}/s at batch {published.batch}: "
            f"{SOURCES[published.source]['title']}"
        )
        return Compute(batch / published.rate, source, published.batch)
    remedy = "give the milliseconds of one worker's forward and backward pass with --compute-ms"
    if network.macs is None:
        raise UsageError(f"{network.name}: its number of multiplications is unknown; {remedy}")
    if cluster.utilization is not None:
        share, source = cluster.utilization, "given"
    else:
        similar = utilization_of(device, network.family or "")
        if similar is None:
            raise UsageError(
                f"{network.name} on {device.name}: no throughput is published for it or for its "
                f"family; {remedy}, or its utilization with --cluster-set utilization=0.3"
            )
        share, source = similar[0], f"as published for {similar[1]}"
    seconds = OPERATIONS * network.macs * batch / (device.tflops * 1e12 * share)
    return Compute(seconds, f"{share:.0%} of {device.tflops:g} TFLOPS, {source}")
