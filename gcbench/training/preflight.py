"""Check before the first step that all workers have the same settings and data.

Otherwise processes would interpret each other's payloads differently. If anything differs, all of
them end with an error that names it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch

from gcbench.core.errors import UsageError
from gcbench.core.task import Split
from gcbench.core.values import canonical
from gcbench.core.world import World
from gcbench.training import configuration
from gcbench.training.configuration import Config

SHOWN = 120
"""Maximum number of characters of a value in an error."""


def facts(config: Config) -> dict[str, str]:
    """Return everything that determines a run's bits except data: versions, config, plug-ins."""
    versions = configuration.versions()
    objects = configuration.objects(config)
    return {
        "version of gcbench": versions["gcbench"],
        "version of torch": versions["torch"],
        "instruction set": str(configuration.machine()["isa"]),
        "threads": str(torch.get_num_threads()),
        **{
            f"setting {key}": canonical(value)
            for key, value in config.model_dump(mode="json").items()
        },
        **{name: canonical(value) for name, value in objects.items()},
        "plug-ins": canonical(configuration.plugins(config)),
    }


def digest(*splits: Split | None) -> str:
    """Return the SHA-256 of the splits' inputs, targets and names of files; None is ignored."""
    total = hashlib.sha256()
    for split in splits:
        for tensor in () if split is None else (split.inputs, split.targets):
            total.update(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
            data = tensor.detach().cpu().contiguous().view(-1)
            if data.numel():
                total.update(data.view(torch.uint8).numpy().data)
        names = () if split is None else split.locations()
        total.update("".join(f"{name}\0" for name in names).encode(errors="surrogateescape"))
    return total.hexdigest()


def check(world: World, local: Mapping[str, str]) -> None:
    """Compare the values of `local`, by name, between the workers of several processes.

    Raises:
        UsageError: on every worker if a value differs; the message lists the values by worker.
    """
    if len(world.ranks) == world.size:
        return
    everyone = world.collect([dict(local)])
    apart = []
    for name in dict.fromkeys(name for each in everyone for name in each):
        values = [each.get(name, "nothing") for each in everyone]
        if len(set(values)) > 1:
            by_worker = (
                f"{_short(value)} on worker(s) "
                f"{', '.join(str(rank) for rank, v in enumerate(values) if v == value)}"
                for value in dict.fromkeys(values)
            )
            apart.append(f"{name}: {', '.join(by_worker)}")
    if apart:
        raise UsageError(
            f"the workers do not agree before the first step: {'; '.join(apart)}. Start all "
            "workers with the same gcbench, command and data"
        )


def _short(value: str) -> str:
    return value if len(value) <= SHOWN else value[:SHOWN] + "..."
