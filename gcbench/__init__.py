"""gcbench: the honest comparison of gradient compressors for distributed training."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = ["__version__", "get_compressor", "get_task"]

# In a checkout the plug-in folders are siblings of this package; in a wheel they lie inside it.
_HERE = Path(__file__).parent
if not (_HERE / "compressors").is_dir():
    __path__.append(str(_HERE.parent))

if TYPE_CHECKING:
    from gcbench.compressor import Compressor
    from gcbench.task import Task


def get_compressor(name: str, **fields: Any) -> Compressor:
    """Return the compressor registered as `name`, with its dataclass `fields` set.

    >>> import gcbench
    >>> gcbench.get_compressor("terngrad", clip=2.0).clip
    2.0

    Raises:
        gcbench.errors.UsageError: unknown name or field; the message lists the known ones.
    """
    from gcbench import registry

    return registry.compressor(name, **fields)


def get_task(name: str, **fields: Any) -> Task:
    """Return the task registered as `name`, with its dataclass `fields` set.

    Raises:
        gcbench.errors.UsageError: unknown name or field; the message lists the known ones.
    """
    from gcbench import registry

    return registry.task(name, **fields)
