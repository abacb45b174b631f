"""Benchmarks of collectives, plain and compressed: from which size does compression pay?

Flags, sizes, columns and factors are those of nccl-tests (its doc/PERFORMANCE.md):

algbw = size / time: for an exchange, the effective bandwidth of a float32 gradient.
busbw = bytes that a worker sends to others / time. For plain collectives these bytes are
    nccl-tests' factors times the size: 2 (N - 1) / N for all_reduce, (N - 1) / N for all_gather,
    reduce_scatter and alltoall, 1 for broadcast and sendrecv. For an exchange they are counted
    (`gcbench.core.world`).

Exchanges are compared with the library's own all-reduce of the same size, in the same command.
"""

from __future__ import annotations

from pathlib import Path

from gcbench.core import progress
from gcbench.profile.bandwidth.picture import draw
from gcbench.profile.bandwidth.settings import KIND, Settings, items
from gcbench.profile.bandwidth.tables import summarize
from gcbench.profile.bandwidth.worker import measure
from gcbench.report import analysis
from gcbench.report.analysis import Analysis
from gcbench.training import rank
from gcbench.training.rank import Rank

__all__ = ["Settings", "draw", "run"]


def _worker(
    member: Rank, settings_json: str, folder: str, mode: progress.Mode, force: bool
) -> None:
    """Run one worker: join the process group and measure what is missing in the ledger."""
    from gcbench.training import engines

    settings = Settings.model_validate_json(settings_json)
    world = engines.join(member, settings.device, settings.threads)
    leads = world.ranks[0] == 0
    finished = leads and not force and analysis.finished(Path(folder))
    measure(world, settings, Path(folder), mode, afresh=force, finished=finished)
    world.close()  # not after an error: report it before the others lose the connection


def run(
    settings: Settings, results: Path, mode: progress.Mode, *, force: bool
) -> tuple[Analysis, bool] | None:
    """Measure, or load a finished measurement; return the analysis and whether it is new.

    Under torchrun only worker 0 writes and prints; the others return None.

    Raises:
        GcbenchError: the first error of any worker.
        Interrupted: the user stopped the command; finished measurements are saved.
    """
    from gcbench.training import engines, launch

    name = f"{KIND}-{analysis.digest(settings.model_dump(mode='json'))}"
    folder = results / name
    arguments = settings.model_dump_json(), str(folder), mode, force
    finished = analysis.load(folder) if not force and analysis.finished(folder) else None
    if (member := rank.from_torchrun()) is not None:
        engines.check_size(member, settings.workers)
        _worker(member, *arguments)
        if member.rank != 0:
            return None
    elif finished is None:
        launch.in_processes(settings.workers, settings.threads, _worker, arguments)
    if finished is not None:
        return finished, False
    with analysis.Ledger(folder).open() as ledger:
        pairs = [(size, item) for size in settings.sizes for item in items(settings)]
        records = {(size, item): ledger[item.key(size)] for size, item in pairs}
    result = summarize(settings, records)
    result.provenance["started"] = ledger.started
    return result, True
