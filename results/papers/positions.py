"""The cost of encoding which elements are kept: bitmap, indices, gaps, entropy (FFT, figure 6).

For each share, K of n positions are drawn at random, packed by the codings of sparse payloads
(`gcbench.ops.selection`), and unpacked, so the bytes are those of a payload. The entropy, log2 of
the number of choices of K out of n, is the lower bound for random positions. Large elements of a
gradient may be close together, and then a code could need less.
Source: Wang et al., HPDC 2020, arXiv:1811.08596, figure 6, where a share of 1 - theta is kept, and
the cost of the bitmap limits the gain of a larger theta.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import torch
from _paper import Choices, Columns, Distinct, main, number, plot, result, table, values
from pydantic import Field

from gcbench import ops
from gcbench.core.errors import GcbenchError
from gcbench.core.progress import Observer
from gcbench.report import figures, verdicts
from gcbench.report.analysis import Analysis, Ledger, Row
from gcbench.report.verdicts import Claim

KIND = "positions"
SOURCE = "Wang et al. 2020, figure 6"
THETA = 0.95
"""The paper uses a bitmap up to this share of dropped elements."""
CODINGS = ops.selection.POSITION_CODINGS

CHEAPER = Claim(
    f"bits of the bitmap / of a list of int32 indices, largest up to theta = {THETA:g}",
    SOURCE,
    1.0,
    above=False,
)
RATIO = Claim(
    "32 bits / bits sent at theta = 0.85, with a bitmap", "Wang et al. 2020, 4.2", 21.3, above=True
)
RATIO_BEST = RATIO._replace(claim="32 bits / bits sent at theta = 0.85, cheapest positions")


class Settings(Choices):
    """The settings that decide the result."""

    elements: int = Field(default=1_000_000, ge=1000, description="n, elements of the gradient.")
    shares: Annotated[list[Annotated[float, Field(gt=0, le=0.5)]], Distinct] = Field(
        default=[0.5, 0.3, 0.15, 0.1, 0.05, 0.03125, 0.02, 0.01, 0.003, 0.001],
        min_length=1,
        description="Shares K / n that are kept.",
    )
    value_bits: int = Field(default=10, ge=1, le=32, description="Bits per kept value.")
    seed: int = Field(default=0, ge=0, lt=2**63, description="Seed of the positions.")


def entropy_bits(n: int, k: int) -> float:
    """Return log2 of the number of choices of k out of n."""
    lost = math.lgamma(k + 1) + math.lgamma(n - k + 1)
    return (math.lgamma(n + 1) - lost) / math.log(2)


def packed_bits(positions: torch.Tensor, n: int, coding: str) -> int:
    """Return the bits of packed positions, after checking that unpacking restores them.

    `positions`: from 0 to n - 1, int64, shape (K,), increasing.

    Raises:
        GcbenchError: unpacking returns other positions.
    """
    run = ops.selection.KeptRun(0, 1, n, len(positions))
    parts = ops.selection.pack_positions(positions, n, coding)
    back = ops.selection.unpack_positions(parts, n, coding, (run,), KIND)
    if not torch.equal(back, positions):
        raise GcbenchError(f"{coding}: unpacking changed {len(positions)} positions of {n}")
    return 8 * sum(part.numel() * part.element_size() for part in parts)


def measure(settings: Settings) -> list[Row]:
    """Return one row per share: bits per element of the positions by each coding, and entropy.

    Raises:
        GcbenchError: see `packed_bits`.
    """
    rows: list[Row] = []
    n = settings.elements
    generator = torch.Generator().manual_seed(settings.seed)
    for share in settings.shares:
        k = max(1, round(share * n))
        positions = torch.randperm(n, generator=generator)[:k].sort().values
        bits = {coding: packed_bits(positions, n, coding) / n for coding in CODINGS}
        codes = settings.value_bits * k / n
        rows.append(
            {
                "kept": k / n,
                "theta": 1 - k / n,
                **bits,
                "entropy": entropy_bits(n, k) / n,
                "values": codes,
                "positions_share": bits["bitmap"] / (bits["bitmap"] + codes),
                "ratio": 32 / (bits["bitmap"] + codes),
                "ratio_best": 32 / (min(bits.values()) + codes),
                "cheapest": min(bits, key=lambda coding: bits[coding]),
            }
        )
    return rows


def run(settings: Settings, command: str, observer: Observer, ledger: Ledger) -> Analysis:
    """Draw, pack and unpack positions for each share, and judge the paper's claims."""
    rows = measure(settings)
    observer.step(1, "done")
    columns: Columns = {
        "kept": ("kept\n%", 100.0),
        **dict(zip(CODINGS, CODINGS, strict=True)),
        "entropy": "entropy",
        "cheapest": "cheapest",
        "values": "bits of\nvalues",
        "positions_share": ("bitmap,\n% of all", 100.0),
        "ratio": "ratio\nbitmap",
        "ratio_best": "ratio\ncheapest",
    }
    notes = [
        f"{settings.elements:,} elements, {settings.value_bits} bits per kept value. Bits are per "
        "element of the gradient. ratio: 32 bits divided by positions and values together."
    ]
    shares = table("shares", "Bits of the positions per element", columns, rows, notes=notes)
    return result(KIND, settings, command, judge(rows), shares, notes=["Bytes are exact counts."])


def judge(rows: Sequence[Row]) -> list[Row]:
    """Return the verdicts on rows of `measure`; the worst share decides a claim about several."""
    ratios = [
        number(row["bitmap"]) / number(row["int32"])
        for row in rows
        if number(row["theta"]) <= THETA + 1e-9
    ]
    worst = verdicts.exactly(max(ratios, default=math.nan), len(ratios), "shares")
    judged = [verdicts.row(CHEAPER, worst)]
    for row in rows:
        if math.isclose(number(row["theta"]), 0.85, abs_tol=1e-3):
            for claim, field in ((RATIO, "ratio"), (RATIO_BEST, "ratio_best")):
                exact = verdicts.exactly(number(row[field]), 1, "share")
                judged.append(verdicts.row(claim, exact))
    return judged


def draw(analysis: Analysis, path: Path) -> None:
    """Draw bits per element over the share that is kept."""
    rows = sorted(analysis.table("shares").rows, key=lambda row: number(row["kept"]))
    look = figures.styles(CODINGS)
    x = values(rows, "kept", 100)
    with plot(path, 8.5, 5, "The cost of encoding which elements are kept") as (axes,):
        for coding in CODINGS:
            axes.plot(x, values(rows, coding), **look[coding], label=coding)
        entropy = values(rows, "entropy")
        axes.plot(x, entropy, color="0.3", ls=(0, (2, 2)), label="entropy, the lower bound")
        label = f"values, {analysis.settings['value_bits']} bits each"
        axes.plot(x, values(rows, "values"), color="0.7", lw=4, zorder=0, label=label)
        axes.set(xscale="log", yscale="log")
        axes.set(xlabel="elements kept, %", ylabel="bits per element of the gradient")


if __name__ == "__main__":
    main()
