"""The freeze: what gcbench does, before and after a restructuring that may change nothing.

    python tests/freeze.py against COMMIT            # all of it: this tree beside a commit
    python tests/freeze.py collect before.json       # what this tree does, as one JSON document
    python tests/freeze.py compare before.json after.json

Results depend on the processor and on torch's kernels, so no result is stored: both sides run on
the same machine. Everything goes through the command line, `python -m gcbench`, each command in a
process and a folder of its own, so modules may move. The exit code is 0 if nothing differs, 1 if
something does, 2 if nothing could be compared.

An entry is one command, or several in one folder, and all that came of it: exit codes, output, the
names of the files, the tables among them. What differs from run to run is marked by `VOLATILE`.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import fnmatch
import hashlib
import html.parser
import json
import math
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
PATIENCE = 1800.0
"""Seconds until a command counts as stuck."""
SHOWN = 12
"""Differences of an entry that are printed; all of them count."""
SOURCES = ("gcbench", "compressors", "tasks", "cuda", "tests/golden", "hatch_build.py")


class FreezeError(Exception):
    """Nothing could be collected or compared, with the reason."""


# ---- what differs from run to run ----------------------------------------------------------------


@dataclass(frozen=True)
class Volatile:
    """Leaves that no two runs share; each is replaced by its type, so that it must stay there."""

    entries: str
    """Pattern of the entries, as in a shell."""
    path: str
    """Regular expression that the end of the leaf's path must match."""
    reason: str


VOLATILE = (
    Volatile("*", r"\.provenance\.(started|finished)", "time of day"),
    Volatile("*", r"\.provenance\.(commit|code)", "the commits are what is compared"),
    Volatile("*", r"\.provenance\.versions\.\w[\w-]*", "a restructuring may raise the version"),
    Volatile("*", r"\.provenance\.machine\.\w+", "named once in the document"),
    Volatile("runs/*", r"\.phase_seconds\.\w+", "measured time; null stays null"),
    Volatile("runs/*", r"\.files\.(provenance|metrics)\.\w+", "digest of a file with times"),
    Volatile("runs/*", r"\.stdout(\[\d+\])?\.digest", "digest of a summary with times"),
    Volatile("runs/*", r"\.stdout(\[\d+\])?\.(step_)?seconds", "measured time of a run"),
    Volatile("runs/*", r"\.(columns|rows)\.(\w*_)?seconds\[\d+\]", "measured time in a table"),
)


class Text(NamedTuple):
    """A piece of a text that no two runs share."""

    pattern: re.Pattern[str]
    instead: str
    reason: str


TEXTS = (
    Text(re.compile(r"\b\d{4}-\d\d-\d\d[T ]\d\d:\d\d(:\d\d)?\S*"), "<time>", "time of day"),
    Text(re.compile(r"\bgcbench \d+\.\d+\.\d+\w*"), "gcbench <version>", "the version may rise"),
    Text(re.compile(r"\b[0-9a-f]{40}\b"), "<commit>", "the commits are what is compared"),
    Text(re.compile(r'"seconds": [\d.e-]+'), '"seconds": <time>', "measured time of a run"),
)


@dataclass
class Normalizer:
    """Replaces what is volatile in one entry, and counts what it keeps and drops."""

    entry: str
    places: Mapping[str, str] = field(default_factory=dict)
    """Folders of this run, and the words that stand for them."""
    kept: int = 0
    dropped: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self._mine = [
            (re.compile(rf".*{each.path}"), each.reason)
            for each in VOLATILE
            if fnmatch.fnmatchcase(self.entry, each.entries)
        ]

    def value(self, value: Any, path: str = "") -> Any:
        """Return a JSON value whose volatile leaves are `<number>` or `<text>`."""
        if isinstance(value, dict):
            # Tables have a column named after a folder as little as keys of a summary do.
            return {self.text(key): self.value(v, f"{path}.{key}") for key, v in value.items()}
        if isinstance(value, list):
            return [self.value(each, f"{path}[{i}]") for i, each in enumerate(value)]
        if value is not None and not isinstance(value, bool):
            for pattern, reason in self._mine:
                if pattern.fullmatch(path):
                    self.dropped[reason] += 1
                    return "<text>" if isinstance(value, str) else "<number>"
        self.kept += 1
        return self.text(value) if isinstance(value, str) else value

    def text(self, text: str) -> str:
        """Return a text without the folders and times of this run."""
        for place, word in self.places.items():
            text = text.replace(place, word)
        for each in TEXTS:
            text = each.pattern.sub(each.instead, text)
        return text

    def check(self) -> None:
        """Refuse patterns that leave nothing to compare.

        Raises:
            FreezeError: as many leaves were dropped as kept, or none was kept.
        """
        if self.kept <= self.dropped.total():
            raise FreezeError(
                f"{self.entry}: {self.kept} values kept and {self.dropped.total()} dropped as "
                "volatile: VOLATILE swallows the entry; name less there"
            )


# ---- comparing -----------------------------------------------------------------------------------


class Difference(NamedTuple):
    """One place in which two documents differ."""

    path: str
    before: str
    after: str


ABSENT = "(absent)"


def _shown(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 160 else f"{text[:157]}..."


def _apart(path: str, a: Any, b: Any) -> Difference:
    """Return a difference, of long texts the parts around the first letter that differs."""
    if isinstance(a, str) and isinstance(b, str):
        pairs = enumerate(zip(a, b, strict=False))
        same = next((i for i, (x, y) in pairs if x != y), min(len(a), len(b)))
        start = max(0, same - 60)
        if start:
            a, b = f"...{a[start:]}", f"...{b[start:]}"
    return Difference(path, _shown(a), _shown(b))


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, float) and isinstance(b, float) and math.isnan(a) and math.isnan(b):
        return True
    return type(a) is type(b) and a == b


def _lines(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(each, str) for each in value)


def differences(a: Any, b: Any, path: str = "") -> Iterator[Difference]:
    """Yield where two JSON values differ: types, keys and their order, lengths, values.

    1, 1.0 and true are different values; NaN equals NaN. Texts of unequal length are compared as
    lines that came and went.
    """
    if isinstance(a, dict) and isinstance(b, dict):
        for key in [*a, *(key for key in b if key not in a)]:
            inner = f"{path}.{key}" if path else key
            if key not in b:
                yield Difference(inner, _shown(a[key]), ABSENT)
            elif key not in a:
                yield Difference(inner, ABSENT, _shown(b[key]))
            else:
                yield from differences(a[key], b[key], inner)
        if a.keys() == b.keys() and list(a) != list(b):
            yield Difference(f"{path} (order of keys)", _shown(list(a)), _shown(list(b)))
    elif _lines(a) and _lines(b) and len(a) != len(b):
        for kind, i, j, k, m in difflib.SequenceMatcher(None, a, b, autojunk=False).get_opcodes():
            if kind != "equal":
                before, after = a[i:j], b[k:m]
                yield Difference(f"{path}[{i}:{j}]", _shown(before), _shown(after))
    elif isinstance(a, list) and isinstance(b, list):
        if len(a) != len(b):
            yield Difference(f"{path} (length)", str(len(a)), str(len(b)))
        for i, (x, y) in enumerate(zip(a, b, strict=False)):
            yield from differences(x, y, f"{path}[{i}]")
    elif not _same(a, b):
        yield _apart(path, a, b)


def compare(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, list[Difference]]:
    """Return the differences of two documents by entry; entries that agree are left out.

    Raises:
        FreezeError: one document is empty, they were made by different scripts or on different
            machines or inputs, or a command of the first ended as it should not.
    """
    for document, name in ((before, "first"), (after, "second")):
        if not document.get("entries"):
            raise FreezeError(f"the {name} document has no entries: collect it again")
    for key in ("script", "machine", "inputs"):
        if not _same(before[key], after[key]):
            raise FreezeError(
                f"the documents differ in {key}, which is no part of what is compared: collect "
                f"both here and now\n  {_shown(before[key])}\n  {_shown(after[key])}"
            )
    if before["unexpected"]:
        raise FreezeError(
            "commands of the first document did not end as they should, so it is no measure: "
            + "; ".join(before["unexpected"])
        )
    a, b = before["entries"], after["entries"]
    found = {}
    for name in sorted({*a, *b}):
        if name not in b:
            each = [Difference("", "(an entry)", ABSENT)]
        elif name not in a:
            each = [Difference("", ABSENT, "(an entry)")]
        else:
            each = list(differences(a[name], b[name]))
        if each:
            found[name] = each
    return found


def show(before: Mapping[str, Any], after: Mapping[str, Any]) -> int:
    """Print what differs; return the exit code."""
    found = compare(before, after)
    for name, each in found.items():
        print(f"{name}: {len(each)} differ")
        for path, x, y in each[:SHOWN]:
            print(f"  {path}\n    before {x}\n    after  {y}")
        if len(each) > SHOWN:
            print(f"  and {len(each) - SHOWN} more")
    kept = sum(each["kept"] for each in after["leaves"].values())
    dropped = sum(sum(each["dropped"].values()) for each in after["leaves"].values())
    entries = len({*before["entries"], *after["entries"]})
    print(
        f"{len(found)} of {entries} entries differ ({kept} values compared, {dropped} volatile)"
        if found
        else f"nothing differs: {entries} entries, {kept} values compared, {dropped} volatile"
    )
    _show_bench(before.get("bench"), after.get("bench"))
    return 1 if found else 0


MEASURED = {"gb_per_second", "copy_seconds", "seconds", "iqr", "fastest", "rounds"}
"""Of a row of timings: what was measured. The other fields say what of."""


def _ratios(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return speeds as multiples of copy_, by what was timed."""
    found = {}
    for row in rows:
        key = " ".join(f"{value}" for name, value in row.items() if name not in MEASURED)
        if row.get("copy_seconds") and row.get("seconds"):
            found[key] = row["copy_seconds"] / row["seconds"]
    return found


def _show_bench(before: Any, after: Any) -> None:
    """Print speeds beside each other: for information, no part of the verdict."""
    if not before or not after:
        return
    a, b = _ratios(before["rows"]), _ratios(after["rows"])
    print("time of copy_ / time of the operation, before and after; for information only:")
    for key in sorted({*a, *b}):
        x, y = (f"{side[key]:.2f}" if key in side else "-" for side in (a, b))
        print(f"  {key}: {x} {y}")


# ---- what is run ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Command:
    """One call of gcbench."""

    words: tuple[str, ...]
    code: int | None = 0
    """Exit code that it must have in the first document; None: it may have any."""
    stop_after: int = 0
    """Interrupt it when its run has so many records; its output depends on chance then."""


@dataclass(frozen=True)
class Entry:
    """Commands that run one after the other in a folder."""

    name: str
    commands: tuple[Command, ...]
    pages: tuple[str, ...] = ()
    """HTML files that the commands write, to be read."""
    given: tuple[tuple[str, str], ...] = ()
    """Names and texts of files that the commands read."""


def _entry(name: str, *words: str, code: int | None = 0, pages: tuple[str, ...] = ()) -> Entry:
    return Entry(name, (Command(words, code),), pages)


RUN = (
    *("run", "--task", "digits", "--batch", "12", "--steps", "4", "--log-every", "1"),
    *("--eval-every", "2", "--threads", "1", "--results", "runs", "--progress", "none", "--json"),
)
ANALYSIS = ("--results", "analyses", "--progress", "none", "--json")
THREE = (*RUN, "--workers", "3")
MEMORIES = ("momentum", "forced-residual", "residual", "dgc")
CONTRACTING = ("residual", "dgc")
"""Memories that feed an error back without being asked twice: only for codes that contract."""
MEMORY_FIELDS = {
    "residual": ("decay=0.5", "at_owner=false"),
    "momentum": ("beta=0.5",),
    "dgc": ("nesterov=true", "clip=1.0", "masking=false"),
}
ALWAYS = {"dgc": ("--memory-set", "masking=false")}
"""What a memory needs to go with every method: masking is refused around codes that send all."""
VARIATIONS: Mapping[str, tuple[str, ...]] = {
    "start-step": ("--start-step", "2"),
    "delay": ("--delay", "1"),
    "rebroadcast": ("--rebroadcast-every", "2"),
    "dense-last": ("--dense-last",),
    "dense-below": ("--dense-below", "200"),
    "batched": ("--gradients", "batched"),
    "adam": ("--optimizer", "adam", "--lr", "0.001", "--ema", "0.9", "--weight-decay", "0.01"),
    "decay-update": (
        *("--weight-decay", "0.01", "--decay", "update"),
        *("--momentum", "0.9", "--nesterov"),
        *("--schedule", "step", "--schedule-steps", "2"),
    ),
    "decay-loss": ("--weight-decay", "0.01", "--decay", "loss", "--schedule", "constant"),
    "dgc-masking": ("--compressor", "topk", "--memory", "dgc", "--start-step", "2"),
    "skip": ("--on-nonfinite", "skip", "--lr", "1e38"),
    "holdout": ("--holdout", "96", "--rows", "rows.parquet"),
    "network": ("--network", "conv"),
    "quadratic": ("--task", "quadratic"),
    "reference": ("--backend", "reference"),
    "seeds": ("--seed", "1,2"),
    "two threads": ("--threads", "2"),
}


VARIANTS = """\
title: the configurations whose payloads are golden
source: tests/golden
place: all
differs: nothing is published
config: {task: digits, workers: 3, batch: 12, steps: 4, log_every: 1, eval_every: 2, threads: 1}
"""


def kinds(compressors: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return one method of each kind: of one default collective, memory, and claim of no bias."""
    found: dict[tuple[str, str, bool], str] = {}
    for each in compressors:
        kind = (each["collectives"][0], each["memory"], bool(each["unbiased"]))
        found.setdefault(kind, each["name"])
    return sorted(found.values())


def runs(compressors: Sequence[Mapping[str, Any]]) -> Iterator[Entry]:
    """Yield the matrix of runs; methods that take the same flags share a process."""
    names = [each["name"] for each in compressors]
    some = ",".join(kinds(compressors))
    for i in range(0, len(names), 4):
        few = ",".join(names[i : i + 4])
        yield _entry(
            f"runs/spawn {few}", *RUN, "--workers", "2", "--engine", "spawn", "--compressor", few
        )
    spawned = ("--workers", "2", "--engine", "spawn", "--compressor", some)
    mixed = ("--delay", "1", "--start-step", "1", "--rebroadcast-every", "2", "--dense-below", "99")
    yield _entry("runs/spawn mixed", *RUN, *spawned, *mixed)
    for collective in sorted({name for each in compressors for name in each["collectives"]}):
        able = [each["name"] for each in compressors if collective in each["collectives"]]
        words = (*THREE, "--collective", collective, "--compressor", ",".join(able))
        yield _entry(f"runs/simulate {collective}", *words)
    for memory in MEMORIES:
        fits = [
            each["name"] for each in compressors if each["contractive"] or memory not in CONTRACTING
        ]
        words = (*THREE, "--memory", memory, "--compressor", ",".join(fits))
        yield _entry(f"runs/memory {memory}", *words, *ALWAYS.get(memory, ()))
        if fields := MEMORY_FIELDS.get(memory):
            set_ = [word for each in fields for word in ("--memory-set", each)]
            yield _entry(f"runs/memory {memory} with fields", *words, *set_)
    yield _entry("runs/memory none", *THREE, "--memory", "none", "--compressor", ",".join(names))
    for name, words in VARIATIONS.items():
        yield _entry(f"runs/{name}", *THREE, "--compressor", some, *words)
    yield _entry("runs/stop", *THREE, "--compressor", some, "--lr", "1e38", code=1)
    floats = {
        key: value
        for each in compressors
        for key, value in each["fields"].items()
        if isinstance(value, float)
    }
    if floats:  # a schedule of each field that is a fraction, at half its default from step 2 on
        scheduled = [
            each["name"]
            for each in compressors
            if any(isinstance(v, float) for v in each["fields"].values())
        ]
        set_ = [w for k, v in floats.items() for w in ("--set", f"{k}=0:{v}/2:{v / 2}")]
        yield _entry("runs/schedules", *THREE, "--compressor", ",".join(scheduled), *set_)
    residual = next(each["name"] for each in compressors if each["memory"] == "residual")
    for engine in ("simulate", "spawn"):
        words = (
            *("run", "--task", "digits", "--batch", "12", "--steps", "200", "--log-every", "10"),
            *("--eval-every", "100", "--threads", "1", "--results", "runs", "--progress", "none"),
            *("--compressor", residual, "--workers", "2", "--checkpoint-seconds", "0"),
            *("--engine", engine, "--delay", "1", "--json"),
        )
        stopped = Command(words, 130, stop_after=4)
        yield Entry(f"runs/resume {engine}", (stopped, Command(words)))
    captured = Command((*THREE, "--compressor", "none", "--capture", "0,3"))
    analysed = Command(("histogram", "runs", "--compressor", some, *ANALYSIS))
    yield Entry("runs/histogram", (captured, analysed))


def variants(tree: Path) -> Iterator[Entry]:
    """Yield runs of every configuration whose payloads are golden, as suites: many in a process."""
    paths = sorted((tree / "tests" / "golden").glob("*.json"))
    for i in range(0, len(paths), 5):
        entries = []
        for path in paths[i : i + 5]:
            for fields in json.loads(path.read_text()):
                words = [] if fields == "default" else fields.split()
                options = ", ".join(word.replace("=", ": ", 1) for word in words)
                config = f"{{compressor: {path.stem}, options: {{{options}}}}}"
                entries.append(f"  - {{config: {config}, place: {json.dumps(fields)}}}")
        suite = "\n".join([VARIANTS, "entries:", *entries, ""])
        words = ("run", "--suite", "variants.yaml", "--results", "runs", "--progress", "none")
        names = ",".join(path.stem for path in paths[i : i + 5])
        yield Entry(
            f"runs/variants {names}",
            (Command((*words, "--json")),),
            given=(("variants.yaml", suite),),
        )


def payloads(compressors: Sequence[Mapping[str, Any]]) -> Iterator[Entry]:
    """Yield what `gcbench verify` says of every method."""
    for each in compressors:
        words = ("verify", each["name"], "--no-processes", "--json")
        yield _entry(f"payloads/verify {each['name']}", *words)


def _wrong(compressors: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, ...]]:
    """Yield command lines that must be refused."""
    first = compressors[0]["name"]
    for flag in ("compressor", "task", "collective", "memory", "engine", "backend", "optimizer"):
        yield ("run", f"--{flag}", "nonesuch")
    yield ("run", "--set", "nonesuch=1")
    yield ("run", "--task-set", "nonesuch=1")
    yield ("run", "--workers", "0")
    yield ("run", "--workers", "3", "--batch", "32")
    yield ("run", "--delay", "2")
    yield ("run", "--suite", "nonesuch")
    yield ("run", "--config", "nonesuch.yaml")
    yield ("run", "--nonesuch")
    for each in compressors:
        if not each["contractive"]:
            yield ("run", "--compressor", each["name"], "--memory", "residual")
            break
    for each in compressors:
        if illegal := {"allreduce", "allgather", "twoshot", "ring"} - set(each["collectives"]):
            yield ("run", "--compressor", each["name"], "--collective", min(illegal))
            break
    yield ("compare", "nonesuch")
    yield ("compare", "inputs/ddp-hooks.json", "--where", "nonesuch=1")
    yield ("verify", "nonesuch")
    yield ("verify", first, "--set", "nonesuch=1")
    yield ("kernels", "nonesuch.json")
    yield ("predict", "--model", "nonesuch")
    yield ("predict", "--cluster", "nonesuch")
    yield ("advise", "--tolerance", "-1")
    yield ("bounds", "--claims", "nonesuch")
    yield ("histogram", "nonesuch")
    yield ("bandwidth", "--sizes", "nonesuch")
    yield ("report", "nonesuch")
    yield ("data", "path", "nonesuch")
    yield ("nonesuch",)


def commands(
    compressors: Sequence[Mapping[str, Any]],
    suites: Sequence[str],
    pages: Sequence[tuple[str, ...]],
    inputs: Path,
) -> Iterator[Entry]:
    """Yield every command on fixed inputs: `inputs` are the stored results of the first tree."""
    files = {
        path: json.loads((inputs / path).read_text())
        for path in sorted(each.name for each in inputs.glob("*.json"))
    }
    rows = [f"inputs/{name}" for name, value in files.items() if isinstance(value, list)]
    if not rows:
        raise FreezeError(f"{inputs} has no rows of runs, *.json: the commands need some")
    timings = "inputs/kernels.json"
    # Without a choice of claims most of the time would go to the bounds on quadratics.
    small = (
        "--claims",
        "signsgd/*",
        "--steps",
        "4",
        "--every",
        "2",
        "--snapshots",
        "1",
        "--batches",
        "8",
        "--compressed-steps",
        "2",
    )
    yield _entry("commands/bounds", "bounds", "--seed", "0", "--workers", "2", *small, *ANALYSIS)
    for word in ("resnet20", "alexnet"):
        words = ("predict", "--model", word, "--workers", "8,64", *ANALYSIS)
        yield _entry(f"commands/predict {word}", *words)
    yield _entry("commands/predict validate", "predict", "--validate", *ANALYSIS)
    stored = [word for each in rows for word in ("--runs", each)]
    yield _entry("commands/advise", "advise", *stored, "--cluster", "gtx1080x4-1gbe", *ANALYSIS)
    for shape in ("table", "markdown", "csv", "json", "latex"):
        yield _entry(f"commands/compare {shape}", "compare", *rows, "--format", shape)
    yield _entry("commands/compare by", "compare", *rows, "--by", "task", "--target", "0.5")
    for suite in suites:
        yield _entry(
            f"commands/compare suite {suite}", "compare", *rows, "--suite", suite, code=None
        )
    yield _entry("commands/kernels", "kernels", timings, "--json")
    yield _entry("commands/kernels table", "kernels", timings, "--size", "1e6")
    every = [f"inputs/{name}" for name in files]
    written = ("--output", "page.html", "--progress", "none")
    yield _entry("commands/report", "report", *every, *written, pages=("page.html",))
    for kind in ("compressors", "tasks", "suites", "backends"):
        yield _entry(f"commands/list {kind}", "list", kind, "--json")
    yield _entry("commands/list table", "list")
    yield _entry("commands/data path", "data", "path", "cifar10")
    for words in pages:
        yield _entry(f"commands/help {' '.join(words)}".rstrip(), *words, "--help")
    for words in _wrong(compressors):
        yield _entry(f"commands/refused {' '.join(words)}", *words, code=None)


PARTS = ("runs", "payloads", "commands")


# ---- running it ----------------------------------------------------------------------------------


class _Page(html.parser.HTMLParser):
    """Reads the text of an HTML page, by heading; scripts, styles and pictures are left out."""

    def __init__(self) -> None:
        super().__init__()
        self.parts: list[tuple[str, list[str]]] = [("", [])]
        self._open: list[str] = []

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        if tag in ("script", "style", "svg", "h1", "h2", "h3"):
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag in self._open:
            self._open.remove(tag)

    def handle_data(self, data: str) -> None:
        text = " ".join(data.split())
        if not text or {"script", "style", "svg"} & set(self._open):
            return
        if self._open:
            self.parts.append((text, []))
        else:
            self.parts[-1][1].append(text)


def page(text: str, clean: Normalizer) -> dict[str, Any]:
    """Return the text of an HTML page as a number of texts and a digest under each heading."""
    reader = _Page()
    reader.feed(text)
    told: dict[str, Any] = {}
    for number, (heading, lines) in enumerate(reader.parts):
        digest = hashlib.sha256(clean.text("\n".join(lines)).encode()).hexdigest()
        told[f"{number} {heading}"] = {"texts": len(lines), "sha256": digest}
    return told


def _table(path: Path) -> dict[str, Any]:
    """Return the types and values of a Parquet file's columns."""
    import pyarrow.parquet

    table = pyarrow.parquet.read_table(path)
    types = {each.name: str(each.type) for each in table.schema}
    return {"types": types, "columns": json.loads(json.dumps(table.to_pydict(), default=str))}


def _parsed(text: str) -> Any:
    """Return a JSON document parsed, other text as its lines."""
    with contextlib.suppress(json.JSONDecodeError):
        found = json.loads(text)
        if isinstance(found, dict | list):
            return found
    return text.splitlines()


class Machine:
    """Starts gcbench of a tree in processes, and ends those that live when it is stopped."""

    def __init__(self, tree: Path, inputs: Path, scratch: Path) -> None:
        self.tree, self.inputs, self.scratch = tree, inputs, scratch
        self.stopped = threading.Event()
        self._starting = threading.Lock()  # none is started that `stop` does not know of
        self._living: set[subprocess.Popen[str]] = set()
        kept = ("PATH", "HOME", "LD_LIBRARY_PATH", "TMPDIR", "CXX")
        self.environment = {
            **{key: os.environ[key] for key in kept if key in os.environ},
            "PYTHONPATH": str(tree),
            "PYTHONHASHSEED": "0",
            "PYTHONDONTWRITEBYTECODE": "1",
            "LANG": "C.UTF-8",
            "TZ": "UTC",
            "TERM": "dumb",
            "NO_COLOR": "1",
            "COLUMNS": "120",
            "MPLBACKEND": "Agg",
            "MPLCONFIGDIR": str(scratch / "matplotlib"),
            "XDG_CACHE_HOME": str(scratch / "cache"),
            "OMP_NUM_THREADS": "1",
            "OMP_WAIT_POLICY": "passive",
        }

    def python(self, *words: str, folder: Path) -> subprocess.Popen[str]:
        """Start Python in a session of its own, with nothing of the caller's environment."""
        with self._starting:
            if self.stopped.is_set():
                raise FreezeError("stopped")
            process = subprocess.Popen(
                [sys.executable, *words],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                stdin=subprocess.DEVNULL,
                text=True,
                start_new_session=True,
                cwd=folder,
                env=self.environment,
            )
            self._living.add(process)
        return process

    def end(self, process: subprocess.Popen[str]) -> tuple[int, str, str]:
        """Wait for a process: exit code, stdout, stderr.

        Raises:
            FreezeError: it did not end in time.
        """
        try:
            out, err = process.communicate(timeout=PATIENCE)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
            raise FreezeError(f"{process.args} took longer than {PATIENCE:.0f} s") from None
        finally:
            self._living.discard(process)
        return process.returncode, out, err

    def stop(self) -> None:
        """End all that was started and lives."""
        with self._starting:
            self.stopped.set()
            living = list(self._living)
        for process in living:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)

    def ask(self, *words: str) -> str:
        """Return what `gcbench *words` prints.

        Raises:
            FreezeError: it failed.
        """
        code, out, err = self.end(self.python("-m", "gcbench", *words, folder=self.scratch))
        if code:
            raise FreezeError(f"gcbench {' '.join(words)} of {self.tree} failed: {err}")
        return out

    def _interrupted(self, process: subprocess.Popen[str], folder: Path, records: int) -> None:
        """Interrupt a run, as Ctrl-C does, once it has written so many records."""
        patience = time.monotonic() + PATIENCE
        while process.poll() is None and time.monotonic() < patience:
            files = folder.glob("runs/*/metrics.jsonl")
            if sum(len(path.read_bytes().splitlines()) for path in files) >= records:
                os.killpg(process.pid, signal.SIGINT)
                return
            time.sleep(0.02)

    def run(self, entry: Entry) -> dict[str, Any]:
        """Run an entry; return its part of the document.

        Raises:
            FreezeError: see `end`; or VOLATILE leaves nothing of it.
        """
        with tempfile.TemporaryDirectory(dir=self.scratch, prefix="entry-") as name:
            folder = Path(name).resolve()
            (folder / "inputs").symlink_to(self.inputs)
            for file, text in entry.given:
                (folder / file).write_text(text)
            places = {
                str(folder): "<folder>",
                str(self.scratch): "<scratch>",
                str(self.tree): "<tree>",
                str(self.inputs): "<inputs>",
                sys.executable: "<python>",
            }
            clean = Normalizer(entry.name, places)
            told: dict[str, Any] = {"commands": []}
            unexpected = []
            for command in entry.commands:
                process = self.python("-m", "gcbench", *command.words, folder=folder)
                if command.stop_after:
                    self._interrupted(process, folder, command.stop_after)
                code, out, err = self.end(process)
                if self.stopped.is_set():  # it was killed: this is no result
                    raise FreezeError("stopped")
                one: dict[str, Any] = {"words": [*command.words], "exit_code": code}
                if not command.stop_after:
                    one |= {"stdout": _parsed(out), "stderr": err.splitlines()}
                told["commands"].append(one)
                if command.code is not None and code != command.code:
                    last = err.strip().splitlines()[-1:] or [""]
                    unexpected.append(f"{entry.name}: exit code {code}, {clean.text(last[0])}")
            found = sorted(path for path in folder.rglob("*") if path.is_file())
            told["files"] = [str(path.relative_to(folder)) for path in found]
            told["tables"] = {
                str(path.relative_to(folder)): _table(path)
                for path in found
                if path.suffix == ".parquet"
            }
            told["pages"] = {
                name: page((folder / name).read_text(), clean)
                for name in entry.pages
                if (folder / name).exists()
            }
            told = clean.value(told)
        clean.check()
        leaves = {"kept": clean.kept, "dropped": dict(sorted(clean.dropped.items()))}
        return {"told": told, "leaves": leaves, "unexpected": unexpected}


def _digest(*parts: str | bytes) -> str:
    total = hashlib.sha256()
    for part in parts:
        part = part.encode() if isinstance(part, str) else part
        total.update(len(part).to_bytes(8, "little") + part)
    return total.hexdigest()


def _digest_of(tree: Path, names: Sequence[str]) -> str:
    """Return a digest of files, and of all files in folders, without what Python compiles."""
    paths = []
    for name in names:
        top = tree / name
        below = sorted(top.rglob("*")) if top.is_dir() else [top]
        paths += [p for p in below if p.is_file() and "__pycache__" not in p.parts]
    return _digest(*(b for p in paths for b in (str(p.relative_to(tree)), p.read_bytes())))


def machine() -> dict[str, Any]:
    """Return what results may depend on beside the code."""
    from importlib.metadata import version

    model = ""
    with contextlib.suppress(OSError):
        text = Path("/proc/cpuinfo").read_text()
        model = "; ".join(
            sorted(set(re.findall(r"^(?:model name|flags)\s*:\s*(.*)$", text, re.MULTILINE)))
        )
    return {
        "system": f"{platform.system()} {platform.machine()}",
        "processor": _digest(model)[:12],
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "torch": version("torch"),
        "numpy": version("numpy"),
    }


def _help_pages(asked: Machine, jobs: int) -> Iterator[tuple[str, ...]]:
    """Yield every command, as its words, found from the help of the one above it."""
    level: list[tuple[str, ...]] = [()]
    with ThreadPoolExecutor(jobs) as pool:
        while level:
            yield from level
            texts = list(pool.map(lambda words: asked.ask(*words, "--help"), level))
            level = [
                (*words, name)
                for words, text in zip(level, texts, strict=True)
                for name in re.findall(
                    r"^│ (\w[\w-]*) {2,}", text.partition("─ Commands ─")[2], re.MULTILINE
                )
            ]


def golden(tree: Path) -> dict[str, str]:
    """Return a digest of the content of each golden file."""
    files = sorted((tree / "tests" / "golden").glob("*.json"))
    if not files:
        raise FreezeError(f"{tree}/tests/golden has no golden payloads")
    return {
        path.name: _digest(json.dumps(json.loads(path.read_text()), sort_keys=True))
        for path in files
    }


def _chosen(entry: str, only: Sequence[str]) -> bool:
    """Return whether an entry, or some entry of a part, is among the patterns; none choose all."""
    patterns = [each for word in only for each in word.split(",")]
    if entry in PARTS:
        return not patterns or any(
            fnmatch.fnmatchcase(entry, each.partition("/")[0]) for each in patterns
        )
    return not patterns or any(
        entry.startswith(f"{each}/") or fnmatch.fnmatchcase(entry, each) for each in patterns
    )


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def collect(
    tree: Path, inputs: Path, only: Sequence[str], jobs: int, kept: Path, bench: str | None
) -> dict[str, Any]:
    """Return the document of a tree.

    `kept` is a folder for finished entries: what is there from the same sources is not run again.
    `bench`: sizes of gradients to time, as in `make bench`; None: nothing is timed.

    Raises:
        FreezeError: gcbench cannot be asked, or nothing was chosen.
    """
    inputs, tree = inputs.resolve(), tree.resolve()
    document: dict[str, Any] = {
        "script": _digest(Path(__file__).read_bytes())[:12],
        "machine": machine(),
        "inputs": {p.name: _digest(p.read_bytes())[:12] for p in sorted(inputs.glob("*.json"))},
    }
    sources = _digest_of(tree, SOURCES)
    same = _digest(sources, json.dumps(document))[:12]
    kept = kept / same
    kept.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="freeze-") as name:
        scratch = Path(name).resolve()
        asked = Machine(tree, inputs, scratch)
        # What matplotlib says when it looks for fonts is no part of a command's output.
        warm = "import matplotlib.font_manager, gcbench; print(gcbench.__file__)"
        code, out, err = asked.end(asked.python("-c", warm, folder=scratch))
        if code or tree not in Path(out.strip()).parents:
            raise FreezeError(f"gcbench of {tree} is not what Python imports: {out}{err}")
        compressors = json.loads(asked.ask("list", "compressors", "--json"))
        entries = [*runs(compressors), *variants(tree), *payloads(compressors)]
        if _chosen("commands", only):
            suites = [each["name"] for each in json.loads(asked.ask("list", "suites", "--json"))]
            pages = list(_help_pages(asked, jobs))
            entries += commands(compressors, suites, pages, inputs)
        entries = [each for each in entries if _chosen(each.name, only)]
        done: dict[str, Any] = {}
        if _chosen("payloads/golden", only):
            digests = golden(tree)
            leaves = {"kept": len(digests), "dropped": {}}
            done["payloads/golden"] = {"told": digests, "leaves": leaves, "unexpected": []}
        if not entries and not done:
            raise FreezeError(f"--only {' '.join(only)} chooses nothing: runs, payloads, commands")
        todo = []
        for entry in entries:
            path = kept / f"{_digest(entry.name)[:16]}.json"
            if path.exists():
                done[entry.name] = json.loads(path.read_text())
            else:
                todo.append((entry, path))
        if len(entries) > len(todo):
            _say(f"{len(entries) - len(todo)} entries were collected before")
        _work(asked, todo, jobs, done)
        if bench is not None:
            document["bench"] = _timed(asked, bench)
    for key in ("told", "leaves", "unexpected"):
        document["entries" if key == "told" else key] = {k: done[k][key] for k in sorted(done)}
    document["unexpected"] = [each for one in document["unexpected"].values() for each in one]
    return document


def _work(
    asked: Machine, todo: Sequence[tuple[Entry, Path]], jobs: int, done: dict[str, Any]
) -> None:
    """Run entries, `jobs` at a time; each that ended as it should is written at once."""
    started = time.monotonic()

    def one(entry: Entry, path: Path) -> tuple[str, dict[str, Any], float]:
        begun = time.monotonic()
        told = asked.run(entry)
        if not told["unexpected"]:  # what somebody killed, or ran out of memory, is run again
            part = path.with_suffix(".part")
            part.write_text(json.dumps(told))
            part.replace(path)
        return entry.name, told, time.monotonic() - begun

    with ThreadPoolExecutor(jobs) as pool:
        try:
            waiting = [pool.submit(one, *each) for each in todo]
            for number, future in enumerate(as_completed(waiting), 1):
                name, told, seconds = future.result()
                done[name] = told
                _say(f"[{number}/{len(todo)}] {name}: {seconds:.1f} s")
                for each in told["unexpected"]:
                    _say(f"  unexpected: {each}")
        except BaseException:
            asked.stop()
            pool.shutdown(cancel_futures=True)
            raise
    if todo:
        _say(f"{len(todo)} entries in {time.monotonic() - started:.0f} s")


def _timed(asked: Machine, sizes: str) -> Any:
    """Return the rows of `make bench` for some sizes."""
    out = asked.scratch / "timings.json"
    words = ("-m", "pytest", "tests/benchmarks", "--quiet", "--benchmark-quiet", "--sizes", sizes)
    more = ("-p", "no:cacheprovider", "--benchmark-json", str(out))
    process = asked.python(*words, *more, folder=asked.tree)
    code, said, err = asked.end(process)
    if code:
        raise FreezeError(f"the benchmarks of {asked.tree} failed: {said[-2000:]}{err[-2000:]}")
    return json.loads(asked.ask("kernels", str(out), "--json"))


# ---- against a commit ----------------------------------------------------------------------------


def _git(*words: str) -> str:
    done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise FreezeError(f"git {' '.join(words)}: {done.stderr.strip()}")
    return done.stdout


def _build(tree: Path) -> None:
    """Build a tree's native library, in a process of its own; what is built from the same stays."""
    done = subprocess.run(
        [sys.executable, "hatch_build.py"], cwd=tree, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise FreezeError(f"hatch_build.py of {tree} failed: {done.stdout}{done.stderr}")


def checked_out(commit: str, cache: Path) -> Path:
    """Return a git work tree of a commit with its native library, made once.

    It is a work tree and no mere copy of the files, as runs name the commit that they are of.

    Raises:
        FreezeError: there is no such commit, or its library cannot be built.
    """
    tree = cache / commit
    if not tree.exists():
        _git("worktree", "prune")  # of those whose folders were deleted
        _git("worktree", "add", "--detach", str(tree), commit)
        built = ROOT / "gcbench" / "_native"
        if built.exists():  # hatch_build.py keeps it only if it is from the commit's sources
            shutil.copytree(built, tree / "gcbench" / "_native", dirs_exist_ok=True)
    _build(tree)
    return tree


def _against(asked: argparse.Namespace) -> int:
    cache = asked.cache
    cache.mkdir(parents=True, exist_ok=True)
    commit = _git("rev-parse", "--verify", f"{asked.commit}^{{commit}}").strip()
    tree = checked_out(commit, cache)
    _build(ROOT)
    # One file may differ between the trees and the comparison still be fair: this one is used
    # for both, and so are the stored results of the commit.
    inputs = tree / "results"
    chosen = (asked.only, asked.jobs)
    bench = asked.bench_sizes if asked.bench else None
    _say(f"{commit[:12]}, in {tree}")
    before = collect(tree, inputs, *chosen, cache / "entries", bench)
    _say(f"here, in {ROOT}")
    here = cache / "here"
    after = collect(ROOT, inputs, *chosen, here, bench)
    (cache / "before.json").write_text(json.dumps(before, indent=1))
    (cache / "after.json").write_text(json.dumps(after, indent=1))
    code = show(before, after)
    shutil.rmtree(here)  # the next time this tree is run afresh
    return code


def _collect(asked: argparse.Namespace) -> int:
    bench = asked.bench_sizes if asked.bench else None
    kept = asked.out.with_name(f"{asked.out.name}.parts")
    document = collect(
        asked.tree, asked.inputs or asked.tree / "results", asked.only, asked.jobs, kept, bench
    )
    asked.out.write_text(json.dumps(document, indent=1))
    shutil.rmtree(kept)
    _say(f"wrote {asked.out}: {len(document['entries'])} entries")
    return 1 if document["unexpected"] else 0


def main(words: Sequence[str] | None = None) -> int:
    """Parse the command line and carry it out; return the exit code."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    commands_ = parser.add_subparsers(required=True)
    shared = argparse.ArgumentParser(add_help=False)
    shared.add_argument(
        "--only",
        action="append",
        default=[],
        help="parts, or patterns of entries, with commas: runs, payloads, commands, 'runs/spawn*'",
    )
    shared.add_argument("--jobs", type=int, default=os.cpu_count(), help="entries at a time")
    shared.add_argument("--bench", action="store_true", help="time kernels, too: for information")
    shared.add_argument("--bench-sizes", default="1e6", help="sizes of gradients for --bench")
    one = commands_.add_parser("collect", parents=[shared], help="write what a tree does")
    one.add_argument("out", type=Path)
    one.add_argument("--tree", type=Path, default=ROOT, help="the tree; default this one")
    one.add_argument("--inputs", type=Path, help="stored results; default those of the tree")
    one.set_defaults(do=_collect)
    two = commands_.add_parser("compare", help="print what differs between two documents")
    two.add_argument("before", type=Path)
    two.add_argument("after", type=Path)
    two.set_defaults(
        do=lambda asked: show(
            json.loads(asked.before.read_text()), json.loads(asked.after.read_text())
        )
    )
    three = commands_.add_parser("against", parents=[shared], help="this tree beside a commit")
    three.add_argument("commit")
    three.add_argument(
        "--cache", type=Path, default=ROOT / "build" / "freeze", help="for trees and entries"
    )
    three.set_defaults(do=_against)
    asked = parser.parse_args(words)
    try:
        code: int = asked.do(asked)
    except KeyboardInterrupt:
        _say("freeze: stopped; what was collected is kept, the same command goes on")
        return 130
    except (FreezeError, OSError, json.JSONDecodeError) as error:
        _say(f"freeze: {error}")
        return 2
    return code


if __name__ == "__main__":
    # A shell's background jobs ignore SIGINT, and so would the runs that are to be interrupted.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    sys.exit(main())
