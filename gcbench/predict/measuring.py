"""Takes the link and the encoding times from this machine (`gcbench advise --measure`).

`gcbench bandwidth` measures all-reduces of two sizes and the exchanges of the methods: among the
ranks of torchrun, whose nodes have the link in question, or between two local processes.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from gcbench.core import progress
from gcbench.core.errors import UsageError
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


FITTED = frozenset({"inter", "inter.gbit", "inter.latency_us", "transport"})
"""The settings of a cluster that `measure` takes from the ranks of torchrun."""


def on_one_machine() -> bool:
    """Return whether torchrun started all ranks here, so that no link between nodes is used."""
    here, total = (os.environ.get(name) for name in ("LOCAL_WORLD_SIZE", "WORLD_SIZE"))
    return here is not None and here == total


def measure(
    specs: Sequence[str], device: str, results: Path, mode: progress.Mode, *, force: bool
) -> Here | None:
    """Measure, or read a finished measurement; None on torchrun's ranks other than 0.

    `device`: "cpu" (gloo) or "cuda" (NCCL).

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
    if not rank.by_torchrun():
        return Here(path, {})
    if on_one_machine():
        return Here(path, {"note": "not measured: all ranks of torchrun are on one machine"})
    gbit, latency_us = link(result)
    note = f"measured by all-reduces among {chosen.workers} ranks of torchrun"
    changes = {"inter.gbit": gbit, "inter.latency_us": latency_us, "note": note}
    return Here(path, {**changes, "transport": "achieved"})


def link(result: analysis.Analysis) -> tuple[float, float]:
    """Return rate (Gbit/s) and latency (us) of a ring, from all-reduces of two sizes.

    Raises:
        UsageError: the larger all-reduce was not slower, so there is no link to fit.
    """
    workers = int(result.settings["workers"])
    rows = [row for row in result.table("transfers").rows if row["collective"] == "all_reduce"]
    points = sorted((float(row["size"] or 0), float(row["p50"] or 0)) for row in rows)
    (small, first), (large, last) = points[0], points[-1]
    if last <= first:
        raise UsageError(
            f"--measure: an all-reduce of {large:.0f} bytes took {last:.2g} s, one of {small:.0f} "
            f"bytes {first:.2g} s; repeat it on an idle machine, or give the link in place of "
            "--measure: --cluster-set inter.gbit=10"
        )
    moved = 2 * (workers - 1) / workers
    rate = moved * (large - small) / (last - first)
    latency = max(0.0, first - moved * small / rate) / (2 * (workers - 1))
    return 8e-9 * rate, 1e6 * latency
