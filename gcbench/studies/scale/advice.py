"""Whether to compress on a given cluster, and with what: predicted gain beside measured cost.

The gain is `prediction`'s, each method by the legal collective with the best advice, then the
fastest. The cost is the accuracy lost in rows of the protocol (`evidence`): of several rows the
worst. What nobody measured is not taken for free: such a method is never advised, and the command
that measures it is told. A row by another collective counts where all give one mean.

By all-gather a worker is handed (N - 1) payloads of b bits an element, by a ring all-reduce of fp32
it is handed 2 (N - 1) / N times 32 bits: an all-gather moves less only below N = 64 / b workers.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from gcbench.core.compressor import Segments
from gcbench.core.errors import UsageError
from gcbench.reporting import figures, reader
from gcbench.reporting.analysis import Analysis, Ledger, Row, Shown, Table, provenance
from gcbench.studies import methods
from gcbench.studies.scale import evidence, prediction, traffic
from gcbench.studies.scale.evidence import Evidence, Tolerance
from gcbench.studies.scale.prediction import Prepared, Step
from gcbench.training import progress, suites

KIND = "advice"
USE, UNCLEAR, UNTESTED = "use", "unclear", "untested"
LOSES, NO_GAIN, REFUSED = "loses too much", "no gain", "refused"
ORDER = (USE, UNCLEAR, UNTESTED, LOSES, NO_GAIN, REFUSED)
OF_VERDICT = {evidence.FITS: USE, evidence.UNCLEAR: UNCLEAR, evidence.LOSES: LOSES}
SUITE = "main"
"""The suite whose runs tell the accuracy of a method that has none."""
ROWS = "results/reference"
"""Where committed rows lie."""


class Settings(prediction.Settings):
    """What decides the advice."""

    workers: Annotated[
        list[Annotated[int, Field(ge=2, le=prediction.MOST_WORKERS)]],
        Field(min_length=1, max_length=1),
    ]
    tolerance: Annotated[float, Field(ge=0, le=1)]
    """Accuracy that may be lost, a fraction."""
    tolerance_loss: Annotated[float, Field(ge=0, allow_inf_nan=False)]
    """What may be added to the test loss of tasks without an accuracy."""
    margin: Annotated[float, Field(ge=0, allow_inf_nan=False)]
    """Gain below which it is not worth while: 0.05 is 5 %."""
    runs: list[str]
    """Where results are."""

    @property
    def allowed(self) -> Tolerance:
        """What may be lost."""
        return Tolerance(self.tolerance, self.tolerance_loss)


def usual_places(runs: Path) -> list[Path]:
    """Return where results are looked for when none are named, of those places that have some.

    Files of rows in `ROWS` below the current folder, and the folder `runs`.
    """
    files = reader.row_files(Path(ROWS))
    done = any((folder / "summary.json").exists() for folder in reader.run_folders(runs))
    return [*files, *([runs] if done else [])]


# ---- the cost ------------------------------------------------------------------------------------


def costs_of(settings: Settings, step: Step, known: Sequence[Evidence]) -> list[Evidence]:
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
        "local_steps": 0,
        "dense_last": settings.dense_last,
        "dense_below": settings.dense_below,
    }

    def counts(one: Evidence) -> bool:
        run = one.row.runs[0]
        if run.summary.compressor != repr(method) or reader.schedules(run.summary):
            return False
        if any(run.config.get(key, value) != value for key, value in asked.items()):
            return False
        same = run.summary.collective == step.collective or not method.requantizes
        loses = one.judge(settings.allowed) == evidence.LOSES
        return same or (step.collective == "twoshot" and loses)

    return [one for one in known if counts(one)]


def worst(known: Sequence[Evidence], tolerance: Tolerance) -> Evidence:
    """Return the row with the worst verdict, of equal ones that which may have lost most."""

    def badness(one: Evidence) -> tuple[int, bool, float]:
        lost = one.lost
        place = evidence.VERDICTS.index(one.judge(tolerance))
        allowed = tolerance.accuracy if one.row.metric == "accuracy" else tolerance.loss
        most = math.inf if lost is None else lost[2] / allowed if allowed else lost[2]
        return place, bool(one.row.failed), most

    return max(known, key=badness)


# ---- the analysis --------------------------------------------------------------------------------


def run(settings: Settings, command: str, observer: progress.Observer, ledger: Ledger) -> Analysis:
    """Rank the methods for a model on a cluster.

    Raises:
        UsageError: see `prediction.prepare`; or results that are not there.
    """
    found = prediction.prepare(settings, observer, ledger, every=True)
    workers = settings.workers[0]
    gathered = evidence.gather([Path(place) for place in settings.runs])
    base = found.plain.at(workers, settings.cluster)
    rows = [
        _row(settings, found, word, gathered.found, base)
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
        f"use: predicted to gain at least {100 * settings.margin:g} %, and in no result a loss "
        f"beyond {_allowed(settings)} is within the 95 % interval. unclear: gains as much, but "
        "such a loss is within the interval. loses too much: the whole interval is beyond it, or a "
        "seed diverged. untested: predicted faster, no run shows its accuracy. no gain: gains "
        "less. speedup: step of `none` by all-reduce / step, predicted.",
        "accuracy there: what the worst result of the method lost against `none`, mean of paired "
        "seeds with its 95 % interval. Results of a schedule, with other dense tensors, or by a "
        "collective with another mean do not count, but what loses too much by all-gather does so "
        "by two-shot, too. all-gather up to: fewer than 64 / b workers, b the bits an element of a "
        "payload; beyond, it moves more bytes than fp32 by a ring all-reduce, and two-shot or "
        "all-reduce must serve.",
    ]
    seen = list(_seen(settings, found, gathered.found))
    return Analysis(
        kind=KIND,
        settings=settings.model_dump(mode="json"),
        command=command,
        provenance=provenance(),
        conclusions=[
            *_known(settings, found, gathered, seen),
            *_advice(settings, rows, most),
        ],
        tables=[
            Table(name="methods", title=title, shown=_SHOWN, notes=notes, rows=rows),
            Table(
                name="evidence",
                title=f"Where accuracy was seen; {found.network.title} has "
                f"{evidence.count_text(found.network.numel)} parameters",
                shown=_SEEN,
                notes=[
                    "lost: against `none`, paired by seed, in points of accuracy or of test loss, "
                    "with the 95 % interval of Student's t. rate: chosen by the suite's rule "
                    "(tuned), at the edge of what was tried, or not by it (untuned). size: "
                    "parameters of your model over those there.",
                ],
                rows=seen,
            ),
        ],
    )


_SHOWN = [
    Shown(field="method", heading="method"),
    Shown(field="advice", heading="advice"),
    Shown(field="speedup", heading="speedup"),
    Shown(field="accuracy", heading="accuracy there"),
    Shown(field="step_seconds", heading="step\nms", scale=1e3),
    Shown(field="collective", heading="by"),
    Shown(field="wire_bytes", heading="wire\nMB", scale=1e-6),
    Shown(field="pays_on", heading="pays on links"),
    Shown(field="results", heading="results"),
    Shown(field="bits", heading="bits an\nelement"),
    Shown(field="gather_limit", heading="all-gather\nup to"),
]
_SEEN = [
    Shown(field="method", heading="method"),
    Shown(field="collective", heading="by"),
    Shown(field="task", heading="task"),
    Shown(field="network", heading="network"),
    Shown(field="parameters", heading="para-\nmeters"),
    Shown(field="steps", heading="steps"),
    Shown(field="batch", heading="batch"),
    Shown(field="workers", heading="workers"),
    Shown(field="seeds", heading="seeds"),
    Shown(field="lost", heading="lost"),
    Shown(field="lost_low", heading="from"),
    Shown(field="lost_high", heading="to"),
    Shown(field="lost_unit", heading="of"),
    Shown(field="rate", heading="rate"),
    Shown(field="size", heading="size,\ntimes"),
    Shown(field="suite", heading="suite"),
]

_LOST = ("lost", "lost_low", "lost_high")


def _allowed(settings: Settings) -> str:
    return f"{100 * settings.tolerance:g} points of accuracy or {settings.tolerance_loss:g} of loss"


def _row(
    settings: Settings,
    found: Prepared,
    word: str,
    known: Sequence[Evidence],
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
    known: Sequence[Evidence],
    base: Mapping[str, Any],
) -> Row:
    method, workers, cluster = step.method, settings.workers[0], settings.cluster
    segments = Segments.of(found.network.shapes, method.granularity)
    bits = 8 * traffic.payload_bytes(method, segments)[0] / found.network.numel
    row: Row = {"method": word, "compressor": repr(method), "collective": step.collective}
    gathers = "allgather" in method.legal_collectives()
    row |= {"bits": bits, "gather_limit": math.ceil(64 / bits) - 1 if gathers and bits else None}
    own = costs_of(settings, step, known)
    row |= {"results": len(own), "accuracy": "untested"}
    advice = UNTESTED
    if own:
        shown = worst(own, settings.allowed)
        advice = OF_VERDICT[shown.judge(settings.allowed)]
        row |= {"accuracy": shown.words(settings.allowed), "accuracy_from": shown.place}
        row["distance"] = shown.distance(found.network.numel)
        if shown.row.metric == "accuracy" and not shown.row.failed and shown.lost:
            middle, low, high = shown.lost
            row |= {"accuracy_difference": -middle, "accuracy_low": -high, "accuracy_high": -low}
    try:
        at = step.at(workers, cluster)
    except UsageError as error:
        return {**row, "advice": REFUSED, "refused": str(error), "speedup": None}
    gain = base["step_seconds"] / at["step_seconds"]
    row |= {key: at[key] for key in ("step_seconds", "wire_bytes", "topology")}
    row["speedup"] = gain
    row |= prediction.pays_fields(step, found.plain, workers, cluster)
    row["advice"] = advice if gain >= 1 + settings.margin else NO_GAIN
    row["refused"] = None
    return row


def _seen(settings: Settings, found: Prepared, known: Sequence[Evidence]) -> list[Row]:
    """Return a row for each result of the methods that are looked at."""
    rows: list[Row] = []
    for word in dict.fromkeys(word for word, _ in found.steps):
        own: dict[int, Evidence] = {}
        for (name, _), step in found.steps.items():
            if name == word:
                own |= {id(one): one for one in costs_of(settings, step, known)}
        for one in own.values():
            first, config = one.row.first, one.row.runs[0].config
            points = one.row.metric == "accuracy"
            scale = 100.0 if points else 1.0
            lost = {} if one.lost is None else dict(zip(_LOST, one.lost, strict=True))
            rows.append(
                {
                    "method": word,
                    "collective": first.collective,
                    "task": first.task,
                    "network": (config.get("task_options") or {}).get("network"),
                    "parameters": first.params,
                    "steps": first.steps,
                    "batch": first.batch,
                    "workers": first.workers,
                    "seeds": one.seeds,
                    "failed": len(one.row.failed),
                    **{field: scale * lost[field] if lost else None for field in _LOST},
                    "lost_unit": "points" if points else "loss",
                    "rate": one.rate,
                    "size": found.network.numel / first.params if first.params else None,
                    "suite": one.suite,
                }
            )
    return rows


def _known(
    settings: Settings, found: Prepared, gathered: evidence.Gathered, seen: Sequence[Row]
) -> list[str]:
    """Return what was read, and of how many methods it shows the accuracy."""
    read = f"No results were read: no rows in {ROWS}, and no finished run, below this folder."
    if settings.runs:
        read = gathered.told(settings.runs)
    every = {word for word, _ in found.steps} - {"none"}
    told = {str(row["method"]) for row in seen}
    if not told:
        return [
            read,
            "There is no evidence of accuracy: no run made for a suite with a holdout, of at least "
            f"{evidence.LEAST_SEEDS} seeds, is of these methods as they would be used.",
        ]
    tasks = ", ".join(dict.fromkeys(str(row["task"]) for row in seen))
    return [read, f"The accuracy of {len(told)} of {len(every)} methods was seen, on {tasks}."]


def _advice(settings: Settings, rows: Sequence[Row], most: float) -> list[str]:
    """Return what to do, and the most that any method could gain."""
    used = [row for row in rows if row["advice"] == USE]
    untested = [row for row in rows if row["advice"] == UNTESTED]
    unclear = [row for row in rows if row["advice"] == UNCLEAR]
    bound = f"If sending and compressing took no time, a step would be {most:.3g} times as fast."
    if used:
        best = used[0]
        said = [
            f"Use {best['method']} by {best['collective']}: predicted {best['speedup']:.3g} times "
            f"as fast, {best['accuracy']} ({best['accuracy_from']}; {best['distance']})."
        ]
    elif most < 1 + settings.margin:
        said = ["Do not compress: the links are no bottleneck here."]
    elif unclear:
        best = unclear[0]
        said = [
            f"Do not compress yet: {best['method']} by {best['collective']} is predicted "
            f"{best['speedup']:.3g} times as fast, but {best['accuracy']} "
            f"({best['accuracy_from']}; {best['distance']}). More seeds would tell."
        ]
    elif untested:
        said = ["Do not compress yet: of the methods that gain, no run shows the accuracy."]
    elif any(row["advice"] == LOSES for row in rows):
        said = [f"Do not compress: what gains loses more than {_allowed(settings)}."]
    else:
        said = [f"Do not compress: no method gains {100 * settings.margin:g} %."]
    least = float(used[0]["speedup"] or 0) if used else 0.0
    faster = [row for row in untested if float(row["speedup"] or 0) > least]
    if faster:
        names = ", ".join(str(row["method"]) for row in faster)
        said.append(f"Untested: predicted faster, no run shows their accuracy: {names}.")
        said.append(_to_learn(settings, faster))
    return [*said, bound]


@cache
def _entries() -> set[tuple[str, str]]:
    """Return the methods of the suite, with what they carry."""
    configs = [point.config for point in suites.load(SUITE).points()]
    return {(repr(config.make_compressor()), config.memory) for config in configs}


def _to_learn(settings: Settings, untested: Sequence[Row]) -> str:
    """Return how to learn the accuracy of these methods, by the suite that compares them."""
    made = {str(row["method"]): methods.parse(str(row["method"])) for row in untested}
    there = [m.name for m in made.values() if (repr(m), m.memory) in _entries()]
    if there and not settings.dense_last and not settings.dense_below:
        names = ",".join(dict.fromkeys(["none", *there]))
        words = ["gcbench", "run", "--suite", SUITE, "--compressor", names]
        words += ["--rows", f"{ROWS}/{SUITE}.parquet"]
        return f"To learn it of {', '.join(there)}: {shlex.join(words)}, then this command again."
    file = "mine.yaml"
    words = ["gcbench", "run", "--suite", file, "--rows", f"{ROWS}/mine.parquet"]
    return (
        f"To learn it: copy the suite {SUITE} (`gcbench list suites`) to {file}, with the methods "
        f"and dense tensors asked for here as entries, then {shlex.join(words)} and this command."
    )


# ---- the picture ---------------------------------------------------------------------------------


def draw(analysis: Analysis, path: Path) -> None:
    """Draw gain against accuracy lost; what has no points of accuracy stands apart."""
    rows = [row for row in analysis.table("methods").rows if row["speedup"]]
    settings = analysis.settings
    styles = figures.styles(ORDER)
    known = [row for row in rows if row.get("accuracy_difference") is not None]
    apart = len(known) < len(rows)
    gains = [float(row["speedup"] or 0) for row in rows] or [1.0]
    with figures.canvas(11, 6) as figure:
        grid = figure.subplots(1, 1 + apart, width_ratios=(3, 1)[: 1 + apart], sharey=True)
        panels = list(grid) if apart else [grid]
        left = panels[0]
        marks: list[list[figures.Mark]] = [[] for _ in panels]
        for row in rows:
            style = styles[str(row["advice"])]
            place = 0 if row in known else 1
            x = 0.0 if place else 100 * float(row["accuracy_difference"] or 0)
            y = float(row["speedup"] or 0)
            if not place:
                ends = [100 * float(row[f"accuracy_{end}"] or 0) for end in ("low", "high")]
                left.plot(ends, [y, y], color=style["color"], lw=1)
            mark = figures.Mark(x, y, 0.0, str(row["method"]), style["color"])
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
        left.set_xlabel("accuracy against `none`, points, with 95 % interval: the worst result")
        left.set_ylabel("speedup, predicted")
        if apart:
            panels[1].set(xlim=(-1, 1), xticks=[], xlabel="untested, diverged, or a loss")
        for name in ORDER:
            if any(row["advice"] == name for row in rows):
                style = styles[name]
                left.plot([], [], style["marker"], color=style["color"], ms=9, label=name)
        figure.legend(loc="outside lower center", ncols=5, fontsize="small")
        figure.suptitle(analysis.table("methods").title, fontsize="medium")
        figure.draw_without_rendering()
        figure.set_layout_engine("none")
        for axes, own in zip(panels, marks, strict=True):
            figures.write_labels(axes, own)
        figures.save(figure, path)
