"""Whether to compress on a given cluster, and with what: predicted gain beside measured cost.

The gain is `prediction`'s, each method by the legal collective with the best advice, then the
fastest. The cost is the accuracy that stored runs lost against their own `none`: of several results
the worst. What nobody measured is not taken for free: such a method is never advised, and the
command that measures it is told. A result by another collective counts where all give one mean.

By all-gather a worker is handed (N - 1) payloads of b bits an element, by a ring all-reduce of fp32
it is handed 2 (N - 1) / N times 32 bits: an all-gather moves less only below N = 64 / b workers.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from gcbench import compare, finished, pictures, progress, registry, tables
from gcbench.compressor import Segments
from gcbench.errors import UsageError
from gcbench.measure.analysis import Analysis, Ledger, Row, Shown, Table, provenance
from gcbench.measure.scale import prediction, traffic
from gcbench.measure.scale.prediction import Prepared, Step

KIND = "advice"
USE, MEASURE, COSTLY, NO_GAIN, REFUSED = "use", "measure", "too costly", "no gain", "refused"
ORDER = (USE, MEASURE, COSTLY, NO_GAIN, REFUSED)


class Settings(prediction.Settings):
    """What decides the advice."""

    workers: Annotated[
        list[Annotated[int, Field(ge=2, le=prediction.MOST_WORKERS)]],
        Field(min_length=1, max_length=1),
    ]
    tolerance: Annotated[float, Field(ge=0, le=1)]
    """Accuracy that may be lost, a fraction."""
    margin: Annotated[float, Field(ge=0, allow_inf_nan=False)]
    """Gain below which it is not worth while: 0.05 is 5 %."""
    runs: list[str]
    """Where stored results are."""


# ---- the cost ------------------------------------------------------------------------------------


def known_costs(rows: Sequence[compare.Row]) -> list[compare.Row]:
    """Return the rows whose distance to `none` is known: of accuracies only."""
    known = (row for row in rows if row.difference is not None or row.failed)
    return [row for row in known if row.metric == "accuracy" and not row.is_baseline]


def costs_of(settings: Settings, step: Step, known: Sequence[compare.Row]) -> list[compare.Row]:
    """Return the rows of this very method as it would be used, by a collective of the same mean.

    It compresses from the first step to the last with the same fields, carries what its source
    carries, and leaves the same tensors dense. What loses too much by all-gather counts against a
    two-shot exchange, too, whose owners lose something more; what does not says nothing of it.
    """
    method = step.method
    asked = {
        "memory": method.memory,
        "memory_options": dict(method.memory_options),
        "start_step": 0,
        "delay": 0,
        "dense_last": settings.dense_last,
        "dense_below": settings.dense_below,
    }

    def counts(row: compare.Row) -> bool:
        run = row.runs[0]
        if run.summary.compressor != repr(method) or finished.schedules(run.summary):
            return False
        if any(run.config.get(key, value) != value for key, value in asked.items()):
            return False
        same = run.summary.collective == step.collective or not method.requantizes
        return same or (step.collective == "twoshot" and not fits(settings, row))

    return [row for row in known if counts(row)]


def fits(settings: Settings, row: compare.Row) -> bool:
    """Return whether no seed failed, and no more accuracy was lost than may be."""
    return not row.failed and (row.difference or 0.0) >= -settings.tolerance


def worst(rows: Sequence[compare.Row]) -> compare.Row:
    """Return the row that lost most; one with a failed seed lost all."""
    return min(rows, key=lambda row: -math.inf if row.failed else row.difference or 0.0)


# ---- the analysis --------------------------------------------------------------------------------


def run(settings: Settings, command: str, observer: progress.Observer, ledger: Ledger) -> Analysis:
    """Rank the methods for a model on a cluster.

    Raises:
        UsageError: see `prediction.prepare`; or results that are not there.
    """
    found = prediction.prepare(settings, observer, ledger, every=True)
    workers = settings.workers[0]
    costs: list[compare.Row] = []
    if settings.runs:
        costs = known_costs(compare.rows(finished.load([Path(run) for run in settings.runs])))
    base = found.plain.at(workers, settings.cluster)
    rows = [
        _row(settings, found, word, costs, base)
        for word in dict.fromkeys(word for word, _ in found.steps)
        if word != "none"
    ]
    rows.sort(key=_rank)
    most = base["step_seconds"] / found.compute
    title = (
        f"{found.network.title}, {found.network.numel:,} parameters, batch {found.batch} a worker, "
        f"{workers} workers of cluster {settings.cluster.name}"
    )
    notes = [
        *found.notes,
        f"use: gains at least {100 * settings.margin:g} % and lost at most "
        f"{100 * settings.tolerance:g} points of accuracy in every stored result. measure: gains "
        "as much, but no such result is stored. too costly: lost more, or diverged. no gain: gains "
        "less. speedup: step of `none` by all-reduce / step, predicted.",
        "accuracy: row minus `none` at equal budget, the worst of the stored results, with its "
        "95 % interval from two seeds on; results of a schedule, with other dense tensors, or by a "
        "collective with another mean do not count, but what loses too much by all-gather is too "
        "costly by two-shot, too. all-gather up to: fewer than 64 / b workers, b the bits an "
        "element of a payload; beyond, it moves more bytes than fp32 by a ring all-reduce, and "
        "two-shot or all-reduce must serve.",
    ]
    return Analysis(
        kind=KIND,
        settings=settings.model_dump(mode="json"),
        command=command,
        provenance=provenance(),
        conclusions=_advice(settings, rows, most),
        tables=[Table(name="methods", title=title, shown=_SHOWN, notes=notes, rows=rows)],
    )


_SHOWN = [
    Shown(field="method", heading="method"),
    Shown(field="advice", heading="advice"),
    Shown(field="speedup", heading="speedup"),
    Shown(field="step_seconds", heading="step\nms", scale=1e3),
    Shown(field="collective", heading="by"),
    Shown(field="wire_bytes", heading="wire\nMB", scale=1e-6),
    Shown(field="pays_on", heading="pays on links"),
    Shown(field="accuracy", heading="accuracy,\npoints"),
    Shown(field="results", heading="stored\nresults"),
    Shown(field="bits", heading="bits an\nelement"),
    Shown(field="gather_limit", heading="all-gather\nup to"),
]


def _row(
    settings: Settings,
    found: Prepared,
    word: str,
    known: Sequence[compare.Row],
    base: Mapping[str, Any],
) -> Row:
    """Return the row of a method by the collective with the best advice, of these the fastest."""
    steps = [step for (name, _), step in found.steps.items() if name == word]
    rows = [_by_collective(settings, found, word, step, known, base) for step in steps]
    return min(rows, key=_rank)


def _rank(row: Row) -> tuple[int, float]:
    return ORDER.index(str(row["advice"])), -float(row["speedup"] or 0)


def _by_collective(
    settings: Settings,
    found: Prepared,
    word: str,
    step: Step,
    known: Sequence[compare.Row],
    base: Mapping[str, Any],
) -> Row:
    method, workers, cluster = step.method, settings.workers[0], settings.cluster
    segments = Segments.of(found.network.shapes, method.granularity)
    bits = 8 * traffic.payload_bytes(method, segments)[0] / found.network.numel
    row: Row = {"method": word, "compressor": repr(method), "collective": step.collective}
    gathers = "allgather" in method.legal_collectives()
    row |= {"bits": bits, "gather_limit": math.ceil(64 / bits) - 1 if gathers and bits else None}
    stored = costs_of(settings, step, known)
    row["results"] = len(stored)
    good = True
    if stored:
        lost = worst(stored)
        row["accuracy"] = "failed" if lost.failed else tables.versus(lost)
        row["accuracy_difference"] = None if lost.failed else lost.difference
        row["accuracy_from"] = f"{lost.first.task}, {lost.first.steps} steps, n={len(lost.values)}"
        good = fits(settings, lost)
    try:
        at = step.at(workers, cluster)
    except UsageError as error:
        return {**row, "advice": REFUSED, "refused": str(error), "speedup": None}
    gain = base["step_seconds"] / at["step_seconds"]
    row |= {key: at[key] for key in ("step_seconds", "wire_bytes", "topology")}
    row["speedup"] = gain
    row |= prediction.pays_fields(step, found.plain, workers, cluster)
    worth = gain >= 1 + settings.margin
    row["advice"] = NO_GAIN if not worth else COSTLY if not good else USE if stored else MEASURE
    row["refused"] = None
    return row


def _advice(settings: Settings, rows: Sequence[Row], most: float) -> list[str]:
    """Return what to do, and the most that any method could gain."""
    used = [row for row in rows if row["advice"] == USE]
    unknown = [row for row in rows if row["advice"] == MEASURE]
    bound = f"If sending and compressing took no time, a step would be {most:.3g} times as fast."
    if used:
        best = used[0]
        said = [
            f"Use {best['method']} by {best['collective']}: predicted {best['speedup']:.3g} times "
            f"as fast, {best['accuracy']} points ({best['accuracy_from']})."
        ]
        if str(best["accuracy_from"]).endswith("n=1"):
            said.append("One seed says little about accuracy: measure more, e.g. --seed 0,1,2.")
    elif most < 1 + settings.margin:
        said = ["Do not compress: the links are no bottleneck here."]
    elif unknown:
        said = ["Do not compress yet: of the methods that gain, no accuracy is known here."]
    elif any(row["advice"] == COSTLY for row in rows):
        said = ["Do not compress: what gains loses more accuracy than the tolerance allows."]
    else:
        said = [f"Do not compress: no method gains {100 * settings.margin:g} %."]
    if unknown and (not used or float(unknown[0]["speedup"] or 0) > float(used[0]["speedup"] or 0)):
        said.append(_to_learn(settings, unknown))
    return [*said, bound]


def _to_learn(settings: Settings, unknown: Sequence[Row]) -> str:
    """Return the command that measures the fastest of these, and others that it can measure, too.

    That are at most three, of the same collective and, where fields are set, the first alone.
    """
    name, *options = str(unknown[0]["method"]).split(":")
    by = str(unknown[0]["collective"])
    alike = [str(row["method"]) for row in unknown if row["collective"] == by]
    names = [name] if options else [word for word in alike if ":" not in word][:3]
    words = ["gcbench", "run", "--task", "cifar10", "--compressor", ",".join(["none", *names])]
    words += [word for option in options for word in ("--set", option)]
    usual = {registry.compressor_class(each).collectives[0] for each in names}
    words += [] if usual == {by} else ["--collective", by]
    words += ["--dense-last"] if settings.dense_last else []
    words += ["--dense-below", str(settings.dense_below)] if settings.dense_below else []
    command = shlex.join([*words, "--seed", "0,1,2"])
    return f"To learn what {','.join(names)} would cost: {command}, then the same command again."


# ---- the picture ---------------------------------------------------------------------------------


def draw(analysis: Analysis, path: Path) -> None:
    """Draw gain against accuracy lost; what nobody measured stands apart."""
    rows = [row for row in analysis.table("methods").rows if row["speedup"]]
    settings = analysis.settings
    styles = pictures.styles(ORDER)
    known = [row for row in rows if row.get("accuracy_difference") is not None]
    apart = len(known) < len(rows)
    gains = [float(row["speedup"] or 0) for row in rows] or [1.0]
    with pictures.canvas(11, 6) as figure:
        grid = figure.subplots(1, 1 + apart, width_ratios=(3, 1)[: 1 + apart], sharey=True)
        panels = list(grid) if apart else [grid]
        left = panels[0]
        marks: list[list[pictures.Mark]] = [[] for _ in panels]
        for row in rows:
            style = styles[str(row["advice"])]
            place = 0 if row in known else 1
            x = 0.0 if place else 100 * float(row["accuracy_difference"] or 0)
            y = float(row["speedup"] or 0)
            mark = pictures.Mark(x, y, 0.0, str(row["method"]), style["color"])
            marks[place].append(mark)
            panels[place].plot(
                x, y, style["marker"], color=style["color"], ms=9, mec="white", mew=0.7
            )
        for axes in panels:
            axes.axhline(1 + settings["margin"], color="0.4", ls=(0, (4, 2)), lw=1)
            if max(gains) > 6 * min(gains):
                axes.set_yscale("log")
                axes.yaxis.set_major_formatter("{x:g}")
        left.axvline(-100 * settings["tolerance"], color="0.4", ls=(0, (4, 2)), lw=1)
        left.margins(x=0.15, y=0.12)
        left.set_xlabel("accuracy against `none`, points: the worst stored result")
        left.set_ylabel("speedup, predicted")
        if apart:
            panels[1].set(xlim=(-1, 1), xticks=[], xlabel="not measured, or failed")
        for name in ORDER:
            if any(row["advice"] == name for row in rows):
                style = styles[name]
                left.plot([], [], style["marker"], color=style["color"], ms=9, label=name)
        figure.legend(loc="outside lower center", ncols=5, fontsize="small")
        figure.suptitle(analysis.table("methods").title, fontsize="medium")
        figure.draw_without_rendering()
        figure.set_layout_engine("none")
        for axes, own in zip(panels, marks, strict=True):
            pictures.write_labels(axes, own)
        pictures.save(figure, path)
