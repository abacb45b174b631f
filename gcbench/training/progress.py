"""What a run says while it goes on: a bar on a terminal, plain lines in a pipe, on stderr."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from datetime import timedelta
from typing import Any, Literal, Protocol

Mode = Literal["auto", "bar", "plain", "none"]
WIDE = 90
"""Columns from which the bar has room for the latest numbers."""
PLAIN_SECONDS = 10.0
"""Seconds between lines in a pipe; evaluations always get one."""


class Observer(Protocol):
    """Hears of every record and of every step."""

    def step(self, step: int, said: str = "") -> None: ...  # noqa: D102

    def record(self, record: Mapping[str, Any]) -> None: ...  # noqa: D102

    def close(self) -> None: ...  # noqa: D102


class Silent:
    """Says nothing."""

    def step(self, step: int, said: str = "") -> None:  # noqa: D102
        pass

    def record(self, record: Mapping[str, Any]) -> None:  # noqa: D102
        pass

    def close(self) -> None:  # noqa: D102
        pass


def _words(record: Mapping[str, Any], *, short: bool = False) -> str:
    if record["kind"] == "train":
        loss = record["train_loss"]
        return "loss not finite" if loss is None else f"loss {loss:.4f}"
    split = "test" if "test_loss" in record else "validation"
    accuracy, loss = record[f"{split}_accuracy"], record[f"{split}_loss"]
    if short:
        figure = loss if accuracy is None else 100 * accuracy
        unit = "" if accuracy is None else " %"
        return f"{split} loss not finite" if figure is None else f"{split} {figure:.4g}{unit}"
    parts = [] if accuracy is None else [f"{split} accuracy {100 * accuracy:.2f} %"]
    parts.append(f"{split} loss not finite" if loss is None else f"{split} loss {loss:.4g}")
    return ", ".join(parts)


class Plain:
    """Prints a line now and then."""

    def __init__(self, name: str, steps: int) -> None:
        self.name, self.steps = name, steps
        self.last = 0.0
        self.first: tuple[int, float] | None = None

    def step(self, step: int, said: str = "") -> None:
        """Print what is said, if anything, with the remaining time by the pace so far."""
        now = time.monotonic()
        if self.first is None:
            self.first = step, now
        done = step - self.first[0]
        if said and now - self.last >= PLAIN_SECONDS:
            left = (now - self.first[1]) / done * (self.steps - step) if done else None
            time_left = "" if left is None else f"  {timedelta(seconds=round(left))} left"
            self._print(f"{step}/{self.steps}  {said}{time_left}")

    def record(self, record: Mapping[str, Any]) -> None:  # noqa: D102
        if record["kind"] == "eval" or time.monotonic() - self.last >= PLAIN_SECONDS:
            self._print(f"step {record['step']}/{self.steps}  {_words(record)}")

    def _print(self, line: str) -> None:
        self.last = time.monotonic()
        print(f"{self.name}  {line}", file=sys.stderr, flush=True)

    def close(self) -> None:  # noqa: D102
        pass


class Bar:
    """Draws a bar with the remaining time and the latest numbers."""

    def __init__(self, name: str, steps: int) -> None:
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            ProgressColumn,
            TextColumn,
        )
        from rich.progress import TimeRemainingColumn as Remaining

        self.name, self.said = name, {"train": "", "eval": ""}
        console = Console(stderr=True)
        columns: list[ProgressColumn] = [TextColumn("{task.description}"), BarColumn(16)]
        columns += [MofNCompleteColumn(), Remaining(compact=True)]
        if console.width >= WIDE:
            columns.append(TextColumn("{task.fields[said]}"))
        self.bar = Progress(*columns, console=console)
        short = name if console.width >= WIDE else name.rsplit("-", 1)[0]
        self.task = self.bar.add_task(short, total=steps, said="")
        self.bar.start()

    def step(self, step: int, said: str = "") -> None:  # noqa: D102
        if said:
            self.bar.update(self.task, completed=step, said=said)
        else:
            self.bar.update(self.task, completed=step)

    def record(self, record: Mapping[str, Any]) -> None:  # noqa: D102
        self.said[record["kind"]] = _words(record, short=True)
        said = "  ".join(filter(None, self.said.values()))
        self.bar.update(self.task, said=said)

    def close(self) -> None:  # noqa: D102
        self.bar.stop()


def observer(mode: Mode, name: str, steps: int) -> Observer:
    """Return the observer for `mode`; "auto" is a bar where stderr is a terminal."""
    if mode == "auto":
        mode = "bar" if sys.stderr.isatty() else "plain"
    if mode == "none":
        return Silent()
    return Bar(name, steps) if mode == "bar" else Plain(name, steps)
