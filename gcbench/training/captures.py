"""Gradients of a training step on disk: `gcbench run --capture` writes them, analyses read them.

One safetensors file per step, `captures/step-000100.safetensors` in a run's folder. Every parameter
has a tensor with its name, float32, shape (workers, *the parameter's): the gradient of each worker
with the loss's L2 term, before memory and compression. Metadata, as text:

    schema   "1"
    step     the step, counted from 0
    layers   JSON list of {"name", "kind"} in the order of the bucket; KINDS lists the kinds
    task, network, seed, config (JSON), pattern (--capture-layers), gcbench (its version): of the
        run; optional in files of other programs
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property
from itertools import compress, pairwise
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
"""The kinds of parameter tensors, by their layer, in the order of tables."""
_NORMS = (nn.modules.batchnorm._NormBase, nn.GroupNorm, nn.LayerNorm, nn.RMSNorm)


class MissedError(UsageError):
    """A run is past steps whose gradients were not captured."""


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
    """Return `count` of `steps` training steps, evenly spread from 0 to the last one.

    Fewer if several of them fall on one step. `count` is at least 1.
    """
    last = steps - 1
    return tuple(sorted({round(i * last / max(1, count - 1)) for i in range(count)}))


def steps(text: str) -> tuple[int, ...]:
    """Return the steps in a comma-separated list, sorted.

    Raises:
        UsageError: an item is not a whole number from 0 on.
    """
    words = [word.strip() for word in text.split(",")]
    if not all(word.isdecimal() for word in words):
        raise UsageError(
            f"--capture {text!r}: expected steps separated by commas, counted from 0: 0,100,399"
        )
    return tuple(sorted(set(map(int, words))))


def matching(names: Sequence[str], pattern: str) -> list[str]:
    """Return the names that match a shell pattern, or one of several, separated by commas.

    Raises:
        UsageError: no name matches.
    """
    patterns = [part.strip() for part in pattern.split(",")]
    result = [name for name in names if any(fnmatchcase(name, each) for each in patterns)]
    if not result:
        raise unknown("layer", pattern, names, "A pattern may contain *, ? and [..].")
    return result


def kinds(model: nn.Module) -> dict[str, str]:
    """Return the kind, out of `KINDS`, of each parameter of a model, by its module and shape."""
    result = {}
    for prefix, module in model.named_modules():
        for leaf, parameter in module.named_parameters(recurse=False):
            name = f"{prefix}.{leaf}" if prefix else leaf
            if isinstance(module, _NORMS):
                result[name] = "normalization"
            elif isinstance(module, nn.Embedding):
                result[name] = "embedding"
            else:
                result[name] = _by_shape(leaf, tuple(parameter.shape))
    return result


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
            pattern = Capture(path).about.get("pattern", "*") if path.exists() else self.layers
            if pattern != self.layers:
                raise UsageError(
                    f"{path} was made with --capture-layers {pattern!r}, not {self.layers!r}; "
                    "use --force to run it again from the start, or another --results folder"
                )
        return [step for step, path in there.items() if not path.exists()]


def place(folder: Path, step: int) -> Path:
    """Return the file of a step in a run's folder."""
    return folder / CAPTURES / f"step-{step:06d}{ENDING}"


def missed(name: str, steps: Sequence[int]) -> MissedError:
    """Return the error for a run that is past `steps` and has no captures of them."""
    return MissedError(
        f"{name} is past step(s) {_listed(steps)}, whose gradients were not captured; use --force "
        "to run it again from the start, or another --results folder"
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
        """Determine which steps are not captured yet in the run `name`, which is at `step`.

        Raises:
            MissedError: the run is past a step that was not captured.
            UsageError: existing captures have other layers.
        """
        mine = self.plan.missing(self.run)
        missing = self.world.collect([mine] * len(self.world.ranks))[0]  # as on worker 0's disk
        past = [each for each in missing if each < step]
        if past:
            raise missed(name, past)
        self.pending = set(missing)

    def hold(self, step: int, buckets: Sequence[Tensor]) -> None:
        """Copy the local workers' buckets, if `step` is planned."""
        if step not in self.pending:
            return
        names = {layer.name for layer in self.layers}
        sizes = [layer.numel for layer in self.all]
        chosen = [layer.name in names for layer in self.all]
        pieces = [compress(torch.split(bucket, sizes), chosen) for bucket in buckets]
        self._held = step, [torch.cat([*each]).cpu() for each in pieces]

    def write(self) -> None:
        """Write the gradients that `hold` copied, if any.

        Raises:
            GcbenchError: the file cannot be written.
        """
        if self._held is None:
            return
        step, buffers = self._held
        self._held = None
        self.pending.discard(step)
        buckets = self.world.collect(buffers)
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
    """One captured step; its tensors are read on access."""

    def __init__(self, path: Path) -> None:
        """Read the metadata and the shapes of the tensors.

        Raises:
            UsageError: it is not a capture, or has another schema.
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
                f"{path} has schema {self.about.get('schema')!r}, expected {SCHEMA!r} as in files "
                "of `gcbench run --capture`; see `gcbench help reading-results`"
            )
        try:
            self.step, self.seed = int(self.about["step"]), int(self.about.get("seed", 0))
            entries = json.loads(self.about["layers"])
            names = [(str(one["name"]), one.get("kind")) for one in entries]
            self.layers = tuple(
                Layer(name, kind or _by_shape(name, shapes[name][1:]), shapes[name][1:])
                for name, kind in names
            )
            workers = {shapes[name][0] for name, _ in names}
            self.config: dict[str, Any] = json.loads(self.about.get("config", "{}"))
        except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
            raise self._damaged(f"metadata or tensors are missing or invalid: {error!r}") from None
        if len(workers) != 1 or min(workers) < 1 or set(shapes) != {name for name, _ in names}:
            raise self._damaged("its tensors do not match its `layers`")
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
        """Ten hex digits of the SHA-256 of the layers and gradients."""
        hashed = hashlib.sha256(json.dumps(self.layers).encode())
        for bucket in self.buckets(self.workers):
            hashed.update(bucket.numpy().tobytes())
        return hashed.hexdigest()[:10]

    @property
    def task(self) -> str:
        """The task, with its network and other options, as text."""
        options = self.config.get("task_options") or {}
        others = [f"{key}={value}" for key, value in options.items() if key != "network"]
        named = self.about.get("task", self.path.parent.name), self.about.get("network", "")
        return " ".join(filter(None, [*named, *others]))

    def buckets(self, workers: int) -> list[Tensor]:
        """Return the flat gradients of the first `workers` workers, each float32, shape (n,)."""

        def joined(file: Any) -> Tensor:
            parts = [file.get_slice(layer.name)[:workers] for layer in self.layers]
            return torch.cat([part.reshape(workers, -1).float() for part in parts], 1)

        flat: Tensor = self._read(joined)
        return list(flat)


def load(places: Sequence[Path]) -> list[Capture]:
    """Return the captures in files and below folders, sorted by seed and step.

    Raises:
        UsageError: there are none, one cannot be read, they differ in layers or workers, or two
            have the same seed and step.
    """
    paths: list[Path] = []
    for where in places:
        below = sorted(where.rglob(f"*{ENDING}")) if where.is_dir() else [where]
        if not below:
            raise UsageError(
                f"no captures (*{ENDING}) in {where}; create them by `gcbench run --capture 0,100`"
            )
        paths += below
    for path in paths:
        if not path.is_file():
            raise UsageError(f"no capture {path}; expected a file or a folder of captures")
    captures = sorted(
        (Capture(path) for path in dict.fromkeys(path.resolve() for path in paths)),
        key=lambda one: (one.seed, one.step),
    )
    first = captures[0]
    for one in captures[1:]:
        if one.layers != first.layers:
            raise UsageError(
                f"{one.path} and {first.path} have different layers: {_difference(one, first)}. "
                "An analysis needs captures of one network: analyze them separately"
            )
        if one.workers != first.workers:
            raise UsageError(
                f"{one.path} has {one.workers} workers, {first.path} {first.workers}: an analysis "
                "needs captures of the same number of workers; analyze them separately"
            )
    for one, other in pairwise(captures):
        if (one.seed, one.step) == (other.seed, other.step):
            raise UsageError(
                f"{one.path} and {other.path} are both step {one.step} of seed {one.seed}; pass "
                "only one of them"
            )
    return captures


def _difference(one: Capture, other: Capture) -> str:
    """Return a text with the first layer in which two captures differ."""
    for mine, theirs in zip(one.layers, other.layers, strict=False):
        if mine != theirs:
            return f"{mine.name} {list(mine.shape)} and {theirs.name} {list(theirs.shape)}"
    return f"{len(one.layers)} and {len(other.layers)} of them"
