"""1-bit Adam: the codec, the memory at both ends, and the update with a frozen second moment."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from commands import invoke
from gcbench.compressors.onebitadam import ExchangedMomentum, FrozenAdam

import gcbench
from gcbench.core import memory, registry
from gcbench.core.compressor import Context, Segments
from gcbench.core.errors import UsageError
from gcbench.core.exchange import Exchange, lane_of
from gcbench.training.configuration import Config

B1, B2, EPS, LR = 0.9, 0.999, 1e-8, 0.01


def gradients(steps: int, workers: int, n: int) -> torch.Tensor:
    return torch.randn(steps, workers, n, generator=torch.Generator().manual_seed(5))


def run(simulated, clock, grads, warm_up, collective="twoshot", code="onebitadam", **fields):
    """Return the parameters after each step, and the exchange."""
    steps, workers, n = grads.shape
    method = gcbench.get_compressor("onebitadam", **fields)
    carried = memory.of(method)
    exact = lane_of([(n,)], 0, method, collective, carried, exact=True)
    lossy = lane_of([(n,)], 0, method, collective, carried, exact=False)
    if code != "onebitadam":
        lossy = type(lossy)(
            gcbench.get_compressor(code), "allreduce", 0, lossy.segments, carried, rule=lossy.rule
        )
    created = Exchange(simulated(workers), [exact], 0, clock)
    clock.start_step()
    theta, path = torch.zeros(n), []
    for step in range(steps):
        if step >= warm_up:
            created.change([exact if method.rule.in_fp32(step) else lossy])
        direction = created.mean(list(grads[step]), step, LR)
        theta = theta.sub(direction, alpha=LR)
        path.append(theta.clone())
    return path, created


def test_skipped_steps_are_no_updates(simulated, clock):
    """As torch's Adam, which a GradScaler does not call; the bias of the momentum had been that of
    more updates, and the first step 0.744 times as long."""
    grads = gradients(12, 2, 6)
    path, _ = run(simulated, clock, grads, 8)
    method = gcbench.get_compressor("onebitadam")
    carried = memory.of(method)
    exact, lossy = (
        lane_of([(6,)], 0, method, "twoshot", carried, exact=warm) for warm in (True, False)
    )
    created = Exchange(simulated(2), [exact], 0, clock)
    clock.start_step()
    theta = torch.zeros(6)
    for step in range(12):
        if step in (0, 1, 6):
            created.skipped += 1
        if step == 8:
            created.change([lossy])
        if step == 4:
            again = Exchange(simulated(2), [exact], 0, clock)
            for worker in range(2):
                again.load_state_dict(created.state_dict(worker), worker)
            created = again
        at = step + created.skipped
        theta = theta.sub(created.mean(list(grads[step]), at, LR), alpha=LR)
    assert torch.equal(theta, path[-1])


def adam(grads, warm_up, beta2=B2):
    """torch.optim.Adam written out, whose second moment is frozen after the warm-up."""
    n = grads.shape[-1]
    theta, m, v, path = torch.zeros(n), torch.zeros(n), torch.zeros(n), []
    for t, g in enumerate(grads, 1):
        m = torch.lerp(m, g, 1 - B1)
        if t <= warm_up:
            v = torch.lerp(v, g * g, (1 - beta2) / (1 - beta2**t))  # v / (1 - beta2^t) of torch
        direction = m / (1 - B1**t) / (v.sqrt() + EPS)
        theta = theta.sub(direction, alpha=LR)
        path.append(theta)
    return path


def test_one_worker_without_loss_is_adam_with_a_frozen_second_moment(simulated, clock):
    """Bit for bit, in the warm-up and after it."""
    grads = gradients(30, 1, 500)
    path, _ = run(simulated, clock, grads, 10, code="none")
    for step, (ours, theirs) in enumerate(zip(path, adam(grads[:, 0], 10), strict=True)):
        assert torch.equal(ours, theirs), step


def test_the_warm_up_is_torchs_adam(simulated, clock):
    """To rounding: torch's own step divides in another order."""
    grads = gradients(20, 3, 500)
    path, _ = run(simulated, clock, grads, 20)
    theta = torch.nn.Parameter(torch.zeros(500))
    optimizer = torch.optim.Adam([theta], lr=LR, betas=(B1, B2), eps=EPS)
    for step in range(20):
        theta.grad = grads[step].mean(0)
        optimizer.step()
        torch.testing.assert_close(path[step], theta.detach(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("refresh", "updates"), [(0, (1, 2, 3, 4)), (2, (1, 2, 4, 6, 10))])
def test_the_exchanged_momentum_by_its_definition(simulated, clock, refresh, updates):
    """The recursions of algorithm 1 in float64, at two workers and by all-gather."""
    grads, warm_up = gradients(12, 2, 300), 4
    path, created = run(simulated, clock, grads, warm_up, "allgather", refresh=refresh)
    m, frozen, theta = (torch.zeros(300, dtype=torch.float64) for _ in range(3))
    errors = torch.zeros(2, 300, dtype=torch.float64)
    for t, g in enumerate(grads.double(), 1):
        if t <= warm_up or t in updates:
            m = B1 * m + (1 - B1) * g.mean(0)
            if t in updates:
                weight = (1 - B2) / (1 - B2 ** (updates.index(t) + 1))
                frozen = (1 - weight) * frozen + weight * g.mean(0).square()
        else:
            p = B1 * m + (1 - B1) * g + errors
            c = p.abs().mean(1, keepdim=True) * torch.where(p >= 0, 1.0, -1.0)
            errors, m = p - c, c.mean(0)
        theta = theta - LR * m / (1 - B1**t) / (frozen.sqrt() + EPS)
        assert float((path[t - 1] - theta).abs().max()) < 1e-4, t
    carried = torch.stack([worker[0]["error"] for worker in created.workers]).double()
    assert float((carried - errors).abs().max()) < 1e-5


def test_both_residuals_telescope(simulated, clock):
    """What was applied, and what workers and owners carry, add up to what was offered."""
    grads, warm_up, n = gradients(10, 3, 2100), 2, 2100
    _, created = run(simulated, clock, grads[:warm_up], warm_up)
    method = gcbench.get_compressor("onebitadam")
    created.change([lane_of([(n,)], 0, method, "twoshot", memory.of(method), exact=False)])
    total = torch.zeros(n, dtype=torch.float64)
    for step in range(warm_up, 10):
        before = created.joint[0]["momentum"].double().clone()
        total += B1 * before + (1 - B1) * grads[step].double().mean(0)
        created.mean(list(grads[step]), step, LR)
        total -= created.joint[0]["momentum"].double()
    carried = torch.stack([worker[0]["error"] for worker in created.workers]).double().mean(0)
    owners = torch.cat([worker[0]["owner"] for worker in created.workers]).double()
    assert float(owners.abs().max()) > 0.01
    assert float((carried + owners - total).abs().max()) < 1e-5


def test_residuals_do_not_follow_the_learning_rate(simulated, clock):
    grads = gradients(6, 2, 300)
    _, created = run(simulated, clock, grads, 2)
    before = [worker[0]["error"].clone() for worker in created.workers]
    created.follow(LR / 10)
    assert all(torch.equal(a, w[0]["error"]) for a, w in zip(before, created.workers, strict=True))


def test_elements_without_gradient_do_not_move(simulated, clock):
    """Their second moment is 0, and the compressed momentum is not: they would leap."""
    grads = gradients(12, 2, 300)
    grads[:, :, 100:] = 0
    path, created = run(simulated, clock, grads, 4)
    assert float(created.joint[0]["momentum"][100:].abs().min()) > 0
    assert not path[-1][100:].any()
    assert float(path[-1][:100].abs().min()) > 0


@pytest.mark.parametrize("refresh", [1, 2, 5, 16])
def test_the_second_moment_is_refreshed_at_growing_intervals(refresh):
    """t_(j+1) = t_j + 2^floor(j / refresh), from t_0 = 0."""
    steps = list(
        itertools.takewhile(
            lambda t: t <= 3000, itertools.accumulate(2 ** (j // refresh) for j in range(3000))
        )
    )
    rule = gcbench.get_compressor("onebitadam", refresh=refresh).rule
    assert [step + 1 for step in range(3000) if rule.in_fp32(step)] == steps
    assert not any(gcbench.get_compressor("onebitadam").rule.in_fp32(step) for step in range(100))


@pytest.mark.usefixtures("forked")
def test_a_run_refreshes_it_in_every_engine(tmp_path):
    """Steps 1, 2, 4, 6 and 10 send 32 bits per element, the others 1 and a scale per tensor."""
    words = ("run", "--task", "digits", "--compressor", "onebitadam", "--set", "refresh=2")
    words = (*words, "--start-step", 2, "--steps", 11, "--workers", 2, "--collective", "allgather")
    words = (*words, "--results", tmp_path, "--json", "--progress", "none")
    runs = invoke(*words, "--engine", "simulate,spawn,ddp").json
    assert len({run["params_sha256"] for run in runs}) == 1
    model = registry.task("digits").model()
    bits = sum(4 * -(-p.numel() // 32) + 4 for p in model.parameters())
    numel = sum(p.numel() for p in model.parameters())
    assert {run["payload_bytes_up"] for run in runs} == {5 * 4 * numel + 6 * bits}


def test_a_negative_refresh_is_refused():
    with pytest.raises(UsageError, match="refresh=-1"):
        gcbench.get_compressor("onebitadam", refresh=-1)


def test_fields_reach_all_three_parts():
    method = gcbench.get_compressor("onebitadam", beta1=0.8, beta2=0.9, eps=1e-4)
    assert method.rule == FrozenAdam(0.8, 0.9, 1e-4)
    assert method.rule.dense() == FrozenAdam(0.8, 0.9, 1e-4, frozen=False)
    assert memory.of(method) == ExchangedMomentum(0.8)
    config = Config.make({"compressor": "onebitadam", "options": {"beta1": 0.8}})
    assert config.make_memory() == ExchangedMomentum(0.8)
    assert (config.optimizer, config.momentum, config.start_step) == ("sgd", 0.0, 100)


def test_a_memory_that_contradicts_the_method_is_refused():
    """The update would correct the bias of another momentum."""
    with pytest.raises(UsageError, match=r"beta1=0\.8.*beta1=0\.9.*--set beta1=0\.8"):
        Config.make({"compressor": "onebitadam", "memory_options": {"beta1": 0.8}})
    with pytest.raises(UsageError, match=r"--set beta1=0\.8"):
        gcbench.comm_hook("onebitadam", start_step=10, memory_options={"beta1": 0.8})


@pytest.mark.parametrize(
    ("settings", "value"),
    [
        ({"start_step": 0}, "start_step"),
        ({"optimizer": "adam"}, "adam"),
        ({"momentum": 0.9}, "momentum"),
        ({"memory": "residual"}, "momentum"),
    ],
)
def test_settings_that_the_update_rule_cannot_work_with_are_refused(settings, value):
    with pytest.raises(UsageError, match=value):
        Config.make({"compressor": "onebitadam", **settings})
    hook = {k: v for k, v in settings.items() if k in ("start_step", "memory")}
    if hook:
        with pytest.raises(UsageError, match=value):
            gcbench.comm_hook("onebitadam", **{"start_step": 10, **hook})


def test_the_memory_alone_in_the_warm_up():
    carried = ExchangedMomentum(0.5).dense()
    gradient, joint = torch.tensor([2.0, -4.0]), {"momentum": torch.tensor([1.0, 1.0])}
    ctx = Context(Segments.of([(2,)]), joint=joint)
    assert carried.offer(gradient, ctx) is gradient
    assert carried.apply(gradient, ctx) is gradient
    assert joint["momentum"].tolist() == [1.5, -1.5]
    assert not carried.feedback
    assert math.isclose(ExchangedMomentum(0.5).beta1, 0.5)


@pytest.mark.parametrize("fields", [{"beta1": 1.0}, {"beta2": 1.0}, {"beta1": -3.0}, {"eps": -1.0}])
def test_constants_of_adam_are_checked(fields):
    """With beta2 = 1 a run ended in a division by zero, with beta1 = 1 in NaN."""
    with pytest.raises(UsageError, match=f"{next(iter(fields))}=.*expected"):
        gcbench.get_compressor("onebitadam", **fields)
    if "beta1" in fields:
        with pytest.raises(UsageError, match=r"beta1=.*expected"):
            memory.of(gcbench.get_compressor("onebitadam"), fields)
