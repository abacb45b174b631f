"""The learning rates that a hook's residuals follow, in one process."""

from __future__ import annotations

import ast
import dataclasses
import gc
import re

import pytest
import torch
from torch import nn
from torch.amp import GradScaler

import gcbench
from gcbench.core import memory
from gcbench.core.compressor import Segments
from gcbench.core.errors import UsageError
from gcbench.core.exchange import Lane
from gcbench.integrations.hook import Hook
from gcbench.integrations.level import Level
from gcbench.integrations.rates import Rates


class OneLevel(Hook):
    """A hook with one exchange of one worker."""

    def __init__(self, level: Level, rates: Rates) -> None:
        super().__init__(None, rates)
        self._level, self._exchanged = level, 0

    @property
    def step(self) -> int:
        return self._exchanged

    def _fresh(self, name: str) -> int:
        return self._exchanged

    def _levels(self) -> list[Level]:
        return [self._level]


@pytest.fixture
def level(simulated, clock):
    """An exchange of the parameters "a" and "b", 4 elements each."""
    lane = Lane(
        *(gcbench.get_compressor("onebit"), "allgather", 0, Segments.of([(4,), (4,)])),
        memory.make("residual", {}),
    )
    return Level(simulated(1), lambda step, skipped: [lane], [0], [[("a", 4), ("b", 4)]], 0, clock)


class Wrapper(torch.optim.Optimizer):
    """An optimizer without step hooks, as torch's PostLocalSGDOptimizer is."""

    def __init__(self, **attributes: object) -> None:
        vars(self).update(attributes)


def test_two_rates_of_a_parameter_are_refused(level):
    """Its residual had been rescaled at every step, by the ratio of the rates, and exploded."""
    a, b = nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(4))
    first, second = torch.optim.SGD([a, b], lr=0.1), torch.optim.SGD([a], lr=0.1)
    rates = Rates([first, second], None)
    hook = OneLevel(level, rates)
    rates.bind({"a": a, "b": b}, hook)
    assert rates.of(["a", "b"]) == [0.1, 0.1]
    level.begin(0, rates)
    second.param_groups[0]["lr"] = 0.01
    with pytest.raises(UsageError, match=r"two optimizers move a, .* 0\.1 and 0\.01"):
        level.begin(1, rates)
    (lane,) = level.exchange.lanes  # without a residual nothing follows the rate
    level.exchange.change([dataclasses.replace(lane, memory=memory.make("none", {}))])
    level.begin(1, rates)


def test_the_optimizer_inside_one_without_step_hooks_is_followed():
    inner = torch.optim.SGD([nn.Parameter(torch.ones(4))], lr=1.0)
    assert Rates(Wrapper(optim=inner), None).optimizers == (inner,)
    with pytest.raises(UsageError, match=r"Wrapper has no step hooks.*set hook\.lr"):
        Rates(Wrapper(param_groups=inner.param_groups), None)


def test_a_step_of_one_of_several_optimizers_records_only_its_rates(level):
    """Each is followed by its schedule, so that the first rate fell when the second one steps."""
    parameters = {"a": nn.Parameter(torch.ones(4)), "b": nn.Parameter(torch.ones(4))}
    first, second = (torch.optim.SGD([p], lr=1.0) for p in parameters.values())
    rates = Rates([first, second], None)
    hook = OneLevel(level, rates)
    hook._follow_steps(parameters)
    residual = level.exchange.workers[0][0]["residual"]
    level.begin(0, rates)
    hook._due.update("ab")  # exchanged
    residual.fill_(1.0)
    for optimizer, falls in ((first, 0.5), (second, 0.25)):
        optimizer.step()
        optimizer.param_groups[0]["lr"] = falls
    level.begin(1, rates)
    hook._due.update("ab")
    assert residual.tolist() == [2.0] * 4 + [4.0] * 4
    second.param_groups[0]["lr"] = 8.0
    second.step()  # applied at 8, though the exchange expected 0.25
    level.begin(2, rates)
    assert level.exchange.rates == [[0.5, 8.0]]
    assert residual.tolist() == [2.0] * 4 + [4.0] * 4


def test_a_rate_that_a_step_hook_sets_counts_from_the_next_step(level):
    """The rate that a step applied is read before such hooks, which follow the hook's own."""
    parameters = {name: nn.Parameter(torch.ones(4)) for name in "ab"}
    optimizer = torch.optim.SGD(parameters.values(), lr=1.0)
    rates = Rates(optimizer, None)
    hook = OneLevel(level, rates)
    hook._follow_steps(parameters)
    optimizer.register_step_post_hook(lambda one, *_: one.param_groups[0].update(lr=0.5))
    level.begin(0, rates)
    hook._due.update("ab")  # exchanged
    level.exchange.workers[0][0]["residual"].fill_(1.0)
    optimizer.step()
    level.begin(1, rates)
    assert level.exchange.workers[0][0]["residual"].tolist() == [2.0] * 8


@pytest.mark.parametrize(("name", "count"), [("residual", 1), ("dgc", 0), ("loco", 0)])
def test_a_warning_about_a_residual_names_options_that_its_memory_has(
    name, count, simulated, clock
):
    carried = memory.make(name, {})
    lane = Lane(gcbench.get_compressor("topk"), "allgather", 0, Segments.of([(4,)]), carried)
    level = Level(simulated(1), lambda step, skipped: [lane], [0], [[("a", 4)]], 0, clock)
    level.exchange.workers[0][0][carried.residuals[0]].fill_(1000.0)
    level.begin(0, Rates(None, None))
    with pytest.warns(UserWarning, match="the residual of a") as caught:
        level.look(0, torch.ones(4))
    options = re.findall(r"memory_options=(\{.*?\})", str(caught[0].message))
    assert len(options) == count
    for each in options:
        memory.make(name, ast.literal_eval(each))


@pytest.fixture
def followed(level):
    """A hook that follows the optimizer of "a" alone, and the parameters."""
    parameters = {name: nn.Parameter(torch.ones(4)) for name in "ab"}
    for parameter in parameters.values():
        parameter.grad = torch.ones(4)
    first = torch.optim.SGD([parameters["a"]], lr=1.0)
    rates = Rates(first, None)
    OneLevel(level, rates)._follow_steps(parameters)
    yield parameters, rates
    rates.close()


def test_an_optimizer_that_is_not_followed_is_named_once(followed):
    parameters, _ = followed
    other = torch.optim.SGD([parameters["b"]], lr=0.5)
    with pytest.warns(UserWarning, match=r"SGD.*moves b with the learning rate 0\.5"):
        other.step()
    other.step()  # warnings are errors


def test_an_optimizer_that_replaces_a_followed_one_is_named_at_another_rate(followed):
    parameters, _ = followed
    new = torch.optim.Adam([parameters["a"]], lr=1.0)
    new.step()
    new.param_groups[0]["lr"] = 0.01
    with pytest.warns(UserWarning, match=r"Adam.*rate 0\.01; the hook follows 1 for it"):
        new.step()


def test_torchs_scaler_is_restored_by_close_or_when_the_hook_is_deleted(level):
    gc.collect()
    parameters = {name: nn.Parameter(torch.ones(4)) for name in "ab"}
    assert not hasattr(GradScaler.step, "__wrapped__")
    first, second = Rates(None, None), Rates(None, None)
    for rates in (first, second):
        OneLevel(level, rates)._follow_steps(parameters)
    first.close()
    assert hasattr(GradScaler.step, "__wrapped__")
    del rates, second
    gc.collect()
    assert not hasattr(GradScaler.step, "__wrapped__")


def test_an_optimizer_without_a_rate_is_refused_or_not_compared(followed):
    """As the Adafactor of Transformers, which computes its rate."""
    parameters, rates = followed
    other = torch.optim.SGD([parameters["b"]], lr=0.0)
    other.param_groups[0]["lr"] = None
    rates._stepped(other)  # warnings are errors
    with pytest.raises(UsageError, match=r"SGD has a parameter group without 'lr'. Set hook\.lr"):
        Rates(other, None).of(["b"])


def test_optimizers_of_other_models_and_of_a_closed_hook_are_not_compared(followed):
    parameters, rates = followed
    torch.optim.SGD(nn.Linear(3, 2).parameters(), lr=0.5).step()
    rates.close()
    torch.optim.SGD([parameters["b"]], lr=0.5).step()
