"""What workers carry from step to step: identities that hold to rounding, and what is refused."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from gcbench.compressors.memories.dgc import Dgc
from gcbench.compressors.memories.ef21 import Ef21
from gcbench.compressors.memories.loco import Loco
from gcbench.compressors.memories.momentum import Momentum
from gcbench.compressors.memories.none import NoMemory
from gcbench.compressors.memories.residual import Residual

import gcbench
from gcbench.core import codec, memory
from gcbench.core.claims import Claims
from gcbench.core.compressor import Compressor, Context, Key, Payload, Segments, fuses_feedback
from gcbench.core.errors import UsageError
from gcbench.core.exchange import Exchange, Lane
from gcbench.core.rule import UpdateRule
from gcbench.training.configuration import Config


class LargestClaims(Claims):
    contractive = True


@dataclass(frozen=True)
class Largest(Compressor):
    """Keeps the largest `share` of all elements: the simplest contractive code."""

    share: float = 0.25
    name = "largest"
    collectives: ClassVar[tuple[str, ...]] = ("allgather", "twoshot")

    @property
    def claims(self):
        return LargestClaims(self)

    def encode(self, x, ctx):
        selected = x.abs().topk(math.ceil(self.share * len(x))).indices.sort().values
        return Payload((selected.int(), x[selected]))

    def decode(self, payload, ctx):
        out = torch.zeros(ctx.segments.numel)
        out[payload.parts[0].long()] = payload.parts[1]
        return out


def gradients(steps: int, workers: int, n: int) -> torch.Tensor:
    """Return noisy gradients with a common part, shape (steps, workers, n)."""
    draw = torch.Generator().manual_seed(steps + workers + n)
    common = torch.randn(n, generator=draw)
    return common + torch.randn(steps, workers, n, generator=draw)


def exchange(simulated, clock, method, collective, selected, workers, n) -> Exchange:
    lane = Lane(method, collective, 0, Segments.of([(n,)]), selected)
    clock.start_step()
    return Exchange(simulated(workers), [lane], 0, clock)


def carried(created: Exchange, name: str) -> list[torch.Tensor]:
    return [states[0][name] for states in created.workers]


@pytest.mark.parametrize("collective", ["allgather", "twoshot"])
@pytest.mark.parametrize("workers", [1, 3])
def test_nothing_is_lost_over_200_steps(simulated, clock, collective, workers):
    """Sum of what was applied + what is still carried, on workers and owners = sum of gradients."""
    n, steps = 2100, 200
    created = exchange(simulated, clock, Largest(), collective, Residual(), workers, n)
    grads = gradients(steps, workers, n)
    applied = torch.zeros(n, dtype=torch.float64)
    for step in range(steps):
        applied += created.mean(list(grads[step]), step).double()
    left = torch.stack(carried(created, "residual")).double().mean(0)
    if collective == "twoshot":
        owners = torch.cat(carried(created, "owner")).double()
        assert workers == 1 or float(owners.abs().max()) > 0.1, "the owners lose something"
        left = left + owners
    total = grads.double().mean(1).sum(0)
    assert float((applied + left - total).abs().max()) < 1e-3
    assert float((applied - total).abs().max()) > 1


def test_forgetting_the_owners_residual_loses_gradient(simulated, clock):
    n, steps, selected = 2100, 50, Residual(at_owner=False)
    created = exchange(simulated, clock, Largest(), "twoshot", selected, 3, n)
    grads = gradients(steps, 3, n)
    applied = sum(created.mean(list(grads[step]), step).double() for step in range(steps))
    left = torch.stack(carried(created, "residual")).double().mean(0)
    assert float((applied + left - grads.double().mean(1).sum(0)).abs().max()) > 1
    assert "owner" not in created.workers[0][0]


def test_the_residual_is_what_went_in_minus_what_was_sent(simulated, clock):
    """By hand, with decay: p = g + 0.5 e, the largest of four elements is sent."""
    created = exchange(simulated, clock, Largest(), "allgather", Residual(decay=0.5), 1, 4)
    first = created.mean([torch.tensor([1.0, -4.0, 2.0, 0.0])], 0)
    assert first.tolist() == [0.0, -4.0, 0.0, 0.0]
    assert carried(created, "residual")[0].tolist() == [1.0, 0.0, 2.0, 0.0]
    second = created.mean([torch.tensor([1.0, 1.0, 1.0, 0.0])], 1)
    assert second.tolist() == [0.0, 0.0, 2.0, 0.0]
    assert carried(created, "residual")[0].tolist() == [1.5, 1.0, 0.0, 0.0]


@pytest.mark.parametrize("decay", [1.0, 0.5])
@pytest.mark.parametrize("name", ["largest", "onebit", "topk"])
def test_owners_offer_the_same_share_of_their_residual_as_workers(simulated, clock, name, decay):
    """With no gradient: what was sent + what is left = decay * what was carried.

    Owners of onebit and topk encode and keep their residual in one operation.
    """
    method = Largest() if name == "largest" else gcbench.get_compressor(name)
    assert fuses_feedback(method) == (name != "largest")
    created = exchange(simulated, clock, method, "twoshot", Residual(decay=decay), 2, 2100)
    created.mean(list(gradients(1, 2, 2100)[0]), 0)
    workers = torch.stack(carried(created, "residual")).double().mean(0)
    owners = torch.cat(carried(created, "owner")).double()
    assert float(owners.abs().max()) > 0.01
    sent = created.mean([torch.zeros(2100)] * 2, 1).double()
    left = torch.stack(carried(created, "residual")).double().mean(0)
    left = left + torch.cat(carried(created, "owner")).double()
    torch.testing.assert_close(sent + left, decay * (workers + owners), rtol=0, atol=1e-5)


def test_feedback_by_steps_leaves_the_payload_alone():
    """The payload of no compression is the tensor that was encoded: it must not be the residual."""
    method, segments = gcbench.get_compressor("none"), Segments.of([(3,)])
    residual = torch.tensor([0.5, 0.0, -2.0])
    x, shared = torch.tensor([1.0, 2.0, 3.0]), torch.empty(0)
    sent = codec.feedback(method, x, residual, Context(segments, shared, Key(0, 0, 0)))
    assert sent.parts[0].tolist() == [1.5, 2.0, 1.0]
    assert residual.tolist() == [0.0, 0.0, 0.0]
    assert x.tolist() == [1.0, 2.0, 3.0]


def test_a_learning_rate_of_zero_rescales_nothing(simulated, clock):
    """Also as the first one; the next positive rate is compared with the last positive one."""
    created = exchange(simulated, clock, Largest(), "twoshot", Residual(), 1, 4)
    seen = []
    for lr in (0.0, 0.5, 0.0, 0.0, 0.25):
        before = carried(created, "residual")[0].clone() + created.workers[0][0].get("owner", 0)
        created.follow(lr)
        after = carried(created, "residual")[0] + created.workers[0][0].get("owner", 0)
        seen.append((float(before.sum()), float(after.sum())))
        created.mean([torch.tensor([1.0, -4.0, 2.0, 0.0])], len(seen), lr)
    assert [after == before for before, after in seen] == [True] * 4 + [False]
    assert seen[-1][1] == 2 * seen[-1][0] != 0
    assert created.lr == 0.25


@pytest.mark.parametrize("collective", ["allgather", "twoshot"])
@pytest.mark.parametrize("first", [0.0, 0.2])
def test_a_step_at_rate_zero_sends_no_residual_and_keeps_its_error(
    simulated, clock, collective, first
):
    """A residual that is sent then is lost; a momentum may apply the mean of the gradient later."""
    n, workers = 1500, 3
    grads = gradients(3, workers, n)

    def left(created: Exchange) -> torch.Tensor:
        residual = torch.stack(carried(created, "residual")).double().mean(0)
        owners = [states[0].get("owner", torch.empty(0)) for states in created.workers]
        return residual + torch.cat(owners).double() if collective == "twoshot" else residual

    used, fresh = (
        exchange(simulated, clock, Largest(0.1), collective, Residual(), workers, n)
        for _ in range(2)
    )
    used.mean(list(grads[0]), 0, first)
    before = left(used)
    assert before.abs().max() > 0
    sent = used.mean(list(grads[1]), 1, 0.0).clone()
    assert torch.equal(sent, fresh.mean(list(grads[1]), 1, 0.0))
    close = {"rtol": 0.0, "atol": 1e-6}
    torch.testing.assert_close(left(used), before + left(fresh), **close)
    torch.testing.assert_close(left(fresh), grads[1].double().mean(0) - sent.double(), **close)


def test_a_statistic_is_of_the_gradient_with_its_residual(simulated, clock):
    """A fused `encode_feedback` had received the statistic of the gradient alone."""
    seen: list[float] = []

    class Statistic(type(gcbench.get_compressor("topk"))):
        def prepare(self, x, ctx):
            seen.append(float(x.abs().sum()))
            return super().prepare(x, ctx)

    assert fuses_feedback(Statistic(ratio=0.25))
    created = exchange(simulated, clock, Statistic(ratio=0.25), "allgather", Residual(), 1, 4)
    for step in range(2):
        created.mean([torch.tensor([1.0, -4.0, 2.0, 0.0])], step)
    assert seen == [7.0, 10.0]


def test_buffers_with_two_users_are_refused():
    """One had overwritten the other."""

    class Reader(UpdateRule):
        buffers: ClassVar[tuple[str, ...]] = ("average",)

    class InRounds(UpdateRule):
        buffers: ClassVar[tuple[str, ...]] = ("state",)

    @dataclass(frozen=True)
    class Average(Residual):
        joint: ClassVar[tuple[str, ...]] = ("average",)

    @dataclass(frozen=True)
    class Owner(Residual):
        buffers: ClassVar[tuple[str, ...]] = ("owner",)

    segments = Segments.of([(4,)])
    Lane(Largest(), "allgather", 0, segments, Average(), rule=UpdateRule())
    Lane(Largest(), "allgather", 0, segments, Residual(), rule=Reader())
    for carrying, rule, name in (
        (Average(), Reader(), "average"),
        (Residual(), InRounds(), "state"),
        (Owner(), UpdateRule(), "owner"),
    ):
        with pytest.raises(UsageError, match=f"the buffer '{name}' would have two users"):
            Lane(Largest(), "allgather", 0, segments, carrying, rule=rule)


@pytest.mark.parametrize("lr", [-0.1, math.nan, math.inf, None, "fast"])
def test_learning_rates_that_are_none_are_refused_where_they_enter(simulated, clock, lr):
    created = exchange(simulated, clock, Largest(), "twoshot", Residual(), 1, 4)
    with pytest.raises(UsageError, match=f"learning rate {lr!r}"):
        created.follow(lr)
    assert created.lr is None
    for hook in (gcbench.comm_hook("none"), gcbench.shard_hook("none")):
        with pytest.raises(UsageError, match=f"learning rate {lr!r}"):
            hook.lr = lr
        assert hook.lr is None
        hook.lr = torch.tensor(0.5)
        assert isinstance(hook.lr, float)


@pytest.mark.parametrize("collective", ["allgather", "twoshot"])
def test_learning_rate_changes_keep_the_update(simulated, clock, collective):
    """Sum of eta_t * applied_t + eta * carried = sum of eta_t * g_t: the virtual iterate."""
    n, steps, workers = 1500, 40, 3
    rates = [0.1 * (1 - t / steps) ** 0.5 for t in range(steps)]
    created = exchange(simulated, clock, Largest(), collective, Residual(), workers, n)
    grads = gradients(steps, workers, n)
    moved = torch.zeros(n, dtype=torch.float64)
    for step, lr in enumerate(rates):
        moved += lr * created.mean(list(grads[step]), step, lr).double()
    left = torch.stack(carried(created, "residual")).double().mean(0)
    if collective == "twoshot":
        left = left + torch.cat(carried(created, "owner")).double()
    rate = torch.tensor(rates, dtype=torch.float64).view(-1, 1)
    expected = (rate * grads.double().mean(1)).sum(0)
    assert float((moved + rates[-1] * left - expected).abs().max()) < 1e-5


def test_momentum_on_every_worker_by_hand(simulated, clock):
    plain = gcbench.get_compressor("none")
    created = exchange(simulated, clock, plain, "allgather", Momentum(beta=0.5), 2, 2)
    assert created.mean([torch.tensor([2.0, 4.0]), torch.tensor([0.0, 8.0])], 0).tolist() == [
        0.5,
        3.0,
    ]
    created.mean([torch.tensor([2.0, 0.0]), torch.tensor([4.0, 0.0])], 1)
    assert [m.tolist() for m in carried(created, "momentum")] == [[1.5, 1.0], [2.0, 2.0]]


def heavy_ball(grads: torch.Tensor, momentum: float, *, nesterov: bool) -> torch.Tensor:
    """Return what torch's SGD adds up to with learning rate 1; gradients: (steps, n)."""
    x = torch.nn.Parameter(torch.zeros(grads.shape[1]))
    optimizer = torch.optim.SGD([x], lr=1.0, momentum=momentum, nesterov=nesterov)
    for gradient in grads:
        x.grad = gradient.clone()
        optimizer.step()
    return -x.detach()


@pytest.mark.parametrize("nesterov", [False, True])
def test_dgc_that_sends_everything_is_momentum_or_plain_sgd(simulated, clock, nesterov):
    """Keep all: without masking it is momentum SGD, with masking (u is cleared) plain SGD."""
    grads = gradients(20, 2, 50)
    plain = gcbench.get_compressor("none")
    for masking in (False, True):
        selected = Dgc(0.9, masking=masking, nesterov=nesterov)
        created = exchange(simulated, clock, plain, "allreduce", selected, 2, 50)
        total = sum(created.mean(list(g), t) for t, g in enumerate(grads))
        beta = 0.0 if masking else 0.9
        expected = heavy_ball(grads.mean(1), beta, nesterov=nesterov and not masking)
        if masking and nesterov:
            expected = 1.9 * expected  # u = m g is cleared at once: every g counts 1 + m times
        torch.testing.assert_close(total, expected, rtol=1e-4, atol=1e-4)


def test_dgc_without_momentum_and_masking_is_error_feedback(simulated, clock):
    grads = gradients(30, 3, 400)
    means = []
    for selected in (Dgc(momentum=0.0, masking=False), Residual()):
        created = exchange(simulated, clock, Largest(), "allgather", selected, 3, 400)
        means.append([created.mean(list(g), t) for t, g in enumerate(grads)])
    for a, b in zip(*means, strict=True):
        torch.testing.assert_close(a, b)


def test_dgc_conserves_the_velocity_without_masking_only(simulated, clock):
    """Sum of what was sent + v = sum of all u: true without masking, by design false with it."""
    grads = gradients(60, 1, 400)
    velocity, total = torch.zeros(400), torch.zeros(400)
    for gradient in grads:
        velocity = 0.9 * velocity + gradient[0]
        total += velocity
    for masking in (False, True):
        selected = Dgc(0.9, masking=masking)
        created = exchange(simulated, clock, Largest(), "allgather", selected, 1, 400)
        sent = sum(created.mean(list(g), t) for t, g in enumerate(grads))
        gap = float((sent + carried(created, "residual")[0] - total).abs().max())
        assert (gap > 1) if masking else (gap < 1e-2)


def test_dgc_masks_the_velocity_where_something_was_sent(simulated, clock):
    created = exchange(simulated, clock, Largest(), "allgather", Dgc(0.5), 1, 4)
    created.mean([torch.tensor([1.0, -4.0, 2.0, 0.0])], 0)
    assert carried(created, "velocity")[0].tolist() == [1.0, 0.0, 2.0, 0.0]
    assert carried(created, "residual")[0].tolist() == [1.0, 0.0, 2.0, 0.0]
    created.mean([torch.tensor([1.0, 1.0, 1.0, 0.0])], 1)
    # u = [1.5, 1, 2, 0], v = [2.5, 1, 4, 0]: the third is sent
    assert carried(created, "velocity")[0].tolist() == [1.5, 1.0, 0.0, 0.0]
    assert carried(created, "residual")[0].tolist() == [2.5, 1.0, 0.0, 0.0]


def test_dgc_clips_before_it_accumulates():
    """A gradient of norm 5 among 4 workers with clip 2: each may have 2 / sqrt(4) = 1."""
    selected = Dgc(momentum=0.0, clip=2.0)

    def offer(gradient, workers):
        ctx = Context(Segments.of([(2,)]), workers=workers, state=selected.state(gradient))
        return selected.offer(gradient, ctx)

    offered = offer(torch.tensor([3.0, 4.0]), 4)
    torch.testing.assert_close(offered, torch.tensor([0.6, 0.8]))
    small = torch.tensor([0.3, 0.4])
    torch.testing.assert_close(offer(small, 4), small)
    huge = torch.full((2,), 1e30)
    torch.testing.assert_close(offer(huge, 1), torch.full((2,), math.sqrt(2)))


def test_tensors_kept_dense_lose_nothing_and_keep_their_momentum(simulated, clock):
    """The dense lane under DGC is momentum SGD, under a residual plain SGD."""
    grads = gradients(20, 2, 30)
    plain = gcbench.get_compressor("none")
    for selected, beta in ((Dgc(0.9), 0.9), (Residual(), 0.0)):
        created = exchange(simulated, clock, plain, "allreduce", selected.dense(), 2, 30)
        total = sum(created.mean(list(g), t) for t, g in enumerate(grads))
        expected = heavy_ball(grads.mean(1), beta, nesterov=False)
        torch.testing.assert_close(total, expected, rtol=1e-4, atol=1e-4)
    assert Momentum(0.5).dense() == Momentum(0.5)
    assert not NoMemory().dense().carries


def test_what_is_carried_survives_another_compressor(simulated, clock):
    """A schedule changes the compressor: the residual stays, the place of a lane may not change."""
    created = exchange(simulated, clock, Largest(0.25), "allgather", Residual(), 1, 4)
    created.mean([torch.tensor([1.0, -4.0, 2.0, 0.0])], 0)
    lane = Lane(Largest(1.0), "allgather", 0, Segments.of([(4,)]), Residual())
    created.change([lane])
    assert created.mean([torch.zeros(4)], 1).tolist() == [1.0, 0.0, 2.0, 0.0]
    with pytest.raises(ValueError, match="range"):
        created.change([Lane(Largest(), "allgather", 0, Segments.of([(5,)]), Residual())])


def test_error_feedback_around_a_code_that_does_not_contract_is_refused():
    terngrad = gcbench.get_compressor("terngrad")
    for name in ("residual", "dgc"):
        with pytest.raises(UsageError, match="--memory forced-residual"):
            memory.check_legal(name, terngrad)
    for name in ("none", "momentum", "forced-residual"):
        memory.check_legal(name, terngrad)
    memory.check_legal("residual", Largest())


@pytest.mark.parametrize("name", ["onebit", "efsignsgd", "powersgd", "fp16", "demo"])
def test_masking_around_codes_that_send_every_element_is_refused(name):
    method = gcbench.get_compressor(name)
    with pytest.raises(UsageError, match="masking=false") as no:
        memory.check_masking("dgc", Dgc(), method)
    assert repr(method) in str(no.value)
    memory.check_masking("dgc", Dgc(masking=False), method)
    with pytest.raises(UsageError, match="masking=false"):
        Config.make({"compressor": name, "memory": "dgc"})
    assert Config.make({"compressor": name, "memory": "dgc", "memory_options": {"masking": False}})


def test_masking_is_left_out_where_nothing_is_lost():
    """A stage of ratio 1 and fp32 keep the momentum; where something is lost, the mask is on."""
    whole, part = (gcbench.get_compressor("topk", ratio=ratio) for ratio in (1.0, 0.25))
    for method in (whole, gcbench.get_compressor("none")):
        memory.check_masking("dgc", Dgc(), method)
        assert memory.for_method(Dgc(clip=2.0), method) == Dgc(masking=False, clip=2.0)
    assert memory.for_method(Dgc(), part) == Dgc()
    # at the magnitude 1 all is sent, and not at others
    assert memory.for_method(Dgc(), gcbench.get_compressor("threshold")) == Dgc()
    with pytest.raises(UsageError, match="masking=false"):  # exact for small matrices alone
        memory.check_masking("dgc", Dgc(), gcbench.get_compressor("powersgd", rank=32))
    assert memory.for_method(Residual(), whole) == Residual()


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("residuals", {}, "unknown memory 'residuals'. Did you mean 'residual'?"),
        ("residual", {"decay": 0}, "decay=0.0"),
        ("residual", {"beta": 0.5}, "unknown field of memory 'residual': 'beta'"),
        ("momentum", {"beta": 1}, "beta=1.0: expected"),
        ("dgc", {"momentum": -1}, "momentum=-1.0: expected"),
        ("ef21", {"eta": 0}, "eta=0.0: expected"),
        ("dgc", {"clip": -1}, "clip=-1.0: expected a 2-norm"),
    ],
)
def test_bad_memories_are_refused(name, options, message):
    with pytest.raises(UsageError) as caught:
        memory.make(name, options)
    assert message in str(caught.value)


# ---- EF21 and LoCo -------------------------------------------------------------------------------


@pytest.mark.parametrize("eta", [1.0, 0.3])
@pytest.mark.parametrize("collective", ["allgather", "twoshot"])
def test_ef21_by_its_definition(simulated, clock, collective, eta):
    """The recursions of algorithm 2 in float64, and H + what owners keep = mean of the h.

    With eta below 1 the average takes the gradient's place, as in EF21-SGDM.
    """
    n, workers, steps = 2100, 3, 30
    created = exchange(simulated, clock, Largest(), collective, Ef21(eta), workers, n)
    grads = gradients(steps, workers, n)
    h, v = (torch.zeros(workers, n, dtype=torch.float64) for _ in range(2))
    for step in range(steps):
        applied = created.mean(list(grads[step]), step).double()
        v = (1 - eta) * v + eta * grads[step].double()
        change = v - h
        if collective == "allgather":
            selected = change.abs().topk(math.ceil(0.25 * n)).indices
            h += torch.zeros_like(h).scatter_(1, selected, change.gather(1, selected))
            assert float((applied - h.mean(0)).abs().max()) < 1e-5
            assert (
                float((torch.stack(carried(created, "estimate")).double() - h).abs().max()) < 1e-5
            )
        else:
            local = torch.stack(carried(created, "estimate")).double().mean(0)
            owners = torch.cat(carried(created, "owner")).double()
            assert float((applied + owners - local).abs().max()) < 1e-4
            assert float(owners.abs().max()) > 0.1


@dataclass(frozen=True)
class SignRule(UpdateRule):
    """Overwrites the mean by its signs."""

    def update(self, mean, ctx):
        return mean.sign_()


def test_an_update_rule_may_overwrite_the_mean_that_ef21_returns(simulated, clock):
    """EF21 returns its estimate of the mean, which must remain the mean of all estimates."""
    lane = Lane(Largest(), "allgather", 0, Segments.of([(700,)]), Ef21(), rule=SignRule())
    clock.start_step()
    created = Exchange(simulated(3), [lane], 0, clock)
    for step, xs in enumerate(gradients(4, 3, 700)):
        applied = created.mean(list(xs), step)
        estimate = created.joint[0]["mean estimate"]
        torch.testing.assert_close(estimate, torch.stack(carried(created, "estimate")).mean(0))
        assert torch.equal(applied, estimate.sign())


def test_ef21_converges_where_nothing_else_of_topk_does(simulated, clock):
    """Under fixed gradients of workers that disagree what is applied converges to their mean.

    Without a memory top-k never gets there, and error feedback is right on average only.
    """
    fixed = list(gradients(1, 3, 400)[0])
    exact, left = torch.stack(fixed).mean(0), {}
    for name, selected in (("ef21", Ef21()), ("residual", Residual()), ("none", NoMemory())):
        created = exchange(simulated, clock, Largest(0.1), "allgather", selected, 3, 400)
        for step in range(60):
            applied = created.mean(fixed, step)
        left[name] = float((applied - exact).norm() / exact.norm())
    assert left["ef21"] < 1e-5
    assert min(left["residual"], left["none"]) > 0.3


def test_ef21_does_not_follow_the_learning_rate(simulated, clock):
    """An estimate of the gradient stays one when the rate changes, on owners, too."""
    fixed = list(gradients(1, 3, 2100)[0])
    for collective in ("allgather", "twoshot"):
        means = []
        for rates in ((1.0, 1.0, 1.0), (1.0, 0.1, 0.01)):
            created = exchange(simulated, clock, Largest(), collective, Ef21(), 3, 2100)
            means.append([created.mean(fixed, s, lr).clone() for s, lr in enumerate(rates)])
        assert all(torch.equal(a, b) for a, b in zip(*means, strict=True))


def test_ef21_wants_a_mean_and_a_contraction():
    for name in ("topk", "fp8", "powersgd", "sparseloco"):
        memory.check_legal("ef21", gcbench.get_compressor(name))
    with pytest.raises(UsageError, match="--memory none"):
        memory.check_legal("ef21", gcbench.get_compressor("terngrad"))
    with pytest.raises(UsageError, match="--memory "):
        memory.check_legal("ef21", gcbench.get_compressor("demo"))


def test_loco_by_its_definition(simulated, clock):
    """p = g + e;  e = Q8(beta e + (1 - beta) (p - q)), with int8's codec as Q8."""
    n, beta = 600, 0.8
    created = exchange(simulated, clock, Largest(), "allgather", Loco(beta), 2, n)
    grads, eight = gradients(8, 2, n), gcbench.get_compressor("int8")
    error = torch.zeros(2, n)
    for step in range(8):
        applied = created.mean(list(grads[step]), step)
        offered = grads[step] + error
        selected = offered.abs().topk(math.ceil(0.25 * n)).indices
        sent = torch.zeros_like(offered).scatter_(1, selected, offered.gather(1, selected))
        torch.testing.assert_close(applied, sent.mean(0))
        average = beta * error + (1 - beta) * (offered - sent)
        error = torch.stack([eight.decompress(eight.compress(local)) for local in average])
        torch.testing.assert_close(torch.stack(carried(created, "error")), error)
    assert float((error - average).abs().max()) > 1e-3, "eight bits lose something"
    assert len(error[0, :256].unique()) <= 255


def test_loco_follows_the_learning_rate_and_keeps_nothing_on_owners(simulated, clock):
    created = exchange(simulated, clock, Largest(), "twoshot", Loco(), 3, 2100)
    grads = gradients(2, 3, 2100)
    created.mean(list(grads[0]), 0, 1.0)
    before = [local.clone() for local in carried(created, "error")]
    created.follow(0.1)
    for old, new in zip(before, carried(created, "error"), strict=True):
        torch.testing.assert_close(new, 10 * old)
    assert "owner" not in created.workers[0][0]
    for beta in (-0.1, 1.0):
        with pytest.raises(ValueError, match="beta"):
            Loco(beta)


def test_memories_by_name_in_a_run():
    """`--memory ef21|loco`, and the fields of a memory by `--memory-set`."""
    settings = {"task": "digits", "compressor": "topk", "steps": 3}
    assert Config.make({**settings, "memory": "ef21"}).make_memory() == Ef21()
    half = Config.make({**settings, "memory": "loco", "memory_options": {"beta": 0.5}})
    assert half.make_memory() == Loco(0.5)
    decays = Config.make({**settings, "memory_options": {"decay": 0.95}})
    assert decays.make_memory() == Residual(0.95)
