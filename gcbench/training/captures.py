"""Gradients of a training step on disk: `gcbench run --capture` writes them, analyses read them.

One safetensors file a step, `captures/step-000100.safetensors` in a run's folder. Every parameter
is a tensor of its name, float32, shape (workers, *the parameter's): what each worker computed, with
the loss's own L2 term, before any memory and compression. Metadata, all of it text:

    schema   "1"
    step     the step, counted from 0
    layers   JSON list of {"name", "kind"} in the order of the bucket; KINDS lists the kinds
    task, network, seed, config (JSON), pattern (--capture-layers), gcbench (its version): of the
        run; files that other programs write may leave them out
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, nn

from gcbench._version import __version__
from gcbench.core import files
from gcbench.core.errors import UsageError, unknown
from gcbench.core.world import World
from gcbench.core.writing import write_atomically
from gcbench.results.run_folder import CAPTURES
from gcbench.training.store import Run

SCHEMA = "1"
ENDING = ".safetensors"
KINDS = ("convolution", "fully connected", "embedding", "normalization", "bias", "other")
"""The kinds of parameter tensors, by the layer that they belong to, in the order of tables."""
_NORMS = (nn.modules.batchnorm._NormBase, nn.GroupNorm, nn.LayerNorm, nn.RMSNorm)


class MissedError(UsageError):
    """A run has passed steps whose gradients were not captured."""


class Layer(NamedTuple):
    """One parameter tensor."""

    name: str
    kind: str
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


def spread(steps: int, count: int) -> tuple[int, ...]:
    """Return `count` steps of a training of `steps`, evenly spread from 0 to the last one.

    Fewer where several of them fall on one step. `count` is at least 1.
    """
    last = steps - 1
    return tuple(sorted({round(i * last / max(1, count - 1)) for i in range(count)}))


def steps(text: str) -> tuple[int, ...]:
    """Return the steps in a comma-separated list, sorted.

    Raises:
        UsageError: an item is no whole number from 0 on.
    """
    words = [word.strip() for word in text.split(",")]
    if not all(word.isdecimal() for word in words):
        raise UsageError(f"--capture {text!r}: steps with commas, counted from 0, e.g. 0,100,399")
    return tuple(sorted(set(map(int, words))))


def matching(names: Sequence[str], pattern: str) -> list[str]:
    """Return the names that match a shell pattern, or one of several, separated by commas.

    Raises:
        UsageError: no name matches.
    """
    patterns = [part.strip() for part in pattern.split(",")]
    found = [name for name in names if any(fnmatchcase(name, each) for each in patterns)]
    if not found:
        raise unknown("layer", pattern, names, "A pattern may hold *, ? and [..].")
    return found


def kinds(model: nn.Module) -> dict[str, str]:
    """Return the kind, out of `KINDS`, of each parameter of a model, by its module and shape."""
    found = {}
    for prefix, module in model.named_modules():
        for leaf, parameter in module.named_parameters(recurse=False):
            name = f"{prefix}.{leaf}" if prefix else leaf
            if isinstance(module, _NORMS):
                found[name] = "normalization"
            elif isinstance(module, nn.Embedding):
                found[name] = "embedding"
            else:
                found[name] = _by_shape(leaf, tuple(parameter.shape))
    return found


def _by_shape(leaf: str, shape: tuple[int, ...]) -> str:
    if len(shape) > 2:
        return "convolution"
    if len(shape) == 2:
        return "fully connected"
    return "bias" if leaf.endswith("bias") else "other"


# ---- writing -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Plan:
    """Which gradients of a run are captured: at which steps, and a pattern of layers."""

    steps: tuple[int, ...]
    layers: str = "*"

    def check(self, name: str, length: int) -> None:
        """Raise UsageError if a run of `length` steps does not have all these steps."""
        beyond = [step for step in self.steps if step >= length]
        if beyond:
            raise UsageError(
                f"--capture {_listed(beyond)}: {name} has {length} steps, counted from 0; "
                f"its last is {length - 1}"
            )

    def missing(self, run: Run) -> list[int]:
        """Return the planned steps for which the run has no file.

        Raises:
            UsageError: a file was made with another pattern of layers.
        """
        there = {step: place(run.folder, step) for step in self.steps}
        for path in there.values():
            if path.exists() and (kept := Capture(path).about.get("pattern", "*")) != self.layers:
                raise UsageError(
                    f"{path} was made with --capture-layers {kept!r}, not {self.layers!r}; "
                    "--force runs again from the start, another --results folder keeps both"
                )
        return [step for step, path in there.items() if not path.exists()]


def place(folder: Path, step: int) -> Path:
    """Return the file of a step in a run's folder."""
    return folder / CAPTURES / f"step-{step:06d}{ENDING}"


def missed(name: str, steps: Sequence[int]) -> MissedError:
    """Return the error for a run that is past `steps` and has no captures of them."""
    return MissedError(
        f"{name} is past step(s) {_listed(steps)}, and their gradients were not captured; "
        "--force runs it again from the start, another --results folder keeps both"
    )


def _listed(steps: Sequence[int]) -> str:
    return ",".join(map(str, steps))


class Recorder:
    """Captures the gradients of the planned steps; the process of worker 0 writes them.

    `hold` copies them within the step, `write` is called after the step has been timed.
    """

    def __init__(
        self,
        plan: Plan,
        run: Run,
        world: World,
        layers: Sequence[Layer],
        config: Mapping[str, Any],
        network: str,
    ) -> None:
        """`config` is the run's, `network` the name of its model."""
        self.run, self.world, self.config, self.network = run, world, config, network
        self.all, self.plan = list(layers), plan
        names = set(matching([layer.name for layer in layers], plan.layers))
        self.layers = [layer for layer in layers if layer.name in names]
        self.pending: set[int] = set()
        self._held: tuple[int, list[Tensor]] | None = None

    def begin(self, step: int, name: str) -> None:
        """Find out which steps are still to be captured in the run `name`, which is at `step`.

        Raises:
            MissedError: the run is past a step that was not captured.
            UsageError: what was captured has other layers.
        """
        mine = self.plan.missing(self.run)
        missing = self.world.collect([mine] * len(self.world.ranks))[0]  # worker 0's disk decides
        past = [each for each in missing if each < step]
        if past:
            raise missed(name, past)
        self.pending = set(missing)

    def hold(self, step: int, buckets: Sequence[Tensor]) -> None:
        """Copy the local workers' buckets, if `step` is to be captured."""
        if step not in self.pending:
            return
        names = {layer.name for layer in self.layers}
        sizes = [layer.numel for layer in self.all]
        pieces = [
            [
                piece
                for layer, piece in zip(self.all, torch.split(bucket, sizes), strict=True)
                if layer.name in names
            ]
            for bucket in buckets
        ]
        self._held = step, [torch.cat(own).cpu() for own in pieces]

    def write(self) -> None:
        """Write the gradients that `hold` has copied, if any.

        Raises:
            GcbenchError: the file cannot be written.
        """
        if self._held is None:
            return
        step, own = self._held
        self._held = None
        self.pending.discard(step)
        buckets = self.world.collect(own)
        if self.world.ranks[0] != 0:
            return
        about = {
            "task": str(self.config["task"]),
            "network": self.network,
            "pattern": self.plan.layers,
            "seed": str(self.config["seed"]),
            "config": json.dumps(dict(self.config), sort_keys=True),
            "gcbench": __version__,
        }
        write(place(self.run.folder, step), step, self.layers, buckets, about)


def write(
    path: Path,
    step: int,
    layers: Sequence[Layer],
    buckets: Sequence[Tensor],
    about: Mapping[str, str] | None = None,
) -> None:
    """Write one capture: `buckets` has each worker's flat gradient of `layers`, float32, (n,).

    Raises:
        GcbenchError: the file cannot be written.
    """
    stacked = torch.stack([bucket.float() for bucket in buckets])
    pieces = torch.split(stacked, [layer.numel for layer in layers], 1)
    tensors = {
        layer.name: piece.reshape(len(buckets), *layer.shape).contiguous()
        for layer, piece in zip(layers, pieces, strict=True)
    }
    metadata = {
        "schema": SCHEMA,
        "step": str(step),
        "layers": json.dumps([{"name": layer.name, "kind": layer.kind} for layer in layers]),
        **(about or {}),
    }
    Run(path.parent).create()
    write_atomically(path, save(tensors, metadata))


# ---- reading -------------------------------------------------------------------------------------


class Capture:
    """One captured step; its tensors are read when they are asked for."""

    def __init__(self, path: Path) -> None:
        """Read the metadata and the shapes of the tensors.

        Raises:
            UsageError: it is no capture, or one of another schema.
            GcbenchError: it does not match its digest in the summary of its run.
        """
        self.path = path
        files.check_capture(path)

        def described(file: Any) -> tuple[dict[str, str], dict[str, tuple[int, ...]]]:
            shapes = {name: tuple(file.get_slice(name).get_shape()) for name in list(file.keys())}
            return file.metadata() or {}, shapes

        self.about, shapes = self._read(described)
        if self.about.get("schema") != SCHEMA:
            raise UsageError(
                f"{path}: schema {self.about.get('schema')!r} in its metadata, {SCHEMA!r} is read; "
                "`gcbench run --capture` writes such files; see `gcbench help reading-results`"
            )
        try:
            self.step, self.seed = int(self.about["step"]), int(self.about.get("seed", 0))
            told = json.loads(self.about["layers"])
            names = [(str(one["name"]), one.get("kind")) for one in told]
            self.layers = tuple(
                Layer(name, kind or _by_shape(name, shapes[name][1:]), shapes[name][1:])
                for name, kind in names
            )
            workers = {shapes[name][0] for name, _ in names}
            self.config: dict[str, Any] = json.loads(self.about.get("config", "{}"))
        except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
            raise self._damaged(f"metadata or tensors are missing or odd: {error!r}") from None
        if len(workers) != 1 or min(workers) < 1 or set(shapes) != {name for name, _ in names}:
            raise self._damaged("its tensors and its `layers` do not fit together")
        (self.workers,) = workers

    def _damaged(self, what: str) -> UsageError:
        return UsageError(
            f"{self.path} cannot be read as a capture ({what}); delete it and capture again"
        )

    def _read(self, call: Callable[[Any], Any]) -> Any:
        try:
            with safe_open(self.path, "pt") as file:
                return call(file)
        except (OSError, SafetensorError) as error:
            raise self._damaged(str(error).splitlines()[0]) from None

    @cached_property
    def digest(self) -> str:
        """Ten hex digits of the SHA-256 of the layers and gradients, whatever the file's name."""
        found = hashlib.sha256(json.dumps(self.layers).encode())
        for bucket in self.buckets(self.workers):
            found.update(bucket.numpy().tobytes())
        return found.hexdigest()[:10]

    @property
    def task(self) -> str:
        """The task that was trained, with its network and other options, as text."""
        options = self.config.get("task_options") or {}
        words = [f"{key}={value}" for key, value in options.items() if key != "network"]
        named = self.about.get("task", self.path.parent.name), self.about.get("network", "")
        return " ".join(filter(None, [*named, *words]))

    def buckets(self, workers: int) -> list[Tensor]:
        """Return the flat gradients of the first `workers` workers, each float32, shape (n,)."""

        def joined(file: Any) -> Tensor:
            parts = [file.get_slice(layer.name)[:workers] for layer in self.layers]
            return torch.cat([part.reshape(workers, -1).float() for part in parts], 1)

        found: Tensor = self._read(joined)
        return list(found)


def load(places: Sequence[Path]) -> list[Capture]:
    """Return the captures in files and below folders, sorted by seed and step.

    Raises:
        UsageError: there are none, one cannot be read, they differ in layers or workers, or the
            same step of the same run comes twice.
    """
    paths: list[Path] = []
    for where in places:
        below = sorted(where.rglob(f"*{ENDING}")) if where.is_dir() else [where]
        if not below:
            raise UsageError(
                f"no captures (*{ENDING}) in {where}; `gcbench run --capture 0,100` makes some"
            )
        paths += below
    for path in paths:
        if not path.is_file():
            raise UsageError(f"no capture {path}; a file or a folder of captures expected")
    found = sorted(
        (Capture(path) for path in dict.fromkeys(path.resolve() for path in paths)),
        key=lambda one: (one.seed, one.step),
    )
    first = found[0]
    for one in found[1:]:
        if one.layers != first.layers:
            raise UsageError(
                f"{one.path} and {first.path} have other layers: {_difference(one, first)}. "
                "One analysis takes captures of one network: name them apart"
            )
        if one.workers != first.workers:
            raise UsageError(
                f"{one.path} has {one.workers} workers, {first.path} {first.workers}: "
                "one analysis takes captures of as many workers; name them apart"
            )
    for one, other in pairwise(found):
        if (one.seed, one.step) == (other.seed, other.step):
            raise UsageError(
                f"{one.path} and {other.path} are both step {one.step} of seed {one.seed}; "
                "name one of them"
            )
    return found


def _difference(one: Capture, other: Capture) -> str:
    """Return a text with the first layer in which two captures differ."""
    for mine, theirs in zip(one.layers, other.layers, strict=False):
        if mine != theirs:
            return f"{mine.name} {list(mine.shape)} and {theirs.name} {list(theirs.shape)}"
    return f"{len(one.layers)} and {len(other.layers)} of them"
