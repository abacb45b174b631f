"""Whether to compress on a given cluster, and with what: predicted gain beside measured cost.

The gain is that of `prediction`, over the better of the uncompressed steps that reduce in fp32 and
in bf16. A method is judged by the legal collective with the best advice, of equal ones the fastest.
Of methods that are tied within the margin the simplest comes first (`prediction.SIMPLE`). The cost
is the accuracy lost in runs by the protocol (`evidence`): those of tasks that read what the model
reads, images or text (`evidence.nearest`), of several rows the worst. What the others show is told
beside it, as a warning. A method whose accuracy or kernels were not measured is never recommended;
the output has the commands that would measure them. A row by another collective counts if both give
the same mean.

By all-gather a worker receives N - 1 payloads of b bits an element, by a ring all-reduce of fp32
2 (N - 1) / N times 32 bits: an all-gather moves less only for fewer than N = 64 / b workers.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from pydantic import Field

from gcbench.core import progress, registry
from gcbench.core.compressor import Compressor, requantizes
from gcbench.core.errors import UsageError
from gcbench.report import figures
from gcbench.report.analysis import Analysis, Ledger, Row, Shown, Table
from gcbench.results import reader
from gcbench.results.schema import Summary
from gcbench.studies import methods
from gcbench.studies.scale import codec, evidence, prediction, shipped, traffic
from gcbench.studies.scale.clusters import Cluster
from gcbench.studies.scale.evidence import Evidence, Tolerance
from gcbench.studies.scale.prediction import HALF, Prepared, Step
from gcbench.training import suites

KIND = "advice"
USE, UNCLEAR, UNTESTED = "use", "unclear", "untested"
LOSES, NO_GAIN, REFUSED = "loses too much", "no gain", "refused"
ORDER = (USE, UNCLEAR, UNTESTED, LOSES, NO_GAIN, REFUSED)
OF_VERDICT = {evidence.FITS: USE, evidence.UNCLEAR: UNCLEAR, evidence.LOSES: LOSES}
SUITE = "main"
"""The suite that is proposed to measure the accuracy of methods without evidence."""
ROWS = "results/reference"
"""The folder of committed rows, below the current folder."""
BF16 = ("DDP: bf16_compress_hook", "FSDP: reduce_dtype=torch.bfloat16")
"""How to reduce in bf16, without and with sharding."""


class Settings(prediction.Settings):
    """The settings that decide the advice."""

    workers: Annotated[
        list[Annotated[int, Field(ge=2, le=prediction.MOST_WORKERS)]],
        Field(min_length=1, max_length=1),
    ]
    tolerance: Annotated[float, Field(ge=0, le=1)]
    """Acceptable loss of accuracy, a fraction of 1."""
    tolerance_loss: Annotated[float, Field(ge=0, allow_inf_nan=False)]
    """Acceptable increase of the test loss, on tasks without an accuracy."""
    margin: Annotated[float, Field(ge=0, allow_inf_nan=False)]
    """Gain below which compression is not worthwhile: 0.05 is 5 %."""
    runs: list[str]
    """Folders and files of results."""

    @property
    def allowed(self) -> Tolerance:
        """The acceptable losses."""
        return Tolerance(self.tolerance, self.tolerance_loss)


def usual_places(runs: Path) -> list[Path]:
    """Return the default places of results, as far as they have some.

    They are the files of rows in `ROWS` below the current folder, those in the package (except
    those with the name of one in the folder), and the folder `runs`.
    """
    files = reader.row_files(Path(ROWS))
    named = {file.name for file in files}
    brought = [file for file in shipped.rows() if file.name not in named]
    done = any((folder / "summary.json").exists() for folder in reader.run_folders(runs))
    return [*files, *brought, *([runs] if done else [])]


# ---- the cost ------------------------------------------------------------------------------------


class Costs(NamedTuple):
    """What runs show of the accuracy of a method, as it would be used."""

    own: Sequence[Evidence]
    """The rows that count for the collective in question."""
    others: Sequence[Evidence]
    """Those by a collective with another mean, which show nothing about it."""


def costs_of(settings: Settings, step: Step, known: Sequence[Evidence], inputs: str = "") -> Costs:
    """Return the rows of exactly this method, as it would be used.

    Rows count if the method has the same fields in all steps, the memory of its source, the same
    tensors in fp32, and the same collective, or one that gives the same mean. A row by all-gather
    that loses too much also counts against a two-shot exchange, whose owners lose something more;
    one that does not lose too much shows nothing about it. `inputs`: what the model reads; a loss
    on a task that reads something else does so only if there is no nearer task.
    """
    found = of_method(settings, step.method, known)
    near = set(map(id, evidence.nearest(found, inputs).near))

    def counts(one: Evidence) -> bool:
        loses = one.judge(settings.allowed) == evidence.LOSES and id(one) in near
        same = _same_mean(step.method, one.row.first.collective, step.collective)
        return same or (step.collective == "twoshot" and loses)

    return Costs([one for one in found if counts(one)], [one for one in found if not counts(one)])


def of_method(settings: Settings, method: Compressor, known: Sequence[Evidence]) -> list[Evidence]:
    """Return the rows of exactly this method, as it would be used, by any collective.

    The name and all fields are the same, and the source of a method that is not built in, too.
    """
    origin = registry.origin(registry.compressors()[method.name])
    asked = {
        "memory": method.memory,
        "memory_options": dict(method.memory_options),
        "start_step": 0,
        "delay": 0,
        "local_steps": 0,
        "dense_last": settings.dense_last,
        "dense_below": settings.dense_below,
    }

    def fits(one: Evidence) -> bool:
        run = one.row.runs[0]
        if not named(run.summary, method) or reader.schedules(run.summary):
            return False
        if not all(same_source(each.summary, origin) for each in one.row.runs):
            return False
        return all(run.config.get(key, value) == value for key, value in asked.items())

    return [one for one in known if fits(one)]


def named(run: Summary, method: Compressor) -> bool:
    """Return whether a run was of a method of this name with these fields."""
    return (run.compressor_name, run.compressor) == (method.name, registry.call(method))


def same_source(run: Summary, origin: Mapping[str, str] | None) -> bool:
    """Return whether a run was of the code that a method has now.

    `origin` is by `registry.origin`. What is built in is taken to be the same in all versions.
    """
    then = (run.provenance.get("plugins") or {}).get("compressor")
    if not isinstance(then, Mapping) or origin is None:
        return then is origin
    digest = origin["sha256"]  # empty for what has no source file
    return bool(digest and then.get("sha256") == digest) or then == origin


def _same_mean(method: Compressor, one: str, other: str) -> bool:
    return one == other or not requantizes(method)


def worst(known: Sequence[Evidence], tolerance: Tolerance) -> Evidence:
    """Return the row with the worst verdict; of equal ones, that with the largest upper limit."""

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
        UsageError: see `prediction.prepare`; or a place of results does not exist.
    """
    found = prediction.prepare(settings, observer, ledger, every=True)
    workers, cluster = settings.workers[0], settings.cluster
    gathered = evidence.gather([Path(place) for place in settings.runs])
    known = {
        key: costs_of(settings, step, gathered.found, found.network.inputs)
        for key, step in found.steps.items()
    }
    rows = _rows(settings, found, known, cluster)
    for row in rows:
        if row["speedup"] is not None:
            step = found.steps[str(row["method"]), str(row["collective"])]
            row |= prediction.pays_fields(found, step, workers, cluster, settings.margin)
    title = (
        f"{found.network.title}, {found.network.numel:,} parameters, "
        f"{prediction.batch_text(found.batch)}, {workers} workers of cluster "
        f"{settings.cluster.name}{', sharded' * settings.sharded}"
    )
    by = "measured kernels where there are any" if found.by_measured else "the floor"
    notes = [
        *found.notes,
        f"use: the method is predicted to gain at least {100 * settings.margin:g} % over the "
        "better of reducing in fp32 and in bf16 by measured kernels, and the 95 % interval of no "
        f"result by which it is judged contains a loss beyond {_allowed(settings)}. unclear: it "
        "may gain as much, but not with its kernels as measured, or these were not measured, or "
        "such a loss is within an interval. untested: it is predicted to be faster, but no stored "
        "run by that collective shows its accuracy. loses too much: a whole interval is beyond "
        "that loss, or a seed diverged. no gain: it gains less.",
        "over fp32 and over bf16: the uncompressed step that reduces in that format divided by "
        f"this step, from measured kernels to the upper bound; step is by {by}. Within a verdict a "
        f"simpler method stands before one that is less than {100 * settings.margin:g} % faster. "
        "worth it on links: the links between nodes with which it gains "
        f"{100 * settings.margin:g} % by measured kernels where there are any.",
        "accuracy there: what the method lost against `none`, as the mean over paired seeds with "
        "its 95 % interval, in the worst of its results on tasks that read what the model reads "
        "(images or text), of all, by name, where there is none or that is not known. on other "
        "inputs: the worst of the others, which decides nothing. Results of a schedule, with other "
        "dense tensors, or by a collective with another mean do not count; but what loses too much "
        "by all-gather does so by two-shot, too. allgather alone, twoshot alone: what it lost by "
        "that collective; by the one advised the mean is another (by two-shot owners encode it "
        "again), and no run shows what that loses.",
        "all-gather up to: with 64 / b workers or more, b being the bits of a payload for each "
        "element, all-gather moves more bytes than an fp32 ring all-reduce; then two-shot or "
        "all-reduce must serve.",
        *(f"Refused: {said}." for said in found.refused.values()),
    ]
    seen = list(_seen(settings, found, gathered.found))
    return Analysis.of(
        KIND,
        settings,
        command,
        answer=_advice(settings, found, rows, known, gathered.found),
        conclusions=[
            *_known(settings, found, gathered, seen),
            *_judged_by(found, seen, rows),
            *_other_sources(found, gathered.found),
            *_unruled(seen),
            *_unknown(settings, rows),
        ],
        tables=[
            Table(name="methods", title=title, shown=_SHOWN, notes=notes, rows=rows),
            Table(
                name="evidence",
                title=f"Where accuracy was seen; {found.network.title} has "
                f"{evidence.count_text(found.network.numel)} parameters",
                shown=_SEEN,
                notes=[
                    "lost is the difference from `none`, paired by seed, in points of accuracy or "
                    "of test loss, with the 95 % interval of Student's t. rate says whether the "
                    "suite's rule chose the learning rate (tuned), whether it lies at the edge of "
                    "what was tried, or was not chosen by that rule (untuned). size is the number "
                    "of your model's parameters divided by that of the model there.",
                ],
                rows=seen,
            ),
        ],
    )


_SHOWN = [
    Shown(field="method", heading="method"),
    Shown(field="advice", heading="advice"),
    Shown(field="over_fp32", heading="over\nfp32"),
    Shown(field="over_bf16", heading="over\nbf16"),
    Shown(field="accuracy", heading="accuracy there"),
    Shown(field="elsewhere", heading="on other\ninputs"),
    Shown(field="step_seconds", heading="step\nms", scale=1e3),
    Shown(field="collective", heading="by"),
    Shown(field="wire_bytes", heading="wire\nMB", scale=1e-6),
    Shown(field="pays_on", heading="worth it on links"),
    Shown(field="results", heading="results"),
    Shown(field="bits", heading="bits an\nelement"),
    Shown(field="gather_limit", heading="all-gather\nup to"),
]
_SEEN = [
    Shown(field="method", heading="method"),
    Shown(field="collective", heading="by"),
    Shown(field="task", heading="task"),
    Shown(field="judged_by", heading="judged\nby it"),
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


Known = Mapping[tuple[str, str], Costs]
"""The evidence for a method by a collective, by method and collective."""


def _rows(
    settings: Settings, found: Prepared, known: Known, cluster: Cluster, longer: float = 1.0
) -> list[Row]:
    """Return a row for each method, sorted by advice, and within equal advice as by `simplest`.

    Each method has the collective with the best advice, of these the fastest. `longer`: factor of
    forward and backward.
    """
    best: dict[str, Row] = {}
    for (word, collective), step in found.steps.items():
        row = _judged(settings, found, step, known[word, collective], cluster, longer)
        row["method"] = word
        if word not in best or _badness(row) < _badness(best[word]):
            best[word] = row
    made: list[Row] = []
    for advice in ORDER:
        left = {word: row for word, row in best.items() if row["advice"] == advice}
        while left:
            gains = {word: -_badness(row)[1] for word, row in left.items()}
            made.append(left.pop(prediction.simplest(gains, settings.margin)))
    return made


def _badness(row: Row) -> tuple[int, float]:
    return ORDER.index(str(row["advice"])), -float(row["gain"] or 0)


def _judged(
    settings: Settings,
    found: Prepared,
    step: Step,
    costs: Costs,
    cluster: Cluster,
    longer: float,
) -> Row:
    """Return the row of a method by a collective: its gain, its loss of accuracy, the advice."""
    method, workers = step.method, settings.workers[0]
    bits = 8 * traffic.gradient_bytes(method, found.network.shapes) / found.network.numel
    row: Row = {"method": "", "compressor": registry.call(method), "collective": step.collective}
    gathers = "allgather" in method.legal_collectives() and not settings.sharded
    row |= {"bits": bits, "gather_limit": math.ceil(64 / bits) - 1 if gathers and bits else None}
    row |= {"results": len(costs.own), "accuracy": "untested"}
    advice = UNTESTED
    inputs, examples = found.network.inputs, _examples(settings, found)
    if costs.others:
        shown = worst(evidence.nearest(costs.others, inputs).near, settings.allowed)
        said = shown.words(settings.allowed).replace(" there", "")
        row["accuracy"] = f"{shown.row.first.collective} alone: {said}"
    if costs.own:
        near, far = evidence.nearest(costs.own, inputs)
        shown = worst(near, settings.allowed)
        if far:
            other = worst(far, settings.allowed)
            words = other.words(settings.allowed).replace(" there", "")
            row["elsewhere"] = f"{other.row.first.task}: {words}"
            row["elsewhere_verdict"] = other.judge(settings.allowed)
        advice = OF_VERDICT[shown.judge(settings.allowed)]
        said = shown.words(settings.allowed)
        if inputs and shown.inputs not in ("", inputs):  # it reads something else: named
            said = f"{shown.row.first.task}: {said.replace(' there', '')}"
        row |= {"accuracy": said, "accuracy_from": shown.place}
        row["accuracy_task"] = shown.row.first.task
        row["distance"] = (
            f"{shown.distance(found.network.numel)}; {shown.budget_distance(examples)}"
        )
        if shown.row.metric == "accuracy" and not shown.row.failed and shown.lost:
            middle, low, high = shown.lost
            row |= {"accuracy_difference": -middle, "accuracy_low": -high, "accuracy_high": -low}
    try:
        at = step.at(workers, cluster, measured=found.by_measured, longer=longer)
        gains = found.gains(step, workers, cluster, longer)
    except UsageError as error:
        return {**row, "advice": REFUSED, "refused": str(error), "speedup": None, "gain": None}
    row |= {key: at[key] for key in ("step_seconds", "wire_bytes", "topology")}
    plain = found.plain.seconds(workers, cluster, longer=longer)
    row["speedup"] = plain / float(at["step_seconds"])
    row |= gains.fields()
    row["gain_low"], row["gain_high"] = gains.better
    row["gain"] = gains.sure
    if gains.better[1] < 1 + settings.margin:
        advice = NO_GAIN
    elif advice == USE and (step.measured is None or gains.sure < 1 + settings.margin):
        advice = UNCLEAR
    row["advice"], row["refused"] = advice, None
    return row


def _examples(settings: Settings, found: Prepared) -> int | None:
    """Return the examples of a step, all workers together; None without a batch."""
    return None if found.batch is None else found.batch * settings.workers[0]


def _seen(settings: Settings, found: Prepared, known: Sequence[Evidence]) -> list[Row]:
    """Return a row for each piece of evidence on the methods in question."""
    rows: list[Row] = []
    for word in dict.fromkeys(word for word, _ in found.steps):
        own: dict[int, Evidence] = {}
        for (name, _), step in found.steps.items():
            if name == word:
                costs = costs_of(settings, step, known, found.network.inputs)
                own |= {id(one): one for one in costs.own}
        near = set(map(id, evidence.nearest([*own.values()], found.network.inputs).near))
        for key, one in own.items():
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
                    **{field: _tidy(scale * lost[field]) if lost else None for field in _LOST},
                    "lost_unit": "points" if points else "loss",
                    "rate": one.rate,
                    "reads": one.inputs or None,
                    "judged_by": "yes" if key in near else "no",
                    "size": found.network.numel / first.params if first.params else None,
                    "suite": one.suite,
                }
            )
    return rows


def _judged_by(found: Prepared, seen: Sequence[Row], rows: Sequence[Row]) -> Iterator[str]:
    """Yield sentences on the tasks by which methods are judged, and what others warn of."""
    if not seen:
        return

    def tasks(told: Sequence[Row]) -> str:
        of = {str(row["task"]): str(row["reads"] or "unknown inputs") for row in told}
        return ", ".join(f"{task} ({reads})" for task, reads in of.items())

    reads = found.network.inputs
    judging = [row for row in seen if row["judged_by"] == "yes"]
    alike = [row for row in judging if not reads or row["reads"] == reads]
    others = [row for row in judging if row not in alike]
    decided = tasks(alike) if alike else "no run of such a task"
    what = f"reads {reads}" if reads else "reads what cannot be told from its layers"
    said = f"{found.network.title} {what}: judged by {decided}"
    if others:
        names = ", ".join(dict.fromkeys(str(row["method"]) for row in others))
        said += f"; what was not seen there ({names}) by {tasks(others)}"
    if any(row["judged_by"] == "no" for row in seen):
        said += "; other results only warn"
    yield f"{said}. These runs are short: a loss that long training shows is not seen."
    warned = [
        f"{row['method']} on {row['elsewhere']}"
        for row in rows
        if row["advice"] in (USE, UNCLEAR) and _warns(row)
    ]
    if warned:
        yield f"Warning, from the other tasks: {'; '.join(warned)}."


def _other_sources(found: Prepared, known: Sequence[Evidence]) -> Iterator[str]:
    """Yield a sentence on each method of which there are runs by another source than today's."""
    for method in {step.method.name: step.method for step in found.steps.values()}.values():
        origin = registry.origin(registry.compressors()[method.name])
        runs = [run.summary for one in known for run in one.row.runs]
        own = [run for run in runs if run.compressor_name == method.name]
        if others := sum(not same_source(run, origin) for run in own):
            yield (
                f"{others:,} runs of {method.name} are of another source than today's, and count "
                "for nothing."
            )


def _unruled(seen: Sequence[Row]) -> Iterator[str]:
    """Yield a sentence on rows of which it is not known how their learning rates were chosen."""
    if names := dict.fromkeys(str(row["suite"]) for row in seen if row["rate"] is None):
        yield (
            f"It is not known by what rule the learning rates of rows of {', '.join(names)} were "
            "chosen: at a rate that suits `none` or the method better, the difference says little "
            "of the method."
        )


def _tidy(value: float) -> float:
    """Return the value without what rounding leaves where two means are equal."""
    return round(value, 9) + 0.0


def _known(
    settings: Settings, found: Prepared, gathered: evidence.Gathered, seen: Sequence[Row]
) -> list[str]:
    """Return sentences on what was read, and for how many methods it shows the accuracy."""
    read = (
        f"No results were read: the package brings no rows, and there are none in {ROWS} and no "
        "finished run below this folder."
    )
    if settings.runs:
        read = gathered.told([shipped.name_of(Path(place)) for place in settings.runs])
    every = {word for word, _ in found.steps}
    told = {str(row["method"]) for row in seen}
    if not told:
        return [
            read,
            "There is no evidence of accuracy: no run made for a suite with a holdout, of at least "
            f"{evidence.LEAST_SEEDS} seeds, is of these methods as they would be used.",
        ]
    tasks = ", ".join(dict.fromkeys(str(row["task"]) for row in seen))
    return [read, f"The accuracy of {len(told)} of {len(every)} methods was seen, on {tasks}."]


def _answer(settings: Settings, found: Prepared, rows: Sequence[Row], half: float) -> str:
    """Return what to do: a method, `HALF` (reduce in bf16), or `none`.

    `half`: the speedup of reducing in bf16 over fp32.
    """
    used = [row for row in rows if row["advice"] == USE]
    if used:
        return str(used[0]["method"])
    return HALF if half >= 1 + settings.margin else "none"


def _advice(
    settings: Settings,
    found: Prepared,
    rows: Sequence[Row],
    known: Known,
    gathered: Sequence[Evidence],
) -> list[str]:
    """Return sentences: what to do, what would change that, the most that a method could gain."""
    workers, cluster = settings.workers[0], settings.cluster
    by = {advice: [row for row in rows if row["advice"] == advice] for advice in ORDER}
    used, unclear = by[USE], by[UNCLEAR]
    free = found.free.seconds(workers, cluster)
    fp32, bf16 = (one.seconds(workers, cluster) for one in found.baselines)
    most, margin = min(fp32, bf16) / free, settings.margin
    said = []
    if used:
        best = used[0]
        said.append(f"Use {_told(best)}, {best['accuracy']} ({_seen_at(best)}).")
        if _warns(best):
            said.append(f"Warning: {best['method']} on {best['elsewhere']}.{_without(used)}")
    elif most < 1 + margin:
        said.append("Do not compress: the links are no bottleneck here.")
    elif unclear:
        best = unclear[0]
        why = "More seeds would tell."
        if best["gain_low"] is None:
            open_ = [str(row["method"]) for row in (*used, *unclear, *by[UNTESTED])]
            why = f"Its kernels were not measured: {codec.measuring(open_)}."
        elif float(best["gain"] or 0) < 1 + margin:
            why = f"By the measured kernels it gains less than {100 * margin:g} %."
        said.append(
            f"Do not compress yet: {_told(best)}, {best['accuracy']} ({_seen_at(best)}). {why}"
        )
    elif by[UNTESTED]:
        said.append("Do not compress yet: of the methods that gain, no run shows the accuracy.")
    elif by[LOSES]:
        said.append(f"Do not compress: what gains loses more than {_allowed(settings)}.")
    else:
        said.append(f"Do not compress: no method gains {100 * margin:g} %.")
    if not used and fp32 / bf16 >= 1 + margin:
        seen = "untested"
        if cast := of_method(settings, methods.parse("bf16"), gathered):
            shown = worst(evidence.nearest(cast, found.network.inputs).near, settings.allowed)
            distance = shown.distance(found.network.numel)
            seen = f"{shown.words(settings.allowed)} ({shown.place}; {distance})"
        said.append(
            f"Reduce in bf16 ({BF16[settings.sharded]}): predicted {fp32 / bf16:.3g} times as fast "
            f"as in fp32. Accuracy of values rounded so, by our exchange: {seen}."
        )

    def answer(there: Cluster, longer: float) -> tuple[str, float]:
        """Return what to do there, and its gain over reducing in fp32."""
        again = _rows(settings, found, known, there, longer)
        plain, cast = (one.seconds(workers, there, longer=longer) for one in found.baselines)
        what = _answer(settings, found, again, plain / cast)
        for row in again:
            if row["method"] == what:
                low, high = row["over_fp32_low"], row["over_fp32_high"]
                return what, float((high if low is None else low) or 0)
        return what, plain / cast if what == HALF else 1.0

    if cluster.nodes_of(workers) > 1:
        said.append(prediction.sensitivity(found, cluster, answer))
    said.append(
        "If sending and compressing gradients took no time, a step would be "
        f"{fp32 / free:.3g} times as fast as reducing in fp32, {bf16 / free:.3g} as in bf16."
    )
    return said


def _unknown(settings: Settings, rows: Sequence[Row]) -> list[str]:
    """Return sentences on faster methods without evidence, and the command to measure them."""
    used = [row for row in rows if row["advice"] == USE]
    least = float(used[0]["gain"] or 0) if used else 0.0
    untested = [row for row in rows if row["advice"] == UNTESTED]
    faster = [row for row in untested if float(row["gain"] or 0) > least]
    if not faster:
        return []
    bound = {True: " (by its upper bound)", False: ""}
    names = ", ".join(f"{_by(row)}{bound[row['gain_low'] is None]}" for row in faster)
    return [
        f"Untested: predicted faster, no stored run shows their accuracy: {names}.",
        *_to_learn(settings, faster),
    ]


def _warns(row: Row) -> bool:
    """Whether results on other inputs than the model's do not show that a method fits."""
    return row.get("elsewhere_verdict") in (evidence.LOSES, evidence.UNCLEAR)


def _without(used: Sequence[Row]) -> str:
    """Return a sentence on the first method to use of which no result warns, "" without one."""
    for row in used:
        if not _warns(row):
            return f" Without such a result: {_told(row)}."
    return ""


def _by(row: Row) -> str:
    return f"{row['method']} by {row['collective']}"


def _told(row: Row) -> str:
    """Return a method and its predicted gain in words."""
    return (
        f"{_by(row)}: predicted {row['over_fp32']} times as fast as reducing in fp32, "
        f"{row['over_bf16']} as in bf16"
    )


def _seen_at(row: Row) -> str:
    return f"{row['accuracy_from']}; {row['distance']}"


@cache
def _entries() -> set[tuple[str, str, str, str]]:
    """Return the methods of the suite: name, expression, memory and collective of each."""
    configs = [point.config for point in suites.load(SUITE).points()]
    return {
        (c.compressor, registry.call(c.make_compressor()), c.memory, c.collective) for c in configs
    }


def _in_suite(settings: Settings, row: Row) -> bool:
    """Whether the suite has runs of the method that count for the row's collective."""
    method = methods.parse(str(row["method"]))
    if settings.dense_last or settings.dense_below:
        return False
    return any(
        (call, memory) == (registry.call(method), method.memory)
        and _same_mean(method, collective, str(row["collective"]))
        for name, call, memory, collective in _entries()
        if name == method.name
    )


def _to_learn(settings: Settings, untested: Sequence[Row]) -> list[str]:
    """Return sentences with the commands that measure the accuracy of these methods."""
    there = [row for row in untested if _in_suite(settings, row)]
    rest = [row for row in untested if row not in there]
    said = []
    if there:
        names = [methods.parse(str(row["method"])).name for row in there]
        words = ["gcbench", "run", "--suite", SUITE]
        words += ["--compressor", ",".join(dict.fromkeys(["none", *names]))]
        words += ["--rows", f"{ROWS}/{SUITE}.parquet"]
        said.append(
            f"To learn it of {', '.join(map(_by, there))}: {shlex.join(words)}, then this command "
            "again."
        )
    if rest:
        file = "mine.yaml"
        words = ["gcbench", "run", "--suite", file, "--rows", f"{ROWS}/mine.parquet"]
        said.append(
            f"To learn it of {', '.join(map(_by, rest))}: copy the suite {SUITE} (`gcbench list "
            f"suites`) to {file}, with none and these methods, collectives and dense tensors as "
            f"entries, then {shlex.join(words)} and this command."
        )
    return said


# ---- the picture ---------------------------------------------------------------------------------


_PLACES = {USE: 2, UNCLEAR: 1, UNTESTED: 0, LOSES: 3}
"""Advice -> index in the colour-blind palette; only recommended methods are green."""


def _styles() -> dict[str, dict[str, Any]]:
    """Return colour and marker of each advice; methods that gain nothing are grey."""
    import seaborn

    palette = seaborn.color_palette("colorblind")
    made = figures.styles(ORDER)
    for name, style in made.items():
        style["color"] = palette[_PLACES[name]] if name in _PLACES else "0.6"
    return made


def draw(analysis: Analysis, path: Path) -> None:
    """Draw the gain of each method, and, where there is evidence, gain against accuracy."""
    rows = [row for row in analysis.table("methods").rows if row["speedup"]]
    settings, styles = analysis.settings, _styles()
    known = [row for row in rows if row.get("accuracy_difference") is not None]
    with figures.canvas(13 if known else 8, max(4.5, 2.2 + 0.32 * len(rows))) as figure:
        widths = (2, 3) if known else (1,)
        axes, *others = figure.subplots(1, len(widths), width_ratios=widths, squeeze=False)[0]
        for place, row in enumerate(reversed(rows)):
            style, high = styles[str(row["advice"])], float(row["gain_high"] or 0)
            low = high if row["gain_low"] is None else float(row["gain_low"])
            axes.plot([low, high], [place, place], color=style["color"], lw=3, alpha=0.5)
            axes.plot(low, place, style["marker"], color=style["color"], ms=8)
        axes.set_yticks(range(len(rows)), [str(row["method"]) for row in reversed(rows)])
        axes.tick_params(axis="y", labelsize="small")
        axes.axvline(1, color="0.4", lw=1)
        axes.axvline(1 + settings["margin"], color="0.4", ls=(0, (4, 2)), lw=1)
        axes.margins(x=0.1)
        axes.set_xlabel("times as fast as the better of fp32 and bf16,\n"
                        "from measured kernels to the upper bound")  # fmt: skip
        for name in ORDER:
            if any(row["advice"] == name for row in rows):
                style = styles[name]
                axes.plot([], [], style["marker"], color=style["color"], ms=8, label=name)
        figure.legend(loc="outside lower center", ncols=5, fontsize="small")
        title = analysis.table("methods").title
        figure.suptitle(title if known else title.replace(", batch", ",\nbatch"), fontsize="medium")
        if others:
            marks = _against_accuracy(others[0], known, styles, settings)
            figure.draw_without_rendering()
            figure.set_layout_engine("none")
            figures.write_labels(others[0], marks)
        figures.save(figure, path)


def _against_accuracy(
    axes: Any,
    known: Sequence[Row],
    styles: Mapping[str, Mapping[str, Any]],
    settings: Mapping[str, Any],
) -> list[figures.Mark]:
    """Draw gain against accuracy lost, and return the positions for the methods' names."""
    marks = []
    for row in known:
        style, y = styles[str(row["advice"])], float(row["gain"] or 0)
        x, low, high = (
            100 * float(row[f"accuracy_{end}"] or 0) for end in ("difference", "low", "high")
        )
        axes.plot([low, high], [y, y], color=style["color"], lw=1)
        axes.plot(x, y, style["marker"], color=style["color"], ms=9, mec="white", mew=0.7)
        name, half = str(row["method"]), (high - low) / 2
        marks.append(figures.Mark(x, y, 0.0, name, style["color"], across=half))
    axes.axhline(1 + settings["margin"], color="0.4", ls=(0, (4, 2)), lw=1)
    axes.axvline(-100 * settings["tolerance"], color="0.4", ls=(0, (4, 2)), lw=1)
    axes.margins(x=0.15, y=0.12)
    axes.set_xlabel("accuracy against `none`, points,\nwith 95 % interval: the worst result")
    axes.set_ylabel("times as fast, by measured kernels")
    return marks
