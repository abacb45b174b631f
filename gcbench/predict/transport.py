"""What a communication library achieves on a link: a share of its rate, and a cost per call.

A collective in which a worker sends W bytes over a link of B bytes per second takes

    call + rounds * latency + W / (share B)

`data/transports.yaml` has share and call of each library, and where they come from. The share
depends on the collective: gloo's all-reduce sends and receives at the same time, while in its
all-gather and all-to-all two workers mostly take turns. Small messages achieve less, by `call`.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml

ACHIEVED = "achieved"
"""The transport of links whose rate is already one that collectives achieved."""
LARGE = 2**20
"""Bytes that a worker sends in a message whose time is that of the bytes."""


class Transport(NamedTuple):
    """A communication library."""

    name: str
    shares: Mapping[str, float]
    """Collective -> share of the link's rate; "allgather 2": between two workers; "all": others."""
    call_us: float
    """Microseconds per call of a collective."""
    source: str
    """Where the numbers come from."""

    def share(self, kind: str, workers: int) -> float:
        """Return the share of the link's rate that a collective achieves."""
        names = (f"{kind} {workers}", kind, "all")
        return next(self.shares[name] for name in names if name in self.shares)


class Sample(NamedTuple):
    """One measured collective."""

    kind: str
    sent: float
    """Bytes that a worker sends."""
    rate: float
    """Bytes per second of the link."""
    seconds: float


def fit(samples: Sequence[Sample]) -> tuple[dict[str, float], float]:
    """Return the share of the link by collective, and the microseconds per call.

    The share of a collective is the median over its messages of at least `LARGE` bytes. The call
    is the median of what the other messages take longer than that, and at least 0.
    """
    shares = {
        kind: statistics.median(
            one.sent / one.rate / one.seconds
            for one in samples
            if one.kind == kind and one.sent >= LARGE
        )
        for kind in dict.fromkeys(one.kind for one in samples)
    }
    rest = [
        one.seconds - one.sent / one.rate / shares[one.kind] for one in samples if one.sent < LARGE
    ]
    return shares, 1e6 * max(0.0, statistics.median(rest))


_DATA: dict[str, dict[str, Any]] = yaml.safe_load(
    (Path(__file__).parent / "data" / "transports.yaml").read_text()
)
TRANSPORTS = {
    name: Transport(name, one["share"], one["call_us"], one["source"])
    for name, one in _DATA.items()
}
"""Name -> communication library."""
