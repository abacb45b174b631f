"""gcbench: the honest comparison of gradient compressors for distributed training."""

from __future__ import annotations

import os

from gcbench._version import __version__

TYPE_CHECKING = False  # importing typing and pathlib would delay the handler of Ctrl-C
PUBLIC = {
    **dict.fromkeys(("Compressor", "MultiRoundCompressor"), "core.compressor"),
    **dict.fromkeys(("Context", "Key", "Payload", "Prepared", "Segments"), "core.payload"),
    "check_finite": "core.payload",
    "Claims": "core.claims",
    "Memory": "core.memory",
    "UpdateRule": "core.rule",
    **dict.fromkeys(("Batch", "Split", "Task"), "core.task"),
    "Dropout": "training.dropout",
    "Sink": "training.sinks",
    "comm_hook": "integrations.ddp",
    "local_steps": "integrations.local",
    "shard_hook": "integrations.fsdp",
}
"""Public names that are imported at their first use, and the module of each."""
__all__ = [
    "Batch",
    "Claims",
    "Compressor",
    "Context",
    "Dropout",
    "Key",
    "Memory",
    "MultiRoundCompressor",
    "Payload",
    "Prepared",
    "Segments",
    "Sink",
    "Split",
    "Task",
    "UpdateRule",
    "__version__",
    "check_finite",
    "comm_hook",
    "get_compressor",
    "get_task",
    "load_results",
    "local_steps",
    "run",
    "shard_hook",
]

# In a checkout the plug-in folders are siblings of this package; in a wheel they lie inside it.
_HERE = os.path.dirname(os.path.abspath(__file__))
if not os.path.isdir(os.path.join(_HERE, "compressors")):
    __path__.append(os.path.dirname(_HERE))

if TYPE_CHECKING:
    from pathlib import Path
    from typing import Any, Literal

    from pandas import DataFrame

    from gcbench.core.claims import Claims
    from gcbench.core.compressor import Compressor, MultiRoundCompressor
    from gcbench.core.memory import Memory
    from gcbench.core.payload import Context, Key, Payload, Prepared, Segments, check_finite
    from gcbench.core.rule import UpdateRule
    from gcbench.core.task import Batch, Split, Task
    from gcbench.integrations.ddp import comm_hook
    from gcbench.integrations.fsdp import shard_hook
    from gcbench.integrations.local import local_steps
    from gcbench.training.dropout import Dropout
    from gcbench.training.sinks import Sink


def __getattr__(name: str) -> Any:
    if name not in PUBLIC:
        raise AttributeError(f"module 'gcbench' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(f"gcbench.{PUBLIC[name]}"), name)


def get_compressor(name: str, **fields: Any) -> Compressor:
    """Return the compressor `name`, with its dataclass `fields` set.

    `name` is a registered name, or a file with a compressor, such as ./mine.py.

    >>> import gcbench
    >>> gcbench.get_compressor("terngrad", clip=2.0).clip
    2.0

    Raises:
        gcbench.core.errors.UsageError: unknown name or field, whose message lists the known ones;
            or no such file.
    """
    from gcbench.core import registry

    return registry.compressor(registry.add_file(name), **fields)


def run(
    *,
    results: str | Path = "results/runs",
    data_dir: str | Path | None = None,
    progress: Literal["auto", "bar", "plain", "none"] = "none",
    force: bool = False,
    **settings: Any,
) -> DataFrame:
    """Train a grid of runs, as `gcbench run` does, and return them as `load_results` does.

    `settings` are the flags of `gcbench run` by their names (task, compressor, workers, steps, lr,
    ...); a list is an axis of the grid. Fields of the compressor, the task and the memory are the
    mappings `options`, `task_options` and `memory_options`.

    `results`: the folder of the runs. A run that is finished there is not repeated unless `force`
    is true; one that was interrupted is resumed. `data_dir`: the folder of the data sets; None: the
    folder that the environment variable GCBENCH_DATA names, else the download cache. `progress`:
    how progress is shown on stderr.

    >>> import gcbench, tempfile
    >>> folder = tempfile.mkdtemp()
    >>> runs = gcbench.run(compressor=["none", "terngrad"], task="digits", steps=20, results=folder)
    >>> runs[["compressor_name", "steps"]].values.tolist()
    [['none', 20], ['terngrad', 20]]

    Raises:
        gcbench.core.errors.UsageError: an unknown setting or value; the message lists those known.
            Or torchrun started this process.
        gcbench.core.errors.GcbenchError: a run failed; the other runs of the grid are finished.
    """
    import warnings
    from pathlib import Path

    from gcbench.core.errors import UsageError, unknown
    from gcbench.results import reader
    from gcbench.training import configuration, grid, rank, runner

    if rank.by_torchrun():
        raise UsageError(
            "gcbench.run under torchrun: only worker 0 would have the results. Use `torchrun -m "
            "gcbench run`, or engine='spawn' without torchrun"
        )
    for name in settings:
        if name not in configuration.Config.model_fields:
            raise unknown("setting", name, configuration.Config.model_fields)
    folder = Path(results)
    configs = grid.expand(settings, None)
    for sentence in grid.without_effect(settings, configs):
        warnings.warn(sentence, stacklevel=2)
    named = os.environ.get("GCBENCH_DATA") if data_dir is None else data_dir
    data = Path(named) if named else None
    running = runner.Runner(folder, data, 60.0, progress, force=force, caller="gcbench.run")
    running.all(configs, json=False)
    return reader.frame([reader.load([folder / config.run_name])[0] for config in configs])


def load_results(*places: str | Path) -> DataFrame:
    """Return the finished runs in these folders, .json and .parquet files, one run a row.

    The columns are the entries of a run's summary.json (`gcbench help reading-results`), nested
    names joined by dots: `test_accuracy`, `config.lr`, `phase_seconds.encode`,
    `provenance.machine.cpu`. Without an argument the folder results/runs is read.

    Raises:
        gcbench.core.errors.GcbenchError: a place holds no finished run, or cannot be read.
    """
    from pathlib import Path

    from gcbench.results import reader

    return reader.frame(reader.load([Path(place) for place in places or ("results/runs",)]))


def get_task(name: str, **fields: Any) -> Task:
    """Return the task registered as `name`, with its dataclass `fields` set.

    Raises:
        gcbench.core.errors.UsageError: unknown name or field; the message lists the known ones.
    """
    from gcbench.core import registry

    return registry.task(name, **fields)
