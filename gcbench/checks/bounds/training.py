"""Compressed training: every method trains the task, and each exchange is compared with its claims.

The method trains with the memory of its source, by a collective that encodes only once where one is
legal. The claims that `codec_claims` tests on known inputs are tested here on real gradients, on
the trajectory of a training with the method itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from gcbench.checks.bounds.audit import Audited, Record, once
from gcbench.core.compressor import Compressor
from gcbench.core.errors import GcbenchError, Interrupted, PayloadError
from gcbench.core.world import Link, SimulatedWorld
from gcbench.training import configuration, grid
from gcbench.training.configuration import Config
from gcbench.training.store import Run
from gcbench.training.train import Options, Trainer


def config_of(base: Config, word: str, method: Compressor, steps: int) -> Config:
    """Return the config of a training with the method `word`, otherwise as `base`.

    Raises:
        UsageError: see `Config.make`.
    """
    name, options = grid.method(word)
    fields = ("task", "task_options", "workers", "seed", "batch", "lr")
    return Config.make(
        {
            **{field: getattr(base, field) for field in fields},
            "compressor": name,
            "options": options,
            "collective": once(method),
            "memory": "auto",
            "steps": steps,
        }
    )


@contextmanager
def trainer_of(
    config: Config,
    folder: Path,
    data_dir: Path | None,
    on_bucket: Callable[[int, int, Tensor], None] | None = None,
) -> Iterator[Trainer]:
    """Yield a trainer of simulated workers on the CPU; its world is closed at the end.

    `folder`: of the trainer's checkpoints, if it is asked to save any. `on_bucket`: see `Options`.
    """
    threads = configuration.threads_per_worker(config)
    parallel = min(config.workers, max(1, configuration.cores() // threads))
    link = Link(config.link_gbit, config.link_latency_us)
    world = SimulatedWorld(config.workers, torch.device("cpu"), link, threads, parallel)
    try:
        options = Options(data_dir=data_dir, on_bucket=on_bucket)
        yield Trainer(config, world, Run(folder), options)
    finally:
        world.close()


def train(
    base: Config,
    word: str,
    method: Compressor,
    steps: int,
    folder: Path,
    data_dir: Path | None,
    report: Callable[[int], None],
) -> Record:
    """Return the audit's record of `steps` steps of compressed training.

    `report` is called with each step. A gradient that is not finite ends the training; the record
    has the step as `stopped`. So does an exception in the method, or a payload that it refuses; the
    record has the error's text as `refused`.
    """
    config = config_of(base, word, method, steps)
    ended: Record = {}
    with trainer_of(config, folder, data_dir) as trainer:
        audited = Audited(trainer.world, trainer.exchange.lanes[0], config.seed, trainer.clock)
        trainer.exchange = audited
        for step in range(steps):
            report(step)
            try:
                trainer.train_step()
            except PayloadError as error:
                ended = {"refused": str(error)}
                break
            except GcbenchError as error:
                if not audited.audit.steps or isinstance(error, Interrupted):
                    raise  # the first gradients are not finite: the compressor is not the cause
                ended = {"stopped": step}
                break
            except Exception as error:  # from the method
                ended = {"refused": f"{type(error).__name__}: {error}"}
                break
    return {**audited.audit.record(), **ended}
