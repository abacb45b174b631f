"""How fast devices compute in training: published throughput, each figure with its source.

If there is no figure for a network on a device, it is assumed to reach the same share of the
device's peak as networks of its family, the median of them; if there are none either, the share on
the device that this one is `like`. A share is the floating-point operations a
second (6 for each MAC, `networks.OPERATIONS`) over the peak in data/clusters.yaml. The figures are
for large batches. Smaller ones reach less, which is not modelled: then computation takes longer
than predicted, and compression gains less.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from gcbench.core.errors import UsageError
from gcbench.studies.scale import networks
from gcbench.studies.scale.clusters import DEVICES, Cluster, Device
from gcbench.studies.scale.networks import OPERATIONS, Network

_DATA: dict[str, Any] = yaml.safe_load((Path(__file__).parent / "data" / "rates.yaml").read_text())


@dataclass(frozen=True)
class Published:
    """One published throughput."""

    device: str
    network: str
    rate: float
    """Examples a second of one device."""
    batch: int
    """Examples of a device in a step."""
    title: str
    url: str

    @property
    def share(self) -> float:
        """The share of the device's peak that this throughput is."""
        macs = networks.network(self.network).macs or 0.0
        return OPERATIONS * macs * self.rate / (DEVICES[self.device].tflops * 1e12)


def _published() -> dict[tuple[str, str], Published]:
    found = {}
    for row in _DATA["rates"]:
        source = _DATA["sources"][row["source"]]
        rate = row["rate"] if "rate" in row else row["tokens"] / row["sequence"]
        key = row["device"], row["network"]
        found[key] = Published(*key, rate, row["batch"], source["title"], source["url"])
    return found


PUBLISHED = _published()
"""(device, network) -> throughput."""


@dataclass(frozen=True)
class Compute:
    """The time of forward and backward of one worker's batch."""

    seconds: float
    how: str
    """Where the time comes from, as text for notes."""
    batch: int | None = None
    """The batch of the published figure, if one was used."""


def share_of(device: Device, family: str) -> tuple[float, str] | None:
    """Return the share of the peak that a family of networks reaches on a device, and its source.

    None if no throughput is published for the family on this device, or on one that it is `like`.
    """
    seen: set[str] = set()
    while device.name not in seen:
        seen.add(device.name)
        own = [
            one
            for one in PUBLISHED.values()
            if one.device == device.name and networks.network(one.network).family == family
        ]
        if own:
            told = ", ".join(one.network for one in own)
            return statistics.median(one.share for one in own), f"{told} on {device.name}"
        if device.like not in DEVICES:
            return None
        device = DEVICES[device.like]
    return None


def compute(cluster: Cluster, network: Network, batch: int) -> Compute:
    """Return forward and backward of `batch` examples on one device of the cluster.

    Raises:
        UsageError: no throughput is published, and the network's MACs, or the share of the device's
            peak that such a network reaches, are not known.
    """
    device = cluster.device
    known = PUBLISHED.get((device.name, network.name))
    if known is not None and cluster.utilization is None and device == DEVICES[device.name]:
        how = f"{known.rate:.4g} {network.examples}/s at batch {known.batch}: {known.title}"
        return Compute(batch / known.rate, how, known.batch)
    advice = "give the milliseconds of a worker's forward and backward pass with --compute-ms"
    if network.macs is None:
        raise UsageError(f"{network.name}: its multiplications are not known; {advice}")
    if cluster.utilization is not None:
        share, said = cluster.utilization, "given"
    else:
        found = share_of(device, network.family or "")
        if found is None:
            raise UsageError(
                f"{network.name} on {device.name}: no throughput is published for it or its kin; "
                f"{advice}, or the share of its peak that it reaches with --cluster-set "
                "utilization=0.3"
            )
        share, said = found[0], f"as published for {found[1]}"
    seconds = OPERATIONS * network.macs * batch / (device.tflops * 1e12 * share)
    return Compute(seconds, f"{share:.0%} of {device.tflops:g} TFLOPS, {said}")
