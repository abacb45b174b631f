"""Gradients of a short training without compression, which several analyses use.

They are captured as by `gcbench run --capture`, in runs below `<results>/runs`, which every
analysis, `gcbench histogram` included, reuses.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from gcbench.core.errors import GcbenchError, UsageError
from gcbench.report.analysis import Analysis, Ledger
from gcbench.studies import histogram
from gcbench.studies.histogram.reconstruction import Gradients
from gcbench.training import captures


class Trained(BaseModel):
    """Settings of the training and of the captured steps, for analyses that use them."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    task: str = Field(default="digits", description="Task that is trained, without compression.")
    network: str = Field(default="", description="Its network; empty: the task's.")
    steps: int = Field(default=200, ge=2, description="Training steps.")
    capture: list[Annotated[int, Field(ge=0)]] = Field(
        default=[], description="Steps, from 0, whose gradients are used; empty: 5, evenly spread."
    )
    workers: int = Field(default=4, ge=1, description="Workers.")
    seed: list[Annotated[int, Field(ge=0, lt=2**63)]] = Field(
        default=[0, 1, 2], min_length=1, description="Seeds, a training each."
    )

    def named(self) -> str:
        """Return task and network as text for titles and notes."""
        return named(self.task, self.network)


def named(task: str, network: str) -> str:
    """Return task and network as text for titles and notes."""
    return f"{task}, {network}" if network else task


def title(analysis: Analysis) -> str:
    """Return task and network of an analysis, for the title of its picture."""
    return " ".join(filter(None, (analysis.settings[field] for field in ("task", "network"))))


def check_seeds(seeds: Sequence[int]) -> None:
    """Raise UsageError if a seed comes twice."""
    if len({*seeds}) < len(seeds):
        raise UsageError(f"--seed {seeds}: each seed once expected")


def gradients(
    settings: Trained, ledger: Ledger, data_dir: Path | None, also: tuple[int, ...] = ()
) -> Iterator[Gradients]:
    """Yield the workers' gradients at each captured step, seed by seed, steps in order.

    `also`: steps that are captured in addition to those of the settings.

    Raises:
        UsageError: a seed comes twice, the config is invalid, or it has no such steps.
        GcbenchError: the training fails, or a gradient is not finite.
    """
    check_seeds(settings.seed)
    given: dict[str, Any] = {
        "task": settings.task,
        "workers": settings.workers,
        "steps": settings.steps,
    }
    if settings.network:
        given["task_options"] = {"network": settings.network}
    chosen = settings.capture or captures.spread(settings.steps, histogram.SNAPSHOTS)
    wanted = sorted({*chosen, *also})
    results = ledger.path.parent.parent
    for one in histogram.train(given, settings.seed, wanted, results, data_dir, "plain"):
        found = Gradients(one.layers, one.buckets(settings.workers), one.step, one.seed)
        if problem := found.problem():
            raise GcbenchError(f"step {one.step}, seed {one.seed}: {problem}")
        yield found
