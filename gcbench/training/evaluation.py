"""Accuracy and loss of a model on a split of a task's examples."""

from __future__ import annotations

import torch
from torch import nn

from gcbench.core.task import Split, Task
from gcbench.core.values import finite as or_none


def evaluate(
    task: Task, model: nn.Module, split: Split, name: str, device: torch.device
) -> dict[str, float | None]:
    """Return `<name>_accuracy` (None if the task has none), `<name>_loss`, the task's metrics."""
    right, loss, has_accuracy = 0, 0.0, True
    further: dict[str, float] = {}
    size = task.evaluation_batch
    with torch.no_grad():
        for start in range(0, len(split), size):
            stop = min(start + size, len(split))
            inputs, targets = task.batch(split, torch.arange(start, stop, device=device), None)
            outputs = model(inputs)
            loss += float(task.loss(outputs, targets)) * (stop - start)
            correct = task.correct(outputs, targets)
            has_accuracy = has_accuracy and correct is not None
            right += int(correct.sum()) if correct is not None else 0
            for metric, each in task.metrics(outputs, targets).items():
                further[metric] = further.get(metric, 0.0) + float(each.sum())
    return {
        f"{name}_accuracy": right / len(split) if has_accuracy else None,
        f"{name}_loss": or_none(loss / len(split)),
        **{f"{name}_{k}": or_none(v / len(split)) for k, v in further.items()},
    }
