"""Takes the link and the encoding times from this machine (`gcbench advise --measure`).

`gcbench bandwidth` measures all-reduces of two sizes and the exchanges of the methods: among the
ranks of torchrun, whose nodes have the link in question, or between two local processes.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from gcbench.core import progress
from gcbench.core.errors import UsageError
from gcbench.predict.clusters import Cluster, Link
from gcbench.predict.transport import ACHIEVED
from gcbench.profile import bandwidth
from gcbench.profile.bandwidth import settings
from gcbench.report import analysis
from gcbench.training import rank

SIZES = "64K,4M"
ITERATIONS = 9
TIMES = "times.json"


class Here(NamedTuple):
    """What was measured on this machine."""

    kernels: Path
    """A file for --kernels."""
    changes: dict[str, object]
    """Changes to a cluster's settings: the link between torchrun's machines, or a note that it was
    not measured; else empty."""
    stored: str | None = None
    """None: measured now. Else a stored measurement was read; text on its machine, `elsewhere`."""


FITTED = frozenset({"inter", "inter.gbit", "inter.latency_us", "transport"})
"""The settings of a cluster that `measure` takes from the ranks of torchrun."""


def on_one_machine() -> bool:
    """Return whether torchrun started all ranks here, so that no link between nodes is used."""
    here, total = (os.environ.get(name) for name in ("LOCAL_WORLD_SIZE", "WORLD_SIZE"))
    return here is not None and here == total


def measure(
    specs: Sequence[str],
    device: str,
    results: Path,
    mode: progress.Mode,
    cluster: Cluster,
    *,
    force: bool,
) -> Here | None:
    """Measure, or read a finished measurement; None on torchrun's ranks other than 0.

    `device`: "cpu" (gloo) or "cuda" (NCCL). `cluster`: whose link between nodes is fitted.

    Raises:
        GcbenchError: the first error of any worker.
        UsageError: under torchrun, no link can be fitted (`link`).
    """
    chosen = settings.make(
        compressors=",".join(["none", *specs]),
        collectives=None,
        plain="all_reduce",
        sizes=settings.listed(SIZES),
        workers=None,
        engine=None,
        threads=None,
        iterations=ITERATIONS,
        device=device,
    )
    finished = bandwidth.run(chosen, results, mode, force=force)
    if finished is None:
        return None
    result, new = finished
    if new:
        analysis.save(result, results)
    path = results / result.name / TIMES
    path.write_text(json.dumps(analysis.document(result)))
    stored = None if new else result.elsewhere
    if not rank.by_torchrun():
        return Here(path, {}, stored)
    if on_one_machine():
        note = "not measured: all ranks of torchrun are on one machine"
        return Here(path, {"note": note}, stored)
    here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    gbit, latency_us = link(result, cluster.model_copy(update={"gpus_per_node": here}))
    note = f"measured by all-reduces among {chosen.workers} ranks of torchrun"
    changes = {"inter.gbit": gbit, "inter.latency_us": latency_us, "note": note}
    return Here(path, {**changes, "transport": ACHIEVED}, stored)


def link(result: analysis.Analysis, cluster: Cluster) -> tuple[float, float]:
    """Return rate (Gbit/s) and latency (us) between nodes, from all-reduces of two sizes.

    With them `cluster` predicts the measured times. If the smaller all-reduce was faster than
    predicted without any latency, the latency is 0.

    Raises:
        UsageError: no link gives these times.
    """
    workers = int(result.settings["workers"])
    rows = [row for row in result.table("transfers").rows if row["collective"] == "all_reduce"]
    points = sorted((float(row["size"] or 0), float(row["p50"] or 0)) for row in rows)
    (small, first), (large, last) = points[0], points[-1]

    def seconds(size: float, gbit: float, latency_us: float) -> float:
        between = Link(gbit=gbit, latency_us=latency_us)
        there = cluster.model_copy(update={"inter": between, "transport": ACHIEVED})
        return there.seconds("allreduce", size, workers)

    def rate(latency_us: float) -> float:
        """Return the rate at which the larger all-reduce takes as long as measured."""
        return bisect(lambda gbit: seconds(large, gbit, latency_us) > last, *RATES)

    if last <= max(first, seconds(large, RATES[1], 0.0)):
        raise UsageError(
            f"--measure: an all-reduce of {large:.0f} bytes took {last:.2g} s, one of {small:.0f} "
            f"bytes {first:.2g} s, which no link between nodes of {cluster.name} explains; repeat "
            "it on an idle machine, or give the link in place of --measure: --cluster-set "
            "inter.gbit=10"
        )
    latency = bisect(lambda us: seconds(small, rate(us), us) < first, *LATENCIES)
    return rate(latency), latency if latency > LATENCIES[0] * 1.01 else 0.0


RATES = (1e-4, 1e5)
"""Gbit/s between which the rate of a link is sought."""
LATENCIES = (1e-2, 1e7)
"""Microseconds between which its latency is sought; the least stands for 0."""


def bisect(below: Callable[[float], bool], low: float, high: float) -> float:
    """Return where `below`, which holds up to some number, ends between two positive numbers."""
    for _ in range(60):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if below(middle) else (low, middle)
    return low
