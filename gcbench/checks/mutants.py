"""Survival rate of automatic mutants: does `gcbench verify` refuse a broken method?

    python -m gcbench.checks.mutants [--share 0.25] [--again] [FILE ...]

Each mutant changes one place of a file of compressors/, in the code that encodes and decodes: it
drops a statement, negates a condition, changes a constant, an index, a comparison or an operator,
or swaps two arguments. Claims, default hyper-parameters, the checks of hyper-parameters and texts
stay as they are: they define the method, and another value defines another method.

A mutant is equivalent if no output changes on a broad set of inputs: payloads, decoded values,
layouts, states, and which corrupt payloads are refused. All others count. The checks run from the
cheapest to the most expensive, each mutant in a forked process, and stop at the first failure.

The result is written after each mutant, and a second run continues from there. `--share` takes a
fixed sample of each file. `--again` repeats the survivors after a change of the checks. The reason
why a survivor is acceptable is written by hand, to "reasons" in the result.
"""

from __future__ import annotations

import argparse
import ast
import datetime
import hashlib
import importlib
import inspect
import json
import math
import os
import platform
import random
import resource
import signal
import sys
import time
import types
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gcbench.checks import (
    exchanges,
    inputs,
    memories,
    oracle,
    payloads,
    processes,
    properties,
)
from gcbench.checks.adversary import Search
from gcbench.checks.calls import Calls, encode
from gcbench.checks.cases import Effort, effort_for
from gcbench.core import codec, memory
from gcbench.core.compressor import Compressor, Context, Payload, Segments, cuttable, requantizes
from gcbench.core.errors import PayloadError

SMOKE = Effort(every=40, long=0, many=0, million=0, steps=3, thin=100)
BROAD = Effort(every=10, long=1, many=0, million=0, steps=32, thin=16)
BROAD_SCRATCH = BROAD._replace(long=0)
"""For methods in plain torch, whose long inputs take half a minute."""
VARIANT = Effort(every=20, long=0, many=0, million=0, steps=3, thin=60)
LEAST = 4
"""Mutants per file, however small the share."""
STUCK = 60
"""CPU seconds after which a mutant counts as killed if it has not finished the first inputs."""
PATIENCE = 600
"""CPU seconds after which any other mutant is undecided."""
Verdict = dict[str, Any]
BEGIN, END = "<!-- mutants: begin -->", "<!-- mutants: end -->"
DEFINITIONS = ("__post_init__", "claims", "recipe", "variants")
OPERATORS: Mapping[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.Pow: ast.Mult,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
    ast.BitXor: ast.BitAnd,
    ast.LShift: ast.RShift,
    ast.RShift: ast.LShift,
}
COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.Gt: ast.GtE,
    ast.Eq: ast.NotEq,
    ast.Is: ast.IsNot,
    ast.In: ast.NotIn,
}
COMPARISONS |= {other: one for one, other in COMPARISONS.items()}


class Mutant(NamedTuple):
    """One change of one place."""

    file: str
    line: int
    change: str
    tree: ast.Module

    @property
    def name(self) -> str:
        """The file, the line and the change."""
        return f"{self.file}:{self.line} {self.change}"


def _changes(node: ast.AST) -> Iterator[tuple[str, Callable[[Any], None]]]:
    """Yield the changes of one node: what they do, and a function that applies them to a copy."""
    if isinstance(node, ast.Constant) and isinstance(node.value, bool):
        yield f"{node.value} -> {not node.value}", lambda n: setattr(n, "value", not n.value)
    elif isinstance(node, ast.Constant) and isinstance(node.value, int | float):
        yield f"{node.value} -> {node.value + 1}", lambda n: setattr(n, "value", n.value + 1)
        if node.value:
            yield f"{node.value} -> 0", lambda n: setattr(n, "value", 0 * n.value)
    elif isinstance(node, ast.BinOp | ast.AugAssign) and type(node.op) in OPERATORS:
        other = OPERATORS[type(node.op)]
        mark = "=" if isinstance(node, ast.AugAssign) else ""
        yield (
            f"{type(node.op).__name__}{mark} -> {other.__name__}{mark}",
            lambda n: setattr(n, "op", other()),
        )
    elif isinstance(node, ast.Compare) and type(node.ops[0]) in COMPARISONS:
        turned = COMPARISONS[type(node.ops[0])]
        yield (
            f"{type(node.ops[0]).__name__} -> {turned.__name__}",
            lambda n: n.ops.__setitem__(0, turned()),
        )
    elif isinstance(node, ast.BoolOp):
        swapped = ast.Or if isinstance(node.op, ast.And) else ast.And
        yield f"{type(node.op).__name__} swapped", lambda n: setattr(n, "op", swapped())
    elif isinstance(node, ast.Call) and len(node.args) > 1:
        if not any(isinstance(argument, ast.Starred) for argument in node.args[:2]):
            yield (
                "first two arguments swapped",
                lambda n: n.args.__setitem__(slice(0, 2), n.args[1::-1]),
            )
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.Not):
        yield f"{type(node.op).__name__} removed", lambda n: setattr(n, "op", ast.UAdd())
    elif isinstance(node, ast.If | ast.IfExp):
        yield (
            "condition negated",
            lambda n: setattr(n, "test", ast.UnaryOp(ast.Not(), n.test)),
        )


def _bodies(tree: ast.Module) -> Iterator[ast.FunctionDef]:
    """Yield the functions that encode and decode: not those of claims, nor checks of fields."""
    for item in tree.body:
        if isinstance(item, ast.FunctionDef):
            yield item
        elif isinstance(item, ast.ClassDef) and not item.name.endswith("Claims"):
            for inner in item.body:
                if isinstance(inner, ast.FunctionDef) and inner.name not in DEFINITIONS:
                    yield inner


def mutants_of(path: Path) -> Iterator[Mutant]:
    """Yield all mutants of one file, in the order of its lines."""
    source = path.read_text()
    plain = _parsed(source)
    for number, function in enumerate(_bodies(plain)):
        skipped: set[int] = set()
        for node in ast.walk(function):
            if isinstance(node, ast.Raise | ast.JoinedStr):
                skipped |= {id(inner) for inner in ast.walk(node)} - {id(node)}
            if isinstance(node, ast.arg) and node.annotation is not None:
                skipped |= {id(inner) for inner in ast.walk(node.annotation)}
        for decorated in (*function.decorator_list, function.returns, *function.args.kw_defaults):
            if decorated is not None:
                skipped |= {id(inner) for inner in ast.walk(decorated)}
        for place, node in enumerate(ast.walk(function)):
            if id(node) in skipped:
                continue
            for index, (change, _) in enumerate(_changes(node)):
                tree = _parsed(source)
                same = list(ast.walk(list(_bodies(tree))[number]))[place]
                list(_changes(same))[index][1](same)
                yield _mutant(path, node, change, tree)
            for name in ("body", "orelse", "finalbody"):
                body = getattr(node, name, None)
                for index, statement in enumerate(body if isinstance(body, list) else ()):
                    if not isinstance(statement, ast.stmt) or isinstance(
                        statement, ast.Return | ast.Pass | ast.FunctionDef
                    ):
                        continue
                    tree = _parsed(source)
                    same = list(ast.walk(list(_bodies(tree))[number]))[place]
                    getattr(same, name)[index] = ast.Pass()
                    yield _mutant(path, statement, "statement dropped", tree)


def _parsed(source: str) -> ast.Module:
    """Return the code without docstrings."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
            continue
        if ast.get_docstring(node, clean=False) is not None:
            node.body = node.body[1:] or [ast.Pass(lineno=node.body[0].lineno, col_offset=0)]
    return tree


def _mutant(path: Path, node: Any, change: str, tree: ast.Module) -> Mutant:
    text = " ".join(ast.unparse(node).split())
    return Mutant(
        path.name, node.lineno, f"`{text[:60]}`: {change}", ast.fix_missing_locations(tree)
    )


# ---- one mutant ----------------------------------------------------------------------------------


def load(mutant: Mutant | None, file: str) -> list[type[Compressor]]:
    """Return the classes of a file as the mutant has them; None: as they are."""
    package = importlib.import_module("compressors")
    folder = Path(package.__path__[0])
    files = [file]
    if file.startswith("_"):
        word = f"from .{file.removesuffix('.py')} import"
        files += [p.name for p in sorted(folder.glob("[a-z]*.py")) if word in p.read_text()]
    classes = []
    for name in files:
        stem = name.removesuffix(".py")
        module = types.ModuleType(f"compressors.{stem}")
        module.__package__, module.__file__ = "compressors", str(folder / name)
        sys.modules[module.__name__] = module
        changed = mutant is not None and name == mutant.file
        tree = mutant.tree if changed and mutant else ast.parse((folder / name).read_text())
        exec(compile(tree, str(folder / name), "exec"), module.__dict__)
        for value in vars(module).values():
            if (
                inspect.isclass(value)
                and issubclass(value, Compressor)
                and value.__module__ == module.__name__
                and not stem.startswith("_")
                and not inspect.isabstract(value)
            ):
                value.name = stem
                classes.append(value)
    return classes


def configured(classes: list[type[Compressor]]) -> list[Compressor]:
    """Return all declared variants of the classes."""
    return [cls(**dict(options)) for cls in classes for options in cls().variants]


def refused_by_search(methods: list[Compressor], effort: Effort | None = None) -> str:
    """Return the first fault that a search finds in any configuration, or "".

    Without `effort` it tries as much as `gcbench verify` does.
    """
    for number, method in enumerate(methods):
        search = Search(method, effort or effort_for(method, first=not number), shrink=0)
        for finding in search.run():
            return f"search, {finding.function}: {finding.fault}"
    return ""


def refused_by_list(methods: list[Compressor]) -> str:
    """Return the first declared property that fails, of the methods or their memories, or ""."""
    for name in properties.CHECKS:
        for method in methods:
            outcome = properties.run(method, name)
            if outcome.verdict == "fails":
                return f"{name}: {outcome.measured} {outcome.note}"
    for row in memories.verify(memory.of(methods[0]), methods[0]):
        if row.verdict == "fails":
            return f"{row.check}: {row.measured}"
    return ""


class Recording(Calls):
    """Calls whose results are added to a digest."""

    def __init__(self, method: Compressor) -> None:
        super().__init__(method)
        self.digest = hashlib.sha256()

    def __getattribute__(self, name: str) -> Any:
        value = super().__getattribute__(name)
        if name.startswith("_") or not inspect.ismethod(value):
            return value

        def call(*arguments: Any, **options: Any) -> Any:
            result = value(*arguments, **options)
            for part in result if type(result) is list else [result]:
                for tensor in part.parts if isinstance(part, Payload) else [part]:
                    if isinstance(tensor, Tensor):
                        self.digest.update(tensor.contiguous().numpy().tobytes())
                    elif not isinstance(tensor, Search):
                        self.digest.update(repr(type(tensor)).encode())
            return result

        return call


def broad_search(methods: list[Compressor]) -> tuple[str, str]:
    """Return the first fault on the broad inputs, or "", and a digest of all outputs on them."""
    digest = hashlib.sha256()
    for number, method in enumerate(methods):
        effort = VARIANT if number else BROAD_SCRATCH if method.scratch else BROAD
        search = Search(method, effort, seed=1, shrink=0)
        search.calls = Recording(method)
        for finding in search.run():
            return f"search, {finding.function}: {finding.fault}", ""
        digest.update(search.calls.digest.digest())
        segments = Segments.of([(40, 33), (1,), (70,)], method.granularity)
        try:
            payload, ctx = encode(method, inputs.normal(1391), segments)
            for seed in range(3):
                for _, broken, _ in payloads.corruptions(payload, seed):
                    digest.update(_decoded(method, broken, ctx))
        except Exception as error:
            digest.update(repr(error).encode())
        digest.update(repr(processes.digests(method)).encode())
        digest.update(_with_warm_up(method))
        facts = method.legal_collectives(), requantizes(method), cuttable(method), method.memory
        digest.update(repr(facts).encode())
    return "", digest.hexdigest()


def _with_warm_up(method: Compressor) -> bytes:
    """Return the updates of memory and update rule, behind steps in fp32, and after a rescaling."""
    n = sum(map(math.prod, exchanges.RULE_SHAPES))
    steps = [
        [inputs.normal(n, 10 * step + rank) for rank in range(2)]
        for step in range(exchanges.WARM_UP + 3)
    ]
    carried = memory.of(method)
    state = {name: inputs.normal(9, i) for i, name in enumerate(carried.buffers)}
    try:
        carried.rescale(state, 0.25)
        shapes = exchanges.RULE_SHAPES
        updates = exchanges.steps_of(carried, method.rule, method, steps, shapes)
        return b"".join(map(oracle.raw, [*updates, *state.values()]))
    except Exception as error:
        return repr(error).encode()


def _decoded(method: Compressor, payload: Payload, ctx: Context) -> bytes:
    try:
        return oracle.raw(codec.decode(method, payload, ctx))
    except PayloadError:
        return b"refused"
    except Exception as error:
        return type(error).__name__.encode()


def decide(mutant: Mutant, original: str, report: Callable[[Verdict], None]) -> None:
    """Report whether a mutant is killed, equivalent or survives, and by what.

    `original`: the digest of the unchanged file's outputs. Reports "undecided" once the first
    inputs ended, so that a later time-out does not count as killed.
    """
    try:
        methods = configured(load(mutant, mutant.file))
    except Exception as error:
        return report({"outcome": "killed", "by": f"does not load: {type(error).__name__}"})
    if why := refused_by_search(methods[:1], SMOKE):
        return report({"outcome": "killed", "by": why})
    report({"outcome": "undecided", "by": "out of time"})
    resource.setrlimit(resource.RLIMIT_CPU, (PATIENCE, resource.RLIM_INFINITY))
    why, digest = broad_search(methods)
    if why:
        return report({"outcome": "killed", "by": why})
    if digest == original:
        return report({"outcome": "equivalent", "by": "no output changes"})
    why = refused_by_list(methods) or refused_by_search(methods)
    report({"outcome": "killed" if why else "survived", "by": why})


def isolated(work: Callable[[Callable[[Any], None]], None]) -> Any:
    """Return the last value that `work` reports from a forked process.

    A process that dies before it reports anything counts as killed.
    """
    read, write = os.pipe()
    child = os.fork()
    if not child:
        try:
            os.close(read)
            resource.setrlimit(resource.RLIMIT_CPU, (STUCK, resource.RLIM_INFINITY))
            silent = os.open(os.devnull, os.O_WRONLY)
            os.dup2(silent, 1)
            os.dup2(silent, 2)
            work(lambda value: os.write(write, json.dumps(value).encode()[:60_000] + b"\n"))  # type: ignore[arg-type]
        finally:
            os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        lines = pipe.read().splitlines()
    _, status = os.waitpid(child, 0)
    if lines:
        return json.loads(lines[-1])
    stuck = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGXCPU
    return {"outcome": "killed", "by": "stuck" if stuck else f"the process died ({status})"}


# ---- all of them ---------------------------------------------------------------------------------


def main() -> None:
    """Run the mutants of all files, or of those named, and write the result."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("files", nargs="*", metavar="FILE", help="such as topk.py; without: all")
    parser.add_argument("--share", type=float, default=1.0, help="share of each file's mutants")
    parser.add_argument("--output", type=Path, default=Path("results/mutants.json"))
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after these")
    parser.add_argument("--again", action="store_true", help="repeat the survivors")
    options = parser.parse_args()
    torch.set_num_threads(1)
    folder = Path(importlib.import_module("compressors").__path__[0])
    paths = [p for p in sorted(folder.glob("*.py")) if p.name != "__init__.py"]
    names = [path.name for path in paths]
    if unknown := sorted({*options.files} - {*names}):
        parser.error(f"no file of compressors: {', '.join(unknown)}; there are {', '.join(names)}")
    stored = json.loads(options.output.read_text()) if options.output.is_file() else {}
    done: dict[str, Any] = stored.get("mutants", {})
    if options.again:
        done = {k: v for k, v in done.items() if v["outcome"] not in ("survived", "undecided")}
    start = time.monotonic()
    chosen, totals, current = [], {}, set()
    for path in paths:
        every = list(mutants_of(path))
        totals[path.name] = len(every)
        current |= {digest(mutant) for mutant in every}
        if options.files and path.name not in options.files:
            continue
        order = random.Random(path.name).sample(range(len(every)), len(every))
        count = max(LEAST, round(options.share * len(every)))
        chosen += [(rank / len(every), every[i]) for rank, i in enumerate(order[:count])]
    chosen.sort(key=lambda pair: pair[0])  # every file in turn
    done = {key: each for key, each in done.items() if key in current}
    originals: dict[str, str] = {}
    for _, mutant in chosen:
        key = digest(mutant)
        if key in done or time.monotonic() - start > options.seconds:
            continue
        began = _cpu_seconds()
        if mutant.file not in originals:
            originals[mutant.file] = isolated(
                lambda report: report(broad_search(configured(load(None, mutant.file))))  # noqa: B023
            )[1]
        verdict = isolated(partial(decide, mutant, originals[mutant.file]))
        done[key] = {
            "mutant": mutant.name,
            **verdict,
            "by": verdict["by"][:160],
            "cpu_seconds": round(_cpu_seconds() - began, 1),
        }
        print(f"{verdict['outcome']}: {mutant.name}: {verdict['by'][:100]}", flush=True)
        write(options.output, summary(done, totals, stored.get("reasons", {}), options.share))
    result = summary(done, totals, stored.get("reasons", {}), options.share)
    write(options.output, result)
    print(page(result))


def write(path: Path, result: Mapping[str, Any]) -> None:
    """Write a result as JSON, and its table to MUTANTS.md beside it if that page exists."""
    path.write_text(json.dumps(result, indent=1) + "\n")
    place = path.with_name("MUTANTS.md")
    if place.is_file():
        text = place.read_text()
        head, _, rest = text.partition(BEGIN)
        place.write_text(f"{head}{page(result)}{rest.partition(END)[2]}")


def page(result: Mapping[str, Any]) -> str:
    """Return the tables of a result in Markdown, between `BEGIN` and `END`."""
    counts = ("all", "tried", "equivalent", "killed", "survived", "undecided")
    lines = [
        BEGIN,
        f"`{result['command']}`, {result['date']}, {result['machine']}, torch {result['torch']}: "
        f"{result['killed']} of {result['counted']} mutants that change an output are killed, "
        f"{100 * result['share']:.1f} %, in {result['cpu_seconds']:,.0f} CPU seconds.",
        "",
        "| file | mutants | tried | equivalent | killed | survived | undecided |",
        "|-|-|-|-|-|-|-|",
    ]
    rows = {**result["files"]}
    rows["all files"] = {name: sum(row[name] for row in rows.values()) for name in counts}
    lines += [
        f"| {name} | {' | '.join(str(row[count]) for count in counts)} |"
        for name, row in rows.items()
    ]
    if result["survivors"]:
        lines += ["", "| survivor | reason |", "|-|-|"]
        lines += [
            f"| {name.replace('|', ' or ')} | {result['reasons'].get(name, 'not examined')} |"
            for name in result["survivors"]
        ]
    return "\n".join([*lines, END])


def digest(mutant: Mutant) -> str:
    """Return what identifies a mutant: its code without docstrings."""
    return hashlib.sha256(ast.unparse(mutant.tree).encode()).hexdigest()[:16]


def _cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def summary(
    done: Mapping[str, Any], totals: Mapping[str, int], reasons: Mapping[str, str], share: float
) -> dict[str, Any]:
    """Return the result as it is stored: counts by file, the survivors, and every mutant.

    `share`: the share of each file's mutants that was asked for.
    """
    files: dict[str, dict[str, int]] = {}
    for each in done.values():
        file = each["mutant"].partition(":")[0]
        counts = files.setdefault(
            file,
            {"all": totals.get(file, 0), "tried": 0}
            | dict.fromkeys(("equivalent", "killed", "survived", "undecided"), 0),
        )
        counts["tried"] += 1
        counts[each["outcome"]] += 1
    killed = sum(counts["killed"] for counts in files.values())
    survived = sum(counts["survived"] + counts["undecided"] for counts in files.values())
    return {
        "command": f"make mutants SHARE={share:g}",
        "date": datetime.date.today().isoformat(),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores; one thread",
        "torch": torch.__version__,
        "killed": killed,
        "counted": killed + survived,
        "share": round(killed / max(1, killed + survived), 4),
        "cpu_seconds": round(sum(each["cpu_seconds"] for each in done.values())),
        "files": dict(sorted(files.items())),
        "survivors": sorted(
            e["mutant"] for e in done.values() if e["outcome"] in ("survived", "undecided")
        ),
        "reasons": dict(reasons),
        "mutants": done,
    }


if __name__ == "__main__":
    main()
