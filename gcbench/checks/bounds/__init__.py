"""`gcbench bounds`: the papers' convergence theorems, and what methods declare, put to the test.

Compressors run in three places: on known inputs and in compressed training of a task
(`codec_claims`, both by means of `audit`), and in SGD on quadratics whose constants are known
(`quadratic_claims`). Which claims apply to a method follows from its declarations, never from its
name. Properties of gradients themselves, measured while no compressor runs, are in a table of their
own (`observe`, `gradient_claims`). `claims` has the rule by which all are judged.
"""

from __future__ import annotations

import fnmatch
import math
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from gcbench.checks.bounds import (
    audit,
    codec_claims,
    gradient_claims,
    gradient_tables,
    quadratic_claims,
    training,
)
from gcbench.checks.bounds.claims import (
    KINDS,
    LOOSE,
    LOOSELY,
    VERDICTS,
    Judged,
    MethodVerdicts,
    Unit,
)
from gcbench.checks.bounds.observe import Plan, Record, Watch
from gcbench.core import progress
from gcbench.core.compressor import Compressor
from gcbench.core.errors import Interrupted, PayloadError, UsageError, unknown
from gcbench.report import analysis as measuring
from gcbench.report import figures
from gcbench.report.analysis import Analysis, Ledger, Row, Table
from gcbench.training import captures, configuration, grid, methods
from gcbench.training.configuration import Config

if TYPE_CHECKING:
    from matplotlib.axes import Axes

KIND = "bounds"
PUBLISHED = (
    *("qsgd:norm=2", "terngrad:clip=0", "powersgd:warm_start=false", "randomk:scaled=false"),
    "int8:rounding=stochastic",
)
"""Configurations that theorems are about, though they are not the defaults: also tested."""

_GENERIC = (*codec_claims.OF_METHODS, *quadratic_claims.OF_METHODS)

Count = Annotated[int, Field(ge=1)]


class Settings(BaseModel):
    """The settings that decide the verdicts."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    task: str = "digits"
    task_options: dict[str, Any] = {}
    compressor: str = "none"
    """The compressor of the training whose gradients are observed, with its fields after colons."""
    workers: Count = 4
    steps: Count = 200
    batch: Count | None = None
    lr: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    seeds: tuple[Annotated[int, Field(ge=0, lt=2**63)], ...] = (0, 1, 2)
    every: Count = 10
    snapshots: Count = 3
    batches: Annotated[int, Field(ge=8)] = 128
    compressed_steps: Annotated[int, Field(ge=0)] = 20
    """Training steps with each method and seed; 0: none."""
    methods: str = ""
    """Comma-separated; empty: all registered ones and `PUBLISHED`. `compressor` is added."""
    claims: str = "*"
    """A shell pattern of the claims' names."""
    quadratic_only: bool = False
    """Whether nothing is trained: only known inputs and quadratics."""
    sources: dict[str, str] = {}
    """By `methods.sources`; `make` fills it."""

    def config(self, seed: int) -> Config:
        """Return the config of one training run.

        Raises:
            UsageError: see `Config.make`.
        """
        name, options = grid.method(self.compressor)
        shared = {"task", "task_options", "workers", "steps", "batch", "lr"}
        values = self.model_dump(include=shared, exclude_none=True)
        config = Config.make({**values, "compressor": name, "options": options, "seed": seed})
        configuration.check_limits(config)
        return config

    def chosen(self) -> dict[str, Compressor]:
        """Return the methods to test, by their words; a file is called by its registered name."""
        from gcbench.core import registry

        chosen = methods.all_of(self.methods or None, [*registry.compressors(), *PUBLISHED])
        if self.compressor != "none":  # the compressor of the training is tested as well
            chosen.setdefault(self.compressor, methods.parse(self.compressor))
        return {methods.short(word): method for word, method in chosen.items()}

    def wanted(self, name: str) -> bool:
        """Return whether a claim is to be tested; of a name that ends in "/", any of its group."""
        if not name.endswith("/"):
            return fnmatch.fnmatchcase(name, self.claims)
        return any(c.name.startswith(name) and self.wanted(c.name) for c in gradient_claims.FIXED)

    def snapshot_steps(self) -> tuple[int, ...]:
        """Return the steps of the snapshots, from the first to the last."""
        return captures.spread(self.steps, min(self.snapshots, self.steps))


def make(**values: Any) -> Settings:
    """Return settings with the values that the user gave, checked.

    Raises:
        UsageError: a value is out of range, no claim matches, the training's config is invalid, or
            seeds are missing or repeated.
    """
    try:
        settings = Settings(**values)
    except ValidationError as error:
        first = error.errors()[0]
        where = "/".join(map(str, first["loc"]))
        raise UsageError(f"{where}={first['input']!r}: {first['msg'].lower()}") from None
    chosen = settings.chosen()
    fixed = () if settings.quadratic_only else gradient_claims.FIXED
    of_methods = [claim.of(word) for claim in _GENERIC for word in chosen]
    if not any(settings.wanted(claim.name) for claim in (*fixed, *of_methods)):
        names = [claim.name for claim in fixed] + [claim.of("METHOD").name for claim in _GENERIC]
        raise unknown("claim", settings.claims, names, "A pattern may have *, e.g. 'sign*'.")
    if len(set(settings.seeds)) < len(settings.seeds) or not settings.seeds:
        raise UsageError(f"seeds {settings.seeds}: different numbers expected, e.g. --seed 0,1,2")
    if not settings.quadratic_only:
        settings.config(settings.seeds[0])
    return settings.model_copy(update={"sources": methods.sources(chosen)})


def finished(settings: Settings, results: Path) -> Path | None:
    """Return the folder with this analysis if it is finished, else None."""
    folder = results / f"{KIND}-{measuring.digest(settings.model_dump(mode='json'))}"
    return folder if measuring.finished(folder) else None


def run(
    settings: Settings,
    results: Path,
    data_dir: Path | None = None,
    mode: progress.Mode = "none",
    *,
    command: str = "gcbench bounds",
    force: bool = False,
) -> Analysis:
    """Test all claims that match; what an interrupted attempt has finished is not done again.

    `settings`: from `make`, which checks them.

    Raises:
        GcbenchError: a gradient is not finite, data are missing, the folder cannot be written.
    """
    analysis = Analysis.of(KIND, settings, command, tables=[])
    chosen = settings.chosen()
    work = [*codec_claims.units(chosen, settings.seeds)]
    work += quadratic_claims.units(chosen, settings.seeds)
    units = [
        unit
        for unit in work
        if any(settings.wanted(claim.of(unit.word).name) for claim in unit.claims)
    ]
    train = not settings.quadratic_only
    watched = train and any(settings.wanted(claim.name) for claim in gradient_claims.FIXED)
    seeds = settings.seeds if watched else ()
    compressed = [
        (word, method, seed)
        for word, method in chosen.items()
        for seed in settings.seeds
        if train and settings.compressed_steps
        if any(settings.wanted(claim.of(word).name) for claim in codec_claims.AUDITED)
    ]
    folder = results / analysis.name
    steps = settings.steps * len(seeds), settings.compressed_steps * len(compressed)
    shown = progress.observer(mode, KIND, len(units) + sum(steps))
    judged = Judged(settings.wanted)
    with Ledger(folder).open(afresh=force) as ledger:
        try:
            before = 0

            def report(step: int) -> None:
                shown.step(before + step, f"{key}, step {step}")

            records: list[Record] = []
            audits: dict[str, list[Record]] = {}
            for seed in seeds:
                key = f"seed {seed}"
                if key not in ledger:
                    ledger[key] = _train(settings, seed, folder, data_dir, report)
                records.append(ledger[key])
                before += settings.steps
            for word, method, seed in compressed:
                key = f"training {word}, seed {seed}"
                if key not in ledger:
                    args = settings.config(seed), word, method, settings.compressed_steps, folder
                    ledger[key] = training.train(*args, data_dir, report)
                audits.setdefault(word, []).append(ledger[key])
                before += settings.compressed_steps
            network = settings.task_options.get("network")
            task = settings.task + (f", {network}" if network else "")
            trained = {word: audit.merged(each) for word, each in audits.items()}
            for word, record in trained.items():
                verdicts = MethodVerdicts(judged, word, f"training of {task}")
                codec_claims.judge(
                    record, verdicts, f"{record['steps']} steps, M={settings.workers}"
                )
            if records:
                place = f"gradients of {task}, {settings.steps} steps by {settings.compressor}"
                gradient_claims.judge(records, judged, place)
            for number, unit in enumerate(units):
                shown.step(sum(steps) + number, unit.key)
                if unit.key not in ledger:
                    ledger[unit.key] = _verdicts_of(unit, settings).record()
                judged.take(ledger[unit.key])
            shown.step(sum(steps) + len(units), "done")
        finally:
            shown.close()
        judged.sort()
        analysis.provenance["started"] = ledger.started
        analysis.tables = [*_tables(settings, judged, records, trained)]
        analysis.conclusions = _conclusions(judged.rows)
        if left := unjudged(settings, judged.rows):
            analysis.conclusions.append(
                f"No theorem applies to {', '.join(left)}: a method needs a declared property that "
                "a theorem covers, and another collective than two-shot. `gcbench verify` tests "
                "its code."
            )
        analysis.failed = any(
            row["kind"] == "theorem" and row["verdict"] == "fails" for row in judged.rows
        )
    return analysis


def _verdicts_of(unit: Unit, settings: Settings) -> Judged:
    """Return the verdicts of one unit of work; an exception in the method is one of them."""
    judged = Judged(settings.wanted)
    verdicts = MethodVerdicts(judged, unit.word, unit.place)
    try:
        unit.judge(verdicts)
    except Interrupted:
        raise
    except Exception as error:
        message = str(error)
        if not isinstance(error, PayloadError):
            message = f"{type(error).__name__}: {error}"
        where = unit.key.replace(f" {unit.word}", "")
        verdicts.refused(codec_claims.CONTRACT, where, message)
    return judged


def _train(
    settings: Settings,
    seed: int,
    folder: Path,
    data_dir: Path | None,
    report: Callable[[int], None],
) -> Record:
    """Train with one seed, and return what was observed; `report` is called with each step."""
    config = settings.config(seed)
    watch = Watch(
        Plan(
            every=settings.every,
            snapshots=settings.snapshot_steps(),
            batches=settings.batches,
            wanted=settings.wanted,
        )
    )
    with training.trainer_of(config, folder, data_dir, watch.on_bucket) as trainer:
        watch.start(trainer)
        for step in range(config.steps):
            report(step)
            trainer.train_step()
    return watch.record()


# ---- tables --------------------------------------------------------------------------------------


def _tables(
    settings: Settings,
    judged: Judged,
    records: Sequence[Record],
    trained: Mapping[str, Record],
) -> Iterator[Table]:
    ran = [row for row in judged.rows if row["ran"]]
    alone = [row for row in judged.rows if not row["ran"]]
    yield _verdicts("claims", "Verdicts on compressors", ran)
    yield _verdicts("gradients", "Properties of gradients; no compressor runs in them", alone)
    yield Table(
        name="details",
        title="To the verdicts",
        shown=measuring.shown({"claim": "claim", "why": "note"}),
        which=2,
        by="place",
        rows=[
            {"claim": _label(row), "place": row["place"], "why": row["why"]}
            for row in judged.rows
            if row["why"]
        ],
    )
    yield Table(
        name="not_applicable",
        title="Not applicable",
        shown=measuring.shown({"claim": "claims", "why": "why", "which": "of"}),
        which=3,
        by="place",
        rows=judged.skipped(),
    )
    if trained:
        yield _codecs(trained)
    if records:
        yield from gradient_tables.tables(records, settings.seeds)


def _verdicts(name: str, title: str, rows: list[Row]) -> Table:
    statements = {(str(row["statement"]), str(row["source"])): row for row in reversed(rows)}
    notes = [
        f"{_group(str(row['claim']))} ({row['kind']}): {statement} [{source}]"
        for (statement, source), row in reversed(statements.items())
    ]
    present = {row["kind"] for row in rows}
    kinds = "; ".join(f"{kind}: {text}" for kind, text in KINDS.items() if kind in present)
    return Table(
        name=name,
        title=title,
        shown=measuring.shown(
            {
                "claim": "claim",
                "setting": "setting",
                "verdict": "verdict",
                "bound": "bound",
                "measured": "measured",
                "low": "from",
                "high": "to",
                "slack": "slack",
                "n": "n",
                "over": "of",
                "ran": "compressor\nthat ran",
            }
        ),
        by="place",
        notes=[*notes, f"Kinds of claims. {kinds}."] if rows else [],
        rows=rows,
    )


def _codecs(records: Mapping[str, Record]) -> Table:
    """Return the table of each method's errors on the gradients of its own compressed training."""
    rows: list[Row] = []
    for word, record in records.items():
        row: Row = {"method": word, "steps": record["steps"]}
        lost: list[float] = [value for value in record.get("lost", ()) if value is not None]
        if lost:
            row["lost"] = math.fsum(lost) / len(lost)
        spread, scale = record.get("spread"), record.get("bias", {}).get("scale", [0.0])[0]
        if spread and scale:
            row["variance"] = _over(spread["error"], scale)
            row["declared"] = _over(spread["declared"], scale) if record["exact"] else None
        if record.get("stopped") is not None:
            row["stopped"] = record["stopped"]
        rows.append(row)
    return Table(
        name="codecs",
        title="What is lost in compressed training, as a share of ||x||^2",
        shown=measuring.shown(
            {
                "method": "method",
                "lost": "lost:\n1 - delta",
                "variance": "variance\nof the mean",
                "declared": "declared",
                "steps": "steps",
                "stopped": "stopped\nat step",
            }
        ),
        rows=rows,
    )


def _over(value: float | None, scale: float) -> float | None:
    return None if value is None else value / scale


def _label(row: Row) -> str:
    return f"{row['claim']}, {row['setting']}" if row["setting"] else str(row["claim"])


def _group(name: str) -> str:
    """Return the name of a claim; for one that is made about every method, that of its group."""
    group = name.partition("/")[0]
    generic = {claim.name for claim in _GENERIC}
    return f"{group}/" if group in generic else name


VERIFY = (
    "These rows are about theorems. `gcbench verify METHOD` holds its code to what it declares: "
    "with up to 401 workers, tied votes, 300 tensors, far elements, and its bytes."
)
VERBS = {"holds": "hold", LOOSELY: "hold loosely", "fails": "fail", "undecided": "undecided"}


def unjudged(settings: Settings, rows: Sequence[Row]) -> list[str]:
    """Return the methods, by their words, that ran in no theorem row; none if claims were chosen.

    `rows`: those of the table `claims`.
    """
    if settings.claims != Settings.model_fields["claims"].default:
        return []
    ran = {row["ran"] for row in rows if row["kind"] == "theorem"}
    return [word for word in settings.chosen() if word not in ran]


def _conclusions(rows: Sequence[Row]) -> list[str]:
    counts = []
    for kind in KINDS:
        verdicts = [row["verdict"] for row in rows if row["kind"] == kind]
        numbers = [f"{verdicts.count(v)} {VERBS[v]}" for v in VERDICTS if verdicts.count(v)]
        rows_of = f"{kind} rows" if len(verdicts) > 1 else f"{kind} row"
        counts.append(f"{len(verdicts)} {rows_of}: {', '.join(numbers)}" if verdicts else "")
    sentences = ["; ".join(filter(None, counts)) + "."] if rows else []
    for verdict, meaning in (
        ("undecided", "could not be decided: the interval is too wide for the bound"),
        (LOOSELY, f"held with a slack above {LOOSE:g}, under which a wrong code could hide"),
    ):
        such = [row for row in rows if row["verdict"] == verdict and row["kind"] == "theorem"]
        if such:
            words: dict[str, dict[str, None]] = {}
            for row in such:
                group, _, word = str(row["claim"]).partition("/")
                words.setdefault(group, {})[word] = None
            claims = ", ".join(f"{group} ({', '.join(of)})" for group, of in words.items())
            rows_of = "theorem row" if len(such) == 1 else "theorem rows"
            sentences.append(f"{len(such)} {rows_of} {meaning}: {claims}.")
    for row in rows:
        if row["verdict"] == "fails":
            measured, bound = measuring.cell(row["measured"]), measuring.cell(row["bound"])
            setting = f" ({row['setting']})" if row["setting"] else ""
            note = f"; {row['why']}" if row["why"] else ""
            sentences.append(
                f"{row['claim']}{setting}, {row['kind']}, fails on {row['place']}: {measured} "
                f"against {bound}{note}."
            )
    if any(row["kind"] == "theorem" for row in rows):
        sentences.append(VERIFY)
    return sentences


# ---- picture -------------------------------------------------------------------------------------

COLOURS = {"holds": 0, LOOSELY: 9, "undecided": 1, "fails": 3}
"""Verdict -> index in seaborn's colour-blind palette."""
SYMBOLS = {"theorem": "o", "assumption": "D", "observation": "^", "property": "s"}
LEAST, MOST = 1e-3, 1e3
"""Ratios beyond these are drawn at the edge, with an arrow."""
MANY = 30
"""Rows of a panel that still have a line each."""


def draw(analysis: Analysis, path: Path) -> None:
    """Draw measured / bound of every row with its interval; rows left of 1 hold.

    Where a panel would have more than `MANY` lines, the rows of a claim share a line.

    Raises:
        GcbenchError: the file cannot be written.
    """
    import seaborn
    from matplotlib.lines import Line2D

    rows = [*analysis.table("claims").rows, *analysis.table("gradients").rows]
    places = list(dict.fromkeys(str(row["place"]) for row in rows)) or [codec_claims.PLACE]
    by_place = [[row for row in rows if row["place"] == place] for place in places]
    shared = max(map(len, by_place)) > MANY
    lines = [_lines(members, shared=shared) for members in by_place]
    longest = max(map(len, lines))
    palette = seaborn.color_palette("colorblind")
    colours = {verdict: palette[place] for verdict, place in COLOURS.items()}
    width, height = (6.5, 0.6) if shared else (9.5, 0.3)
    with figures.canvas(width * len(places), 2.6 + height * longest) as figure:
        panels = figure.subplots(1, len(places), squeeze=False)[0]
        for axes, place, labelled in zip(panels, places, lines, strict=True):
            _panel(axes, labelled, longest, colours)
            axes.set_title(textwrap.fill(place, 40))
        verdicts = [row["verdict"] for row in rows]
        symbols = [
            ("s", colour, f"{verdict} ({verdicts.count(verdict)})")
            for verdict, colour in colours.items()
        ]
        symbols += [(marker, "0.4", kind) for kind, marker in SYMBOLS.items()]
        handles = [
            Line2D([], [], ls="", ms=9, marker=marker, color=colour, label=label)
            for marker, colour, label in symbols
        ]
        handles.append(Line2D([], [], color="0.4", lw=2.5, label="interval"))
        count = len(handles)
        figure.legend(handles=handles, loc="outside lower center", ncols=count, frameon=False)
        figure.suptitle("Convergence claims: left of 1 the bound holds")
        figures.save(figure, path)


def _ratio(value: Any) -> float:
    """Return a ratio clipped to the axis; None, which stands for no finite number, at its end."""
    return MOST if value is None else min(max(float(value), LEAST), MOST)


def _lines(rows: Sequence[Row], *, shared: bool) -> list[tuple[str, list[Row]]]:
    """Return the label and the rows of each line: a row, or with `shared` those of a claim."""
    if not shared:
        return [(_label(row), [row]) for row in rows]
    claims: dict[str, list[Row]] = {}
    for row in rows:
        claims.setdefault(_group(str(row["claim"])).rstrip("/"), []).append(row)
    return [(f"{claim} ({len(members)})", members) for claim, members in claims.items()]


def _panel(
    axes: Axes, lines: Sequence[tuple[str, Sequence[Row]]], longest: int, colours: Mapping[str, Any]
) -> None:
    ratios = []
    for line, (_, rows) in enumerate(lines):
        width, size = (2.5, 8) if len(rows) == 1 else (1, 5)
        for place, row in enumerate(rows):
            height = line + 0.7 * ((place + 0.5) / len(rows) - 0.5)
            colour, at = colours[str(row["verdict"])], _ratio(row["ratio"])
            if row["ratio_low"] is not None or row["ratio_high"] is not None:
                limits = _ratio(row["ratio_low"] or 0.0), _ratio(row["ratio_high"])
                axes.plot(limits, (height, height), color=colour, lw=width, solid_capstyle="butt")
            outside = {LEAST: "<", MOST: ">"} if row["ratio"] != at else {}
            marker = outside.get(at, SYMBOLS[str(row["kind"])])
            axes.plot(at, height, marker, color=colour, ms=size)
            ratios.append(at)
    axes.axvline(1.0, color="0.2", lw=1.5)
    axes.set_xscale("log")
    axes.set_xlim(LEAST / 1.6, MOST * 1.6 if max(ratios, default=0.0) > 30 else 30)
    axes.set_ylim(longest - 0.3, -0.7)
    axes.set_yticks(range(len(lines)), [label for label, _ in lines], fontsize="small")
    axes.grid(axis="y", visible=False)
    axes.set_xlabel("measured / bound")
