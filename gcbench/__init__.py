"""gcbench: the honest comparison of gradient compressors for distributed training."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
PUBLIC = {
    **dict.fromkeys(("Compressor", "Key", "MultiRoundCompressor", "Payload"), "core.compressor"),
    **dict.fromkeys(("Prepared", "Segments"), "core.compressor"),
    "Claims": "core.claims",
    "Memory": "core.memory",
    **dict.fromkeys(("Batch", "Split", "Task"), "core.task"),
    "Dropout": "training.dropout",
    "Sink": "training.sinks",
}
"""What a plug-in derives from and what it is handed, and the module of each; imported late."""
__all__ = [
    "Batch",
    "Claims",
    "Compressor",
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
    "__version__",
    "get_compressor",
    "get_task",
]

# In a checkout the plug-in folders are siblings of this package; in a wheel they lie inside it.
_HERE = Path(__file__).parent
if not (_HERE / "compressors").is_dir():
    __path__.append(str(_HERE.parent))

if TYPE_CHECKING:
    from gcbench.core.claims import Claims
    from gcbench.core.compressor import (
        Compressor,
        Key,
        MultiRoundCompressor,
        Payload,
        Prepared,
        Segments,
    )
    from gcbench.core.memory import Memory
    from gcbench.core.task import Batch, Split, Task
    from gcbench.training.dropout import Dropout
    from gcbench.training.sinks import Sink


def __getattr__(name: str) -> Any:
    if name not in PUBLIC:
        raise AttributeError(f"module 'gcbench' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(f"gcbench.{PUBLIC[name]}"), name)


def get_compressor(name: str, **fields: Any) -> Compressor:
    """Return the compressor registered as `name`, with its dataclass `fields` set.

    >>> import gcbench
    >>> gcbench.get_compressor("terngrad", clip=2.0).clip
    2.0

    Raises:
        gcbench.core.errors.UsageError: unknown name or field; the message lists the known ones.
    """
    from gcbench.core import registry

    return registry.compressor(name, **fields)


def get_task(name: str, **fields: Any) -> Task:
    """Return the task registered as `name`, with its dataclass `fields` set.

    Raises:
        gcbench.core.errors.UsageError: unknown name or field; the message lists the known ones.
    """
    from gcbench.core import registry

    return registry.task(name, **fields)
