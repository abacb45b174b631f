"""Settings of `gcbench bandwidth`: sizes, and the legal combinations to measure."""

from __future__ import annotations

import math
import re
import shlex
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict

from gcbench import ops
from gcbench.core import exchange
from gcbench.core.compressor import COLLECTIVES
from gcbench.core.errors import UsageError, unknown
from gcbench.core.values import items_of
from gcbench.profile.bandwidth.transfers import BOUNDS, PLAIN, YARDSTICK, Item
from gcbench.training import configuration, limits, methods, rank

KIND = "bandwidth"
_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30}
_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?)([KMG]?)", re.IGNORECASE)


class Settings(BaseModel):
    """The settings that decide the result."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    compressors: tuple[str, ...]
    """Methods, as in `gcbench.training.methods`."""
    collectives: tuple[str, ...] = ("default",)
    """Collectives of the exchanges: names, "default" (each method's first), or "all" legal ones."""
    plain: tuple[str, ...] = tuple(PLAIN)
    """Collectives of the library that are measured uncompressed."""
    sizes: tuple[int, ...]
    """Bytes of the float32 gradient, multiples of 4, ascending."""
    iterations: int = 20
    warmup: int = 5
    workers: int = 2
    engine: str = "spawn"
    device: str = "cpu"
    backend: str = "auto"
    threads: int = 1
    """Threads of each worker."""
    seed: int = 0
    memory: bool = True
    """Whether methods use their memory (error feedback, momentum)."""
    link_latency_us: float = 50.0
    """Latency per message of the links in predictions."""
    sources: dict[str, str] = {}
    """By `methods.sources`."""

    @property
    def library(self) -> str:
        """The library that carries out the collectives."""
        return "nccl" if self.device.startswith("cuda") else "gloo"


# ---- sizes ---------------------------------------------------------------------------------------


def size_of(text: str) -> int:
    """Return the bytes that "512", "4K", "1.5M" or "1G" mean; K, M, G are powers of 1024.

    Raises:
        UsageError: it is not a size.
    """
    match = _SIZE.fullmatch(text.strip().upper().removesuffix("B"))
    if not match:
        raise UsageError(f"size {text!r}: give bytes, e.g. 4096, 64K, 16M or 1G")
    return int(float(match[1]) * _UNITS[match[2]])


def listed(text: str) -> tuple[int, ...]:
    """Return the sizes of a comma-separated list in bytes, multiples of 4, ascending.

    Raises:
        UsageError: an entry is empty, not a size, or below 4 bytes.
    """
    sizes = sorted({size_of(word) // 4 * 4 for word in items_of("--sizes", text)})
    if sizes[0] < 4:
        raise UsageError(f"--sizes {text}: use at least 4 bytes, the size of a float")
    return tuple(sizes)


def size_text(size: int) -> str:
    """Return a size as text for nccl-tests' flags: 16M, or 1234 if no unit divides it."""
    for letter, unit in reversed(_UNITS.items()):
        if size % unit == 0 and size >= unit:
            return f"{size // unit}{letter}"
    return str(size)


# ---- validation ----------------------------------------------------------------------------------


def make(
    *,
    compressors: str | None,
    collectives: str | None,
    plain: str | None,
    sizes: tuple[int, ...],
    workers: int | None,
    engine: str | None,
    threads: int | None,
    **others: Any,
) -> Settings:
    """Return validated settings; under torchrun engine and workers are those of its job.

    Raises:
        UsageError: a setting cannot be measured.
    """
    member = rank.from_torchrun()
    engine = "torchrun" if member else engine or "spawn"
    if engine == "simulate":
        raise UsageError(
            "engine simulate has no network to measure; use --engine spawn (local processes) or "
            "torchrun"
        )
    if engine == "torchrun" and member is None:
        raise UsageError(
            "engine torchrun is detected from the environment: start the command with "
            "`torchrun --nproc-per-node N -m gcbench bandwidth ...`, or use --engine spawn"
        )
    if engine not in ("spawn", "torchrun"):
        raise unknown("engine", engine, ("spawn", "torchrun"))
    if workers is None:
        workers = member.size if member else 2
    if workers < 2:
        raise UsageError(f"--workers {workers}: an exchange needs at least 2")
    if math.isinf(others.get("link_latency_us", 0.0)):
        raise UsageError("--link-latency-us inf: expected a finite number of microseconds")
    here = member.local_size if member else workers
    limits.check_threads(threads or 1)
    if member is None:
        limits.check_workers(workers, processes=True, cores=configuration.cores())
    by_spec = methods.all_of(compressors)
    named = _names("--collective", collectives, ("default",))
    if named not in (("default",), ("all",)):
        for name in named:
            if name not in COLLECTIVES:
                raise unknown("collective", name, COLLECTIVES, "Or: default, all.")
    chosen = _names("--plain", plain, tuple(PLAIN))
    for name in chosen:
        if name not in PLAIN:
            raise unknown("plain collective", name, PLAIN)
    if YARDSTICK not in chosen:
        chosen = (YARDSTICK, *chosen)
    settings = Settings(
        compressors=tuple(by_spec),
        sources=methods.sources(by_spec),
        collectives=named,
        plain=chosen,
        sizes=sizes,
        workers=workers,
        engine=engine,
        threads=threads or max(1, configuration.cores() // here),
        **others,
    )
    configuration.require_device(settings.device)
    if settings.library == "nccl" and here > (gpus := torch.cuda.device_count()):
        raise UsageError(f"{here} workers on {gpus} GPU(s): NCCL needs one GPU per worker")
    ops.choose(settings.backend, settings.device.partition(":")[0])
    items(settings)
    return settings


def _names(flag: str, text: str | None, default: tuple[str, ...]) -> tuple[str, ...]:
    """Return the items of a flag's list, each once; `default` without the flag."""
    return default if text is None else tuple(dict.fromkeys(items_of(flag, text)))


def items(settings: Settings) -> tuple[Item, ...]:
    """Return the items that are measured at every size: bounds, plain collectives, exchanges.

    Raises:
        UsageError: no method can be exchanged by any of the given collectives.
    """
    result = [Item("bound", name, "-") for name in BOUNDS]
    result += [Item("library", settings.library, name) for name in settings.plain]
    pairs = [(word, name) for word, name, legal in combinations(settings) if legal]
    if not pairs:
        exchange.check_legal(methods.parse(settings.compressors[0]), settings.collectives[0])
    return (*result, *(Item("exchange", *pair) for pair in pairs))


def combinations(settings: Settings) -> list[tuple[str, str, bool]]:
    """Return each method with each of the given collectives, and whether that is legal."""
    result = []
    for spec in settings.compressors:
        legal = methods.parse(spec).legal_collectives()
        match settings.collectives:
            case ("default",):
                wanted = legal[:1]
            case ("all",):
                wanted = legal
            case named:
                wanted = named
        result += [(spec, name, name in legal) for name in wanted]
    return result


def command(settings: Settings) -> str:
    """Return the command line that repeats this measurement."""
    argv = ["gcbench", KIND, "--compressor", ",".join(settings.compressors)]
    if settings.engine == "torchrun":
        argv[:1] = ["torchrun", "--nproc-per-node", str(settings.workers), "-m", "gcbench"]
    argv += ["--sizes", ",".join(map(size_text, settings.sizes))]
    flags = {
        "collectives": "--collective",
        "plain": "--plain",
        "iterations": "-n",
        "warmup": "-w",
        "workers": "--workers",
        "device": "--device",
        "backend": "--backend",
        "threads": "--threads",
        "seed": "--seed",
        "link_latency_us": "--link-latency-us",
    }
    for field, flag in flags.items():
        value, usual = getattr(settings, field), Settings.model_fields[field].default
        if value != usual or field in ("workers", "threads"):
            argv += [flag, ",".join(value) if isinstance(value, tuple) else f"{value}"]
    if not settings.memory:
        argv.append("--no-memory")
    return shlex.join(argv)
