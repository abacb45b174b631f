"""Streaming local steps: when fragments are exchanged and taken over, and a run by hand."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from gcbench.core.errors import UsageError
from gcbench.core.fragments import Rounds, of_names
from gcbench.training.configuration import Config
from gcbench.training.store import Run
from gcbench.training.train import Options, Trainer

DILOCO = {"outer_lr": 0.7, "outer_momentum": 0.9, "outer_nesterov": True}
PLAIN: dict[str, Any] = {
    **{"task": "digits", "compressor": "none", "workers": 2, "optimizer": "sgd", "lr": 0.1},
    **{"momentum": 0.0, "weight_decay": 0.0, "schedule": "constant"},
}
STREAMING: dict[str, Any] = {**PLAIN, **DILOCO, "local_steps": 6, "fragments": 2}


@pytest.fixture
def trainer(simulated, tmp_path):
    def make(**settings: Any) -> Trainer:
        config = Config.make(settings)
        return Trainer(config, simulated(config.workers), Run(tmp_path), Options())

    return make


def test_the_published_schedule() -> None:
    """P = 4, H = 12, V = 1 as in MaxText; the last step exchanges what is not on its way."""
    rounds = Rounds(12, 4, 1, 26)
    sent = {done: rounds.sent(done) for done in range(26) if rounds.sent(done)}
    taken = {done: rounds.taken(done) for done in range(26) if rounds.taken(done)}
    first = {3: [1], 6: [2], 9: [3], 12: [0]}
    assert sent == {**first, **{done + 12: which for done, which in first.items()}}
    assert taken == {done + 1: which for done, which in sent.items()}
    assert rounds.sent(26) == [0, 1, 2, 3]
    assert Rounds(12, 4, 1, 25).sent(25) == [1, 2, 3], "fragment 0 is on the way"
    assert Rounds(12, 4, 2, 26).sent(26) == [1, 2, 3]


def test_without_fragments_rounds_end_at_every_h_steps_and_at_the_last() -> None:
    rounds = Rounds(4, 1, 0, 10)
    sent = [done for done in range(1, 11) if rounds.sent(done) == [0] == rounds.taken(done)]
    assert sent == [4, 8, 10]


def test_blocks_follow_in_turn() -> None:
    names = ["wte.weight", *(f"h.{i}.mlp.{j}.weight" for i in range(4) for j in (0, 2)), "ln.bias"]
    assert of_names(names, 1) == [0] * 10
    assert of_names(names, 3) == [0, 1, 1, 2, 2, 1, 1, 2, 2, 0]
    assert of_names(["1.weight", "1.bias", "3.weight"], 2) == [0, 0, 1]
    with pytest.raises(UsageError, match="at most 5"):
        of_names(names, 6)


@pytest.mark.parametrize(("delay", "blend"), [(0, 0.0), (1, 0.25), (2, 0.0)])
def test_a_run_by_hand(trainer, delay: int, blend: float) -> None:
    """Two workers, two fragments (the layers), 13 steps: Nesterov by its formula, in float64."""
    created = trainer(**STREAMING, steps=13, delay=delay, blend=blend)
    models = [copy.deepcopy(created.model) for _ in range(2)]
    common = {name: p.detach().double() for name, p in created.model.named_parameters()}
    velocity = {name: torch.zeros_like(p) for name, p in common.items()}
    layers = ("1.", "3.")
    sent = {3: "3.", 6: "1.", 9: "3.", 12: "1."}
    for done in range(1, 14):
        for rank, model in enumerate(models):
            inputs, targets = created.batches.of(done - 1, rank)
            loss = created.task.loss(model(inputs), targets)
            gradients = torch.autograd.grad(loss, list(model.parameters()))
            for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                parameter.data -= 0.1 * gradient
        due = (sent[done],) if done in sent else ()
        if done == 13:
            due = layers if delay == 0 else ("3.",)
        workers = [dict(model.named_parameters()) for model in models]
        for name in (name for name in common if name.startswith(due)):
            ends = torch.stack([worker[name].detach().double() for worker in workers])
            outward = common[name] - ends.mean(0)
            velocity[name] = 0.9 * velocity[name] + outward
            common[name] = common[name] - 0.7 * (outward + 0.9 * velocity[name])
        arrived = sent.get(done - delay)
        for name in (name for name in common if arrived and name.startswith(arrived)):
            for worker in workers:
                worker[name].data = (blend * worker[name] + (1 - blend) * common[name]).float()
    for _ in range(13):
        created.train_step()
    for name, parameter in created.model.named_parameters():
        torch.testing.assert_close(parameter.double(), common[name], rtol=0, atol=2e-5)


def test_a_round_sends_every_element_once_and_half_of_them_at_a_time(trainer) -> None:
    created = trainer(**STREAMING, steps=12)
    traffic, sent = created.world.traffic[0], [0.0]
    for _ in range(6):
        created.train_step()
        sent.append(traffic.payload_up)
    assert sent[6] == 4 * created.total
    assert sent[3] - sent[2] == 4 * sum(created.sizes[created.fragments[1]])
    assert sent[2] == 0
    assert sent[5] == sent[3]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"local_steps": 100, "fragments": 37}, "local_steps=74"),
        ({"local_steps": 4, "fragments": 2, "delay": 2}, "delay=2"),
        ({"fragments": 2}, "--local-steps"),
        ({"blend": 0.5}, "--local-steps"),
        ({"delay": 2}, "delay=2"),
    ],
)
def test_what_does_not_fit_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Config.make({**PLAIN, "steps": 10, **settings})
