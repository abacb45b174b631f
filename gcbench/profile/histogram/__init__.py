"""What methods do to the gradients of a real training (`gcbench histogram`).

Every method encodes and decodes the same captured gradients (`gcbench.training.captures`), without
a memory (`reconstruction`). The papers' claims about such gradients are tested by counting layers
and steps (`tables`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict
from torch import Tensor

from gcbench.core import progress, registry
from gcbench.core.compressor import TILE, Compressor
from gcbench.core.errors import Interrupted, UsageError
from gcbench.profile.histogram import reconstruction, tables
from gcbench.profile.histogram.picture import draw
from gcbench.profile.histogram.reconstruction import ALL, Decoded, Gradients, Sums
from gcbench.profile.histogram.tables import FIGURES, GRADIENT
from gcbench.report import analysis as measuring
from gcbench.report.analysis import Analysis, Ledger, Row
from gcbench.training import captures
from gcbench.training import methods as specs
from gcbench.training.captures import Capture, Layer
from gcbench.training.configuration import Config
from gcbench.training.runner import Runner

__all__ = ["Settings", "draw", "measure", "train"]

KIND = "histogram"
METHODS = ("terngrad", "qsgd", "topk", "fft", "onebit", "efsignsgd", "powersgd")
"""Methods that are compared by default, one per family."""
PANELS = 3
"""Default number of layers with histograms."""
SNAPSHOTS = 5
"""Default number of captured steps."""
RUNS = "runs"
"""The folder of trained runs, beside the analyses."""


class Settings(BaseModel):
    """The settings that decide the result."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    captures: list[dict[str, Any]]
    """Task, seed, step and digest of each."""
    workers: int
    methods: dict[str, str]
    """Each method as given, and its compressor as an expression with every field."""
    sources: dict[str, str]
    """By `methods.sources`."""
    layers: str


# ---- gradients -----------------------------------------------------------------------------------


def train(
    settings: Mapping[str, Any],
    seeds: Sequence[int],
    steps: Sequence[int] | None,
    results: Path,
    data_dir: Path | None,
    shown: progress.Mode,
    *,
    force: bool = False,
) -> list[Capture]:
    """Train with these settings, without compression, and return the captures at `steps`.

    Runs are stored in `results/runs`: finished ones are reused, interrupted ones resumed, and a
    run that passed a step without capturing it is trained again.

    Raises:
        UsageError: the config is invalid, or has no such steps.
        Interrupted: the user asked to stop.
        GcbenchError: the training fails.
    """
    places: list[Path] = []
    for number, seed in enumerate(seeds, 1):
        config = Config.make({**settings, "compressor": "none", "seed": seed})
        wanted = tuple(sorted({*(steps or captures.spread(config.steps, SNAPSHOTS))}))
        plan = captures.Plan(wanted)
        plan.check(config.run_name, config.steps)
        folder = results / RUNS
        runner = Runner(folder, data_dir, 60.0, shown, force=force, capture=plan)
        place = f"[{number}/{len(seeds)}]"
        try:
            try:
                runner.one(config, place, leads=True)
            except captures.MissedError:
                there = (folder / config.run_name).rglob(f"*{captures.ENDING}")
                also = [Capture(path).step for path in there]
                plan = captures.Plan(tuple(sorted({*plan.steps, *also})))
                runner = Runner(folder, data_dir, 60.0, shown, force=True, capture=plan)
                runner.one(config, place, leads=True)
        except Interrupted as stopped:
            raise Interrupted(f"{stopped}; repeat the command to continue") from None
        places += [captures.place(folder / config.run_name, step) for step in wanted]
    return captures.load(places)


def select(
    loaded: Sequence[Capture], steps: Sequence[int] | None, workers: int | None
) -> tuple[list[Capture], int]:
    """Return the captures of these steps, and the number of workers to use (None: all of them).

    Raises:
        UsageError: the captures have other steps, or fewer workers.
    """
    there = sorted({one.step for one in loaded})
    if absent := sorted(set(steps or ()) - {*there}):
        raise UsageError(
            f"--capture {','.join(map(str, absent))}: not captured; captured steps: "
            f"{','.join(map(str, there))}"
        )
    has = loaded[0].workers
    if workers is not None and not 1 <= workers <= has:
        raise UsageError(
            f"--workers {workers}: allowed are 1 to {has}, the workers of the captures"
        )
    return [one for one in loaded if not steps or one.step in steps], workers or has


def panels(layers: Sequence[Layer], pattern: str) -> list[int]:
    """Return the indices of the layers with histograms: those that match the pattern.

    For "*", up to `PANELS` weights: the largest of each kind, the last and the first, in the order
    of the bucket.
    """
    names = [layer.name for layer in layers]
    if pattern != "*":
        return [names.index(name) for name in captures.matching(names, pattern)]
    weights = [i for i, layer in enumerate(layers) if len(layer.shape) > 1] or [0]
    largest: dict[str, int] = {}
    for i in sorted(weights, key=lambda i: -layers[i].numel):
        largest.setdefault(layers[i].kind, i)
    order = dict.fromkeys([*largest.values(), weights[-1], weights[0]])
    return sorted([*order][:PANELS])


# ---- one method on one capture -------------------------------------------------------------------


def apply(
    method: Compressor, gradients: Gradients, which: Sequence[int], binned: Sequence[int]
) -> dict[str, list[Row]]:
    """Return the rows of all tables for one method and one step.

    Layers in `which` have their own rows, those in `binned` histograms. Layers of fewer than TILE
    elements have no bits, because codes are packed in tiles.
    """
    decoded = reconstruction.exchange(method, gradients)
    if not all(y.isfinite().all() for y in (*decoded.alone, decoded.averaged)):
        return {"steps": [{"group": ALL, "failed": "a decoded gradient is not finite"}]}
    alone = [
        Sums.of(gradients, x, y) for x, y in zip(gradients.buckets, decoded.alone, strict=True)
    ]
    averaged = Sums.of(gradients, gradients.mean, decoded.averaged)
    sent = {"bits_up": decoded.bits_up, "bits_down": decoded.bits_down}

    def bits(members: Tensor) -> float | None:
        """Return the bits per element that these layers add to a payload; None if unknown."""
        saved = reconstruction.marginal_bits(method, gradients.layers, members.tolist())
        n = int(gradients.lengths[members].sum())
        return saved / n if saved is not None and n >= TILE else None

    pooled: list[Row] = [
        {
            "group": group,
            **_figures(alone, averaged, members),
            **(sent if group == ALL else {}),
            "bits": None if group == ALL else bits(members),
        }
        for group, members in gradients.groups().items()
    ]
    layers: list[Row] = []
    for i in which:
        layer, one = gradients.layers[i], torch.tensor([i])
        row: Row = {"layer": layer.name, "kind": layer.kind, "elements": layer.numel}
        layers.append({**row, **_figures(alone, averaged, one), "bits": bits(one)})
    return {
        "steps": pooled,
        "layers": layers,
        "bins": [row for i in binned for row in _bins(gradients, decoded, i)],
    }


def _figures(alone: Sequence[Sums], averaged: Sums, members: Tensor) -> Row:
    per_worker = reconstruction.averages([one.over(members) for one in alone])
    joint = averaged.over(members)
    return {
        **{f"{name}_alone": per_worker[name] for name in FIGURES},
        **{f"{name}_averaged": joint[name] for name in FIGURES},
    }


def _bins(gradients: Gradients, decoded: Decoded, layer: int) -> Iterator[Row]:
    """Yield the bins of decoded values, of the mean, and of targets if they differ from x."""
    shown = {"decoded": decoded.alone, "averaged": [decoded.averaged]}
    place = gradients.place(layer)
    both = zip(gradients.buckets, decoded.targets, strict=True)
    if any(bool((x[place] != target[place]).any()) for x, target in both):
        shown["target"] = decoded.targets
    for values, buckets in shown.items():
        for row in reconstruction.histogram(gradients, layer, buckets):
            yield {"layer": gradients.layers[layer].name, "values": values, **row}


def plain(gradients: Gradients, binned: Sequence[int]) -> dict[str, list[Row]]:
    """Return the rows of the uncompressed gradients: their bins and zeros."""
    per_worker = [Sums.of(gradients, x, x) for x in gradients.buckets]
    mean = Sums.of(gradients, gradients.mean, gradients.mean)
    pooled: list[Row] = []
    for group, members in gradients.groups().items():
        measures = _figures(per_worker, mean, members)
        zeros = {key: measures[key] for key in ("zeros_alone", "zeros_averaged")}
        pooled.append({"group": group, **zeros})
    bins: list[Row] = [
        {"layer": gradients.layers[i].name, "values": values, **row}
        for i in binned
        for values, measures in (("gradient", gradients.buckets), ("mean", [gradients.mean]))
        for row in reconstruction.histogram(gradients, i, measures)
    ]
    return {"steps": pooled, "bins": bins}


# ---- the whole -----------------------------------------------------------------------------------


def methods_of(chosen: str | None) -> dict[str, Compressor]:
    """Return the methods of a comma-separated list; None: `METHODS`; "all": all registered ones.

    Raises:
        UsageError: an unknown method.
    """
    return specs.all_of(None if chosen == "all" else chosen, METHODS if chosen is None else None)


def measure(
    loaded: Sequence[Capture],
    chosen: str | None,
    *,
    workers: int,
    layers: str,
    results: Path,
    shown: progress.Mode,
    command: str,
    force: bool = False,
) -> Analysis:
    """Measure the methods of a comma-separated list on captures of the same layers.

    Raises:
        UsageError: an unknown method or layer.
        GcbenchError: `results` cannot be written.
    """
    all_of = methods_of(chosen)
    names = [layer.name for layer in loaded[0].layers]
    which = [names.index(name) for name in captures.matching(names, layers)]
    binned = panels(loaded[0].layers, layers)
    settings = Settings(
        captures=[
            {"task": one.task, "seed": one.seed, "step": one.step, "sha256": one.digest}
            for one in loaded
        ],
        workers=workers,
        methods={word: registry.call(method) for word, method in all_of.items()},
        sources=specs.sources(all_of),
        layers=layers,
    )
    folder = results / f"{KIND}-{measuring.digest(settings.model_dump())}"
    provenance = measuring.provenance()
    rows: dict[str, list[Row]] = {name: [] for name in ("steps", "layers", "bins")}
    watch = progress.observer(shown, KIND, len(loaded) * (len(all_of) + 1))
    with Ledger(folder).open(afresh=force) as ledger:
        try:
            done = 0
            for one in loaded:
                jobs = _jobs(one, all_of, workers, which, binned)
                for word, job in jobs.items():
                    key = f"{one.seed} {one.step} {word}"
                    if key not in ledger:
                        ledger[key] = job()
                    base: Row = {"seed": one.seed, "step": one.step}
                    for table, new in ledger[key].items():
                        rows[table] += [{**base, "method": word, **row} for row in new]
                    done += 1
                    watch.step(done, f"step {one.step}, {word}")
        finally:
            watch.close()
        shown_tables, answer = tables.of(rows, settings.model_dump())
        result = Analysis.of(KIND, settings, command, tables=shown_tables, answer=answer)
        result.provenance = {**provenance, "started": ledger.started}
    return result


def _jobs(
    one: Capture,
    methods: Mapping[str, Compressor],
    workers: int,
    which: Sequence[int],
    binned: Sequence[int],
) -> dict[str, Callable[[], dict[str, list[Row]]]]:
    """Return the computations on one capture, by name; gradients are read when first needed."""

    @cache
    def gradients() -> Gradients:
        return Gradients(one.layers, one.buckets(workers), one.step, one.seed)

    def job(method: Compressor | None) -> dict[str, list[Row]]:
        problem = gradients().problem()
        if problem is None:
            if method is None:
                return plain(gradients(), binned)
            try:
                return apply(method, gradients(), which, binned)
            except Exception as error:
                # A failing method, perhaps a third party's, must not affect the others.
                problem = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
        return {"steps": [{"group": ALL, "failed": problem}]}

    return {word: partial(job, method) for word, method in {GRADIENT: None, **methods}.items()}
