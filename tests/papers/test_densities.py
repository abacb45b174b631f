"""Densities of gradients and noise: brackets against truth, verdicts that say no, the command."""

from __future__ import annotations

import math
from functools import partial

import _paper
import densities
import pytest
import torch
from commands import invoke as run

from gcbench.checks.bounds.observe import density
from gcbench.core.errors import UsageError
from gcbench.report import analysis as measuring
from gcbench.training.train import Trainer

invoke = partial(run, main=partial(_paper.main, densities))


def drawn(g: torch.Tensor, sigma: torch.Tensor, batches: int, seed: int = 0):
    generator = torch.Generator().manual_seed(seed)
    for _ in range(batches):
        yield g + sigma * torch.randn(len(g), generator=generator)


def normal(n: int, seed: int) -> torch.Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("noise", [0.1, 1.0, 5.0])
@pytest.mark.parametrize("sparse", [False, True])
def test_the_bracket_holds_the_truth(noise, sparse):
    """64 batches: where phi of their mean is mostly noise's, the bracket still has phi(g)."""
    n = 100_000
    g = normal(n, 1)
    if sparse:
        g[n // 50 :] = 0
    true = density(g)
    row = densities.look(drawn(g, torch.full((n,), noise), 64), 64)
    assert row["gradient_low"] <= true * 1.03
    assert row["gradient_high"] >= true * 0.97
    assert row["noise"] == pytest.approx(1, abs=0.02)  # equal everywhere, but for its estimate
    assert row["norm"] == pytest.approx(float(g.norm()), rel=0.15)
    if noise == 0.1 and not sparse:
        assert row["gradient_high"] / row["gradient_low"] < 1.2
    if sparse and noise == 5.0:  # the mean alone would say that g is dense
        assert row["gradient"] > 0.5
        assert row["noise_share"] > 0.9
        assert row["gradient_low"] < 0.1


def test_a_density_of_nothing_is_none():
    row = densities.look(drawn(torch.zeros(100), torch.zeros(100), 8), 8)
    assert row["gradient"] is None
    assert row["gradient_low"] is None
    assert row["noise"] is None


def test_too_few_batches_are_an_error():
    with pytest.raises(UsageError, match="received 7 batches, expected 8"):
        densities.look(drawn(torch.ones(10), torch.ones(10), 7), 8)


def rows(gradient, noise, spread=1.1):
    """Six snapshots of three seeds; `gradient` and `noise` give the densities of (seed, step)."""
    result = []
    for seed in range(3):
        for step in range(6):
            at = gradient(seed, step)
            ends = {"gradient_low": at / spread, "gradient_high": min(1.0, at * spread)}
            result.append(
                {"seed": seed, "step": step, "gradient": at, "noise": noise(seed, step), **ends}
            )
    return result


def wave(seed: int, step: int) -> float:
    return 0.3 * (1 + 0.2 * step + 0.01 * seed)


def verdict(of) -> list[str]:
    return [str(row["verdict"]) for row in densities.judge(of)]


def test_dense_alike_and_coupled():
    assert verdict(rows(wave, lambda s, t: 1.2 * wave(s, t))) == ["holds"] * 4


@pytest.mark.parametrize(
    ("which", "gradient", "noise"),
    [
        (0, wave, lambda s, t: 0.05 * wave(s, t)),
        (1, lambda s, t: 0.05 * wave(s, t), wave),
        (2, lambda s, t: 0.01 * wave(s, t), wave),
        (3, wave, lambda s, t: 0.2 / wave(s, t)),
    ],
    ids=["noise sparse", "gradient sparse", "of other orders", "opposed"],
)
def test_what_is_not_so_does_not_hold(which, gradient, noise):
    assert verdict(rows(gradient, noise))[which] == "does not hold"


def test_a_wide_bracket_tells_nothing():
    result = verdict(rows(wave, lambda s, t: 1.2 * wave(s, t), spread=20.0))
    assert result[:3] == ["holds", "cannot tell", "cannot tell"]
    broken = rows(wave, wave)
    broken[3]["gradient_low"] = None
    assert verdict(broken)[1:] == ["cannot tell"] * 3


def test_one_seed_tells_nothing():
    one = [row for row in rows(wave, wave) if row["seed"] == 0]
    assert verdict(one) == ["cannot tell"] * 4


def test_the_command(tmp_path, monkeypatch):
    words = ("--steps", 7, "--snapshots", 3, "--batches", 8, "--seed", "0,1")
    done = invoke(*words, "--results", tmp_path, "--json")
    result = done.json
    assert result["kind"] == "densities"
    (claims, snapshots) = result["tables"]
    assert [(row["seed"], row["step"]) for row in snapshots["rows"]] == [
        (seed, step) for seed in (0, 1) for step in (0, 3, 6)
    ]
    assert all(0 < row["noise"] <= 1 for row in snapshots["rows"])
    assert all(row["n"] == 2 for row in claims["rows"])
    (folder,) = tmp_path.glob("densities-*")
    assert (folder / "densities.png").stat().st_size > 10_000

    def trained(*_):
        raise UsageError("it trains")

    monkeypatch.setattr(densities, "_train", trained)
    again = invoke(*words, "--results", tmp_path, "--json")
    assert again.json == result
    assert f"{folder} is finished; --force" in again.err
    assert "it trains" in invoke(*words, "--results", tmp_path, "--force").err
    monkeypatch.setattr(measuring, "code", lambda module: "other")
    again = invoke(*words, "--results", tmp_path, "--json")
    assert again.json == result
    assert "is finished, made by another version of the code; --force" in again.err
    bad = invoke("--seed", "0,0", "--results", tmp_path)
    assert bad.code == 2
    assert "[0, 0]" in bad.err
    odd = invoke("--batches", 9, "--results", tmp_path)
    assert odd.code == 2
    assert "--batches" in odd.err or "--batche" in odd.err


def test_fisher_is_finite_for_perfect_lines():
    assert math.isfinite(densities._fisher(1.0))
    assert math.tanh(densities._fisher(0.5)) == pytest.approx(0.5)
    assert math.isnan(densities._fisher(math.nan))


def test_what_was_trained_before_a_stop_is_kept_and_dated(tmp_path, monkeypatch):
    """The last of six snapshots ends the command; the next one trains from the fifth."""
    words = ("--steps", 7, "--snapshots", 3, "--batches", 8, "--seed", "0,1", "--json", "--results")
    whole = invoke(*words, tmp_path / "whole").json["tables"]
    step, look, steps, looks, times = Trainer.train_step, densities.look, [], [], iter(range(100))

    def counted(trainer):
        steps.append(trainer.step)
        return step(trainer)

    def stopped(*arguments):
        looks.append(arguments)
        if len(looks) in (6, 10):
            raise UsageError("stopped")
        return look(*arguments)

    monkeypatch.setattr(Trainer, "train_step", counted)
    monkeypatch.setattr(densities, "look", stopped)
    monkeypatch.setattr(measuring, "now", lambda: f"{next(times):03}")
    assert "stopped" in invoke(*words, tmp_path).err
    assert steps == [*range(6), *range(6)]
    monkeypatch.setattr(measuring, "code", lambda module: "other")
    done = invoke(*words, tmp_path)
    assert (steps[12:], len(looks)) == ([3, 4, 5], 7)
    assert done.json["tables"] == whole
    assert done.json["provenance"]["started"] == "000"
    assert "made by another version of the code; --force" in done.err
    again = invoke(*words, tmp_path)  # its first part is still the old code's
    assert "is finished, made by another version of the code; --force" in again.err
    assert "stopped" in invoke(*words, tmp_path, "--force").err
    assert steps[15:] == [*range(6)]
    assert invoke(*words, tmp_path, "--force").json["tables"] == whole
    assert steps[21:] == [*range(6), *range(6)]
    assert not [*tmp_path.glob("densities-*/seed-*")]
