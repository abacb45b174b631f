"""Local steps: what a round is, its bytes, engines that agree, resuming, and what is refused."""

from __future__ import annotations

import copy

import pytest
import torch

from gcbench.core.clock import Clock
from gcbench.core.errors import DivergedError, UsageError
from gcbench.training import configuration, engines
from gcbench.training.configuration import Config
from gcbench.training.store import Run
from gcbench.training.train import Options, Trainer

pytestmark = pytest.mark.usefixtures("forked")

PLAIN = {
    **{"optimizer": "sgd", "momentum": 0.0, "weight_decay": 0.0, "lr": 0.1},
    **{"schedule": "constant", "ema": 0.0},
}
DILOCO = {"outer_lr": 0.7, "outer_momentum": 0.9, "outer_nesterov": True}


@pytest.fixture
def trainer(simulated, tmp_path):
    def make(**settings) -> Trainer:
        config = Config.make({"task": "digits", "compressor": "none", "workers": 2, **settings})
        return Trainer(config, simulated(config.workers), Run(tmp_path), Options())

    return make


def flat(parameters) -> torch.Tensor:
    return torch.cat([parameter.detach().view(-1) for parameter in parameters])


def take(created: Trainer, steps: int) -> torch.Tensor:
    for _ in range(steps):
        created.train_step()
    return flat(created.parameters)


# ---- H = 1 is today's exchange -------------------------------------------------------------------


@pytest.mark.parametrize("compressor", ["none", "int8", "efsignsgd", "topk"])
def test_one_local_step_and_plain_averaging_is_the_exchange_of_gradients(trainer, compressor):
    """Of plain SGD, x - mean C(x - (x - lr g)) is x - lr mean C(g), to the rounding of x - x_i.

    That is 2^-24 of a parameter, and C scales with its input. Uncompressed, 20 steps end within
    1e-5 of the way; a code may round the other way where x - x_i was near a tie: within 5e-3. Two
    local steps, or half an outer step, end elsewhere.
    """
    settings = {**PLAIN, "compressor": compressor, "steps": 20}
    today = trainer(**settings)
    start = flat(today.parameters)
    goal = take(today, 20)
    way = float((goal - start).norm())

    def apart(**local) -> float:
        return float((take(trainer(**settings, **local), 20) - goal).norm()) / way

    near = 1e-5 if compressor == "none" else 5e-3
    assert apart(local_steps=1) < near
    for other in ({"local_steps": 2}, {"local_steps": 1, "outer_lr": 0.5}):
        assert apart(**other) > 1e-2


def test_one_local_step_is_bit_for_bit_the_exchange_where_nothing_rounds(trainer):
    """Parameters and gradients that are small multiples of 2^-10, and a rate of 2^-2."""
    settings = {**PLAIN, "lr": 0.25, "steps": 2}
    ends = []
    for local in ({}, {"local_steps": 1}):
        created = trainer(**settings, **local)
        draw = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for owned in (created.parameters, *created.owned):
                draw.manual_seed(1)
                for parameter in owned:
                    grid = torch.randint(-99, 99, parameter.shape, generator=draw)
                    parameter.copy_(grid * 2.0**-10)
        draw.manual_seed(2)
        buckets = [
            torch.randint(-99, 99, (created.total,), generator=draw) * 2.0**-10 for _ in range(2)
        ]
        for bucket, each_one in zip(buckets, created.buckets, strict=True):
            each_one.copy_(bucket)
        created._gradients = lambda created=created: (created.buckets, [0.0, 0.0])
        created.train_step()
        ends.append(flat(created.parameters))
    assert torch.equal(*ends)


# ---- a round by hand -----------------------------------------------------------------------------


@pytest.mark.parametrize("outer", [{}, DILOCO], ids=["averaging", "diloco"])
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_rounds_by_hand(trainer, outer, optimizer):
    """Two workers with models and torch optimizers of their own, three rounds of three steps.

    Algorithm 1 of DiLoCo: each worker's optimizer keeps its state, its parameters do not.
    """
    settings = {**PLAIN, "optimizer": optimizer, "lr": 0.01, "steps": 9, "momentum": 0.0}
    if optimizer == "sgd":
        settings["momentum"] = 0.9
    created = trainer(**settings, **outer, local_steps=3)
    common = flat(created.parameters).double()
    models = [copy.deepcopy(created.model) for _ in range(2)]
    inner = [
        torch.optim.Adam(m.parameters(), lr=0.01)
        if optimizer == "adam"
        else torch.optim.SGD(m.parameters(), lr=0.01, momentum=0.9)
        for m in models
    ]
    rate, beta = outer.get("outer_lr", 1.0), outer.get("outer_momentum", 0.0)
    velocity = torch.zeros_like(common)
    for step in range(9):
        for rank in range(2):
            inputs, targets = created.batches.of(step, rank)
            inner[rank].zero_grad()
            created.task.loss(models[rank](inputs), targets).backward()
            inner[rank].step()
        if step % 3 == 2:
            ends = [flat(dict(m.named_parameters())[n] for n in created.names) for m in models]
            outward = common - torch.stack(ends).double().mean(0)
            velocity = beta * velocity + outward
            common = common - rate * (outward + beta * velocity if beta else outward)
            for m in models:
                named = dict(m.named_parameters())
                pieces = torch.split(common.float(), created.sizes)
                with torch.no_grad():
                    for name, piece in zip(created.names, pieces, strict=True):
                        named[name].copy_(piece.view_as(named[name]))
    created.step = 0
    assert float((take(created, 9).double() - common).abs().max()) < 2e-5
    assert all(torch.equal(flat(each_one), flat(created.parameters)) for each_one in created.owned)


def test_inside_a_round_workers_are_apart_and_the_common_parameters_rest(trainer):
    created = trainer(**PLAIN, steps=8, local_steps=4)
    start = flat(created.parameters)
    evaluated = created.evaluate()
    assert torch.equal(take(created, 3), start)
    first, second = map(flat, created.owned)
    assert not torch.equal(first, second)
    assert not torch.equal(first, start)
    assert created.evaluate() == evaluated, "judged are the parameters of the last round"
    assert created.world.traffic[0].payload_up == 0
    take(created, 1)
    assert created.evaluate() != evaluated


def test_the_average_of_parameters_counts_the_steps_of_a_round(trainer):
    created = trainer(**{**PLAIN, "ema": 0.05}, steps=4, local_steps=2)
    start = flat(created.parameters)
    after = take(created, 2)
    decay = min(0.05, 2 / 11) ** 2
    torch.testing.assert_close(flat(created.average.values), start + (1 - decay) * (after - start))


# ---- bytes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("compressor", ["none", "int8", "sparseloco", "powersgd"])
def test_bytes_a_step_fall_by_h(trainer, compressor):
    """24 steps: 24 exchanges, 6 rounds of 4, and 4 of 7, the last one shorter."""
    sent = {}
    for steps in (0, 4, 7):
        created = trainer(compressor=compressor, steps=24, local_steps=steps)
        take(created, 24)
        each_one = created.world.traffic[0]
        sent[steps] = (each_one.payload_up, each_one.payload_down, each_one.wire)
    assert sent[4] == pytest.approx([each / 4 for each in sent[0]])
    assert sent[7] == pytest.approx([each / 6 for each in sent[0]])


def test_a_phase_of_some_steps_has_no_median_of_zero():
    """Ten steps, every fifth with an encode of 5 s: 1 s a step, where the plain median says 0."""
    created = Clock(torch.device("cpu"))
    created.steps = [[0.1, 0.0, 5.0 if i % 5 == 4 else 0.0, 0, 0, 0, 2.0] for i in range(11)]
    assert created.medians()["encode"] == 0
    assert created.medians(5)["encode"] == pytest.approx(1.0)
    assert created.medians(5)["step"] == pytest.approx(2.0)
    assert created.medians(50)["step"] == pytest.approx(2.0)


# ---- engines and checkpoints ---------------------------------------------------------------------

SHORT = {"task": "digits", "steps": 10, "workers": 2, "eval_every": 5, "batch": 32}
CASES = {
    "diloco": {"compressor": "int8", "local_steps": 3, "optimizer": "adam", "lr": 1e-3, **DILOCO},
    "streaming": {
        **{"compressor": "int8", "memory": "residual", "local_steps": 4, "momentum": 0.9},
        **{"fragments": 2, "delay": 1, "blend": 0.5, **DILOCO},
    },
    "sparse": {"compressor": "sparseloco", "local_steps": 4, "momentum": 0.9},
    "low rank": {"compressor": "powersgd", "local_steps": 2, "start_step": 3},
}


@pytest.mark.parametrize("case", ["diloco", "streaming"])
def test_processes_do_what_the_simulation_does(tmp_path, case):
    result = []
    for engine in ("simulate", "spawn"):
        config = Config.make({**SHORT, **CASES[case], "engine": engine, "threads": 1})
        run = Run(tmp_path / engine)
        run.create()
        run.start(config.model_dump(mode="json"), configuration.provenance(config))
        engines.ENGINES[engine](config, run, Options())
        result.append(run.summary)
    keys = ("params_sha256", "payload_bytes_up", "payload_bytes_down", "test_loss")
    assert [result[0][key] for key in keys] == [result[1][key] for key in keys]


class PowerCut(Exception):
    """What ends a run here."""


@pytest.mark.parametrize("at", [5, 6, 7])
@pytest.mark.parametrize("case", CASES)
def test_a_crash_inside_a_round_loses_nothing(tmp_path, simulated, case, at):
    """Outer momentum, each worker's parameters and its optimizer's state are in the checkpoint."""
    config = Config.make({**SHORT, **CASES[case]})

    def run(name: str, cut: int | None) -> str:
        def look(step, rank, bucket):
            if step == cut:
                raise PowerCut

        where = Run(tmp_path / name)
        where.create()
        options = Options(checkpoint_seconds=0 if cut else 1e9, on_bucket=look)
        return Trainer(config, simulated(2), where, options).fit()["params_sha256"]

    whole = run("whole", None)
    with pytest.raises(PowerCut):
        run("cut", at)
    assert run("cut", None) == whole


@pytest.mark.parametrize("lost", ["parameters", "optimizer"])
def test_a_checkpoint_without_what_a_worker_had_is_refused(tmp_path, simulated, lost):
    config = Config.make({**SHORT, **CASES["diloco"]})
    run = Run(tmp_path)
    run.create()
    created = Trainer(config, simulated(2), run, Options())
    take(created, 4)
    states = created._worker_states()
    del states[1][lost]
    with pytest.raises(KeyError, match=lost):
        created.local[1].load_state(states[1])


# ---- names, tables, refusals ---------------------------------------------------------------------


REFUSED = {
    "rebroadcast": ({"rebroadcast_every": 2}, "rebroadcast_every with"),
    "batched": ({"gradients": "batched"}, "gradients=loop"),
    "skip": ({"on_nonfinite": "skip"}, "on_nonfinite=stop"),
    "dgc": ({"compressor": "topk", "memory": "dgc"}, "--outer-momentum"),
    "signum": ({"compressor": "signsgd", "memory": "momentum", "outer_lr": 1e-3}, "momentum"),
    "signs": ({"compressor": "signsgd"}, "set --outer-lr"),
    "demo": ({"compressor": "demo"}, "set --outer-lr"),
    "nesterov": ({"outer_nesterov": True}, "outer_nesterov needs outer_momentum"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_combine_is_refused_with_the_reason(case):
    settings, message = REFUSED[case]
    with pytest.raises(UsageError, match=message):
        Config.make({**SHORT, "compressor": "none", "local_steps": 4, **settings})


def test_outer_settings_without_local_steps_are_refused():
    for key, value in DILOCO.items():
        with pytest.raises(UsageError, match=f"{key}.* --local-steps"):
            Config.make({**SHORT, key: value, "outer_momentum": 0.9})
    created = Config.make({**SHORT, "compressor": "signsgd", "local_steps": 4, "outer_lr": 1e-3})
    assert created.outer_lr == 1e-3


def test_parameters_that_overflow_in_a_round_are_told(trainer):
    created = trainer(**{**PLAIN, "lr": 3e38}, steps=4, local_steps=4)
    with pytest.raises(DivergedError, match="non-finite") as caught:
        take(created, 4)
    assert "--on-nonfinite" not in str(caught.value)  # which local steps refuse
