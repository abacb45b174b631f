"""What the CUDA kernels do on this machine's GPU, in one run and one JSON file: `make gpu`.

In this order: compile every CUDA source, compare the bytes of every operation with plain torch,
train one small task on the device, and time every method on it. Beside each method stand copy_ of
the same elements, its definition in plain torch, and, where research code has a few lines for it,
those lines in eager torch and by torch.compile. What does not fit the time is listed as left out.

With `--device cpu` the same steps run on the CPU's kernels and write the same schema.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import kernel_cases
import torch
from pydantic import BaseModel, ConfigDict

import gcbench
from benchmarks.cases import CASES, Case, Gradient
from benchmarks.sizes import SIZES
from benchmarks.test_speed import FLUSHED, Moment
from gcbench import ops
from gcbench.ops import cuda, native
from gcbench.ops.cuda import compile, launch
from gcbench.ops.sources import cuda_families
from gcbench.training import configuration

NO_GPU = 3
"""The exit status where there is no GPU, or no CUDA kernels can run on it."""
WRONG = 1
"""The exit status if an operation returns other bytes than plain torch."""
PARTS = ("encode", "agree_encode", "decode")
TRIED = (33, 1025, 5000)
"""Elements of the tensors that the operations are tried on."""
ROUNDS = 20
FEWEST = 5
"""Calls that are timed, at least, of a row that takes long."""
KERNELS, PLAIN, EAGER, COMPILED = "kernels", "plain torch", "eager torch", "torch.compile"


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Built(_Part):
    """One CUDA source that was compiled, or on the CPU the library that was loaded."""

    name: str
    kernels: int
    seconds: float


class Tried(_Part):
    """One operation's calls, and how many of them returned other bytes than plain torch."""

    op: str
    calls: int
    wrong: int


class Timing(_Part):
    """One part of a method by one backend."""

    op: str
    backend: str
    seconds: float
    """Median."""
    copy_seconds: float
    """Median of copy_ of the same elements, timed before each call."""
    rounds: int


class Slower(_Part):
    """A part of a method whose kernels are slower than torch."""

    op: str
    seconds: float
    faster: str
    """The fastest of the other backends."""
    faster_seconds: float


class Trained(_Part):
    """One run on the device."""

    task: str
    compressor: str
    steps: int
    seconds: float
    accuracy: float


class LeftOut(_Part):
    what: str
    reason: str


class Report(_Part):
    """All of one run."""

    device: str
    machine: dict[str, Any]
    versions: dict[str, str]
    started: str
    seconds: float
    elements: int
    built: list[Built]
    tried: list[Tried]
    trained: Trained | None
    timings: list[Timing]
    slower: list[Slower]
    left_out: list[LeftOut]


class Run:
    """The steps, with the time that is left and what was left out."""

    def __init__(self, device: str, size: str, minutes: float) -> None:
        self.device, self.size = device, size
        self.kind = torch.device(device).type
        self.began = time.monotonic()
        self.deadline = self.began + 60 * minutes
        self.left_out: list[LeftOut] = []

    def in_time(self, what: str, seconds: float = 0.0) -> bool:
        """Return whether `seconds` are left; if not, list `what` as left out."""
        if time.monotonic() + seconds < self.deadline:
            return True
        self.left_out.append(LeftOut(what=what, reason="no time left: give --minutes more"))
        return False

    def build(self) -> Iterator[Built]:
        if self.kind == "cpu":
            began = time.monotonic()
            native.library.load(native.best())
            yield Built(
                name=native.library.isa,
                kernels=len(native.library.functions),
                seconds=time.monotonic() - began,
            )
            return
        major, minor = torch.cuda.get_device_capability(self.device)
        for family in cuda_families():
            began = time.monotonic()
            cubin = compile.compile_family(family, f"sm_{major}{minor}").cubin
            yield Built(
                name=family,
                kernels=len(launch.kernels_of(cubin)),
                seconds=time.monotonic() - began,
            )

    def try_bytes(self) -> list[Tried]:
        served = cuda.KERNELS if self.kind == "cuda" else native.KERNELS
        here = {name.partition(".")[0] for name in served}
        calls: dict[str, int] = {}
        wrong: dict[str, int] = {}
        for name, family in kernel_cases.families().items():
            for size in TRIED:
                if not self.in_time(f"bytes of {name} with {size} elements", 60):
                    continue
                for call in family.cases(size):
                    if call.op.partition(".")[0] not in here:
                        continue
                    with ops.using("reference"):
                        want = kernel_cases.returned(call, torch.device("cpu"))
                    with ops.using(self.kind):
                        actual = kernel_cases.returned(call, torch.device(self.device))
                    calls[call.op] = calls.get(call.op, 0) + 1
                    wrong[call.op] = wrong.get(call.op, 0) + (actual != want)
        return [Tried(op=op, calls=calls[op], wrong=wrong[op]) for op in sorted(calls)]

    def train(self, steps: int) -> Trained | None:
        if not self.in_time("training"):
            return None
        with tempfile.TemporaryDirectory() as folder:
            began = time.monotonic()
            settings = {"task": "digits", "compressor": "terngrad", "steps": steps, "workers": 2}
            rows = gcbench.run(results=folder, device=self.device, **settings)
            row = rows.iloc[0]
            return Trained(
                task="digits",
                compressor="terngrad",
                steps=steps,
                seconds=time.monotonic() - began,
                accuracy=float(row["test_accuracy"]),
            )

    def timings(self, methods: list[str], compiler: str) -> Iterator[Timing]:
        gradient = Gradient(SIZES[self.size], self.device)
        size = FLUSHED if self.kind == "cuda" else 0
        flushed = torch.empty(size, dtype=torch.uint8, device=self.device)
        cases = [
            case
            for case in CASES.values()
            if case.op is None
            and case.name.partition(".")[2] in PARTS
            and (not methods or case.name.partition(".")[0] in methods)
        ]
        for case in cases:
            for backend, name in ((KERNELS, self.kind), (PLAIN, "reference")):
                if self.in_time(f"{case.name} by {backend}"):
                    with ops.using("auto"):
                        timed = case.prepare(gradient)
                    with ops.using(name):
                        yield self._timing(case, backend, timed.call, gradient, flushed)
            if case.eager and self.in_time(f"{case.name} by {EAGER}"):
                yield self._timing(case, EAGER, case.eager(gradient), gradient, flushed)
        for case in cases:
            if case.eager and self.in_time(f"{case.name} by {COMPILED}", 20):
                torch._dynamo.reset()
                try:
                    call = torch.compile(case.eager(gradient), backend=compiler)
                    call()
                except Exception as error:  # whatever the compiler raises is what is reported
                    reason = str(error).strip().partition("\n")[0] or type(error).__name__
                    what = f"{case.name} by {COMPILED}"
                    self.left_out.append(LeftOut(what=what, reason=reason))
                    continue
                yield self._timing(case, COMPILED, call, gradient, flushed)

    def _timing(
        self,
        case: Case,
        backend: str,
        call: Callable[[], Any],
        gradient: Gradient,
        flushed: torch.Tensor,
    ) -> Timing:
        clock: Callable[[], Any] = Moment if self.kind == "cuda" else time.perf_counter

        def clocked(action: Callable[[], Any]) -> float:
            flushed.zero_()
            began = clock()
            action()
            seconds: float = clock() - began
            return seconds

        def copy() -> Any:
            return gradient.copied.copy_(gradient.x)

        copy()
        clocked(call)
        guess = max(clocked(call), 1e-6)
        rounds = max(FEWEST, min(ROUNDS, int(2 / guess)))
        times = [(clocked(copy), clocked(call)) for _ in range(rounds)]
        copies, calls = zip(*times, strict=True)
        return Timing(
            op=case.name,
            backend=backend,
            seconds=statistics.median(calls),
            copy_seconds=statistics.median(copies),
            rounds=rounds,
        )


def slower_ones(timings: list[Timing]) -> list[Slower]:
    """Return the parts of methods whose kernels are slower than the fastest torch."""
    result = []
    for timing in timings:
        others = [row for row in timings if row.op == timing.op and row.backend != KERNELS]
        if timing.backend == KERNELS and others:
            best = min(others, key=lambda row: row.seconds)
            if best.seconds < timing.seconds:
                result.append(
                    Slower(
                        op=timing.op,
                        seconds=timing.seconds,
                        faster=best.backend,
                        faster_seconds=best.seconds,
                    )
                )
    return result


def table(report: Report) -> str:
    """Return the report as text: the bytes, the training, a row for each method's part."""
    backends = (KERNELS, PLAIN, EAGER, COMPILED)
    wrong = [tried for tried in report.tried if tried.wrong]
    lines = [
        f"{report.device}: {report.machine['gpu'] or report.machine['cpu']}, torch "
        f"{report.versions['torch']}; {sum(one.kernels for one in report.built)} kernels built, "
        f"{sum(one.calls for one in report.tried)} calls of {len(report.tried)} operations tried, "
        f"{len(wrong)} operations with wrong bytes; {report.seconds:.0f} s",
        f"{report.elements:,} elements, times as fast as copy_ of them (median of up to {ROUNDS})",
        "",
        "| method | " + " | ".join(backends) + " |",
        "|-|" + "-:|" * len(backends),
    ]
    ratios = {(row.op, row.backend): row.copy_seconds / row.seconds for row in report.timings}
    for op in dict.fromkeys(row.op for row in report.timings):
        cells = [ratios.get((op, backend)) for backend in backends]
        shown = ["-" if cell is None else f"{cell:.3g}" for cell in cells]
        lines.append(f"| {op} | " + " | ".join(shown) + " |")
    lines.append("")
    lines += [
        f"WRONG BYTES: {one.op}, {one.wrong} of {one.calls} calls"
        for one in report.tried
        if one.wrong
    ]
    lines += [
        f"slower than torch: {one.op}, {1e3 * one.seconds:.3g} ms; "
        f"{one.faster} {1e3 * one.faster_seconds:.3g} ms"
        for one in report.slower
    ]
    if report.trained:
        one = report.trained
        lines.append(
            f"trained: {one.task} with {one.compressor}, {one.steps} steps in {one.seconds:.0f} s, "
            f"accuracy {one.accuracy:.3f}"
        )
    lines += [f"left out: {one.what}: {one.reason}" for one in report.left_out]
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    """Run all steps; return 0, `WRONG` or `NO_GPU`."""
    parser = argparse.ArgumentParser(prog="make gpu", description=__doc__)
    parser.add_argument("--device", default="cuda", help="cuda, cuda:1 or cpu")
    parser.add_argument(
        "--out", type=Path, default=Path("build"), help="folder of gpu.json, gpu.md"
    )
    parser.add_argument("--size", choices=list(SIZES), default="25e6", help="elements")
    parser.add_argument("--methods", default="", help="comma-separated; default all")
    parser.add_argument("--minutes", type=float, default=7.5, help="after which rows are left out")
    parser.add_argument("--steps", type=int, default=200, help="steps of the training")
    parser.add_argument("--compiler", default="inductor", help="torch.compile's backend")
    options = parser.parse_args(arguments)
    kind = torch.device(options.device).type
    usable, detail = cuda.status() if kind == "cuda" else native.status()
    if not usable:
        print(f"make gpu: no {kind} kernels can run here: {detail}", file=sys.stderr)
        return NO_GPU
    started = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    run = Run(options.device, options.size, options.minutes)
    built, tried = list(run.build()), run.try_bytes()
    trained = run.train(options.steps)
    timings = list(
        run.timings([name for name in options.methods.split(",") if name], options.compiler)
    )
    report = Report(
        device=options.device,
        machine=configuration.machine(),
        versions=configuration.versions(),
        started=started,
        seconds=time.monotonic() - run.began,
        elements=Gradient(SIZES[options.size]).n,
        built=built,
        tried=tried,
        trained=trained,
        timings=timings,
        slower=slower_ones(timings),
        left_out=run.left_out,
    )
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "gpu.json").write_text(report.model_dump_json(indent=2) + "\n")
    text = table(report)
    (options.out / "gpu.md").write_text(text + "\n")
    print(text)
    return WRONG if any(one.wrong for one in tried) else 0


if __name__ == "__main__":
    sys.exit(main())
