"""What it costs to say which elements are kept: bitmap, indices, gaps, entropy (FFT, figure 6).

For each share that is kept, K of n positions are drawn at random, packed by the codings that
sparse payloads use (`gcbench.ops.selection`), and unpacked again, so that the bytes are those of a
payload. They are compared with the entropy, log2 of the number of choices of K out of n: no code
for random choices needs fewer bits on average. In gradients large elements may lie close together;
then a code could need less.
Source: Wang et al., HPDC 2020, arXiv:1811.08596, figure 6, where a share of 1 - theta is kept, and
the cost of the bitmap limits what a larger theta gains.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import torch
from _script import main
from pydantic import BaseModel, ConfigDict, Field

from gcbench import ops
from gcbench.core.errors import GcbenchError
from gcbench.core.progress import Observer
from gcbench.report import figures
from gcbench.report.analysis import Analysis, Ledger, Row, Shown, Table
from gcbench.studies import verdicts
from gcbench.studies.bounds.claims import Interval
from gcbench.studies.verdicts import Claim

KIND = "positions"
SOURCE = "Wang et al. 2020, figure 6"
THETA = 0.95
"""Up to this share of dropped elements the paper uses a bitmap."""
CODINGS = ops.selection.POSITION_CODINGS

CHEAPER = Claim(
    f"bits of the bitmap / of a list of int32 indices, largest up to theta = {THETA:g}",
    SOURCE,
    1.0,
    above=False,
)
RATIO = Claim(
    "32 bits / what is sent at theta = 0.85, with a bitmap",
    "Wang et al. 2020, 4.2",
    21.3,
    above=True,
)
RATIO_BEST = RATIO._replace(claim="32 bits / what is sent at theta = 0.85, cheapest positions")


class Settings(BaseModel):
    """The settings that decide the result."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    elements: int = Field(default=1_000_000, ge=1000, description="n, elements of the gradient.")
    kept: list[Annotated[float, Field(gt=0, le=0.5)]] = Field(
        default=[0.5, 0.3, 0.15, 0.1, 0.05, 0.03125, 0.02, 0.01, 0.003, 0.001],
        min_length=1,
        description="Shares K / n that are kept.",
    )
    value_bits: int = Field(default=10, ge=1, le=32, description="Bits of a kept value.")
    seed: int = Field(default=0, ge=0, lt=2**63, description="Seed of the drawn positions.")


def entropy_bits(n: int, k: int) -> float:
    """Return log2 of the number of choices of k out of n."""
    lost = math.lgamma(k + 1) + math.lgamma(n - k + 1)
    return (math.lgamma(n + 1) - lost) / math.log(2)


def packed_bits(kept: torch.Tensor, n: int, coding: str) -> int:
    """Return the bits of packed positions, after checking that unpacking restores them.

    `kept`: the positions, int64, shape (K,), increasing, from 0 to n - 1.

    Raises:
        GcbenchError: unpacking returns other positions.
    """
    run = ops.selection.KeptRun(0, 1, n, len(kept))
    parts = ops.selection.pack_positions(kept, n, coding)
    back = ops.selection.unpack_positions(parts, n, coding, (run,), KIND)
    if not torch.equal(back, kept):
        raise GcbenchError(f"{coding}: {len(kept)} of {n} positions do not come back as they were")
    return 8 * sum(part.numel() * part.element_size() for part in parts)


def measure(settings: Settings) -> list[Row]:
    """Return one row for each share: bits an element of the positions by each coding, and entropy.

    Raises:
        GcbenchError: see `packed_bits`.
    """
    rows: list[Row] = []
    n = settings.elements
    generator = torch.Generator().manual_seed(settings.seed)
    for share in settings.kept:
        k = max(1, round(share * n))
        kept = torch.randperm(n, generator=generator)[:k].sort().values
        bits = {coding: packed_bits(kept, n, coding) / n for coding in CODINGS}
        bound = entropy_bits(n, k) / n
        codes = settings.value_bits * k / n
        rows.append(
            {
                "kept": k / n,
                "theta": 1 - k / n,
                **bits,
                "entropy": bound,
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
    judged = judge(rows)
    return Analysis.of(
        KIND,
        settings,
        command,
        conclusions=verdicts.told(judged),
        tables=[
            verdicts.table(judged, notes=["Bytes are counted: there is nothing to estimate."]),
            Table(
                name="shares",
                title="Bits of the positions, of an element of the gradient",
                shown=[
                    Shown(field="kept", heading="kept\n%", scale=100),
                    *(Shown(field=coding, heading=coding) for coding in CODINGS),
                    Shown(field="entropy", heading="entropy"),
                    Shown(field="cheapest", heading="cheapest"),
                    Shown(field="values", heading="values'\nbits"),
                    Shown(field="positions_share", heading="bitmap's\n% of all", scale=100),
                    Shown(field="ratio", heading="ratio\nbitmap"),
                    Shown(field="ratio_best", heading="ratio\ncheapest"),
                ],
                notes=[
                    f"{settings.elements:,} elements, {settings.value_bits} bits for each kept "
                    "value. Bits are per element of the gradient. ratio is 32 bits divided by "
                    "positions and values together."
                ],
                rows=rows,
            ),
        ],
    )


def judge(rows: Sequence[Row]) -> list[Row]:
    """Return the verdicts; bytes are exact, so a claim about several shares is judged by the worst.

    `rows` are those of `measure`.
    """

    def worst(above: str, below: str, most: float) -> Interval:
        ratios = [
            float(row[above] or 0) / float(row[below] or 0)
            for row in rows
            if float(row["theta"] or 0) <= most + 1e-9
        ]
        return verdicts.exactly(max(ratios, default=math.nan), len(ratios), "shares")

    judged = [verdicts.row(CHEAPER, worst("bitmap", "int32", THETA))]
    for row in rows:
        if math.isclose(float(row["theta"] or 0), 0.85, abs_tol=1e-3):
            for claim, field in ((RATIO, "ratio"), (RATIO_BEST, "ratio_best")):
                found = verdicts.exactly(float(row[field] or 0), 1, "share")
                judged.append(verdicts.row(claim, found))
    return judged


def draw(analysis: Analysis, path: Path) -> None:
    """Draw bits an element over the share that is kept.

    Raises:
        UsageError: an ending that is no picture's.
        GcbenchError: `path` cannot be written.
    """
    path = figures.check(path)
    rows = sorted(analysis.table("shares").rows, key=lambda row: float(row["kept"] or 0))
    look = figures.styles(CODINGS)
    with figures.canvas(8.5, 5) as figure:
        axes = figure.subplots()
        at = [100 * float(row["kept"] or 0) for row in rows]
        for coding in CODINGS:
            axes.plot(at, [float(row[coding] or 0) for row in rows], **look[coding], label=coding)
        bound = [float(row["entropy"] or 0) for row in rows]
        axes.plot(at, bound, color="0.3", ls=(0, (2, 2)), label="entropy, the bound")
        values = [float(row["values"] or 0) for row in rows]
        said = f"values, {analysis.settings['value_bits']} bits each"
        axes.plot(at, values, color="0.7", lw=4, zorder=0, label=said)
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_xlabel("elements kept, %")
        axes.set_ylabel("bits an element of the gradient")
        axes.set_title("What it costs to say which elements are kept")
        axes.legend(frameon=False, fontsize="small")
        figures.save(figure, path)


if __name__ == "__main__":
    main()
