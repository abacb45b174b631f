"""The check, before the first step, that all workers run with the same settings and data.

Processes that do not agree would exchange payloads that each of them understands differently. So
all of them end with an error that names what differs.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch

from gcbench.core.errors import UsageError
from gcbench.core.task import Split
from gcbench.core.world import World
from gcbench.training import configuration
from gcbench.training.configuration import Config

SHOWN = 120
"""How many characters of a value an error shows."""


def facts(config: Config) -> dict[str, str]:
    """Return what a run's bits depend on, apart from its data: versions, config, plug-ins."""
    known = configuration.versions()
    made = configuration.objects(config)
    return {
        "version of gcbench": known["gcbench"],
        "version of torch": known["torch"],
        "instruction set": str(configuration.machine()["isa"]),
        "threads": str(torch.get_num_threads()),
        **{
            f"setting {key}": configuration.canonical(value)
            for key, value in config.model_dump(mode="json").items()
        },
        **{name: configuration.canonical(value) for name, value in made.items()},
        "plug-ins": configuration.canonical(configuration.plugins(config)),
    }


def digest(*splits: Split | None) -> str:
    """Return the SHA-256 of the splits' inputs and targets; those that are None are left out."""
    found = hashlib.sha256()
    for split in splits:
        for tensor in () if split is None else (split.inputs, split.targets):
            found.update(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
            data = tensor.detach().cpu().contiguous().view(-1)
            if data.numel():
                found.update(data.view(torch.uint8).numpy().data)
    return found.hexdigest()


def check(world: World, own: Mapping[str, str]) -> None:
    """Compare the texts of `own`, by name, among the workers of several processes.

    Raises:
        UsageError: on every worker, if something differs: its name, and which workers have which
            value.
    """
    if len(world.ranks) == world.size:
        return
    everyone = world.collect([dict(own)])
    apart = []
    for name in dict.fromkeys(name for each in everyone for name in each):
        values = [each.get(name, "nothing") for each in everyone]
        if len(set(values)) > 1:
            told = (
                f"{_short(value)} on worker(s) "
                f"{', '.join(str(rank) for rank, v in enumerate(values) if v == value)}"
                for value in dict.fromkeys(values)
            )
            apart.append(f"{name}: {', '.join(told)}")
    if apart:
        raise UsageError(
            f"the workers do not agree before the first step: {'; '.join(apart)}. Start all "
            "of them with the same gcbench, command and data"
        )


def _short(value: str) -> str:
    return value if len(value) <= SHOWN else value[:SHOWN] + "..."
