"""Break-even links: how fast a link may be before compressing no longer saves time.

On a link of B bit/s with a latency of l seconds per message, an exchange takes

    T(B) = work + R l + 8 W / B

work: seconds in statistic, encode and decode on one worker; R: messages sent one after another;
W: bytes that leave a worker. The exchange pays where T is smaller than the time of a ring
all-reduce. There are two of those: in fp32 without any work, and in bf16 with half the bytes and
two casts at the speed of a copy (a cast moves 6 bytes per element, a copy 8). The additions of the
all-reduce are not counted, which favours it. `gcbench bandwidth`, `predict` and `advise` all use
this definition; `predict` and `advise` also hide communication under the backward pass.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from gcbench.core.values import finite
from gcbench.report.analysis import Row

FLOAT = 4
"""Bytes of a float32."""
COPY = 2 * FLOAT
"""Bytes that a copy moves per float32."""
CAST = 6
"""Bytes that a cast between float32 and bfloat16 moves per element."""

Links = tuple[float, float]
"""A range of link speeds in bit/s; the upper end may be infinite."""


class Cost(NamedTuple):
    """The costs of an exchange that do not depend on the link."""

    work: float
    """Seconds that one worker spends in statistic, encode and decode."""
    wire: float
    """Bytes that leave a worker."""
    rounds: float
    """Number of messages sent one after another."""


def baselines(nbytes: float, workers: int, copy: float) -> tuple[Cost, Cost]:
    """Return the costs of ring all-reduces in fp32 and in bf16 of a float32 gradient.

    `nbytes`: size of the gradient; `copy`: seconds that a copy takes per float32.
    """
    wire, rounds = 2 * (workers - 1) / workers * nbytes, 2.0 * (workers - 1)
    casts = 2 * CAST / COPY * copy * nbytes / FLOAT
    return Cost(0.0, wire, rounds), Cost(casts, wire / 2, rounds)


def pays_on(baseline: Cost, cost: Cost, latency: float) -> Links | None:
    """Return the links on which `cost` is lower than `baseline`; None if there are none.

    With saved = 8 (W_baseline - W) bits and spent = the difference of the terms that do not depend
    on B, the condition is saved / B > spent.
    """
    saved = 8 * (baseline.wire - cost.wire)
    spent = cost.work - baseline.work + (cost.rounds - baseline.rounds) * latency
    if saved > 0:
        return (0.0, saved / spent) if spent > 0 else (0.0, math.inf)
    if spent < 0:
        return (saved / spent, math.inf)
    return None


def intersection(first: Links | None, second: Links | None) -> Links | None:
    """Return the links that lie in both ranges; None if there are none."""
    if first is None or second is None:
        return None
    low, high = max(first[0], second[0]), min(first[1], second[1])
    return (low, high) if low < high else None


def pays_fields(cost: Cost, nbytes: float, workers: int, copy: float, latency: float) -> Row:
    """Return the links on which an exchange pays as fields of a row.

    `pays_on_from`, `pays_on_to` (bit/s) and `links` (text) compare with fp32. With the suffix
    `_better` they compare with the faster of fp32 and bf16. Both ends are None if the exchange pays
    on no link; only the upper end is None if there is no upper limit.
    """
    fp32, bf16 = baselines(nbytes, workers, copy)
    over = pays_on(fp32, cost, latency)
    row: Row = {}
    both = intersection(over, pays_on(bf16, cost, latency))
    for suffix, links in (("", over), ("_better", both)):
        row[f"pays_on_from{suffix}"] = links and links[0]
        row[f"pays_on_to{suffix}"] = links and finite(links[1])
        row[f"links{suffix}"] = links_text([links] if links else [])
    return row


def covers(row: Mapping[str, Any], link: float, suffix: str = "") -> bool:
    """Return whether the fields of `pays_fields` include a link of `link` bit/s."""
    low, high = row[f"pays_on_from{suffix}"], row[f"pays_on_to{suffix}"]
    return low is not None and low < link < (math.inf if high is None else high)


def rate_text(rate: float) -> str:
    """Return a speed in bit/s with two digits in the usual unit: 5.29e8 is "530 Mbit/s"."""
    for unit, size in (("Tbit/s", 1e12), ("Gbit/s", 1e9)):
        if (value := float(f"{rate / size:.2g}")) >= 1:
            return f"{value:g} {unit}"
    return f"{float(f'{rate / 1e6:.2g}'):g} Mbit/s"


def links_text(ranges: Sequence[Links]) -> str:
    """Return ranges of links (bit/s) as text: "below 500 Mbit/s and above 30 Gbit/s"."""

    def text(low: float, high: float) -> str:
        if low == 0:
            return "any link" if math.isinf(high) else f"below {rate_text(high)}"
        if math.isinf(high):
            return f"above {rate_text(low)}"
        return f"{rate_text(low)} to {rate_text(high)}"

    return " and ".join(text(*each) for each in ranges) or "no link"
