"""Optimizer muon: torch's Muon for hidden matrices, torch's AdamW for the rest, at one rate."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from gcbench.core.errors import UsageError
from gcbench.training.configuration import Config
from gcbench.training.store import Run
from gcbench.training.train import Options, Trainer

RECIPE: dict[str, Any] = {
    **{"task": "digits", "compressor": "none", "workers": 2, "steps": 9, "optimizer": "muon"},
    **{"lr": 0.01, "weight_decay": 0.1, "decay": "update", "schedule": "constant"},
}


@pytest.fixture
def trainer(simulated, tmp_path):
    def make(**settings: Any) -> Trainer:
        config = Config.make(settings)
        return Trainer(config, simulated(config.workers), Run(tmp_path), Options())

    return make


def oracle(model: nn.Module) -> list[torch.optim.Optimizer]:
    """Return torch's optimizers of the digits network: Muon for the first of its two matrices."""
    weight, *others = model.parameters()
    assert [p.ndim for p in (weight, *others)] == [2, 1, 2, 1]
    rate: dict[str, Any] = {"lr": 0.01, "weight_decay": 0.1}
    muon = torch.optim.Muon([weight], **rate, adjust_lr_fn="match_rms_adamw")
    return [muon, torch.optim.AdamW(others, **rate)]


def test_steps_are_those_of_torch(trainer) -> None:
    created = trainer(**RECIPE)
    model = copy.deepcopy(created.model)
    optimizers = oracle(model)
    for step in range(3):
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        for rank in range(2):
            inputs, targets = created.batches.of(step, rank)
            (created.task.loss(model(inputs), targets) / 2).backward()
        for optimizer in optimizers:
            optimizer.step()
        created.train_step()
    for name, expected in model.named_parameters():
        actual = dict(created.model.named_parameters())[name]
        torch.testing.assert_close(actual, expected, rtol=0, atol=2e-4)


def test_local_steps_run_it_on_every_worker(trainer) -> None:
    """MuLoCo: two workers' own optimizers, whose parameters are averaged after three steps."""
    created = trainer(**RECIPE, local_steps=3)
    models = [copy.deepcopy(created.model) for _ in range(2)]
    for rank, model in enumerate(models):
        optimizers = oracle(model)
        for step in range(3):
            inputs, targets = created.batches.of(step, rank)
            model.zero_grad()
            created.task.loss(model(inputs), targets).backward()
            for optimizer in optimizers:
                optimizer.step()
    for _ in range(3):
        created.train_step()
    for name, parameter in created.model.named_parameters():
        ends = torch.stack([dict(model.named_parameters())[name] for model in models])
        torch.testing.assert_close(parameter, ends.mean(0), rtol=0, atol=2e-4)


def test_a_model_without_hidden_matrices_is_refused(trainer) -> None:
    with pytest.raises(UsageError, match="muon"):
        trainer(**{**RECIPE, "task": "quadratic"})
